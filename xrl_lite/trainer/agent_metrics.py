"""Metrics of attempts with several turns: turns, trajectories, calls of tools and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xrl_lite.data import RolloutState, split_sessions
from xrl_lite.tools import ToolCounts


def agent_metrics(groups: Sequence[Sequence[RolloutState]]) -> dict[str, float]:
    """Return the metrics of a batch; empty where no agent ran, or all of its attempts failed.

    Turns and trajectories are counted per attempt. ``stopped_by/...`` are the shares of the stop rules of
    `ToolAgentLoop`, ``tools/...`` sums and shares over all calls of the batch.
    """
    sessions = [session for group in groups for session in split_sessions(group)]
    ran = [session for session in sessions if "num_turns" in session[-1].extra_fields]
    if not ran:
        return {}
    turns = [session[-1].extra_fields["num_turns"] for session in ran]
    metrics = {
        "num_turns/mean": sum(turns) / len(turns),
        "num_turns/max": float(max(turns)),
        "num_turns/min": float(min(turns)),
        "trajectories_per_attempt": sum(map(len, ran)) / len(ran),
    }
    stops = Counter(reason for *_, last in ran if (reason := last.extra_fields.get("stopped_by")) is not None)
    metrics |= {f"stopped_by/{reason}": number / stops.total() for reason, number in sorted(stops.items())}
    counts = [counts for *_, last in ran if (counts := last.extra_fields.get("tool_counts")) is not None]
    return metrics | (ToolCounts.total(counts).metrics() if counts else {})
