"""One actor, called from many loops and threads at once; loops that are blocked, and loops that end too early."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.test_handle_bodies import Concurrent, Stateful
from xrl_lite.actors import ActorHandle, ActorSystem, RestartPolicy
from xrl_lite.errors import ActorDiedError

LIMIT_S = 30.0


@pytest.fixture
def stateful(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(Stateful, restart=RestartPolicy(max_restarts=5, backoff_s=0.0))
    handle.ready().result(LIMIT_S)
    yield handle
    handle.stop(0.0).result(LIMIT_S)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, begun together; return what they return."""
    start, results = threading.Barrier(len(functions)), [None] * len(functions)

    def run(index: int) -> None:
        start.wait(LIMIT_S)
        results[index] = functions[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("make", [Stateful, Concurrent], ids=["sync", "async"])
def test_many_loops_and_threads_share_an_actor(system: ActorSystem, make: Any) -> None:
    handle = system.spawn(make, max_concurrency=4)
    num_calls = 300

    async def together(start: int) -> list[int]:
        return await asyncio.gather(*(handle.echo.remote(number) for number in range(start, start + num_calls)))

    async def one_by_one(start: int) -> list[int]:
        return [await handle.echo.remote(number) for number in range(start, start + num_calls)]

    def without_loop(start: int) -> list[int]:
        return [handle.echo.remote(number).result(LIMIT_S) for number in range(start, start + num_calls)]

    ways = [
        lambda: asyncio.run(together(0)),
        lambda: asyncio.run(one_by_one(1000)),
        lambda: asyncio.run(together(2000)),
        lambda: without_loop(3000),
    ]
    assert in_threads(*ways) == [list(range(start, start + num_calls)) for start in (0, 1000, 2000, 3000)]
    statistics = handle.statistics()
    assert (statistics["pending"], statistics["num_ok"]) == (0, 4 * num_calls)
    handle.stop(0.0).result(LIMIT_S)


def test_calls_of_one_thread_start_in_order_whatever_the_others_do(stateful: ActorHandle) -> None:
    def send(name: str) -> None:
        for future in [stateful.note.remote((name, number)) for number in range(200)]:
            future.result(LIMIT_S)

    async def send_from_loop(name: str) -> None:
        await asyncio.gather(*(stateful.note.remote((name, number)) for number in range(200)))

    in_threads(lambda: send("a"), lambda: send("b"), lambda: asyncio.run(send_from_loop("c")))
    notes = stateful.notes.remote().result(LIMIT_S)
    for name in "abc":
        assert [number for who, number in notes if who == name] == list(range(200))


def test_a_thread_gets_its_answer_although_the_loop_that_called_before_is_blocked(stateful: ActorHandle) -> None:
    answered = threading.Event()

    async def block() -> int:
        mine = stateful.echo.remote(1)

        def ask() -> None:
            assert stateful.echo.remote(2).result(LIMIT_S) == 2
            answered.set()

        asker = threading.Thread(target=ask)
        asker.start()
        assert answered.wait(LIMIT_S)  # blocks this loop, which polls the actor's socket
        asker.join()
        return await mine

    assert asyncio.run(block()) == 1


def test_a_loop_that_waits_for_another_loops_call_is_served_while_that_one_is_blocked(stateful: ActorHandle) -> None:
    call: Any = None
    sent = threading.Event()
    answered = threading.Event()

    async def send_and_block() -> None:
        nonlocal call
        call = stateful.echo.remote("x")
        sent.set()
        assert answered.wait(LIMIT_S)

    async def wait() -> str:
        assert sent.wait(LIMIT_S)
        value = await call
        answered.set()
        return value

    assert in_threads(lambda: asyncio.run(send_and_block()), lambda: asyncio.run(wait()))[1] == "x"


def test_a_limit_holds_although_the_loop_is_blocked_and_spares_what_ended_in_time(stateful: ActorHandle) -> None:
    async def block() -> None:
        call = stateful.echo.options(timeout_s=2.0).remote(1)
        time.sleep(2.2)  # noqa: ASYNC251 the answer lies unread for longer than the limit
        assert await call == 1

    asyncio.run(block())
    assert stateful.restarts == 0


def test_a_call_whose_reply_is_on_its_way_can_be_cancelled(stateful: ActorHandle, tmp_path: Path) -> None:
    began, may_end = tmp_path / "began", tmp_path / "may_end"

    def last() -> None:
        began.touch()
        while not may_end.exists():
            time.sleep(0.005)

    async def cancel_late() -> list[int]:
        late = [stateful.add.remote() for _ in range(5)]
        behind = stateful.call.remote(last)
        await asyncio.sleep(0)  # they leave
        deadline = time.monotonic() + LIMIT_S
        while not began.exists() and time.monotonic() < deadline:
            time.sleep(0.005)  # noqa: ASYNC251 this loop shall not read the replies
        for call in late:
            call.cancel()
        may_end.touch()
        await behind
        return [await stateful.add.remote(), await stateful.add.remote(0)]

    first, second = asyncio.run(cancel_late())
    assert first == second == 6, "all five had run; none ran twice"
    statistics = stateful.statistics()
    assert statistics["num_ok"] + statistics["num_cancelled"] == 8
    assert (statistics["pending"], statistics["restarts"]) == (0, 0)


def test_a_loop_that_ends_with_calls_under_way_leaves_the_actor_to_the_next_one(stateful: ActorHandle) -> None:
    async def leave() -> Any:
        await stateful.echo.remote(0)
        return [stateful.echo.remote(number) for number in range(20)]  # not flushed, not read

    futures = asyncio.run(leave())
    assert [future.result(LIMIT_S) for future in futures] == list(range(20))

    async def go_on() -> int:
        return await stateful.echo.remote(7)

    assert asyncio.run(go_on()) == 7


def test_no_descriptor_is_left_by_loops_that_polled_an_actor_which_died(system: ActorSystem) -> None:
    def at_most(count: int) -> bool:
        """Whether no more are open once the threads that close some have done so."""
        deadline = time.monotonic() + LIMIT_S
        while (found := descriptors()) > count and time.monotonic() < deadline:
            time.sleep(0.005)
        return found <= count

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    handle = system.spawn(Stateful, restart=RestartPolicy(max_restarts=10, backoff_s=0.0))
    handle.ready().result(LIMIT_S)
    before = descriptors()

    async def crash() -> None:
        await handle.echo.remote(1)
        with pytest.raises(Exception, match="died"):
            await handle.exit.remote(3)
        await handle.echo.remote(2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            asyncio.run(crash())
        loop = asyncio.new_event_loop()
        loop.run_until_complete(crash())
        with pytest.raises(Exception, match="died"):
            handle.exit.remote(3).result(LIMIT_S)
        handle.echo.remote(1).result(LIMIT_S)  # the successor is there, so its predecessor is gone
        assert at_most(before + 3), "that loop is not closed: its selector and its own pair of sockets"
        loop.close()
    assert at_most(before)
    handle.stop(0.0).result(LIMIT_S)


def test_a_finalizer_may_call_the_actor_while_the_collector_runs_in_the_midst_of_a_call(stateful: ActorHandle) -> None:
    class Noisy:
        def __init__(self) -> None:
            self.itself = self  # only the collector frees it

        def __del__(self) -> None:
            stateful.add.remote()

    async def call(count: int) -> None:
        for _ in range(count):
            Noisy()
            await asyncio.gather(*(stateful.echo.remote(number) for number in range(3)))

    threshold = gc.get_threshold()
    gc.set_threshold(37, 2, 2)  # no divisor of what a call allocates, so it comes to run everywhere
    try:
        in_threads(lambda: asyncio.run(call(150)), lambda: asyncio.run(call(150)))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert stateful.add.remote(0).result(LIMIT_S) == 300


async def test_the_name_of_a_dead_actor_is_free_as_soon_as_it_is_stopped(system: ActorSystem) -> None:
    for _ in range(75):
        handle = system.spawn(Stateful, name="phoenix")
        with pytest.raises(ActorDiedError):
            await handle.exit.remote(3)
        await handle.stop(0.0)
    await system.spawn(Stateful, name="phoenix").stop(0.0)


async def test_submit_waits_for_room_in_the_order_of_asking(system: ActorSystem) -> None:
    handle = system.spawn(Concurrent, max_concurrency=4, max_pending=2)
    blocking = [handle.forever.remote() for _ in range(2)]
    order: list[int] = []

    async def ask(number: int) -> int:
        call = await handle.echo.submit(number)
        order.append(number)
        return await call

    tasks = [asyncio.create_task(ask(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert order == []
    tasks[1].cancel()
    blocking[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 2, 3]
    assert [result for result in results if isinstance(result, int)] == [0, 2, 3]
    blocking[1].cancel()
    assert await (await handle.echo.submit(9)) == 9
    await handle.stop(0.0)
