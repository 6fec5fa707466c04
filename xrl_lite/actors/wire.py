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
from dataclasses import dataclass
from enum import IntEnum

from xrl_lite.actors.payload import Packed
from xrl_lite.actors.segments import Mappings, Segment

_HEADER = struct.Struct("<IIHBB")  # length of the body, call, slot, kind, number of descriptors
_HEADER_BYTES = _HEADER.size
_OWN_SEGMENT = 0x80
_BUFFER_BYTES = 256 * 1024
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


class FrameReader:
    """Cuts what arrives on a stream socket into frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._have = 0
        self._fds: deque[int] = deque()
        self._mappings = Mappings()

    def read(self, flags: int = 0) -> list[Frame]:
        """Receive once and return the frames that are complete now.

        Raises:
            EOFError: the other side is gone.
            BlockingIOError: nothing is there, with ``MSG_DONTWAIT``.
        """
        have = self._have
        room = self._buffer[have:] if have else self._buffer
        try:
            count, ancillary, _, _ = self._sock.recvmsg_into([room], _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
        except ConnectionError as error:
            raise EOFError from error
        if ancillary:
            self._take_descriptors(ancillary)
        if count == 0:
            raise EOFError
        self._have = have + count
        return self._cut()

    def close(self) -> None:
        """Close descriptors that belong to frames which never became complete."""
        while self._fds:
            os.close(self._fds.popleft())

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        buffer, have, at = self._buffer, self._have, 0
        while have - at >= _HEADER_BYTES:
            length, call_id, slot, kind, flags = _HEADER.unpack_from(buffer, at)
            begin = at + _HEADER_BYTES
            if begin + length > have:
                break
            at = begin + length
            body = bytes(buffer[begin:at])
            packed = self._with_segments(body, flags) if flags else Packed(body)
            frames.append(Frame(_KINDS[kind], call_id, slot, packed))
        if at:
            self._have = have - at
            if self._have:
                buffer[: self._have] = bytes(buffer[at:have])
        return frames

    def _with_segments(self, body: bytes, flags: int) -> Packed:
        segments = tuple(Segment.received(self._fds.popleft(), self._mappings) for _ in range(flags & ~_OWN_SEGMENT))
        return Packed(body, segments, bool(flags & _OWN_SEGMENT))


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
