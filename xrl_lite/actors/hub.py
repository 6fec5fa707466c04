"""The thread in which a system watches its children, whatever the driver's own event loop is doing.

It exists so that a handle works from any loop and any thread, and so that time limits and deaths are noticed also while
the driver computes. Everything that supervises runs here and nowhere else, so it needs no locks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from xrl_lite.actors.future import CallFuture
from xrl_lite.log import get_logger

T = TypeVar("T")
logger = get_logger(__name__)


class Hub:
    """A thread with an event loop of its own. `post` and `run` may be called from anywhere."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.loop.set_exception_handler(_log_error)
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._waking = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function` in the hub's thread, soon, in the order of posting."""
        self._inbox.append((function, args))
        if not self._waking:
            self._waking = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # closed: the system was shut down, and has ended every future it knew
                self._inbox.clear()

    def run(self, coroutine: Coroutine[Any, Any, T], label: str, *, last: bool = False) -> CallFuture[T]:
        """Run a coroutine in the hub and return its future. Cancelling the future does not end the coroutine.

        With `last` the hub ends after it.
        """
        future: CallFuture[T] = CallFuture(label)
        self.post(self._start, coroutine, future, last)
        return future

    def join(self) -> None:
        """Wait for the thread, after the last coroutine."""
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self._drain()
            for task in self._tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(self._tasks) if self._tasks else asyncio.sleep(0))
            self.loop.close()

    def _drain(self) -> None:
        self._waking = False  # first: whoever posts from here on either is seen by this loop or wakes the next one
        inbox = self._inbox
        while inbox:
            function, args = inbox.popleft()
            try:
                function(*args)
            except Exception:
                logger.exception("internal error in %s", getattr(function, "__qualname__", function))

    def _start(self, coroutine: Coroutine[Any, Any, T], future: CallFuture[T], last: bool) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._settle(done, future, last))

    def _settle(self, task: asyncio.Task[T], future: CallFuture[T], last: bool) -> None:
        if last:
            self.loop.stop()
        self._tasks.discard(task)
        if task.cancelled():
            future.cancel()
        elif error := task.exception():
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _log_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("internal error: %s", context.get("message"), exc_info=context.get("exception"))
