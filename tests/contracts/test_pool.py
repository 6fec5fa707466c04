"""The contract of a pool, for every backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorPool, ActorSystem, RestartPolicy, share
from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError, ResourceError

FORGIVING = RestartPolicy(max_restarts=100, backoff_s=0.0)
LIMIT_S = 20.0


@pytest.fixture
async def pool(system: ActorSystem) -> AsyncIterator[ActorPool]:
    pool = ActorPool.spawn(system, bodies.Stateful, num_actors=3)
    await pool.ready()
    yield pool
    pool.kill()


@pytest.fixture
async def concurrent(system: ActorSystem) -> AsyncIterator[ActorPool]:
    pool = ActorPool.spawn(system, bodies.Concurrent, num_actors=2, max_concurrency=8, policy="least_loaded")
    await pool.ready()
    yield pool
    pool.kill()


async def test_replicas_take_turns_and_those_that_are_down_are_skipped(pool: ActorPool) -> None:
    assert [await pool.call("add") for _ in range(6)] == [1, 1, 1, 2, 2, 2]
    pool.handles[1].kill()
    with pytest.raises(ActorUnavailableError):
        await pool.handles[1].ready()
    assert [await pool.call("add") for _ in range(4)] == [3, 3, 4, 4]
    assert pool.statistics()["num_down"] == 1
    await pool.stop()
    with pytest.raises(ActorUnavailableError, match="All 3 actors"):
        await pool.call("add")


async def test_the_least_loaded_replica_is_chosen(concurrent: ActorPool) -> None:
    first = [concurrent.submit("forever") for _ in range(4)]
    assert [handle.pending for handle in concurrent.handles] == [2, 2]
    first[0].cancel()
    first[2].cancel()
    async with asyncio.timeout(LIMIT_S):
        while concurrent.handles[0].pending:
            await concurrent.handles[0].echo.remote(1)
    more = [concurrent.submit("forever") for _ in range(2)]
    assert [handle.pending for handle in concurrent.handles] == [2, 2]
    for call in [*first, *more]:
        call.cancel()


async def test_a_map_returns_in_input_order_and_tells_its_progress(pool: ActorPool) -> None:
    seen: list[int] = []
    assert await pool.map("echo", range(50), max_in_flight=4, on_progress=seen.append) == list(range(50))
    assert seen == list(range(1, 51))
    assert await pool.map("echo", []) == []


async def test_a_map_takes_items_only_as_there_is_room(pool: ActorPool) -> None:
    taken: list[int] = []
    ended: list[int] = []

    def items() -> Iterator[int]:
        for item in range(40):
            assert len(taken) - len(ended) < 5
            taken.append(item)
            yield item

    assert await pool.map("echo", items(), max_in_flight=5, on_progress=ended.append) == list(range(40))
    with pytest.raises(ValueError, match="max_in_flight"):
        await pool.map("echo", [1], max_in_flight=0)


async def test_results_come_as_they_are_ready(concurrent: ActorPool) -> None:
    items = ["long", "a", "b"]
    order: list[tuple[int, Any]] = []
    async for index, result in concurrent.map_unordered("echo_when_told", items):
        order.append((index, result))
        if len(order) == 2:
            await concurrent.call_all("tell")
    assert sorted(order[:2]) == [(1, "a"), (2, "b")]
    assert order[2] == (0, "long")


async def test_leaving_a_map_cancels_the_calls_under_way(concurrent: ActorPool) -> None:
    async with contextlib.aclosing(concurrent.map_unordered("echo_when_told", ["a", "long", "long"])) as results:
        async for _ in results:
            break
    async with asyncio.timeout(LIMIT_S):
        while concurrent.statistics()["pending"]:
            await concurrent.call_all("count_cancelled")


async def test_the_first_exception_of_a_map_ends_it(concurrent: ActorPool) -> None:
    with pytest.raises(bodies.OwnError):
        await concurrent.map("echo_when_told", ["long", "raise"])
    async with asyncio.timeout(LIMIT_S):
        while concurrent.statistics()["pending"]:
            await concurrent.call_all("count_cancelled")


async def test_a_map_can_keep_exceptions(concurrent: ActorPool) -> None:
    results = await concurrent.map("echo_when_told", ["a", "raise", "b"], return_exceptions=True)
    assert results[::2] == ["a", "b"]
    assert isinstance(results[1], bodies.OwnError)
    assert isinstance((await concurrent.map("exit_not", [1], return_exceptions=True))[0], AttributeError)


async def test_a_call_is_given_to_another_replica_only_when_asked(system: ActorSystem, tmp_path: Path) -> None:
    pool = ActorPool.spawn(system, bodies.Stateful, num_actors=4)
    with pytest.raises(ActorDiedError):
        await pool.call("exit", 1)
    assert await pool.call("exit_unless", str(tmp_path / "tries"), 2, max_task_retries=2) == 3
    with pytest.raises((ActorDiedError, ActorUnavailableError)):
        await pool.call("exit", 1, max_task_retries=10)
    pool.kill()


async def test_a_time_limit_holds_for_each_call_of_a_map(system: ActorSystem, too_long_s: float) -> None:
    pool = ActorPool.spawn(system, bodies.Stateful, num_actors=2)
    results = await pool.map("wait", [0.0, 2 * too_long_s, 0.0], timeout_s=0.5, return_exceptions=True)
    assert results[::2] == [0.0, 0.0]
    assert isinstance(results[1], ActorTimeoutError)
    await pool.call_all("add")  # also by the replica that was replaced
    assert pool.statistics()["pending"] == 0
    pool.kill()


async def test_one_value_reaches_all_replicas(pool: ActorPool) -> None:
    array = np.arange(100_000)
    for value in await pool.call_all("echo", share(array)):
        np.testing.assert_array_equal(value.get(), array)
    with pytest.raises(bodies.OwnError):
        await pool.call_all("raise_own")


async def test_a_pool_is_spawned_as_a_whole_or_not_at_all(system: ActorSystem) -> None:
    held = system.statistics()["num_cpus_held"]
    with pytest.raises(ResourceError):
        ActorPool.spawn(system, bodies.Stateful, num_actors=3, name="large", num_cpus=30)
    assert system.statistics()["num_cpus_held"] <= held
    ActorPool.spawn(system, bodies.Stateful, num_actors=2, name="large", num_cpus=15).kill()
    with pytest.raises(ValueError, match="num_actors"):
        ActorPool.spawn(system, bodies.Stateful, num_actors=0)
    with pytest.raises(ValueError, match=r"policy must be.*Did you mean 'least_loaded'"):
        ActorPool.spawn(system, bodies.Stateful, num_actors=1, policy="least_load")  # pyright: ignore[reportArgumentType]


async def test_the_end_of_an_actor_that_a_method_calls_is_no_reason_to_repeat_it(system: ActorSystem) -> None:
    inner = system.spawn(bodies.Stateful)
    pool = ActorPool.spawn(system, bodies.Caller, inner, num_actors=2)
    assert await pool.call("add", 1) == 1
    await inner.stop()
    with pytest.raises(ActorUnavailableError) as caught:
        await pool.call("add", 1, max_task_retries=3)
    assert caught.value.actor == inner.name
    assert sum(actor["num_raised"] for actor in pool.statistics()["actors"]) == 1
    await pool.stop()
