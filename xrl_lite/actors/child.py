"""One child process as the driver sees it: its socket, its slot page, its pidfd, its end.

Waiting:
    the end of the child is told by the fork server (with its status), by the pidfd, and by the socket closing;
    whichever comes first, `on_death` is called exactly once, after all that the child had written was read
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from xrl_lite.actors.forkserver import Birth, ForkServer
from xrl_lite.actors.future import wake_together
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.payload import Packed
from xrl_lite.actors.slots import SlotPage
from xrl_lite.actors.wire import Frame, FrameReader, FrameWriter, Kind
from xrl_lite.actors.zygote import ForkRequest
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_STATUS_WITHIN_S = 1.0
_EXIT_WITHIN_S = 0.5
_SOCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended."""

    status: int | None
    """Status of ``waitpid``; None if nobody could tell."""

    reason: str = ""
    """Why we ended it; empty if it was not us."""

    deliberate: bool = False
    """Whether we ended it only for the sake of one call, so that it does not count as a crash."""

    detail: str = ""
    """What happened to the fork server."""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.detail:
            return self.detail
        if self.status is None:
            return "its process vanished"
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            hint = " (out of memory? the kernel ends processes so)" if number == signal.SIGKILL else ""
            return f"its process was killed by {_signal_name(number)}{hint}"
        return f"its process exited with code {os.WEXITSTATUS(self.status)}"


class Child:
    """One process of an actor. Lives in the hub's thread."""

    def __init__(
        self,
        hub: Hub,
        server: ForkServer,
        request: ForkRequest,
        log_fd: int,
        *,
        on_frame: Callable[[Child, Frame], None],
        on_death: Callable[[Child, Death], None],
    ) -> None:
        self.pid: int | None = None
        self.alive = True
        self.page = SlotPage.create(request.num_slots)
        self.free_slots = list(range(request.num_slots - 1, -1, -1))
        self._hub = hub
        self._on_frame = on_frame
        self._on_death = on_death
        self._pidfd = -1
        self._kill_reason = ""
        self._deliberate = False
        self._flush_due = False
        self._timers: list[asyncio.TimerHandle] = []
        self._sock, theirs = socket.socketpair()
        for sock in (self._sock, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._reader = FrameReader(self._sock)
        self._writer = FrameWriter(self._sock)
        hub.loop.add_reader(self._sock, self._receive)
        fds = (theirs.detach(), os.dup(self.page.fd), os.dup(log_fd))
        server.fork(Birth(request, fds, self._forked, self._exited))

    def send(self, kind: Kind, call_id: int, slot: int, packed: Packed) -> None:
        """Send a frame; all frames of one turn of the loop leave together."""
        if not self.alive:
            return
        self._writer.put(kind, call_id, slot, packed)
        if not self._flush_due:
            self._flush_due = True
            self._hub.loop.call_soon(self._flush)

    def take_slot(self) -> int:
        """Occupy a free slot."""
        slot = self.free_slots.pop()
        self.page.clear(slot)
        return slot

    def kill(self, reason: str, *, deliberate: bool = False) -> None:
        """End the process at once, because of `reason`; the first one counts."""
        if not self._kill_reason:
            self._kill_reason, self._deliberate = reason, deliberate
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Before there is a process only SIGKILL is remembered."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    def _flush(self) -> None:
        self._flush_due = False
        if not self.alive:
            return
        try:
            self._writer.flush()
        except BlockingIOError:
            self._flush_due = True
            self._hub.loop.add_writer(self._sock, self._flush)
            return
        except OSError:  # the child is gone, which is told elsewhere
            self._writer.clear()
        self._hub.loop.remove_writer(self._sock)

    def _receive(self) -> None:
        try:
            frames = self._reader.read(socket.MSG_DONTWAIT)
            with wake_together():
                for frame in frames:
                    self._on_frame(self, frame)
        except BlockingIOError:
            return
        except EOFError:
            self._hub.loop.remove_reader(self._sock)
            self._later(_EXIT_WITHIN_S, lambda: self.kill("it closed its connection to the driver"))
        except Exception:  # whatever it is, nobody may go on waiting for this child
            logger.exception("internal error while reading from process %s", self.pid)
            self._hub.loop.remove_reader(self._sock)
            self.kill("the driver could not read what it sent")

    def _forked(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._hub.loop.add_reader(pidfd, self._vanished)
        if self._kill_reason:
            self.kill(self._kill_reason)

    def _vanished(self) -> None:
        self._hub.loop.remove_reader(self._pidfd)
        self._later(_STATUS_WITHIN_S, lambda: self._exited(None, ""))

    def _exited(self, status: int | None, detail: str) -> None:
        if not self.alive:
            return
        self._read_what_is_left()
        self.alive = False
        self._close()
        self._on_death(self, Death(status, self._kill_reason, self._deliberate, detail))
        self.page.close()

    def _read_what_is_left(self) -> None:
        try:
            while True:
                for frame in self._reader.read(socket.MSG_DONTWAIT):
                    self._on_frame(self, frame)
        except (BlockingIOError, EOFError):
            return

    def _close(self) -> None:
        loop = self._hub.loop
        for timer in self._timers:
            timer.cancel()
        # before they are closed: a closed descriptor stays in the selector and swallows the events of its successor
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._sock.close()
        self._reader.close()
        self._writer.clear()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        self._timers.append(self._hub.loop.call_later(delay_s, function))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
