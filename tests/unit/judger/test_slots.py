"""Places at workers are given out in turn, and none is ever lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrl_lite.judger.slots import Lead, Slots


async def acquire(slots: Slots, payload: object = None, *, whole: bool = False) -> object:
    ticket = slots.ask(payload, whole=whole)
    try:
        return await ticket.future
    except asyncio.CancelledError:
        slots.withdraw(ticket)
        raise


async def place(slots: Slots, payload: object = None) -> int:
    given = await acquire(slots, payload)
    assert isinstance(given, Lead)
    return given.index


async def test_without_a_line_it_is_strict_rotation_from_the_first() -> None:
    slots = Slots([1, 1, None])
    taken: list[int] = []
    for _ in range(7):
        index = await place(slots)
        taken.append(index)
        slots.release(index)
    assert taken == [0, 1, 2, 0, 1, 2, 0]


async def test_a_busy_worker_is_passed_over() -> None:
    slots = Slots([1, 1])
    assert [await place(slots), await place(slots)] == [0, 1]
    slots.release(1)
    assert await place(slots) == 1


@given(
    capacities=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.sampled_from(["ask", "free", "cancel"]), st.integers(0, 50)), max_size=60),
)
def test_places_are_never_lost_nor_given_twice(capacities: list[int], steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        slots = Slots(capacities)
        asking: list[asyncio.Task[int]] = []
        held: list[int] = []
        for step, number in steps:
            match step:
                case "ask":
                    asking.append(asyncio.create_task(place(slots)))
                case "free" if held:
                    slots.release(held.pop(number % len(held)))
                case "cancel" if asking:
                    asking.pop(number % len(asking)).cancel()
                case _:
                    pass
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            held += [task.result() for task in asking if task.done()]
            asking = [task for task in asking if not task.done()]
            assert all(held.count(index) <= capacity for index, capacity in enumerate(capacities))
            assert slots.loads == [held.count(index) for index in range(len(capacities))]
            assert not asking or len(held) == sum(capacities)
        for task in asking:
            task.cancel()

    asyncio.run(run())


async def test_cancelled_in_the_moment_the_place_is_given_passes_it_on() -> None:
    slots = Slots([1])
    index = await place(slots)
    first, second = asyncio.create_task(place(slots)), asyncio.create_task(place(slots))
    await asyncio.sleep(0)
    slots.release(index)
    first.cancel()
    assert await second == 0
    assert slots.loads == [1]


async def test_a_leader_carries_others_along_and_puts_back_whom_it_cannot() -> None:
    slots = Slots([1])
    index = await place(slots)
    waiting = [asyncio.create_task(acquire(slots, name)) for name in "abcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first = slots.board(2)
    assert [ticket.payload for ticket in first] == ["b", "c"]
    slots.carry(first[:1], ["done"])
    slots.put_back(first[1:], died=True)
    slots.release(index)
    assert await waiting[1] == "done"
    assert await waiting[2] == Lead(0, num_deaths=1, travels_alone=True)
    assert slots.board(2)[0].payload == "d"
    waiting[3].cancel()
    assert slots.loads == [1]


async def test_who_travels_alone_is_not_boarded() -> None:
    slots = Slots([1])
    await place(slots)
    waiting = [asyncio.create_task(acquire(slots, name)) for name in "ab"]
    await asyncio.sleep(0)
    slots.put_back(slots.board(1), died=False)
    assert slots.board(5) == []
    for task in waiting:
        task.cancel()


async def test_a_whole_worker_is_given_when_nobody_has_a_place_there_and_kept_from_all() -> None:
    slots = Slots([2])
    held = [await place(slots), await place(slots)]
    whole = asyncio.create_task(acquire(slots, "suspect", whole=True))
    await asyncio.sleep(0)
    other = asyncio.create_task(place(slots))
    slots.release(held.pop())
    await asyncio.sleep(0)
    assert not whole.done()
    slots.release(held.pop())
    assert await whole == Lead(0, is_whole=True)
    assert not other.done()
    slots.release(0)
    assert await other == 0


async def test_who_is_put_back_after_the_last_worker_was_lost_is_told() -> None:
    slots = Slots([1])
    await place(slots)
    waiting = asyncio.create_task(acquire(slots, "a"))
    await asyncio.sleep(0)
    on_board = slots.board(1)
    slots.retire(0, RuntimeError("gone"))
    slots.put_back(on_board, died=False)
    with pytest.raises(RuntimeError, match="gone"):
        await waiting


async def test_those_in_line_are_told_when_the_last_worker_is_lost() -> None:
    slots = Slots([1])
    await place(slots)
    waiting = asyncio.create_task(place(slots))
    await asyncio.sleep(0)
    slots.retire(0, RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await waiting
    with pytest.raises(RuntimeError, match="gone"):
        await place(slots)


async def test_while_the_line_is_long_a_worker_has_further_places() -> None:
    slots = Slots([1])
    slots.extra = 1
    first = await place(slots)
    asking = [asyncio.create_task(place(slots, number)) for number in range(12)]
    await asyncio.sleep(0)
    assert slots.loads == [1]  # only a release serves the line
    slots.release(first)
    assert slots.loads == [2]
    for _ in range(12):
        slots.release(0)
        await asyncio.sleep(0)
    assert slots.loads == [0]
    assert [task.result() for task in asking] == [0] * 12


async def test_in_a_short_line_nobody_gets_a_further_place() -> None:
    slots = Slots([1])
    slots.extra = 1
    first = await place(slots)
    asking = [asyncio.create_task(place(slots, number)) for number in range(3)]
    await asyncio.sleep(0)
    slots.release(first)
    assert slots.loads == [1]
    for task in asking:
        task.cancel()
