"""Who may send next, and to which replica: first come, first served, within bounds.

Waits for    the gate (closed while weights are exchanged), and for a replica that is up and has room
Is woken by  `serve`, which is called whenever either may have changed
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from xrl_lite.errors import ActorUnavailableError
from xrl_lite.rollout.link import LinkState, ReplicaLink

Session = int | str | None


@dataclass(eq=False)
class _Turn:
    """Somebody who waits."""

    session: Session
    link: ReplicaLink | None = None
    error: Exception | None = None
    aborted: bool = False
    called: anyio.Event = field(default_factory=anyio.Event)


class Turnstile:
    """Hands out places on replicas.

    Args:
        links: The replicas.
        limit: Requests a replica has at once.
        max_sessions: Sessions that are remembered; the one that was used longest ago is forgotten first.
    """

    def __init__(self, links: Sequence[ReplicaLink], *, limit: int, max_sessions: int) -> None:
        self._links = links
        self._limit = limit
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[int | str, ReplicaLink] = OrderedDict()
        self._queue: deque[_Turn] = deque()
        self._let_through: set[_Turn] = set()
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether anybody is let through."""
        return self._open

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def close(self) -> None:
        """Let nobody through."""
        self._open = False

    def open(self) -> None:
        """Let them through again."""
        self._open = True
        self.serve()

    async def enter(self, session: Session) -> ReplicaLink | None:
        """Wait for a place and return its replica; None where `abort_waiting` was called. Give it back with `leave`.

        Raises:
            ActorUnavailableError: every replica is down; has the reason of the last.
        """
        if self._open and not self._queue and (link := self._choose(session)) is not None:
            return self._take(link, session)
        turn = _Turn(session)
        self._queue.append(turn)
        self.serve()
        try:
            await turn.called.wait()
        except BaseException:
            if turn.link is not None:
                self.leave(turn.link)
            elif not turn.called.is_set():
                self._queue.remove(turn)
            raise
        finally:
            self._let_through.discard(turn)
        if turn.error is not None:
            raise turn.error
        if turn.aborted and turn.link is not None:
            self.leave(turn.link)
            return None
        return turn.link

    def leave(self, link: ReplicaLink) -> None:
        """Give a place back."""
        link.load -= 1
        self.serve()

    def abort_waiting(self) -> int:
        """Send everybody away who waits; return how many there were."""
        # those that were let through and have not run since have sent nothing either
        sent_away, self._queue = [*self._let_through, *self._queue], deque()
        for turn in sent_away:
            turn.aborted = True
            turn.called.set()
        return len(sent_away)

    def serve(self) -> None:
        """Let through whoever can go."""
        if self._queue and all(link.state is LinkState.DOWN for link in self._links):
            self._refuse_all()
        while self._open and self._queue and (link := self._choose(self._queue[0].session)) is not None:
            turn = self._queue.popleft()
            turn.link = self._take(link, turn.session)
            self._let_through.add(turn)
            turn.called.set()

    def _refuse_all(self) -> None:
        reasons = "\n".join(f"{link.name}: {link.error}" for link in self._links)
        for turn in self._queue:
            turn.error = ActorUnavailableError(f"No rollout replica is left to generate.\n{reasons}")
            turn.called.set()
        self._queue.clear()

    def _choose(self, session: Session) -> ReplicaLink | None:
        """The session's replica while it has room, else the least loaded: its cache is not worth a wait.

        That keeps the order fair: whoever is first in line never waits while any replica has room.
        """
        free = [link for link in self._links if link.state is LinkState.UP and link.load < self._limit]
        if session is not None and (own := self._sessions.get(session)) is not None and own in free:
            return own
        return min(free, key=lambda link: link.load, default=None)

    def _take(self, link: ReplicaLink, session: Session) -> ReplicaLink:
        link.load += 1
        if session is not None:
            self._sessions[session] = link
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return link
