"""One child process as the driver sees it: its pidfd, and its end.

Waiting:
    the end of the child is told by the fork server (with its status), by the pidfd, and by its link closing;
    whichever comes first, `on_death` is called exactly once
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from xrl_lite.actors.forkserver import Birth, ForkServer
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.link import Link
from xrl_lite.actors.zygote import ForkRequest

_STATUS_WITHIN_S = 5.0
_EXIT_WITHIN_S = 0.5


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
        link: Link,
        *,
        on_death: Callable[[Child, Death], None],
    ) -> None:
        self.pid: int | None = None
        self.alive = True
        """Whether its end has not been told of yet."""
        self.link = link
        self.page = link.page
        self._hub = hub
        self._on_death = on_death
        self._pidfd = -1
        self._kill_reason = ""
        self._deliberate = False
        self._has_vanished = False
        self._timers: list[asyncio.TimerHandle] = []
        fds = (*link.childs_ends(), os.dup(self.page.fd), os.dup(log_fd))
        self._server = server
        self._birth = Birth(request, fds, self._forked, self._exited)
        server.fork(self._birth)

    @property
    def is_ending(self) -> bool:
        """Whether it was killed."""
        return bool(self._kill_reason)

    def kill(self, reason: str, *, deliberate: bool = False) -> None:
        """End the process at once, because of `reason`; the first one counts, unless it has ended by itself."""
        if not self._kill_reason and not self._has_vanished:
            self._kill_reason, self._deliberate = reason, deliberate
        if self.pid is None:
            self._server.withdraw(self._birth)
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Before there is a process only SIGKILL is remembered."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    def hung_up(self, reason: str) -> None:
        """Its link is broken: it is dying, or else it will be ended for that `reason`."""
        if self.alive:
            self._later(_EXIT_WITHIN_S, lambda: self.kill(reason))

    def _forked(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._hub.loop.add_reader(pidfd, self._vanished)
        if self._kill_reason:
            self.kill(self._kill_reason)

    def _vanished(self) -> None:
        self._has_vanished = True
        self._hub.loop.remove_reader(self._pidfd)
        self._later(_STATUS_WITHIN_S, lambda: self._exited(None, ""))

    def _exited(self, status: int | None, detail: str) -> None:
        if not self.alive:
            return
        self.alive = False
        for timer in self._timers:
            timer.cancel()
        if self._pidfd >= 0:
            self._hub.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._on_death(self, Death(status, self._kill_reason, self._deliberate, detail))

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        self._timers.append(self._hub.loop.call_later(delay_s, function))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
