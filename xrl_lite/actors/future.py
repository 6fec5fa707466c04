"""The future of a call: may be awaited on any event loop, waited for in any thread, and cancelled from anywhere."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, cast

from xrl_lite.actors.failure import add_note
from xrl_lite.actors.payload import Packed, unpack

T = TypeVar("T")

_unpack_lock = threading.RLock()


def _after_fork() -> None:
    global _unpack_lock
    _unpack_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

_Callback: TypeAlias = tuple[asyncio.AbstractEventLoop | None, Callable[[Any], object], contextvars.Context | None]
"""What is called when a future has ended: on that loop, whichever thread ends it; or without one, in this very thread.
A plain tuple, as most calls make one."""


class CallFuture(Generic[T]):
    """What a call returns at once. It ends in a result, an exception, or cancelled; exactly once.

    Awaiting: waits for the actor. Is woken by the thread that watches the actor's process, which also ends the future
    when the process dies, the actor is stopped, or the time limit of the call is over. Cancelling the awaiting task
    cancels the call.

    To asyncio it is a future of the loop it was made on, so `asyncio.gather`, `asyncio.wait`, `asyncio.wait_for` and
    the like take it as it is. It may be awaited on other loops as well.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callbacks",
        "_cancelled",
        "_done",
        "_error",
        "_label",
        "_loop",
        "_packed",
        "_unended",
        "_value",
    )

    def __init__(self, label: str) -> None:
        self._label = label
        self._loop = loop = asyncio._get_running_loop()
        # how a task recognises a future, see asyncio.isfuture; None says it is none, and is awaited in the slower way
        self._asyncio_future_blocking: bool | None = None if loop is None else False
        self._unended = [True]
        self._done = False
        self._cancelled = False
        self._value: Any = None
        self._packed: Packed | None = None
        self._error: BaseException | None = None
        self._callbacks: list[_Callback] = []

    @property
    def label(self) -> str:
        """What an error calls it."""
        return self._label

    @property
    def home(self) -> asyncio.AbstractEventLoop | None:
        """The loop that ran where it was made; None where there was none."""
        return self._loop

    def __repr__(self) -> str:
        state = "pending" if not self._done else "cancelled" if self._cancelled else "failed" if self._error else "done"
        return f"<CallFuture of {self.label}: {state}>"

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            loop = asyncio.get_running_loop()
            if loop is self._loop:
                self._asyncio_future_blocking = True
                yield self
            else:
                yield from self._wait_on(loop)
        if self._packed is not None:
            self._unpack()
        if self._error is None and not self._cancelled:
            return cast("T", self._value)
        return self._fail()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait in this thread for the result. Not for use inside an event loop.

        Raises:
            TimeoutError: there was none within `timeout_s`; the call goes on.
        """
        if not self._done:
            done = threading.Event()
            self.when_done(lambda _: done.set())
            if not done.wait(timeout_s):
                raise TimeoutError(f"{self.label} has not ended within {timeout_s:g} s; it goes on.")
        if self._packed is not None:
            self._unpack()
        if self._error is None and not self._cancelled:
            return cast("T", self._value)
        return self._fail()

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._done

    def cancelled(self) -> bool:
        """Whether it ended by `cancel`."""
        return self._cancelled

    def exception(self) -> BaseException | None:
        """Return the exception it ended with, None for a result.

        Raises:
            asyncio.InvalidStateError: it has not ended.
            asyncio.CancelledError: it was cancelled.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self.label} has not ended.")
        if self._cancelled:
            raise self._make_cancelled_error()
        if self._packed is not None:
            self._unpack()  # which may fail
        return self._error

    def cancel(self, msg: object = None) -> bool:
        """End the future as cancelled, and the call behind it. Return False if it had ended before."""
        if not self._begin_end():
            return False
        self._cancelled = True
        self._value = msg  # anyio knows by it which of its scopes a cancellation belongs to
        self._end()
        return True

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop on which it was made."""
        return self._loop or asyncio.get_running_loop()

    def add_done_callback(
        self, callback: Callable[[CallFuture[T]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Call `callback` with this future when it has ended: on the running loop; without one, see `when_done`."""
        self._callbacks.append((asyncio._get_running_loop(), callback, context))
        if self._done:  # perhaps too late for the thread that ended it
            self._call_back()

    def remove_done_callback(self, callback: Callable[[CallFuture[T]], object]) -> int:
        """Forget a callback; return how often it had been added."""
        found = [entry for entry in self._callbacks if entry[1] == callback]
        for entry in found:
            self._callbacks.remove(entry)
        return len(found)

    def when_done(self, callback: Callable[[CallFuture[T]], object]) -> None:
        """Call `callback` with this future when it has ended, at once, in whichever thread ends it."""
        self._callbacks.append((None, callback, None))
        if self._done:  # perhaps too late for the thread that ended it
            self._call_back()

    def set_packed(self, packed: Packed) -> bool:
        """End with a result that whoever asks first unpacks, in his own thread; False if it had ended before."""
        try:
            self._unended.pop()
        except IndexError:
            return False
        self._packed = packed
        self._end()
        return True

    def set_result(self, value: T) -> bool:
        """End with a result; False if it had ended before."""
        if not self._begin_end():
            return False
        self._value = value
        self._end()
        return True

    def set_exception(self, error: BaseException) -> bool:
        """End with an exception; False if it had ended before."""
        if not self._begin_end():
            return False
        self._error = error
        self._end()
        return True

    def take_packed(self) -> Packed | None:
        """Return the result of an ended future as it arrived, to be sent on; None if it did not arrive packed."""
        return self._packed

    def _make_cancelled_error(self) -> asyncio.CancelledError:
        """What `asyncio.gather` asks a cancelled future for."""
        return asyncio.CancelledError() if self._value is None else asyncio.CancelledError(self._value)

    # Several threads may end, await and watch the same future. There is no lock: each step that only one of them may
    # take is one operation on a list, which is atomic.

    def _begin_end(self) -> bool:
        """Whether the caller is the one that ends it."""
        try:
            return self._unended.pop()
        except IndexError:
            return False

    def _end(self) -> None:
        self._done = True
        if self._callbacks:
            self._call_back()

    def _call_back(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                loop, callback, context = callbacks.pop(0)
            except IndexError:
                return
            if loop is None:
                callback(self)
            elif loop is asyncio._get_running_loop():
                loop.call_soon(callback, self, context=context)
            elif _together.waiting is not None:
                _together.waiting.append((loop, callback, context, self))
            else:
                _call_on(loop, [(loop, callback, context, self)])

    def _wait_on(self, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
        """Wait on a loop other than the one it was made on."""
        waiter: asyncio.Future[None] = loop.create_future()
        self.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
        try:
            yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _fail(self) -> NoReturn:
        if self._cancelled or self._error is None:
            raise self._make_cancelled_error()
        raise self._error.with_traceback(None)

    def _unpack(self) -> None:
        packed = self._packed
        if packed is None:
            return
        try:
            if not packed.segments:
                self._value = pickle.loads(packed.body)
                self._packed = None
                return
            with _unpack_lock:  # memory is lent for one reading; of two threads that ask at once one does it
                if self._packed is not None:
                    self._value = unpack(packed)
                    self._packed = None
        except Exception as error:  # noqa: BLE001 a user's class may raise anything while it is rebuilt
            add_note(error, f"Raised while the result of {self.label} was unpickled at the caller.")
            self._error = error
            self._packed = None


_Wake: TypeAlias = tuple[
    asyncio.AbstractEventLoop, Callable[[Any], object], contextvars.Context | None, CallFuture[Any]
]
"""A callback that is due on its loop, and the future that has ended."""


class _Together(threading.local):
    waiting: list[_Wake] | None = None


_together = _Together()


class WakeTogether:
    """Wakes the tasks of all futures that end inside with one system call for each loop.

    Every such call lets go of the interpreter lock, and the woken loop would take it for a single future.
    """

    def __init__(self) -> None:
        self._outer: list[_Wake] | None = None

    def __enter__(self) -> None:
        self._outer, _together.waiting = _together.waiting, []

    def __exit__(self, *_: object) -> None:
        waiting, _together.waiting = _together.waiting, self._outer
        if not waiting:
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[_Wake]] = {}
        for wake in waiting:
            by_loop.setdefault(wake[0], []).append(wake)
        for loop, wakes in by_loop.items():
            _call_on(loop, wakes)


def _call_on(loop: asyncio.AbstractEventLoop, wakes: list[_Wake]) -> None:
    # a loop that was closed in the meantime has nobody left who waits
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_call_all, wakes)


def _call_all(wakes: list[_Wake]) -> None:
    for loop, callback, context, future in wakes:
        loop.call_soon(callback, future, context=context)
