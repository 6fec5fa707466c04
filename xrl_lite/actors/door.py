"""How an actor is called from inside another one: a handle that travels carries a descriptor of the actor's door.

::

    process that holds a copy of the handle          driver
    RemoteActor ── one connection, frames ────────── Visitor ── submit ──> the actor
         └─ first call: "connect" + one end of a new socket pair, through the door

The door is a socket on which every message is whole, so any number of processes may use the same one, and a process
that dies in the middle of a frame harms only its own connection.

Waiting:
    a call waits for    the reply of the driver
    and is woken by     a thread that reads the connection; its end fails all calls on it
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xrl_lite.actors.actor import Actor, ActorSpec, Call, unavailable_error
from xrl_lite.actors.borrowed import BorrowedActor
from xrl_lite.actors.failure import describe, pack_failure, unpack_failure
from xrl_lite.actors.future import CallFuture, WakeTogether
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.payload import Packed, came_along, pack, send_along
from xrl_lite.actors.segments import Segment
from xrl_lite.actors.wire import EMPTY, Frame, FrameWriter, Kind, SocketReader, hang_up
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_CONNECT = b"connect"
_GONE = "it was stopped, or its system is gone"


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Goes ahead of a call that comes through the door."""

    method: str
    timeout_s: float | None
    retries: int


class Door:
    """The driver's side of one actor's door. Made in any thread, lives in the hub's."""

    def __init__(self, hub: Hub, actor: Actor) -> None:
        self._hub = hub
        self._actor = actor
        self._visitors: set[_Visitor] = set()
        self._inside, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inside.setblocking(False)
        self.segment = Segment(outside.detach(), 0)
        hub.post(hub.loop.add_reader, self._inside, self._let_in)

    def close(self) -> None:
        """Let nobody in any more, and end the connections."""
        self._hub.loop.remove_reader(self._inside)
        hang_up(self._inside)  # its other end is closed with the last message that carries it
        for visitor in list(self._visitors):
            visitor.close()

    def _let_in(self) -> None:
        try:
            _, fds, _, _ = socket.recv_fds(self._inside, 64, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        for fd in fds:
            sock = socket.socket(fileno=fd)
            self._visitors.add(_Visitor(self._hub, sock, self._actor, self._visitors.discard))


class _Visitor:
    """One connection of one process to one actor (hub thread)."""

    def __init__(self, hub: Hub, sock: socket.socket, actor: Actor, on_end: Callable[[_Visitor], None]) -> None:
        self._hub = hub
        self._sock = sock
        self._actor = actor
        self._on_end = on_end
        self._reader = SocketReader(sock)
        self._writer = FrameWriter(sock)
        self._calls: dict[int, Call] = {}
        self._options: dict[int, CallOptions] = {}
        self._closed = False
        hub.loop.add_reader(sock, self._receive)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hub.loop.remove_reader(self._sock)
        self._hub.loop.remove_writer(self._sock)
        hang_up(self._sock)
        self._reader.close()
        self._on_end(self)
        for call in list(self._calls.values()):
            call.cancel()  # nobody is left who waits for them
        self._calls.clear()

    def _receive(self) -> None:
        try:
            for frame in self._reader.read(socket.MSG_DONTWAIT):
                self._take(frame)
        except BlockingIOError:
            return
        except EOFError:
            self.close()
        except Exception:  # calls got lost, and nobody may wait for them
            logger.exception("a connection to actor %s is ended: what came cannot be read", self._actor.spec.name)
            self.close()

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.OPTIONS:
            self._options[frame.call_id] = pickle.loads(frame.packed.body)
        elif frame.kind is Kind.CALL:
            self._call(frame)
        elif frame.kind is Kind.CANCEL and (call := self._calls.get(frame.call_id)) is not None:
            call.cancel()

    def _call(self, frame: Frame) -> None:
        options = self._options.pop(frame.call_id)
        call = Call(self._actor, options.method, frame.packed, options.timeout_s, options.retries)
        self._calls[frame.call_id] = call
        self._actor.submit(call)
        call.when_done(lambda done: self._hub.post(self._reply, frame.call_id, done))

    def _reply(self, call_id: int, future: CallFuture[Any]) -> None:
        if self._closed or self._calls.pop(call_id, None) is None:
            return
        if future.cancelled():
            self._writer.put(Kind.CANCELLED, call_id, 0, EMPTY)
        elif (packed := future.take_packed()) is not None:  # whoever called unpacks it
            self._writer.put(Kind.RESULT, call_id, 0, packed)
        elif (error := future.exception()) is not None:
            self._writer.put(Kind.ERROR, call_id, 0, pack_failure(describe(error)))
        else:
            self._writer.put(Kind.RESULT, call_id, 0, pack(None, name="result"))
        self._flush()

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except BlockingIOError:
            self._hub.loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self.close()
            return
        self._hub.loop.remove_writer(self._sock)


class RemoteActor(BorrowedActor):
    """An actor of another process's system, as seen by whoever got its handle. Calls it; does not own it."""

    def __init__(self, name: str, max_pending: int, door: Segment) -> None:
        super().__init__(name, max_pending)
        self._door = door
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    @property
    def pending(self) -> int:
        return len(self._connection.calls) if self._connection is not None else 0

    @property
    def is_up(self) -> bool:
        return not self.is_down

    @property
    def is_down(self) -> bool:
        return self._connection is not None and self._connection.ended

    def submit(self, call: Call) -> None:
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self._spec, self._door)
                # the connection's thread refers to the connection only, so this runs when the last handle is gone
                weakref.finalize(self, self._connection.hang_up)
        self._connection.submit(call)

    def cancel(self, call: Call) -> None:
        if self._connection is not None:
            self._connection.cancel(call)

    def statistics(self) -> dict[str, Any]:
        return {"name": self._spec.name, "pending": self.pending}

    def after_fork(self) -> None:
        super().after_fork()
        if self._connection is not None:
            self._connection.leave_it_to_the_parent()

    def reduce(self) -> tuple[Any, ...]:
        return reduce_through(self._door, self._spec)


class _Connection:
    """A connection through the door, and the thread that reads it."""

    def __init__(self, spec: ActorSpec, door: Segment) -> None:
        self.calls: dict[int, Call] = {}
        self.ended = False
        self._spec = spec
        self._lock = threading.RLock()  # the collector may run a user's __del__ in here, which calls something
        self._sock, theirs = socket.socketpair()
        self._writer = FrameWriter(self._sock)
        with theirs, socket.socket(fileno=os.dup(door.fd)) as entrance:
            try:
                socket.send_fds(entrance, [_CONNECT], [theirs.fileno()])
            except OSError:  # the door was closed with its actor
                self.ended = True
        threading.Thread(target=self._read, name=f"calls-{spec.name}", daemon=True).start()

    def submit(self, call: Call) -> None:
        options = CallOptions(call.method, call.timeout_s, call.retries_left)
        self.calls[call.call_id] = call
        self._send(call, (Kind.OPTIONS, Packed(pickle.dumps(options))), (Kind.CALL, call.packed))
        if self.ended:
            self._fail_all()

    def cancel(self, call: Call) -> None:
        self._send(call, (Kind.CANCEL, EMPTY))

    def hang_up(self) -> None:
        """End the connection, and with it the thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def leave_it_to_the_parent(self) -> None:
        """Close this fork's descriptor of it, so that nothing here can hang up."""
        self._sock.close()

    def _send(self, call: Call, *frames: tuple[Kind, Packed]) -> None:
        with self._lock:
            if self.ended:
                return
            try:
                for kind, packed in frames:
                    self._writer.send(kind, call.call_id, 0, packed)
            except OSError:
                self.ended = True

    def _read(self) -> None:
        reader = SocketReader(self._sock)
        try:
            while True:
                frames = reader.read()
                with WakeTogether():
                    for frame in frames:
                        self._take(frame)
        except EOFError:
            self._end(reader, _GONE)
        except Exception as error:  # noqa: BLE001 replies got lost, and nobody may wait for them
            self._end(reader, f"what it answers cannot be read here: {error}")

    def _end(self, reader: SocketReader, why: str) -> None:
        with self._lock:
            self.ended = True
        hang_up(self._sock)
        reader.close()
        self._fail_all(why)

    def _take(self, frame: Frame) -> None:
        call = self.calls.pop(frame.call_id, None)
        if call is None:
            return
        if frame.kind is Kind.RESULT:
            call.set_packed(frame.packed)
        elif frame.kind is Kind.ERROR:
            call.set_exception(unpack_failure(frame.packed).error(self._spec.name, call.method))
        else:
            call.cancel()

    def _fail_all(self, why: str = _GONE) -> None:
        for call_id in list(self.calls):
            if (call := self.calls.pop(call_id, None)) is not None:
                call.set_exception(unavailable_error(self._spec, why))


def reduce_through(door: Segment, spec: ActorSpec) -> tuple[Any, ...]:
    """Say how an actor whose handle is being pickled is rebuilt elsewhere."""
    return remote_actor, (spec.name, spec.max_pending, send_along(door))


def remote_actor(name: str, max_pending: int, place: int) -> RemoteActor:
    """Build the actor of a handle that arrived."""
    return RemoteActor(name, max_pending, came_along(place))
