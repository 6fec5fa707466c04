"""Frames between the driver and a child: on a socket, and on a pipe for replies.

A frame is a header of 12 bytes and a body of at most some 10 KB; what is larger lies in a segment, whose descriptor
travels with the frame. So neither side ever waits for the other to take a large message, and nothing can lock up.
Descriptors travel on sockets only. All other replies take the pipe: many small messages, each written at once, cost it
a third of what they cost a socket, and their reader next to nothing; and like a socket it keeps what was written when
the writer dies.
The number of the call stands outside the pickle: a body that does not unpickle fails one call and nothing else.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from xrl_lite.actors.payload import Packed, is_lent
from xrl_lite.actors.segments import Mappings, Segment

_HEADER = struct.Struct("<IIHBB")  # length of the body, call, slot, kind, number of descriptors
_HEADER_BYTES = _HEADER.size
_OWN_SEGMENT = 0x80
_BUFFER_BYTES = 256 * 1024
_PIPE_BYTES = 256 * 1024
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * 250)
_SEND_BYTES = 256 * 1024
_MAX_PARTS = 1024  # what the kernel takes in one call


class Kind(IntEnum):
    """What a frame says."""

    INIT = 1
    """To the child: class and constructor arguments."""
    CALL = 2
    """To the child: method name and arguments."""
    CANCEL = 3
    """To the child: end this call; it has been marked in its slot as well."""
    STOP = 4
    """To the child: finish, run exit handlers, and end."""
    OPTIONS = 8
    """To the driver, through a door: the options of the call that follows."""

    RESULT = 5
    """To the driver: what the call returned."""
    ERROR = 6
    """To the driver: what the call raised, see `failure`."""
    CANCELLED = 7
    """To the driver: the call was ended as asked, or never begun."""


@dataclass(slots=True)
class Frame:
    """One message."""

    kind: Kind
    call_id: int
    slot: int
    packed: Packed


EMPTY = Packed(b"")
_KINDS = {int(kind): kind for kind in Kind}


class FrameReader(ABC):
    """Cuts what arrives into frames."""

    def __init__(self, fd: int) -> None:
        self.at_end = False
        """Set by its owner when nothing more is to be read."""
        self._fd = fd
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._have = 0

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    @property
    def num_incomplete(self) -> int:
        """Bytes that were read of a frame of which the rest is yet to come."""
        return self._have

    def read(self, flags: int = 0) -> list[Frame]:
        """Receive once and return the frames that are complete now.

        Raises:
            EOFError: the other side is gone.
            BlockingIOError: nothing is there, and reading does not wait.
        """
        have = self._have
        count = self._receive(self._buffer[have:] if have else self._buffer, flags)
        if count == 0:
            raise EOFError
        self._have = have + count
        return self._cut()

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors that it owns."""

    @abstractmethod
    def _receive(self, room: memoryview, flags: int) -> int:
        """Fill `room` as far as there is something, and return how far."""

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        have, at = self._have, 0
        data = bytes(self._buffer[:have])  # once for all, as slices of bytes cost less than those of a view
        while have - at >= _HEADER_BYTES:
            length, call_id, slot, kind, flags = _HEADER.unpack_from(data, at)
            begin = at + _HEADER_BYTES
            if begin + length > have:
                break
            at = begin + length
            body = data[begin:at]
            packed = self._with_segments(body, flags) if flags else Packed(body)
            frames.append(Frame(_KINDS[kind], call_id, slot, packed))
        if at:
            self._have = have - at
            self._buffer[: self._have] = data[at:]
        return frames

    def _with_segments(self, body: bytes, flags: int) -> Packed:
        raise ValueError(f"a frame of {len(body)} bytes speaks of descriptors ({flags}), and none can come this way")


class PipeReader(FrameReader):
    """Reads a pipe, which it owns. Whether reading waits is up to the pipe; flags say nothing here."""

    def close(self) -> None:
        os.close(self._fd)

    def _receive(self, room: memoryview, flags: int) -> int:
        return os.readv(self._fd, [room])


class SocketReader(FrameReader):
    """Reads a stream socket, which it does not own, with the descriptors that come along."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.fileno())
        self._sock = sock
        self._fds: deque[int] = deque()
        self._mappings = Mappings()

    def close(self) -> None:
        """Close descriptors that belong to frames which never became complete."""
        while self._fds:
            os.close(self._fds.popleft())

    def _receive(self, room: memoryview, flags: int) -> int:
        try:
            count, ancillary, told, _ = self._sock.recvmsg_into(
                [room], _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError as error:
            raise EOFError from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if told & socket.MSG_CTRUNC:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise OSError(
                errno.EMFILE,
                f"What came along with a message is lost, since this process has no descriptors left (its limit is "
                f"{limit}). Close files and sockets that are not needed any more, or raise the limit (ulimit -n)",
            )
        return count

    def _with_segments(self, body: bytes, flags: int) -> Packed:
        has_own, number = bool(flags & _OWN_SEGMENT), flags & ~_OWN_SEGMENT
        lends = has_own and is_lent(body)
        fds, mappings = self._fds, self._mappings
        own = [Segment.received(fds.popleft(), mappings, lent=lends)] if has_own else []
        others = [Segment.received(fds.popleft(), mappings) for _ in range(number - has_own)]
        return Packed(body, (*own, *others), has_own)


def hang_up(sock: socket.socket) -> None:
    """Close a socket such that the other side sees its end, also where a fork of this process still has it open."""
    with contextlib.suppress(OSError):  # the other side is gone
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def reply_pipe() -> tuple[int, int]:
    """Return both ends of a pipe for replies. Reading does not wait; writing does, until there is room."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    with contextlib.suppress(OSError):  # users may have so much memory in pipes and no more; the usual 64 KB do as well
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


class PipeWriter:
    """Writes frames without descriptors on a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, kind: Kind, call_id: int, slot: int, body: bytes) -> None:
        """Write one frame, waiting for room."""
        data = _HEADER.pack(len(body), call_id, slot, kind, 0) + body
        written = os.write(self._fd, data)
        while written < len(data):  # a signal came between
            written += os.write(self._fd, memoryview(data)[written:])


class FrameWriter:
    """Sends frames on a socket, either as far as it takes them (`flush`) or all at once (`send`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._out: deque[tuple[bytes, Packed]] = deque()
        """Header and payload of frames of which nothing has been sent."""
        self._begun: memoryview | None = None
        """What is left of bytes that were sent in part; their descriptors went with the first one."""

    @property
    def pending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._out) or self._begun is not None

    @property
    def num_queued(self) -> int:
        """How many frames wait."""
        return len(self._out)

    def put(self, kind: Kind, call_id: int, slot: int, packed: Packed) -> None:
        """Queue a frame. Its segments stay open until it has left."""
        body, flags = packed.body, 0
        if packed.segments:
            flags = len(packed.segments) | _OWN_SEGMENT if packed.own_segment else len(packed.segments)
        self._out.append((_HEADER.pack(len(body), call_id, slot, kind, flags), packed))

    def flush(self, flags: int = socket.MSG_DONTWAIT) -> None:
        """Send what the socket takes.

        Raises:
            BlockingIOError: it takes no more; try again when it is writable.
            OSError: the other side is gone.
        """
        while self._begun is not None or self._out:
            if self._begun is not None:
                left = self._begun
                sent = self._sock.send(left, flags)
                self._begun = left[sent:] if sent < len(left) else None
            elif self._out[0][1].segments:
                self._send_with_descriptors(flags)
            else:
                self._send_joined(flags)

    def send(self, kind: Kind, call_id: int, slot: int, packed: Packed) -> None:
        """Send one frame, waiting for room."""
        if packed.segments or self._out or self._begun is not None:
            self.put(kind, call_id, slot, packed)
            self.flush(0)
        else:
            body = packed.body
            self._sock.sendall(_HEADER.pack(len(body), call_id, slot, kind, 0) + body)

    def clear(self) -> None:
        """Forget what has not been sent."""
        self._out.clear()
        self._begun = None

    def _send_with_descriptors(self, flags: int) -> None:
        header, packed = self._out[0]
        fds = array.array("i", [segment.fd for segment in packed.segments])
        parts = [header, packed.body]
        sent = self._sock.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], flags)
        for segment in packed.segments:
            segment.pass_on()
        self._out.popleft()
        self._keep_rest(parts, sent)

    def _send_joined(self, flags: int) -> None:
        """Send the frames at the front together, as far as they carry no descriptors."""
        out = self._out
        parts: list[bytes] = []
        size = 0
        for header, packed in out:
            if packed.segments or size > _SEND_BYTES or len(parts) >= _MAX_PARTS:
                break
            parts += (header, packed.body)
            size += len(packed.body)
        sent = self._sock.sendmsg(parts, (), flags)
        for _ in range(len(parts) // 2):
            out.popleft()
        self._keep_rest(parts, sent)

    def _keep_rest(self, parts: list[bytes], sent: int) -> None:
        if sent < sum(map(len, parts)):
            self._begun = memoryview(b"".join(parts))[sent:]
