"""How many calls of an actor may be under way, and who waits, in order, until there is room for one more."""

from __future__ import annotations

import threading
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
        self.num_inside = 0
        self._lock = threading.Lock()
        self._waiting: deque[CallFuture[None]] = deque()

    def enter(self) -> bool:
        """Take a place; False where there is none, or others wait for one."""
        with self._lock:
            if self.num_inside >= self.max_inside or self._waiting:
                return False
            self.num_inside += 1
            return True

    def wait(self) -> CallFuture[None]:
        """Return a future that ends when a place was taken for whoever awaits it."""
        ticket: CallFuture[None] = CallFuture("the wait for room in the actor's queue")
        if self.enter():
            ticket.set_result(None)
            return ticket
        with self._lock:
            self._waiting.append(ticket)
        self._admit()  # a place may have become free in between
        return ticket

    def leave(self, _call: object = None) -> None:
        """Give a place back."""
        with self._lock:
            self.num_inside -= 1
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self.num_inside >= self.max_inside:
                    return
                ticket = self._waiting.popleft()
                self.num_inside += 1
            if not ticket.set_result(None):  # cancelled in the meantime
                with self._lock:
                    self.num_inside -= 1
