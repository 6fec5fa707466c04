"""The time of an actor system: that of the wall, or one that passes only while everybody waits.

Under a `VirtualClock` an hour of sleeping takes no time, and what happens first is decided by the numbers alone, so a
test of time limits and pauses is fast and the same every time::

    clock = VirtualClock()
    system = ActorSystem(backend="inline", clock=clock)
    clock.run(main(system))          # instead of asyncio.run
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class OutOfTimeError(BaseException):
    """Raised at a ``time.sleep`` that a call's limit does not allow. No Exception, so user code lets it pass."""


class Stopwatch:
    """How long something took."""

    elapsed_s: float = 0.0


class WallClock:
    """The time that really passes."""

    def time(self) -> float:
        """Return seconds since some moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    @contextmanager
    def measure(self, limit_s: float | None) -> Generator[Stopwatch, None, None]:
        """Measure a block of code; `limit_s` is not enforced."""
        watch, began = Stopwatch(), time.monotonic()
        try:
            yield watch
        finally:
            watch.elapsed_s = time.monotonic() - began


class VirtualClock:
    """Time that passes only while everybody waits, and then at once.

    Whoever runs on one of its event loops lives in its time: ``asyncio.sleep``, ``asyncio.timeout``, timers. So does
    ``time.sleep`` in a sync method of an inline actor. Threads, processes and sockets do not: the clock does not wait
    for them while anything else is due. Computing takes no time.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def time(self) -> float:
        """Return seconds since the clock's zero."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass. What is due by then happens when the event loop turns."""
        if seconds < 0:
            raise ValueError(f"Time does not go back: seconds must be at least 0, got {seconds}.")
        self._now_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Wait, which takes no time."""
        await asyncio.sleep(seconds)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Do what ``asyncio.run`` does, in this clock's time."""
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            return runner.run(main)

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop in this clock's time; also a ``loop_factory``."""
        return _VirtualLoop(self)

    def drives(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether `loop` is one of this clock's."""
        return isinstance(loop, _VirtualLoop) and loop.clock is self

    @contextmanager
    def measure(self, limit_s: float | None) -> Generator[Stopwatch, None, None]:
        """Measure how long a block of code sleeps, without waiting for it and without moving the clock.

        Raises:
            OutOfTimeError: it wants to sleep beyond `limit_s`.
        """
        watch, thread, really_sleep = Stopwatch(), threading.get_ident(), time.sleep

        def sleep(seconds: float) -> None:
            if threading.get_ident() != thread:
                really_sleep(seconds)
                return
            watch.elapsed_s += seconds
            if limit_s is not None and watch.elapsed_s > limit_s:
                watch.elapsed_s = limit_s
                raise OutOfTimeError

        time.sleep = sleep
        try:
            yield watch
        finally:
            time.sleep = really_sleep


Clock = WallClock | VirtualClock


def now() -> float:
    """Return seconds since some moment: on a virtual event loop in its time, else in that of the wall.

    To measure with, where an event loop's own ``time()`` is too coarse: uvloop's stands still while the loop is busy.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.perf_counter()
    return loop.time() if isinstance(loop, _VirtualLoop) else time.perf_counter()


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self.clock.time()


class _JumpingSelector(selectors.BaseSelector):
    """Moves the clock to the next timer instead of waiting for it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._files = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._files.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:  # no timer: only a thread or a socket can wake us
            return self._files.select(None)
        self._clock.advance(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()
