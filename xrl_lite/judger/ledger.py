"""The count of outcomes and times of one judger, and the guard that stops a run whose judger never works."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from xrl_lite.errors import JudgerError
from xrl_lite.judger.outcome import Judgement, JudgementPolicy, Outcome
from xrl_lite.judger.whereabouts import full_traceback
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_TIMES_KEPT = 10_000
_POISONED_KEPT = 100
_COUNTS = frozenset({*(outcome.value for outcome in Outcome), "poisoned"})

Statistics = dict[str, dict[str, float]]
"""Per judger: counts of outcomes, and seconds at work and in line at the median and the 99th percentile."""


class Ledger:
    """Counts what became of the judgements of one judger.

    Args:
        name: Name of the judger.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.poisoned: deque[object] = deque(maxlen=_POISONED_KEPT)
        """Ids of the last samples that hung or killed the reward code."""
        self._counts: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self._run_s: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._queue_s: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._initial_failures = 0
        self._has_succeeded = False
        self._first_failure: tuple[str, Exception | None] | None = None

    def enter(self, judgement: Judgement, sample: object, policy: JudgementPolicy) -> None:
        """Count one judgement.

        Raises:
            JudgerError: the first `max_initial_failures` judgements have all failed.
        """
        self._counts[judgement.outcome] += 1
        self._run_s.append(judgement.run_s)
        self._queue_s.append(judgement.queue_s)
        if judgement.error is None:
            self._has_succeeded = True
            self._first_failure = None
        elif judgement.outcome is not Outcome.SKIPPED:
            self._note_failure(judgement, sample, policy)

    def statistics(self, *, reset: bool = False) -> dict[str, float]:
        """Return counts and times since the start or the last reset; times are the only values that vary by run."""
        values: dict[str, float] = {outcome.value: self._counts[outcome] for outcome in Outcome}
        for name, times in (("latency", self._run_s), ("queue", self._queue_s)):
            values[f"{name}_p50"] = _percentile(times, 0.50)
            values[f"{name}_p99"] = _percentile(times, 0.99)
        if reset:
            self._counts = dict.fromkeys(Outcome, 0)
            self._run_s.clear()
            self._queue_s.clear()
        return values

    def _note_failure(self, judgement: Judgement, sample: object, policy: JudgementPolicy) -> None:
        told = judgement.explain(sample)
        logger.warning("%s", told)
        if judgement.outcome in (Outcome.TIMEOUT, Outcome.CRASHED):
            self.poisoned.append(sample)
        if self._has_succeeded:
            return
        self._first_failure = self._first_failure or (told, judgement.error)
        self._initial_failures += 1
        if 0 < policy.max_initial_failures <= self._initial_failures:
            first, error = self._first_failure
            trace = f"\n{full_traceback(error)}" if error is not None else ""
            raise JudgerError(
                f"The first {self._initial_failures} judgements of judger {self.name!r} all failed, so training would "
                f"learn nothing. The first one: {first}{trace}\n"
                f"Mend the reward code, or set max_initial_failures (0 never stops the run)."
            ) from error


def add_statistics(parts: Iterable[Statistics]) -> Statistics:
    """Return statistics of several judgers in one table; under one name counts are added, and the larger times stay."""
    table: Statistics = {}
    for part in parts:
        for name, values in part.items():
            known = table.setdefault(name, dict.fromkeys(values, 0))
            for key, value in values.items():
                known.setdefault(key, 0)
                known[key] = known[key] + value if key in _COUNTS else max(known[key], value)
    return table


def judger_metrics(statistics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return statistics under the names that metrics have: ``judger/<name>/ok``, ``judger/<name>/latency_p50``."""
    return {f"judger/{name}/{key}": value for name, values in statistics.items() for key, value in values.items()}


def _percentile(times: Iterable[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
