"""How many calls of an actor may be under way, and who waits, in order, until there is room for one more."""

from __future__ import annotations

from collections import deque

from xrl_lite.actors.future import CallFuture


class Room:
    """Counts calls that have not ended. May be used from any thread.

    Waiting:
        waits for    a call that ends (`leave`)
        and is woken by whoever ends it, in the order of waiting; a cancelled wait gives its turn away
    """

    def __init__(self, max_inside: int) -> None:
        self.max_inside = max_inside
        self._inside: list[None] = []  # its append, pop and length are atomic, so there is no need for a lock
        self._waiting: deque[CallFuture[None]] = deque()

    @property
    def num_inside(self) -> int:
        """How many places are taken."""
        return len(self._inside)

    def enter(self) -> bool:
        """Take a place; False where there is none, or others wait for one."""
        inside = self._inside
        if self._waiting or len(inside) >= self.max_inside:
            return False
        inside.append(None)
        if len(inside) > self.max_inside:  # another thread was faster
            inside.pop()
            return False
        return True

    def wait(self) -> CallFuture[None]:
        """Return a future that ends when a place was taken for whoever awaits it."""
        ticket: CallFuture[None] = CallFuture("the wait for room in the actor's queue")
        self._waiting.append(ticket)
        self._admit()
        return ticket

    def leave(self) -> None:
        """Give a place back."""
        self._inside.pop()
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            self._inside.append(None)
            if len(self._inside) > self.max_inside:
                self._inside.pop()
                return
            try:
                ticket = self._waiting.popleft()
            except IndexError:  # another thread was faster
                self._inside.pop()
                return
            if not ticket.set_result(None):  # cancelled in the meantime
                self._inside.pop()
