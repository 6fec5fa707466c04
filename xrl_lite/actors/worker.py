"""The child's side of an actor: makes the object, runs its methods, sends back what they return or raise.

::

    class with sync methods only           class with at least one async method
    main thread: receive, run, reply       main thread: runs sync methods, one at a time
                                           loop thread: receives, runs async methods, replies, beats

Waiting:
    waits for    the next frame
    is woken by  the driver; or by the end of the driver, which closes the socket: then the process ends
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from xrl_lite.actors.failure import describe, pack_failure, unsendable
from xrl_lite.actors.payload import Packed, pack, unpack
from xrl_lite.actors.slots import HEARTBEAT_S, MethodKind, SlotPage
from xrl_lite.actors.wire import EMPTY, Frame, FrameWriter, Kind, PipeWriter, SocketReader
from xrl_lite.actors.zygote import INTERRUPT_SIGNAL
from xrl_lite.errors import PayloadError

Outcome = tuple[Kind, Packed]
AsyncMethod = Callable[..., Awaitable[Any]]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict})
"""What most methods return, and nobody can await."""


class CallInterrupted(BaseException):
    """Raised in the main thread while a call runs that is to be cancelled. No Exception, so user code lets it pass."""


@dataclass(slots=True)
class Work:
    """A call, unpacked."""

    frame: Frame
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def serve(sock: socket.socket, replies_fd: int, page: SlotPage, *, max_concurrency: int) -> NoReturn:
    """Be an actor until the driver says stop, or is gone."""
    line = _Line(sock, replies_fd)
    first = line.receive()
    assert first.kind is Kind.INIT
    page.start(first.slot, MethodKind.SYNC)
    made = _construct(first.packed)
    if isinstance(made, Packed):
        line.reply(first, (Kind.ERROR, made))
        line.wait_for_the_end()
    line.reply(first, _RETURNED_NOTHING)
    runner = _SyncRunner(made.target, page)
    signal.signal(INTERRUPT_SIGNAL, runner.interrupt)
    if _has_async_methods(made.target):
        _LoopWorker(line, runner, page, max_concurrency).run()
    else:
        _run_in_main_thread(line, runner)
    leave(0)


@dataclass(frozen=True, slots=True)
class _Made:
    target: Any


def _construct(packed: Packed) -> _Made | Packed:
    try:
        cls, args, kwargs = unpack(packed)
        return _Made(cls(*args, **kwargs))
    except SystemExit as error:
        leave(_exit_code(error))
    except BaseException as error:  # noqa: BLE001 whatever the constructor raises is the caller's to see
        return pack_failure(describe(error, skip_frames=1))


def _has_async_methods(target: object) -> bool:
    kind = type(target)
    return any(_is_async(inspect.getattr_static(kind, name, None)) for name in dir(kind) if not name.startswith("__"))


def _is_async(method: object) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(method) if callable(method) else method)


class _Line:
    """The socket to the driver, and the pipe for replies without descriptors."""

    def __init__(self, sock: socket.socket, replies_fd: int) -> None:
        self.sock = sock
        self.reader = SocketReader(sock)
        self._writer = FrameWriter(sock)
        self._pipe = PipeWriter(replies_fd)
        self._lock: threading.Lock | None = None

    def share(self) -> None:
        """From now on replies come from several threads."""
        self._lock = threading.Lock()

    def receive(self) -> Frame:
        """Wait for the first frame."""
        while True:
            for frame in self.reader.read():
                return frame

    def reply(self, frame: Frame, outcome: Outcome) -> None:
        """Send the outcome of a call, waiting for room: the driver always reads."""
        try:
            if self._lock is None:
                self._send(frame, *outcome)
            else:
                with self._lock:
                    self._send(frame, *outcome)
        except OSError:  # the driver is gone
            os._exit(1)

    def _send(self, frame: Frame, kind: Kind, packed: Packed) -> None:
        if packed.segments:
            self._writer.send(kind, frame.call_id, frame.slot, packed)
        else:
            self._pipe.send(kind, frame.call_id, frame.slot, packed.body)

    def wait_for_the_end(self) -> NoReturn:
        """Do nothing more until the driver ends this process."""
        try:
            while True:
                for frame in self.reader.read():
                    if frame.kind is Kind.STOP:
                        leave(0)
        except EOFError:
            os._exit(1)


class _SyncRunner:
    """Runs sync methods in the main thread, so that ``signal``-based time limits in user code work."""

    def __init__(self, target: Any, page: SlotPage) -> None:
        self.target = target
        self.hand_over: Callable[[Frame, str, Awaitable[Any]], None] | None = None
        """Takes what a method returned to be awaited, and replies some time. Without it that is awaited right here."""
        self._page = page
        self._running: int | None = None
        self._was_asked = False
        self.num_begun = 0

    def interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle the signal by which the driver asks to look at the mark in the slot."""
        if self._running is not None and self._page.cancelled(self._running):
            self._running = None
            raise CallInterrupted
        self._was_asked = True

    def run(self, frame: Frame, work: Work | None = None) -> Outcome | None:
        """Run one call to its end and return what to reply; None if somebody else will."""
        self.num_begun += 1
        if not self._page.start(frame.slot, MethodKind.SYNC):
            return Kind.CANCELLED, EMPTY
        try:
            # not to be interrupted: a module that is imported for the arguments would stay half of itself
            name, args, kwargs = unpack(frame.packed) if work is None else (work.name, work.args, work.kwargs)
            self._running = frame.slot
            try:
                if self._was_asked and self._page.cancelled(frame.slot):
                    return Kind.CANCELLED, EMPTY
                result = getattr(self.target, name)(*args, **kwargs)
                if type(result) not in _PLAIN and inspect.isawaitable(result):
                    if self.hand_over is not None:
                        return self.hand_over(frame, name, result)
                    result = asyncio.run(_await(result))
            finally:
                self._running = None
        except CallInterrupted:
            return Kind.CANCELLED, EMPTY
        except SystemExit as error:
            leave(_exit_code(error))
        except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
            return Kind.ERROR, pack_failure(describe(error, skip_frames=1))
        return pack_result(result, name)


def _run_in_main_thread(line: _Line, runner: _SyncRunner) -> None:
    while _run_what_comes(line, runner):
        pass


def _run_what_comes(line: _Line, runner: _SyncRunner) -> bool:
    # a function of its own, so that the arguments of a call do not outlive it in a variable while we wait
    try:
        frames = line.reader.read()
    except EOFError:
        os._exit(1)
    for frame in frames:
        if frame.kind is Kind.STOP:
            return False
        if frame.kind is Kind.CALL and (outcome := runner.run(frame)) is not None:
            line.reply(frame, outcome)
    return True


class _LoopWorker:
    """Runs async methods on a loop in a thread of its own; sync ones go to the main thread.

    Calls begin in the order in which they were sent. Where the next one is for the other thread it waits until those
    before it have begun, and never for their end: async calls beyond `max_concurrency` hold up no sync ones.
    """

    def __init__(self, line: _Line, runner: _SyncRunner, page: SlotPage, max_concurrency: int) -> None:
        self._line = line
        self._runner = runner
        self._page = page
        self._max_concurrency = max_concurrency
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[tuple[Work, AsyncMethod | None]] = deque()
        """Calls in the order in which they came; sync ones have no method here."""
        self._without_room: deque[tuple[Work, AsyncMethod]] = deque()
        """Async calls whose turn it was when `max_concurrency` others ran."""
        self._begun: set[int] = set()
        """Calls that a sync method has begun, and of which the rest is awaited."""
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}
        self._new_tasks: set[int] = set()
        """Calls whose task has not taken its first step."""
        self._sync: SimpleQueue[Work | None] = SimpleQueue()
        self._num_sync_sent = 0
        """Counted by the loop; the main thread counts those that it has taken, and those that it has begun."""
        self._num_sync_taken = 0
        runner.hand_over = self._hand_over
        line.share()

    def run(self) -> None:
        """Serve until told to stop."""
        thread = threading.Thread(target=self._run_loop, name="actor-loop", daemon=True)
        thread.start()
        while (work := self._sync.get()) is not None:
            self._note_taken()
            if (outcome := self._runner.run(work.frame, work)) is not None:
                self._line.reply(work.frame, outcome)
            del work, outcome
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(timeout=1.0)

    def _note_taken(self) -> None:
        self._num_sync_taken += 1
        if self._waiting:  # looked at after counting, as the loop counts after it has queued: one of them notices
            self._loop.call_soon_threadsafe(self._begin_waiting)  # lets other threads run, so it may not come later

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._line.sock, self._receive)
        self._beat()
        self._loop.run_forever()

    def _beat(self) -> None:
        self._page.beat()
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _receive(self) -> None:
        try:
            for frame in self._line.reader.read(socket.MSG_DONTWAIT):
                self._take(frame)
        except BlockingIOError:
            return
        except EOFError:
            os._exit(1)
        except Exception:  # noqa: BLE001 whatever it is, calls got lost, and nobody may wait for them
            traceback.print_exc()
            leave(1)

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.STOP:
            self._sync.put(None)
        elif frame.kind is Kind.CANCEL:
            self._cancel(frame)
        elif self._page.cancelled(frame.slot):
            self._line.reply(frame, (Kind.CANCELLED, EMPTY))
        else:
            self._queue(frame)

    def _cancel(self, frame: Frame) -> None:
        if task := self._tasks.get(frame.call_id):
            task.cancel()
            return
        for queue in (self._waiting, self._without_room):
            for index, (work, _) in enumerate(queue):
                if work.frame.call_id == frame.call_id:
                    del queue[index]
                    self._begun.discard(frame.call_id)
                    self._line.reply(frame, (Kind.CANCELLED, EMPTY))
                    self._begin_waiting()
                    return

    def _queue(self, frame: Frame) -> None:
        try:
            work = unpack_call(frame)
            method = getattr(self._runner.target, work.name)
        except Exception as error:  # noqa: BLE001 arguments of a user's class may raise anything while they are rebuilt
            self._line.reply(frame, (Kind.ERROR, pack_failure(describe(error, skip_frames=1))))
            return
        # a sync wrapper of an async function is called where sync methods are: it may do anything
        self._waiting.append((work, method if inspect.iscoroutinefunction(method) else None))
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the calls whose turn it is."""
        while self._without_room and len(self._tasks) < self._max_concurrency:
            self._begin_async(*self._without_room.popleft())
        while self._waiting:
            work, method = self._waiting[0]
            if method is None:
                if self._new_tasks:
                    return
                self._num_sync_sent += 1
                self._sync.put(work)
            else:
                if self._runner.num_begun < self._num_sync_sent:
                    if self._num_sync_taken == self._num_sync_sent:  # it begins in this moment
                        self._loop.call_soon(self._begin_waiting)
                    return
                if len(self._tasks) < self._max_concurrency:
                    self._begin_async(work, method)
                else:
                    self._without_room.append((work, method))
            self._waiting.popleft()

    def _begin_async(self, work: Work, method: AsyncMethod) -> None:
        call_id = work.frame.call_id
        task = self._loop.create_task(self._run_async(work, method), name=work.name)
        self._tasks[call_id] = task
        self._new_tasks.add(call_id)
        task.add_done_callback(functools.partial(self._end, work.frame))

    def _note_begun(self, call_id: int) -> None:
        self._new_tasks.discard(call_id)
        if self._waiting and not self._new_tasks:
            self._loop.call_soon(self._begin_waiting)  # after the first step

    async def _run_async(self, work: Work, method: AsyncMethod) -> Outcome:
        call_id, slot = work.frame.call_id, work.frame.slot
        self._note_begun(call_id)
        has_begun = call_id in self._begun  # its time runs since then
        self._begun.discard(call_id)
        if self._page.cancelled(slot) if has_begun else not self._page.start(slot, MethodKind.ASYNC):
            return Kind.CANCELLED, EMPTY
        try:
            result = await method(*work.args, **work.kwargs)
        except asyncio.CancelledError as error:
            if self._page.cancelled(work.frame.slot):
                raise
            return Kind.ERROR, pack_failure(describe(error, skip_frames=1))
        except SystemExit as error:
            leave(_exit_code(error))
        except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
            return Kind.ERROR, pack_failure(describe(error, skip_frames=1))
        return pack_result(result, work.name)

    def _end(self, frame: Frame, task: asyncio.Task[Outcome]) -> None:
        # a callback, not the task's own last step: a task that is cancelled before its first step never takes one
        del self._tasks[frame.call_id]
        self._new_tasks.discard(frame.call_id)
        self._line.reply(frame, (Kind.CANCELLED, EMPTY) if task.cancelled() else task.result())
        self._begin_waiting()

    def _hand_over(self, frame: Frame, name: str, awaitable: Awaitable[Any]) -> None:
        self._loop.call_soon_threadsafe(self._adopt, Work(frame, name, (), {}), awaitable)

    def _adopt(self, work: Work, awaitable: Awaitable[Any]) -> None:
        """Go on with what a sync method returned as with an async method; it has begun, so it waits for room only."""
        self._page.turn_async(work.frame.slot)
        self._begun.add(work.frame.call_id)
        self._without_room.append((work, lambda: awaitable))
        self._begin_waiting()


def unpack_call(frame: Frame) -> Work:
    """Rebuild method name and arguments."""
    name, args, kwargs = unpack(frame.packed)
    return Work(frame, name, args, kwargs)


_RETURNED_NOTHING: Outcome = (Kind.RESULT, pack(None, name="result"))


def pack_result(result: object, method: str) -> Outcome:
    """Pickle what a method returned; where that fails, the call fails."""
    if result is None:
        return _RETURNED_NOTHING
    try:
        return Kind.RESULT, pack(result, name="result")
    except PayloadError as error:
        return Kind.ERROR, pack_failure(describe(unsendable(error, method)))
    except Exception as error:  # noqa: BLE001 a user's __reduce__ may raise anything
        return Kind.ERROR, pack_failure(describe(error))


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def leave(code: int) -> NoReturn:
    """End this process, after its exit handlers.

    Not by returning: below on the stack is the fork server, and threads that user code left behind must not hold us up.
    """
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] # what multiprocessing children call as well
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
