"""Places at workers, given out in rotation; who finds none waits in line, or is carried along by another.

::

    ask() --> free place, starting behind the last one taken --> Lead: use this worker, then release it
      waits for    a place, in the order of asking; or for somebody who has one to carry its payload along
      is woken by  release() of any worker, carry() of a leader, or the loss of the last worker

A leader may `board` others from the line, send their payloads with its own, and `carry` the items to those who wait:
the states of cases are settled then, one after the other. What a leader cannot carry after all, it puts back at the
front, to travel alone.

Whoever asks for a *whole* worker gets one that nobody else has a place at, and nobody gets one until it is released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrl_lite.judger.company import Case, hand_over

_SHORT_LINE = 8


@dataclass(slots=True)
class Lead:
    """A place at a worker."""

    index: int
    """Which worker."""
    num_deaths: int = 0
    """How many workers died while they had the payload."""
    travels_alone: bool = False
    """Whether the payload was on board of a journey that failed."""
    is_whole: bool = False
    """Whether nobody else has a place there."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A payload in line, or on board."""

    payload: Any
    future: asyncio.Future[Any]
    """Gets a `Lead`, a place at the worker to use next, or what is read of the payload's item that somebody else
    brought; or the error given to `Slots.retire`, when no worker is left."""
    case: Case | None = None
    """What the payload is of; then it need not be made before somebody carries it."""
    num_deaths: int = 0
    travels_alone: bool = False
    is_whole: bool = False

    @property
    def is_void(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.done() or self.future.get_loop().is_closed()


class Slots:
    """Counts what is in flight at each worker. Without a line this is strict rotation from worker 0.

    Args:
        capacities: Places at each worker; None stands for no limit.
    """

    extra: int = 0
    """Further places at each worker while the line is long, so that it need not wait for us between two journeys."""

    def __init__(self, capacities: Sequence[int | None]) -> None:
        self._capacities = list(capacities)
        self._in_flight = [0] * len(self._capacities)
        self._retired: dict[int, Exception] = {}
        self._whole: set[int] = set()
        self._next = 0
        self._line: deque[Ticket] = deque()

    @property
    def loads(self) -> list[int]:
        """How many places are taken at each worker."""
        return list(self._in_flight)

    @property
    def num_workers(self) -> int:
        """How many are left."""
        return len(self._capacities) - len(self._retired)

    @property
    def num_in_line(self) -> int:
        """How many wait."""
        return len(self._line)

    def ask(self, payload: Any = None, *, case: Case | None = None, whole: bool = False) -> Ticket:
        """Get in line for a place. Who waits for the ticket's future no longer must `withdraw` it.

        Args:
            payload: What others may carry along; None for what they may not.
            case: What others may make a payload of, and carry along.
            whole: Whether a place will not do, and it has to be all of a worker.
        """
        ticket = Ticket(payload, asyncio.get_running_loop().create_future(), case, is_whole=whole)
        self._line.append(ticket)
        if self._line[0] is ticket:  # else there is no free place, or the first in line wants a whole worker
            self._serve_line()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Get out of line. A place that was given in this very moment goes to the next."""
        future = ticket.future
        if ticket in self._line:
            self._line.remove(ticket)
        elif future.done() and not future.cancelled() and future.exception() is None:
            given = future.result()
            if isinstance(given, Lead):
                self.release(given.index)

    def release(self, index: int) -> None:
        """Give a place back, to the first in line if there is one."""
        self._in_flight[index] -= 1
        self._whole.discard(index)
        self._serve_line()

    def board(self, count: int) -> list[Ticket]:
        """Take up to `count` tickets out of the line. Each must be carried or put back."""
        line = self._line
        boarded: list[Ticket] = []
        while line and len(boarded) < count:
            ticket = line[0]
            if ticket.future.done():
                line.popleft()
            elif ticket.travels_alone or ticket.is_whole or (ticket.payload is None and ticket.case is None):
                break
            else:
                boarded.append(line.popleft())
        return boarded

    def carry(self, tickets: Sequence[Ticket], items: Sequence[Any]) -> None:
        """Hand the items of boarded tickets to whoever waits for them."""
        for ticket, item in zip(tickets, items, strict=True):
            hand_over(ticket.future, item, ticket.case)

    def put_back(self, tickets: Sequence[Ticket], *, died: bool) -> None:
        """Put boarded tickets back at the front of the line, to travel alone."""
        for ticket in reversed(tickets):
            ticket.travels_alone = True
            ticket.num_deaths += died
            self._line.appendleft(ticket)
        self._serve_line()

    def retire(self, index: int, error: Exception) -> None:
        """Give out no place at this worker any more; `error` is what those in line get when it was the last one."""
        self._retired[index] = error
        self._serve_line()

    def __reduce__(self) -> tuple[type[Slots], tuple[list[int | None]]]:
        return Slots, (self._capacities,)  # a copy counts for itself

    def _serve_line(self) -> None:
        while self._line:
            ticket = self._line[0]
            if not ticket.is_void:
                try:
                    index = self._take_free(
                        extra=self.extra if len(self._line) > _SHORT_LINE else 0, whole=ticket.is_whole
                    )
                except Exception as error:  # noqa: BLE001 - what `retire` was given
                    ticket.future.set_exception(error)
                else:
                    if index is None:
                        return
                    ticket.future.set_result(Lead(index, ticket.num_deaths, ticket.travels_alone, ticket.is_whole))
            self._line.popleft()

    def _take_free(self, *, extra: int = 0, whole: bool = False) -> int | None:
        if len(self._retired) == len(self._capacities):
            raise next(reversed(self._retired.values()))
        for step in range(len(self._capacities)):
            index = (self._next + step) % len(self._capacities)
            if index not in self._retired and self._has_room(index, extra=extra, whole=whole):
                self._in_flight[index] += 1
                if whole:
                    self._whole.add(index)
                self._next = (index + 1) % len(self._capacities)
                return index
        return None

    def _has_room(self, index: int, *, extra: int, whole: bool) -> bool:
        if whole:
            return self._in_flight[index] == 0
        capacity = self._capacities[index]
        return index not in self._whole and (capacity is None or self._in_flight[index] < capacity + extra)
