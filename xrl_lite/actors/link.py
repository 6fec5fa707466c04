"""The connection between the driver and one child: socket, pipe for replies, page.

On the page both sides mark what happens to calls.

Who polls socket and pipe:
    the event loop that sends the calls, as long as all calls under way come from one loop: then an answer takes no
    other thread on its way. Otherwise the hub. In both cases the hub looks after what has lain there for long, since a
    loop may be blocked, or closed with calls under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable

from xrl_lite.actors.hub import Hub
from xrl_lite.actors.payload import Packed
from xrl_lite.actors.slots import SlotPage
from xrl_lite.actors.wire import EMPTY, Frame, FrameReader, FrameWriter, Kind, PipeReader, SocketReader, reply_pipe

_SOCKET_BYTES = 1 << 20
_TRY_AGAIN_S = 0.005
_PASSING = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})
"""What sending fails with while the kernel is short of something: too many descriptors under way, no memory."""

_FLUSH_AT = 32
"""Frames that leave together while one turn of a loop sends many: the child works on them meanwhile."""


class Link:
    """Made and closed in the hub's thread. All other methods: any thread, under the lock of the actor's desk."""

    def __init__(
        self,
        hub: Hub,
        num_slots: int,
        *,
        on_readable: Callable[[Link, FrameReader], object],
        on_writable: Callable[[Link], object],
        on_broken: Callable[[Link, str], object],
    ) -> None:
        self.page = SlotPage.create(num_slots)
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.open = True
        self._hub = hub
        self._on_readable = on_readable
        self._on_writable = on_writable
        self._on_broken = on_broken
        self._sock, childs_sock = socket.socketpair()
        for sock in (self._sock, childs_sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        pipe, childs_pipe = reply_pipe()
        self._childs_ends = [childs_sock.detach(), childs_pipe]
        self._readers = (PipeReader(pipe), SocketReader(self._sock))
        self._unclosed: list[FrameReader | socket.socket] = [*self._readers, self._sock]
        self._writer = FrameWriter(self._sock)
        self.flush_due = False
        self._is_full = False
        self.poller: asyncio.AbstractEventLoop = hub.loop
        self._registered: set[asyncio.AbstractEventLoop] = set()
        self._register(hub.loop)

    def childs_ends(self) -> tuple[int, ...]:
        """Hand over the descriptors of the child: its end of the socket, and that of the pipe."""
        ends, self._childs_ends = self._childs_ends, []
        return tuple(ends)

    def send(self, kind: Kind, call_id: int, packed: Packed) -> int:
        """Queue a frame about a call, and return the slot that the call has from now on. `flush` sends it."""
        slot = self.free_slots.pop()
        self.page.clear(slot)
        self._writer.put(kind, call_id, slot, packed)
        return slot

    @property
    def is_due(self) -> bool:
        """Whether so much is queued that it should not wait for more."""
        return self._writer.num_queued >= _FLUSH_AT and not self._is_full

    def tell(self, kind: Kind, call_id: int = 0, slot: int = 0) -> None:
        """Send a frame that carries nothing."""
        if self.open:
            self._writer.put(kind, call_id, slot, EMPTY)
            self.flush()

    def read(self, reader: FrameReader | None = None) -> list[Frame]:
        """Return the frames that have arrived, on pipe and socket unless told which; none if there is nothing.

        Raises:
            EOFError: nothing is left to read, and the child has closed one of its ends.
        """
        frames: list[Frame] = []
        ended: list[FrameReader] = []
        for source in self._readers if reader is None else (reader,):
            if self.open and not source.at_end:
                try:
                    frames += source.read(socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except EOFError:
                    ended.append(source)
        if ended and not frames:
            for source in ended:
                source.at_end = True
            raise EOFError
        return frames

    @property
    def num_incomplete(self) -> int:
        """Bytes that were read of frames of which the rest is yet to come."""
        return sum(reader.num_incomplete for reader in self._readers)

    def read_no_more(self) -> None:
        """Leave whatever comes unread."""
        for reader in self._readers:
            reader.at_end = True

    def flush(self) -> None:
        """Send what is queued."""
        self.flush_due = self._is_full = False
        if not self.open:
            return
        try:
            self._writer.flush()
        except BlockingIOError:
            self.flush_due = self._is_full = True
            self._hub.post(self._flush_when_writable)
        except ConnectionError:  # the child is gone, which is told elsewhere
            self._writer.clear()
        except OSError as error:
            if error.errno in _PASSING:
                self.flush_due = self._is_full = True
                self._hub.post(self._hub.loop.call_later, _TRY_AGAIN_S, self._on_writable, self)
            else:
                self._writer.clear()
                self._hub.post(self._on_broken, self, f"the driver could not send to it: {error}")

    def flush_soon(self, loop: asyncio.AbstractEventLoop, flush: Callable[[Link], None]) -> None:
        """Let all frames of one turn of the running loop leave together."""
        self.flush_due = True
        loop.call_soon(flush, self)

    def poll_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on this loop polls the socket; it is the running one, or the hub's."""
        self.poller = loop
        if loop in self._registered:
            return
        for other in list(self._registered):
            if other.is_closed():  # it has let go of all descriptors itself
                self._registered.discard(other)
        if loop is self._hub.loop:
            self._hub.post(self._register, loop)
        else:
            self._register(loop)

    def close(self) -> None:
        """Close socket and pipe, as soon as no loop polls them any more (hub)."""
        self.open = False
        self._writer.clear()
        for fd in self.childs_ends():
            os.close(fd)
        self._hub.loop.remove_writer(self._sock)
        for loop in list(self._registered):
            if loop is self._hub.loop or not loop.is_running():
                self._unregister(loop)
            else:
                with contextlib.suppress(RuntimeError):  # closed in this moment
                    loop.call_soon_threadsafe(self._unregister, loop)
        self._close_if_unused()

    def _register(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.open and loop not in self._registered:
            self._registered.add(loop)
            for reader in self._readers:
                if not reader.at_end:
                    loop.add_reader(reader.fileno(), self._readable, loop, reader)

    def _readable(self, loop: asyncio.AbstractEventLoop, reader: FrameReader) -> None:
        if loop is not self.poller or not self.open:
            self._unregister(loop)
        elif reader.at_end:
            loop.remove_reader(reader.fileno())
        else:
            self._on_readable(self, reader)

    def _unregister(self, loop: asyncio.AbstractEventLoop) -> None:
        # before they are closed: a closed descriptor stays in the selector and swallows the events of the next one
        if loop in self._registered and not loop.is_closed():
            for reader in self._readers:
                loop.remove_reader(reader.fileno())
        self._registered.discard(loop)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.open or self._registered:
            return
        with contextlib.suppress(IndexError):
            while True:  # two threads may come here at once, and a descriptor that is closed twice is somebody else's
                self._unclosed.pop(0).close()

    def _flush_when_writable(self) -> None:
        if self.open:
            self._hub.loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        self._hub.loop.remove_writer(self._sock)
        self._on_writable(self)
