"""The contract of a handle, for every backend."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorHandle, ActorSystem, RestartPolicy, share
from xrl_lite.errors import (
    ActorDiedError,
    ActorError,
    ActorTaskError,
    ActorTimeoutError,
    ActorUnavailableError,
    PayloadError,
    ResourceError,
)

LIMIT_S = 20.0
FORGIVING = RestartPolicy(max_restarts=100, backoff_s=0.0)


@pytest.fixture
def stateful(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(bodies.Stateful, restart=FORGIVING)
    yield handle
    handle.kill()


@pytest.fixture
def concurrent(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(bodies.Concurrent, max_concurrency=8, restart=FORGIVING)
    yield handle
    handle.kill()


async def until_cancelled(handle: ActorHandle) -> None:
    """Wait until an async method of the actor was cancelled; each question is a round trip, so this does not spin."""
    async with asyncio.timeout(LIMIT_S):
        while await handle.count_cancelled.remote() == 0:
            pass


async def test_a_call_returns_what_the_method_returns(stateful: ActorHandle) -> None:
    assert await stateful.add.remote(3) == 3
    assert await stateful.add.remote(amount=4) == 7


async def test_constructor_arguments_arrive(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful, 5, kwargs={"path": "x"})
    await handle.ready()
    assert await handle.add.remote(0) == 5
    await handle.stop()


async def test_calls_start_in_the_order_they_were_sent(stateful: ActorHandle) -> None:
    await asyncio.gather(*(stateful.note.remote(index) for index in range(200)))
    assert await stateful.notes.remote() == list(range(200))


async def test_sync_and_async_calls_start_in_the_order_they_were_sent(system: ActorSystem) -> None:
    if system.backend == "ray":
        pytest.skip("Ray orders sync and async methods each by themselves")
    handle = system.spawn(bodies.Ordered, max_concurrency=4)
    calls = [handle.until_told.remote("never ends"), handle.sync.remote("long", 0.1), handle.quick.remote("first")]
    for index in range(20):
        calls += [handle.sync.remote(f"sync {index}"), handle.quick.remote(f"quick {index}")]
    pairs = [name for index in range(20) for name in (f"sync {index}", f"quick {index}")]
    assert await handle.noted.remote() == ["never ends", "long", "first", *pairs]
    await handle.tell.remote()
    await asyncio.gather(*calls)
    await handle.stop()


async def test_async_calls_without_room_hold_up_no_sync_call(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Ordered, max_concurrency=1)
    running, waiting = handle.until_told.remote("running"), handle.until_told.remote("waiting")
    async with asyncio.timeout(LIMIT_S):
        while not handle.statistics()["running"]:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0)
        await handle.tell_sync.remote()
        await asyncio.gather(running, waiting)
    await handle.stop()


async def test_a_call_that_waits_for_its_turn_can_be_cancelled(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Ordered, max_concurrency=1)
    await handle.ready()
    first, waiting, last = (handle.until_told.remote(name) for name in ("first", "waiting", "last"))
    for call in (waiting, last, first):  # the one that runs makes way last, or another would begin
        call.cancel()
    assert await handle.noted.remote() in (["first"], [])
    await handle.stop()


async def test_arguments_and_results_are_copies(stateful: ActorHandle) -> None:
    value = {"list": [1]}
    result = await stateful.echo.remote(value)
    assert result == value
    assert result["list"] is not value["list"]


async def test_sync_methods_run_in_the_main_thread(stateful: ActorHandle) -> None:
    assert await stateful.is_main_thread.remote()


async def test_sync_methods_run_in_the_main_thread_beside_async_ones(
    system: ActorSystem, concurrent: ActorHandle
) -> None:
    if system.backend == "ray":
        pytest.skip("Ray needs the main thread of an actor with async methods for itself")
    assert await concurrent.sync.remote()


async def test_async_methods_run_side_by_side(concurrent: ActorHandle) -> None:
    assert await asyncio.gather(*(concurrent.meet.remote(8) for _ in range(8))) == [8] * 8


async def test_what_sync_methods_return_to_be_awaited_runs_side_by_side(
    system: ActorSystem, concurrent: ActorHandle
) -> None:
    if system.backend == "ray":
        pytest.skip("Ray awaits it in the one thread of the sync methods")
    assert await asyncio.gather(*(concurrent.meet_by_sync.remote(8) for _ in range(8))) == [8] * 8
    call = concurrent.forever_by_sync.remote()
    async with asyncio.timeout(LIMIT_S):
        while await concurrent.count_running.remote() == 0:
            pass
    call.cancel()
    await until_cancelled(concurrent)
    assert concurrent.restarts == 0


async def test_async_methods_are_bounded_by_max_concurrency(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Concurrent, max_concurrency=3)
    results = await asyncio.gather(*(handle.meet.remote(3) for _ in range(6)))
    assert max(results) == 3
    await handle.stop()


@pytest.mark.parametrize("method", ["raise_own"])
async def test_an_exception_arrives_as_itself_with_the_remote_traceback(
    stateful: ActorHandle, concurrent: ActorHandle, method: str
) -> None:
    for handle in (stateful, concurrent):
        with pytest.raises(bodies.OwnError, match="mine") as caught:
            await handle.method_named(method).remote()
        assert f"in {method}" in "".join(caught.value.__notes__)
        assert handle.name in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("method", "type_name"),
    [
        ("raise_badly_pickled", "BadlyPickledError"),
        ("raise_local", "LocalError"),
        ("raise_keyboard_interrupt", "KeyboardInterrupt"),
        ("raise_stop_iteration", "StopIteration"),
    ],
)
async def test_an_exception_that_cannot_travel_is_described(stateful: ActorHandle, method: str, type_name: str) -> None:
    with pytest.raises(ActorTaskError, match=type_name) as caught:
        await stateful.method_named(method).remote()
    assert f"in {method}" in str(caught.value)
    assert await stateful.add.remote() == 1


async def test_a_method_that_cancels_itself_does_not_cancel_the_caller(concurrent: ActorHandle) -> None:
    with pytest.raises(ActorTaskError, match="CancelledError"):
        await concurrent.cancel_itself.remote()


async def test_an_exception_class_made_in_a_function_arrives_as_itself(stateful: ActorHandle) -> None:
    class MadeHereError(Exception):
        pass

    def fail() -> None:
        raise MadeHereError("here")

    with pytest.raises(MadeHereError, match="here"):
        await stateful.call.remote(fail)


async def test_what_a_constructor_raises_is_raised_by_ready_and_by_every_call(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful, -1)
    with pytest.raises(bodies.OwnError, match="negative"):
        await handle.ready()
    for _ in range(2):
        with pytest.raises(bodies.OwnError, match="negative"):
            await handle.add.remote()


async def test_sys_exit_is_the_death_of_the_process_and_the_actor_is_restarted(
    stateful: ActorHandle, concurrent: ActorHandle
) -> None:
    for handle in (stateful, concurrent):
        deaths: list[ActorDiedError] = []
        handle.on_death(deaths.append)
        with pytest.raises(ActorDiedError, match=r"code 3 while it ran exit\(\)"):
            await handle.exit.remote(3)
        assert await handle.echo.remote("again") == "again"
        assert handle.restarts == 1
        assert len(deaths) == 1


async def test_without_a_restart_policy_a_crash_is_the_end(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful)
    running = handle.exit.remote(3)
    queued = handle.add.remote()
    with pytest.raises(ActorDiedError):
        await running
    with pytest.raises(ActorUnavailableError, match="code 3"):
        await queued
    with pytest.raises(ActorUnavailableError, match="used up"):
        await handle.add.remote()
    assert handle.is_down


async def test_restarts_are_bounded(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful, restart=RestartPolicy(max_restarts=2, window_s=600, backoff_s=0.0))
    for _ in range(3):
        with pytest.raises(ActorDiedError):
            await handle.exit.remote(1)
    with pytest.raises(ActorUnavailableError, match="2 in 600 s"):
        await handle.add.remote()


async def test_calls_behind_a_crash_are_served_by_the_successor(stateful: ActorHandle) -> None:
    crash = stateful.exit.remote(1)
    behind = [stateful.add.remote() for _ in range(20)]
    with pytest.raises(ActorDiedError):
        await crash
    assert await asyncio.gather(*behind) == list(range(1, 21))


async def test_a_running_call_is_sent_again_only_when_asked(stateful: ActorHandle, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def die_once(path: str) -> str:
        if os.path.exists(path):
            return "survived"
        open(path, "w").close()
        raise SystemExit(1)

    with pytest.raises(ActorDiedError):
        await stateful.call.remote(die_once, str(marker))
    marker.unlink()
    assert await stateful.call.options(max_task_retries=1).remote(die_once, str(marker)) == "survived"


async def test_a_sync_call_over_its_limit_ends_and_the_actor_is_replaced(
    stateful: ActorHandle, too_long_s: float
) -> None:
    await stateful.add.remote(5)
    with pytest.raises(ActorTimeoutError, match=r"wait\(\) of actor .* 0.1 s"):
        await stateful.wait.options(timeout_s=0.1).remote(too_long_s)
    assert await stateful.add.remote() == 1
    assert stateful.restarts == 1


async def test_time_limits_do_not_use_up_restarts(system: ActorSystem, too_long_s: float) -> None:
    handle = system.spawn(bodies.Stateful)
    for _ in range(2):
        with pytest.raises(ActorTimeoutError):
            await handle.wait.options(timeout_s=0.1).remote(too_long_s)
    assert await handle.add.remote() == 1
    await handle.stop()


async def test_an_async_call_over_its_limit_is_cancelled_in_the_actor(concurrent: ActorHandle) -> None:
    with pytest.raises(ActorTimeoutError):
        await concurrent.forever.options(timeout_s=0.1).remote()
    await until_cancelled(concurrent)
    assert concurrent.restarts == 0


async def test_cancelling_the_waiting_task_cancels_an_async_call(concurrent: ActorHandle) -> None:
    async def wait_for_it() -> None:
        await concurrent.forever.remote()

    task = asyncio.create_task(wait_for_it())
    await concurrent.echo.remote(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_cancelled(concurrent)
    assert concurrent.restarts == 0


async def test_a_queued_call_that_is_cancelled_never_runs(stateful: ActorHandle) -> None:
    first = stateful.wait.remote(0.05)
    queued = stateful.note.remote("never")
    assert queued.cancel()
    assert not queued.cancel()
    await first
    assert await stateful.notes.remote() == []
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert stateful.restarts == 0


async def test_what_cannot_be_pickled_is_refused_with_its_path(stateful: ActorHandle) -> None:
    class Config:
        def __init__(self) -> None:
            self.extra_info = {"tokenizer": Tokenizer()}

    class Tokenizer:
        def __init__(self) -> None:
            self._lock = threading.Lock()

    with pytest.raises(PayloadError, match=r"value\.extra_info\['tokenizer'\]\._lock"):
        stateful.echo.remote(Config())
    lock = threading.Lock()
    with pytest.raises(PayloadError, match=r"function\.<variable lock> cannot be sent"):
        stateful.call.remote(lambda: lock)


async def test_spawn_refuses_arguments_that_cannot_be_pickled(system: ActorSystem) -> None:
    with pytest.raises(PayloadError, match="path cannot be sent"):
        system.spawn(bodies.Stateful, kwargs={"path": threading.Lock()}, name="refused")
    with pytest.raises(KeyError):
        system.get("refused")


async def test_a_result_that_cannot_be_pickled_fails_its_call_only(stateful: ActorHandle) -> None:
    with pytest.raises(PayloadError, match=r"return_lock\(\) returned .*result\['inner'\]\[0\]"):
        await stateful.return_lock.remote()
    assert await stateful.add.remote() == 1


async def test_functions_of_all_kinds_travel(stateful: ActorHandle) -> None:
    factor = 3
    assert await stateful.call.remote(lambda x: x * factor, 2) == 6
    assert await stateful.call.remote(functools.partial(pow, 2), 5) == 32
    assert await stateful.call.remote(len, [1, 2]) == 2


@pytest.mark.parametrize("size", [0, 10, 70_000, 3_000_000])
async def test_payloads_of_every_size_arrive(stateful: ActorHandle, size: int) -> None:
    array = np.arange(size, dtype=np.uint8)
    value: dict[str, Any] = {"array": array, "bytes": b"x" * size, "text": "é" * size, "many": [array, array[::2]]}
    result = await stateful.echo.remote(value)
    assert result["bytes"] == value["bytes"]
    assert result["text"] == value["text"]
    np.testing.assert_array_equal(result["array"], array)
    np.testing.assert_array_equal(result["many"][1], array[::2])
    result["array"][:1] = 7  # received memory is writable, and private


async def test_a_shared_value_travels_any_number_of_times(stateful: ActorHandle, concurrent: ActorHandle) -> None:
    array = np.arange(500_000)
    shared = share({"weights": array})
    array[0] = 99  # too late: it was copied when it was shared
    returned = await stateful.echo.remote({"deep": [shared]})
    for value in (shared, returned["deep"][0], await concurrent.echo.remote(returned["deep"][0])):
        np.testing.assert_array_equal(value.get()["weights"], np.arange(500_000))


async def test_unknown_methods_are_refused_with_the_closest_name(stateful: ActorHandle) -> None:
    with pytest.raises(AttributeError, match=r"no method 'ecko'\. Did you mean 'echo'"):
        stateful.ecko.remote(1)
    with pytest.raises(TypeError, match=r"handle.echo.remote"):
        stateful.echo(1)


async def test_too_many_pending_calls_are_refused(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Concurrent, max_pending=3)
    calls = [handle.forever.remote() for _ in range(3)]
    with pytest.raises(ActorError, match="max_pending"):
        handle.echo.remote(1)
    for call in calls:
        call.cancel()
    assert await handle.echo.remote(1) == 1
    await handle.stop()


async def test_names_are_unique_while_the_actor_lives(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful, name="judger/7")
    assert system.get("judger/7") is handle
    with pytest.raises(ValueError, match="judger/7"):
        system.spawn(bodies.Stateful, name="judger/7")
    await handle.stop()
    with pytest.raises(KeyError, match="judger/7"):
        system.get("judger/7")
    again = system.spawn(bodies.Stateful, name="judger/7")
    assert await again.add.remote() == 1
    await again.stop()


async def test_too_many_cpus_are_refused_with_a_table_and_given_back(system: ActorSystem) -> None:
    held = system.statistics()["num_cpus_held"]
    handle = system.spawn(bodies.Stateful, name="large", num_cpus=50.5)
    with pytest.raises(ResourceError, match=r"(?s)'more'.*large\s+50.5.*free"):
        system.spawn(bodies.Stateful, name="more", num_cpus=30)
    await handle.stop()
    assert system.statistics()["num_cpus_held"] == held


async def test_a_stopped_actor_is_unavailable(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful)
    last = handle.add.remote()
    await last
    await handle.stop()
    await handle.stop()
    with pytest.raises(ActorUnavailableError, match="stopped"):
        await handle.add.remote()
    with pytest.raises(ActorUnavailableError, match="stopped"):
        await handle.ready()


async def test_a_killed_actor_fails_its_calls(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Concurrent)
    call = handle.forever.remote()
    await handle.ready()
    handle.kill()
    with pytest.raises(ActorUnavailableError, match="killed by its owner"):
        await call


def test_a_handle_works_from_several_loops_in_turn(stateful: ActorHandle) -> None:
    async def add() -> int:
        return await stateful.add.remote()

    assert [asyncio.run(add()) for _ in range(3)] == [1, 2, 3]


def test_a_handle_works_from_a_thread_without_a_loop(stateful: ActorHandle) -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(stateful.add.remote().result(LIMIT_S)))
    thread.start()
    thread.join(LIMIT_S)
    assert results == [1]


async def test_a_handle_works_inside_another_actor(
    system: ActorSystem, stateful: ActorHandle, too_long_s: float
) -> None:
    caller = system.spawn(bodies.Caller, stateful, max_concurrency=4)
    assert sorted(await asyncio.gather(*(caller.add.remote(1) for _ in range(20)))) == list(range(1, 21))
    large = np.arange(500_000)
    np.testing.assert_array_equal(await caller.pass_on.remote(large), large)
    with pytest.raises(bodies.OwnError, match="mine"):
        await caller.fail.remote()
    with pytest.raises(ActorTimeoutError):
        await caller.too_long.remote(too_long_s)
    again = await caller.give_handle.remote()  # and back
    assert await again.add.remote(3) == 3
    await caller.stop()


async def test_statistics_count_every_ending(stateful: ActorHandle, too_long_s: float) -> None:
    await stateful.add.remote()
    with pytest.raises(bodies.OwnError):
        await stateful.raise_own.remote()
    with pytest.raises(ActorTimeoutError):
        await stateful.wait.options(timeout_s=0.1).remote(too_long_s)
    await stateful.add.remote()
    numbers = stateful.statistics()
    assert (numbers["num_ok"], numbers["num_raised"], numbers["num_timeout"]) == (2, 1, 1)
    assert numbers["pending"] == 0


async def test_an_exception_that_takes_no_notes_ends_its_call_and_no_other(stateful: ActorHandle) -> None:
    calls = [stateful.raise_frozen.remote(7) if index == 3 else stateful.echo.remote(index) for index in range(20)]
    async with asyncio.timeout(LIMIT_S):
        ends = await asyncio.gather(*calls, return_exceptions=True)
    error = ends.pop(3)
    assert isinstance(error, ActorTaskError)
    assert "FrozenError" in str(error)
    assert ends == [index for index in range(20) if index != 3]


async def test_a_result_that_cannot_be_rebuilt_ends_whatever_waits_for_it(stateful: ActorHandle) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ValueError, match="cannot be rebuilt"):
            await asyncio.gather(stateful.hard_to_rebuild.remote(), stateful.echo.remote(1))
        with pytest.raises(ValueError, match="cannot be rebuilt"):
            await asyncio.shield(stateful.hard_to_rebuild.remote())
        with pytest.raises(ValueError, match="cannot be rebuilt"):
            await asyncio.wait_for(stateful.hard_to_rebuild.remote(), LIMIT_S)
        done, _ = await asyncio.wait([stateful.hard_to_rebuild.remote()])
        assert isinstance(done.pop().exception(), ValueError)
