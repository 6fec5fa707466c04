"""Time in line and time at work, told apart across the layers of a judger.

Whoever measures opens a stopwatch; whoever holds a judgement back (a pool without a free worker, a full limiter) says
when it stops waiting. The stopwatch is found through the context of the task, so no layer hands it on.
"""

from __future__ import annotations

from contextvars import ContextVar
from time import perf_counter
from typing import Self


class Stopwatch:
    """Measures the judgement made in its ``with`` block: when it was asked for, and when it started to run."""

    __slots__ = ("_asked", "_started", "_token")

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        self._asked = self._started = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def start(self) -> None:
        """Note that the judgement starts to run now; the last note counts."""
        self._started = perf_counter()

    def took(self, run_s: float) -> None:
        """Note that the judgement has just ended and ran so long, as measured where it ran."""
        self._started = max(perf_counter() - run_s, self._asked)

    def read(self) -> tuple[float, float]:
        """Return the seconds waited and the seconds run so far."""
        return self._started - self._asked, perf_counter() - self._started


_current: ContextVar[Stopwatch | None] = ContextVar("xrl_lite_judger_stopwatch", default=None)


def execution_starts() -> None:
    """Say that the judgement being measured, if any, has left the line."""
    watch = _current.get()
    if watch is not None:
        watch.start()


def execution_took(run_s: float) -> None:
    """Say how long the judgement being measured, if any, ran until now."""
    watch = _current.get()
    if watch is not None:
        watch.took(run_s)
