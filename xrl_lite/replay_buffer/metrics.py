"""What one batch cost: groups evicted on the way to it, by reason, and how old it is. Names are verl's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from xrl_lite.data import version_range
from xrl_lite.replay_buffer.eviction import Reason, span
from xrl_lite.replay_buffer.groups import PromptGroup


class SampleTally:
    """Counts from one batch to the next."""

    def __init__(self) -> None:
        self._by_reason: Counter[Reason] = Counter()
        self._earlier: Counter[Reason] = Counter()
        self._stale_spans: list[int] = []
        self._filtered: Counter[float] = Counter()
        self.num_surplus = 0
        self.last_failure = ""

    def evicted(self, group: PromptGroup, reasons: Iterable[Reason], global_steps: int) -> None:
        """Count a group that was evicted, under each of its reasons."""
        for reason in reasons:
            self._by_reason[reason] += 1
            if reason is Reason.STALE:
                self._stale_spans.append(span(global_steps, group.global_steps))
            if reason is Reason.UNIFORM and group.metric is not None:
                self._filtered[group.metric] += 1
            if reason is Reason.FAILED:
                self.last_failure = group.reason

    @property
    def num_failed(self) -> int:
        """Failed groups since the last `start_over`."""
        return self._by_reason[Reason.FAILED] - self._earlier[Reason.FAILED]

    @property
    def num_uniform(self) -> int:
        """Filtered groups since the last `start_over`."""
        return self._by_reason[Reason.UNIFORM] - self._earlier[Reason.UNIFORM]

    @property
    def num_stale(self) -> int:
        """Stale groups since the last `start_over`."""
        return self._by_reason[Reason.STALE] - self._earlier[Reason.STALE]

    def start_over(self) -> None:
        """Count towards starvation from here; the metrics keep everything."""
        self._earlier = self._by_reason.copy()

    def histogram(self) -> dict[float, int]:
        """Return value of the filter's metric -> groups filtered."""
        return dict(sorted(self._filtered.items()))

    def metrics(self, taken: Sequence[PromptGroup], global_steps: int) -> dict[str, Any]:
        """Return the counts, and the age of the groups that a step has taken."""
        metrics: dict[str, Any] = {
            "training/off_policy/evicted_samples": float(self._by_reason[Reason.STALE]),
            "training/filter_groups/evicted_samples": float(self._by_reason[Reason.UNIFORM]),
            "training/filter_groups/discarded_surplus_samples": float(self.num_surplus),
            "training/rollout_failure/evicted_samples": float(self._by_reason[Reason.FAILED]),
            "buffer/failed_groups": float(self._by_reason[Reason.FAILED]),
            "buffer/stale_dropped": float(self._by_reason[Reason.STALE]),
            **_spread("training/off_policy/evicted_samples_staleness", self._stale_spans),
            **_ages(taken, global_steps),
        }
        if self._filtered:
            metrics["_dapo_filtered_reward_counts"] = self.histogram()
        return metrics


def _ages(taken: Sequence[PromptGroup], global_steps: int) -> dict[str, float]:
    dispatched = [global_steps - group.global_steps for group in taken]
    versions = [versions for group in taken for state in group.states if (versions := version_range(state)) is not None]
    newest = global_steps - 1
    worst = [newest - oldest for oldest, _ in versions]
    return {
        "off_policy/mean": _mean(worst or dispatched),
        "off_policy/max": float(max(worst or dispatched)),
        **_spread("training/off_policy/trajectory_spans", [high - low + 1 for low, high in versions]),
        **_spread("training/off_policy/trajectory_staleness", [newest - high for _, high in versions]),
        **_spread("training/off_policy/trajectory_staleness_worst", worst),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
