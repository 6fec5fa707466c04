"""A place that becomes free goes to whoever waits, however the threads that come, wait and leave are interleaved."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection
from itertools import combinations, count
from typing import Any

import pytest

from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.room import Room

LIMIT_S = 30.0


class Turns:
    """Threads of which one moves at a time. It hands over to the next in line before the steps that are given."""

    def __init__(self, switches: Collection[int]) -> None:
        self._switches = switches
        self._steps = count()
        self._line: deque[threading.Event] = deque()

    def run(self, operations: list[Callable[[], object]]) -> None:
        """Run each operation in a thread of its own, to its end."""
        self._line.extend(threading.Event() for _ in operations)
        threads = [
            threading.Thread(target=self._take_part, args=part) for part in zip(self._line, operations, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._line[0].set()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    def step(self) -> None:
        """What a thread calls before each step."""
        if len(self._line) > 1 and next(self._steps) in self._switches:
            mine = self._line[0]
            mine.clear()
            self._line.rotate(-1)
            self._line[0].set()
            assert mine.wait(LIMIT_S)

    def _take_part(self, mine: threading.Event, operation: Callable[[], object]) -> None:
        assert mine.wait(LIMIT_S)
        operation()
        self._line.popleft()
        if self._line:
            self._line[0].set()


def stepwise(kind: type, items: Any, turns: Turns) -> Any:
    """Return a list or deque of which each operation is a step: another thread may run before any of them."""

    def step_before(name: str) -> Callable[..., Any]:
        def operation(self: Any, *args: Any) -> Any:
            turns.step()
            return getattr(kind, name)(self, *args)

        return operation

    names = [name for name in ("append", "pop", "popleft", "__len__") if hasattr(kind, name)]
    return type(kind.__name__, (kind,), {name: step_before(name) for name in names})(items)


class Crowd:
    """Who comes to a room, and what became of them."""

    def __init__(self, max_inside: int, turns: Turns) -> None:
        self.room = Room(max_inside)
        self.expected = max_inside
        """How many are inside, by what they were told."""
        for _ in range(max_inside):
            assert self.room.enter_now()
        self.room._inside = stepwise(list, self.room._inside, turns)
        self.room._waiting = stepwise(deque, self.room._waiting, turns)
        self.tickets: list[CallFuture[None]] = []

    def enter(self) -> None:
        entered = self.room.enter_now()
        self.expected += entered

    def wait(self) -> None:
        self.tickets.append(self.room.wait())

    def wait_in_vain(self) -> None:
        if not self.room.wait().cancel():
            self.room.leave()

    def leave(self) -> None:
        self.expected -= 1
        self.room.leave()


@pytest.mark.parametrize(
    ("max_inside", "names"),
    [
        (1, "wait leave"),
        (1, "leave wait"),
        (1, "enter wait leave"),
        (1, "leave enter wait"),
        (1, "wait_in_vain wait leave"),
        (2, "wait leave wait leave"),
    ],
)
def test_nobody_waits_beside_a_free_place_in_whatever_order_threads_take_their_steps(
    max_inside: int, names: str
) -> None:
    for number in range(4):
        for switches in combinations(range(12), number):
            turns = Turns(switches)
            crowd = Crowd(max_inside, turns)
            turns.run([getattr(crowd, name) for name in names.split()])
            admitted = sum(ticket.done() for ticket in crowd.tickets)
            assert crowd.room.num_inside == crowd.expected + admitted <= max_inside, switches
            assert admitted == len(crowd.tickets) or crowd.room.num_inside == max_inside, switches


async def test_cancelled_while_waiting_or_in_the_moment_of_entering_leaves_the_place_to_the_next() -> None:
    room = Room(1)
    assert room.enter_now()
    waiting = [asyncio.create_task(room.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    room.leave()
    waiting[1].cancel()  # it has been given the place, and does not know yet
    await waiting[2]
    assert not room.enter_now()
    room.leave()
    assert room.enter_now()


def test_who_waited_in_a_loop_that_has_ended_is_passed_over() -> None:
    room = Room(1)
    assert room.enter_now()
    ended = asyncio.new_event_loop()
    waiting = room.enter()
    ended.call_soon(waiting.send, None)
    ended.call_soon(ended.stop)
    ended.run_forever()
    ended.close()
    room.leave()
    assert room.enter_now()
    waiting.close()
