"""Time at work, told apart from the time in line across the layers of a judger.

Whoever measures starts a stopwatch; whoever holds a judgement back (a pool without a free worker, a full limiter) tells
it when the waiting ends. It is found through the context of the task, so no layer hands it on.
"""

from __future__ import annotations

from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeAlias

Item: TypeAlias = tuple[Any, bool, float]
"""What came of reward code that ran elsewhere: the output or the exception, whether it is the output, and the seconds
it took there. A plain tuple, as many of them travel."""


class Stopwatch:
    """Measures the judgement that is asked for now, in this task, until the next one is measured there."""

    __slots__ = ("_started",)

    def __init__(self) -> None:
        _current.set(self)
        self._started = perf_counter()

    def start(self) -> None:
        """Note that the judgement starts to run now; the last note counts."""
        self._started = perf_counter()

    def took(self, run_s: float) -> None:
        """Note that the judgement has just ended and ran so long, as measured where it ran."""
        self._started = perf_counter() - run_s

    def read_run_s(self) -> float:
        """Return the seconds run so far."""
        return perf_counter() - self._started


_current: ContextVar[Stopwatch | None] = ContextVar("xrl_lite_judger_stopwatch", default=None)


def running_stopwatch() -> Stopwatch:
    """Return the one that measures the judgement of this task, or where none does, one that nobody reads."""
    return _current.get() or Stopwatch()


def unwrap(item: Item, watch: Stopwatch) -> Any:
    """Return the output, or raise the exception, and note how long that ran."""
    value, is_output, run_s = item
    watch.took(run_s)
    if is_output:
        return value
    raise value
