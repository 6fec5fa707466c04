"""The connection between the driver and one child: a socket, and a page on which both mark what happens to calls.

Who polls the socket:
    the event loop that sends the calls, as long as all calls under way come from one loop: then an answer takes no
    other thread on its way. Otherwise the hub. In both cases the hub looks after what has lain there for long, since a
    loop may be blocked, or closed with calls under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from xrl_lite.actors.hub import Hub
from xrl_lite.actors.payload import Packed
from xrl_lite.actors.slots import SlotPage
from xrl_lite.actors.wire import EMPTY, Frame, FrameReader, FrameWriter, Kind

_SOCKET_BYTES = 1 << 20
_FLUSH_AT = 32
"""Frames that leave together while one turn of a loop sends many: the child works on them meanwhile."""


class Link:
    """Made and closed in the hub's thread. All other methods: any thread, under the lock of the actor's desk."""

    def __init__(
        self,
        hub: Hub,
        num_slots: int,
        *,
        on_readable: Callable[[Link], object],
        on_writable: Callable[[Link], object],
    ) -> None:
        self.page = SlotPage.create(num_slots)
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.open = True
        self.at_end = False
        self._hub = hub
        self._on_readable = on_readable
        self._on_writable = on_writable
        self._sock, self.childs_end = socket.socketpair()
        for sock in (self._sock, self.childs_end):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._reader = FrameReader(self._sock)
        self._writer = FrameWriter(self._sock)
        self.flush_due = False
        self._is_full = False
        self.poller: asyncio.AbstractEventLoop = hub.loop
        self._registered: set[asyncio.AbstractEventLoop] = set()
        self._register(hub.loop)

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

    def read(self) -> list[Frame]:
        """Return the frames that have arrived, none if there is nothing.

        Raises:
            EOFError: the child has closed its end. Nobody polls any more.
        """
        if not self.open or self.at_end:
            return []
        try:
            return self._reader.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except EOFError:
            self.at_end = True
            raise

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
        except OSError:  # the child is gone, which is told elsewhere
            self._writer.clear()

    def flush_soon(self, loop: asyncio.AbstractEventLoop, flush: Callable[[Link], None]) -> None:
        """Let all frames of one turn of the running loop leave together."""
        self.flush_due = True
        loop.call_soon(flush, self)

    def poll_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on this loop polls the socket; it is the running one, or the hub's."""
        self.poller = loop
        if loop in self._registered:
            return
        if loop is self._hub.loop:
            self._hub.post(self._register, loop)
        else:
            self._register(loop)

    def close(self) -> None:
        """Close the socket, as soon as no loop polls it any more (hub)."""
        self.open = False
        self._writer.clear()
        self._reader.close()
        self._hub.loop.remove_writer(self._sock)
        for loop in list(self._registered):
            if loop is self._hub.loop or not loop.is_running():
                self._unregister(loop)
            else:
                with contextlib.suppress(RuntimeError):  # closed in this moment
                    loop.call_soon_threadsafe(self._unregister, loop)
        self._close_if_unused()

    def _register(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.open and not self.at_end and loop not in self._registered:
            self._registered.add(loop)
            loop.add_reader(self._sock, self._readable, loop)

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.open and not self.at_end and loop is self.poller:
            self._on_readable(self)
        else:
            self._unregister(loop)

    def _unregister(self, loop: asyncio.AbstractEventLoop) -> None:
        # before the socket is closed: a closed descriptor stays in the selector and swallows the events of the next one
        if loop in self._registered and not loop.is_closed():
            loop.remove_reader(self._sock)
        self._registered.discard(loop)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self.open and not self._registered:
            self._sock.close()

    def _flush_when_writable(self) -> None:
        if self.open:
            self._hub.loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        self._hub.loop.remove_writer(self._sock)
        self._on_writable(self)
