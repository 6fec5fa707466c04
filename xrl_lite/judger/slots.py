"""Places at workers, given out in rotation; who finds none waits in line.

::

    acquire() --> free place, starting behind the last one taken --> index of the worker
      waits for    a place, in the order of asking
      is woken by  release() of any worker, or by the loss of the last worker
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence


class Slots:
    """Counts what is in flight at each worker. Without a line this is strict rotation from worker 0.

    Args:
        capacities: Places at each worker; None stands for no limit.
    """

    def __init__(self, capacities: Sequence[int | None]) -> None:
        self._capacities = list(capacities)
        self._in_flight = [0] * len(self._capacities)
        self._retired: dict[int, Exception] = {}
        self._next = 0
        self._line: deque[asyncio.Future[int]] = deque()

    @property
    def loads(self) -> list[int]:
        """What is in flight at each worker."""
        return list(self._in_flight)

    async def acquire(self) -> int:
        """Return the worker to use next, waiting until one has a place. Each place must be released.

        Raises:
            Exception: the one given to `retire`, when no worker is left.
        """
        index = self._take_free()
        if index is not None:
            return index
        ticket: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.append(ticket)
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket in self._line:
                self._line.remove(ticket)
            elif not ticket.cancelled() and ticket.exception() is None:
                self.release(ticket.result())  # cancelled in the moment the place was given
            raise

    def release(self, index: int) -> None:
        """Give a place back, to the first in line if there is one."""
        self._in_flight[index] -= 1
        if index in self._retired:
            return
        while self._line:
            ticket = self._line.popleft()
            if ticket.done() or ticket.get_loop().is_closed():
                continue
            self._in_flight[index] += 1
            self._next = (index + 1) % len(self._capacities)
            ticket.set_result(index)
            return

    def retire(self, index: int, error: Exception) -> None:
        """Give out no place at this worker any more; `error` is what those in line get when it was the last one."""
        self._retired[index] = error
        if len(self._retired) < len(self._capacities):
            return
        while self._line:
            ticket = self._line.popleft()
            if not ticket.done() and not ticket.get_loop().is_closed():
                ticket.set_exception(error)

    def __reduce__(self) -> tuple[type[Slots], tuple[list[int | None]]]:
        return Slots, (self._capacities,)  # a copy counts for itself

    def _take_free(self) -> int | None:
        if len(self._retired) == len(self._capacities):
            raise next(iter(self._retired.values()))
        for step in range(len(self._capacities)):
            index = (self._next + step) % len(self._capacities)
            capacity = self._capacities[index]
            if index not in self._retired and (capacity is None or self._in_flight[index] < capacity):
                self._in_flight[index] += 1
                self._next = (index + 1) % len(self._capacities)
                return index
        return None
