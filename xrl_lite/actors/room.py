"""How many calls of an actor may be under way, and who waits, in order, until there is room for one more.

::

    enter --> inside --> leave
      waits for    a place inside, first come first served
      is woken by  whoever leaves, and then has its place; a cancelled wait gives its turn away
"""

from __future__ import annotations

import asyncio
from collections import deque

from xrl_lite.actors.future import CallFuture


class Room:
    """Counts calls that have not ended. May be used from any thread, and from several event loops.

    Args:
        max_inside: Most calls inside.
    """

    def __init__(self, max_inside: int) -> None:
        self.max_inside = max_inside
        # There is no lock, since the collector may run a finalizer that enters while its thread does. Each step is one
        # operation on a list, which is atomic. A place is tried for by taking it; whoever gives one back looks whether
        # somebody waits, as others may have found it taken for just that moment.
        self._inside: list[None] = []
        self._waiting: deque[CallFuture[None]] = deque()

    @property
    def num_inside(self) -> int:
        """How many places are taken."""
        return len(self._inside)

    def enter_now(self) -> bool:
        """Enter if that takes no waiting, and nobody else waits. Who enters must leave."""
        inside = self._inside
        if self._waiting or len(inside) >= self.max_inside:
            return False
        inside.append(None)
        if len(inside) <= self.max_inside:
            return True
        self.leave()  # another thread was faster
        return False

    async def enter(self) -> None:
        """Wait for a place, and enter. Cancelling gives the place to the next."""
        if self.enter_now():
            return
        ticket = self.wait()
        try:
            await ticket
        except asyncio.CancelledError:
            if not ticket.cancelled():  # in the moment it was given
                self.leave()
            raise

    def wait(self) -> CallFuture[None]:
        """Return a future that ends when a place was taken for whoever awaits it."""
        ticket: CallFuture[None] = CallFuture("the wait for room in the actor's queue")
        self._waiting.append(ticket)
        self._admit()
        return ticket

    def leave(self) -> None:
        """Give a place back, to who has waited longest."""
        self._inside.pop()
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._inside) < self.max_inside:
            self._inside.append(None)
            if len(self._inside) > self.max_inside or not self._admit_next():
                self._inside.pop()

    def _admit_next(self) -> bool:
        """Tell the next that a place is theirs; False if there is no next, or nobody behind it any more."""
        try:
            ticket = self._waiting.popleft()
        except IndexError:  # another thread was faster
            return False
        loop = ticket.home
        return (loop is None or not loop.is_closed()) and ticket.set_result(None)
