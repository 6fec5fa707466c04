"""Frames on the socket between the driver and a child.

A frame is a header of 12 bytes and a body of at most some 10 KB; what is larger lies in a segment, whose descriptor
travels with the frame. So neither side ever waits for the other to take a large message, and nothing can lock up.
The number of the call stands outside the pickle: a body that does not unpickle fails one call and nothing else.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from xrl_lite.actors.payload import Packed
from xrl_lite.actors.segments import Segment

_HEADER = struct.Struct("<IIHBB")  # length of the body, call, slot, kind, number of descriptors
_OWN_SEGMENT = 0x80
_BUFFER_BYTES = 256 * 1024
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * 250)
_SEND_BYTES = 256 * 1024


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


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    call_id: int
    slot: int
    packed: Packed


EMPTY = Packed(b"")


def encode(kind: Kind, call_id: int, slot: int, packed: Packed) -> tuple[bytes, list[int]]:
    """Return the bytes of a frame and the descriptors that go with them."""
    flags = len(packed.segments) | (_OWN_SEGMENT if packed.own_segment else 0)
    header = _HEADER.pack(len(packed.body), call_id, slot, kind, flags)
    return header + packed.body, [segment.fd for segment in packed.segments]


class FrameReader:
    """Cuts what arrives on a stream socket into frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._have = 0
        self._fds: deque[int] = deque()

    def read(self, flags: int = 0) -> Iterator[Frame]:
        """Receive once and yield the frames that are complete now.

        Raises:
            EOFError: the other side is gone.
            BlockingIOError: nothing is there, with ``MSG_DONTWAIT``.
        """
        try:
            count, ancillary, _, _ = self._sock.recvmsg_into(
                [self._buffer[self._have :]], _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError as error:
            raise EOFError from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if count == 0:
            raise EOFError
        self._have += count
        return self._cut()

    def close(self) -> None:
        """Close descriptors that belong to frames which never became complete."""
        while self._fds:
            os.close(self._fds.popleft())

    def _cut(self) -> Iterator[Frame]:
        frames: list[Frame] = []
        buffer, have, at = self._buffer, self._have, 0
        while have - at >= _HEADER.size:
            length, call_id, slot, kind, flags = _HEADER.unpack_from(buffer, at)
            end = at + _HEADER.size + length
            if end > have:
                break
            body = bytes(buffer[at + _HEADER.size : end])
            own = bool(flags & _OWN_SEGMENT)
            segments = tuple(Segment.received(self._fds.popleft()) for _ in range(flags & ~_OWN_SEGMENT))
            frames.append(Frame(Kind(kind), call_id, slot, Packed(body, segments, own)))
            at = end
        if at:
            rest = bytes(buffer[at:have])
            buffer[: len(rest)] = rest
            self._have = len(rest)
        return iter(frames)


class FrameWriter:
    """Sends frames on a socket, either as far as it takes them (`flush`) or all at once (`send`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._out: deque[tuple[memoryview, list[int], Packed]] = deque()

    @property
    def pending(self) -> bool:
        """Whether something is left to send."""
        return bool(self._out)

    def put(self, kind: Kind, call_id: int, slot: int, packed: Packed) -> None:
        """Queue a frame. Its segments stay open until it has left."""
        data, fds = encode(kind, call_id, slot, packed)
        self._out.append((memoryview(data), fds, packed))

    def flush(self, flags: int = socket.MSG_DONTWAIT) -> None:
        """Send what the socket takes.

        Raises:
            BlockingIOError: it takes no more; try again when it is writable.
            OSError: the other side is gone.
        """
        while self._out:
            data, fds, packed = self._out[0]
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._sock.sendmsg([data], rights, flags)
                self._out[0] = (data, [], packed)  # the descriptors went with the first byte
            else:
                sent = self._sock.sendmsg(list(self._joinable()), [], flags)
            self._drop(sent)

    def send(self, kind: Kind, call_id: int, slot: int, packed: Packed) -> None:
        """Send one frame, waiting for room."""
        self.put(kind, call_id, slot, packed)
        self.flush(0)

    def clear(self) -> None:
        """Forget what has not been sent."""
        self._out.clear()

    def _joinable(self) -> Iterator[memoryview]:
        size = 0
        for data, fds, _ in self._out:
            if fds or size > _SEND_BYTES:
                return
            size += data.nbytes
            yield data

    def _drop(self, sent: int) -> None:
        while sent:
            data, fds, packed = self._out[0]
            if sent < data.nbytes:
                self._out[0] = (data[sent:], fds, packed)
                return
            sent -= data.nbytes
            self._out.popleft()
