"""The future of a call: may be awaited on any event loop, waited for in any thread, and cancelled from anywhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from xrl_lite.actors.payload import Packed, unpack

T = TypeVar("T")

_PENDING = object()


class CallFuture(Generic[T]):
    """What a call returns at once. It ends in a result, an exception, or cancelled; exactly once.

    Awaiting: waits for the actor. Is woken by the thread that watches the actor's process, which also ends the future
    when the process dies, the actor is stopped, or the time limit of the call is over. Cancelling the awaiting task
    cancels the call. For `asyncio.wait`, which takes tasks only, wrap it with `asyncio.ensure_future`.
    """

    __slots__ = ("_callbacks", "_cancel_call", "_cancelled", "_done", "_error", "_label", "_lock", "_packed", "_value")

    def __init__(self, label: str) -> None:
        self._label = label
        self._cancel_call: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._done = False
        self._cancelled = False
        self._value: Any = _PENDING
        self._packed: Packed | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[CallFuture[T]], None]] = []

    def __repr__(self) -> str:
        state = "pending" if not self._done else "cancelled" if self._cancelled else "failed" if self._error else "done"
        return f"<CallFuture of {self._label}: {state}>"

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            self._call_when_done(_Waker(loop, waiter))
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._outcome()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait in this thread for the result. Not for use inside an event loop.

        Raises:
            TimeoutError: there was none within `timeout_s`; the call goes on.
        """
        if not self._done:
            done = threading.Event()
            self._call_when_done(lambda _: done.set())
            if not done.wait(timeout_s):
                raise TimeoutError(f"{self._label} has not ended within {timeout_s:g} s; it goes on.")
        return self._outcome()

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
            raise asyncio.InvalidStateError(f"{self._label} has not ended.")
        if self._cancelled:
            raise asyncio.CancelledError
        return self._error

    def cancel(self) -> bool:
        """End the future as cancelled, and the call behind it. Return False if it had ended before."""
        with self._lock:
            if self._done:
                return False
            self._cancelled = True
            cancel_call = self._cancel_call
            callbacks = self._finish()
        for callback in callbacks:
            callback(self)
        if cancel_call is not None:
            cancel_call()
        return True

    def add_done_callback(self, callback: Callable[[CallFuture[T]], None]) -> None:
        """Call `callback` with this future when it has ended, in whichever thread ends it."""
        self._call_when_done(callback)

    def set_canceller(self, cancel_call: Callable[[], None]) -> None:
        """Set what ends the call when the future is cancelled."""
        self._cancel_call = cancel_call

    def set_packed(self, packed: Packed) -> bool:
        """End with a result that whoever asks first unpacks, in his own thread; False if it had ended before."""
        with self._lock:
            if self._done:
                return False
            self._packed = packed
            callbacks = self._finish()
        for callback in callbacks:
            callback(self)
        return True

    def set_result(self, value: T) -> bool:
        """End with a result; False if it had ended before."""
        with self._lock:
            if self._done:
                return False
            self._value = value
            callbacks = self._finish()
        for callback in callbacks:
            callback(self)
        return True

    def set_exception(self, error: BaseException) -> bool:
        """End with an exception; False if it had ended before."""
        with self._lock:
            if self._done:
                return False
            self._error = error
            callbacks = self._finish()
        for callback in callbacks:
            callback(self)
        return True

    def _finish(self) -> list[Callable[[CallFuture[T]], None]]:
        """Mark it as ended, under the lock; return whom to tell."""
        self._done = True
        callbacks, self._callbacks = self._callbacks, []
        self._cancel_call = None  # it refers to the call, and the call to us: no payload may wait for the collector
        return callbacks

    def _call_when_done(self, callback: Callable[[CallFuture[T]], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _outcome(self) -> T:
        if self._cancelled:
            raise asyncio.CancelledError
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._packed is not None:
            self._unpack()
            return self._outcome()
        return cast("T", self._value)

    def take_packed(self) -> Packed | None:
        """Return the result of an ended future as it arrived, to be sent on; None if it did not arrive packed."""
        return self._packed

    def _unpack(self) -> None:
        with self._lock:
            if self._packed is None:
                return
            try:
                self._value = unpack(self._packed)
            except Exception as error:  # noqa: BLE001 a user's class may raise anything while it is rebuilt
                error.add_note(f"Raised while the result of {self._label} was unpickled at the caller.")
                self._error = error
            self._packed = None


class _Waker:
    """Wakes a task on its own loop, from any thread."""

    __slots__ = ("loop", "waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        self.loop = loop
        self.waiter = waiter

    def __call__(self, _future: CallFuture[Any]) -> None:
        if asyncio._get_running_loop() is self.loop:
            if not self.waiter.done():
                self.waiter.set_result(None)
        elif _together.wakers is not None:
            _together.wakers.append(self)
        else:
            _wake_on(self.loop, [self.waiter])


class _Together(threading.local):
    wakers: list[_Waker] | None = None


_together = _Together()


class WakeTogether:
    """Wakes the tasks of all futures that end inside with one system call for each loop.

    Every such call lets go of the interpreter lock, and the woken loop would take it for a single future.
    """

    def __enter__(self) -> None:
        _together.wakers = []

    def __exit__(self, *_: object) -> None:
        wakers, _together.wakers = _together.wakers, None
        if not wakers:
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for waker in wakers:
            by_loop.setdefault(waker.loop, []).append(waker.waiter)
        for loop, waiters in by_loop.items():
            _wake_on(loop, waiters)


def _wake_on(loop: asyncio.AbstractEventLoop, waiters: list[asyncio.Future[None]]) -> None:
    # a loop that was closed in the meantime has nobody left who waits
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_wake, waiters)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
