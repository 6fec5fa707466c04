"""A bound on the judgements that one judger holds: whoever comes when it is full waits outside, without a payload.

::

    enter --> inside, running or in line for a worker --> leave
      waits for    a place inside, first come first served
      is woken by  the next judgement that ends, and then has its place
"""

from __future__ import annotations

import asyncio
from collections import deque


class Gate:
    """Counts who is inside. A copy starts empty.

    Args:
        max_inside: Most judgements inside.
    """

    def __init__(self, max_inside: int) -> None:
        self._max_inside = max_inside
        self._num_inside = 0
        self._outside: deque[asyncio.Future[None]] = deque()

    def enter_now(self) -> bool:
        """Enter if that takes no waiting. Who enters must leave."""
        if self._num_inside >= self._max_inside:
            return False
        self._num_inside += 1
        return True

    async def enter(self) -> None:
        """Wait for a place, and enter. Cancelling gives the place to the next."""
        if self.enter_now():
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outside.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # in the moment it was given
                self.leave()
            raise

    def leave(self) -> None:
        """Give the place to who has waited longest."""
        while self._outside:
            place = self._outside.popleft()
            if not place.done() and not place.get_loop().is_closed():
                place.set_result(None)
                return
        self._num_inside -= 1

    def __reduce__(self) -> tuple[type[Gate], tuple[int]]:
        return Gate, (self._max_inside,)
