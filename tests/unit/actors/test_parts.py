"""Restart budget, ledger, logs, machine, future."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrl_lite.actors import CallFuture, Resources, RestartPolicy
from xrl_lite.actors.ledger import Claim, Ledger
from xrl_lite.actors.logs import ActorLog, safe_name
from xrl_lite.actors.machine import tree_bytes, usable_memory_bytes, usable_milli_cpus
from xrl_lite.actors.payload import pack
from xrl_lite.actors.restart import RestartBudget
from xrl_lite.errors import ResourceError


def test_restarts_pause_longer_and_longer_until_they_are_used_up() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=4, window_s=60, backoff_s=1.0, max_backoff_s=3.0))
    assert [budget.spend(now) for now in (0, 1, 2, 3, 4)] == [0.0, 1.0, 2.0, 3.0, None]
    assert budget.spend(60.5) == 3.0  # the first crash is forgotten


@given(st.lists(st.integers(0, 10), max_size=50), st.integers(0, 5))
def test_no_window_holds_more_restarts_than_allowed(gaps: list[int], allowed: int) -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=allowed, window_s=5.0))
    now, granted = 0.0, []
    for gap in gaps:
        now += gap
        if budget.spend(now) is not None:
            granted.append(now)
    assert all(sum(0 <= time - other < 5.0 for other in granted) <= allowed for time in granted)


def test_a_policy_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="max_restarts"):
        RestartPolicy(max_restarts=-1)
    with pytest.raises(ValueError, match="window_s"):
        RestartPolicy(window_s=0)


def test_fractions_of_cpus_add_up_exactly() -> None:
    ledger = Ledger(Claim(milli_cpus=1000))
    for number in range(10):
        ledger.claim(f"a{number}", Resources(num_cpus=0.1))
    with pytest.raises(ResourceError, match="are not free"):
        ledger.claim("more", Resources(num_cpus=0.001))
    ledger.release("a3")
    ledger.claim("more", Resources(num_cpus=0.1))


def test_memory_is_counted_only_where_it_is_asked_for() -> None:
    ledger = Ledger(Claim(milli_cpus=10_000, memory_bytes=3 << 20))
    ledger.claim("a", Resources(memory_bytes=2 << 20))
    with pytest.raises(ResourceError, match=r"(?s)'b' asks for 1 CPUs and 2 MB.*a +1 +2\n.*free +9 +1\n"):
        ledger.claim("b", Resources(memory_bytes=2 << 20))
    ledger.claim("b", Resources())


def test_logs_keep_the_last_lines_of_this_incarnation(tmp_path: Path) -> None:
    log = ActorLog(tmp_path, "judger/0")
    os.write(log.fd, b"before\n")
    log.begin()
    os.write(log.fd, "".join(f"line {number}\n" for number in range(60)).encode())
    assert log.tail().splitlines() == [f"line {number}" for number in range(10, 60)]
    assert (tmp_path / "judger" / "0.log").exists()
    log.close()


def test_a_log_without_a_folder_has_no_name() -> None:
    log = ActorLog(None, "x")
    os.write(log.fd, b"words\n")
    assert log.path is None
    assert log.tail() == "words"
    log.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_log_without_a_name_takes_no_more_space_than_its_end(tmp_path: Path, named: bool) -> None:
    log = ActorLog(tmp_path if named else None, "x")
    for number in range(20):
        os.write(log.fd, b"x" * (1 << 20) + b"\n%d\n" % number)
        log.forget_old()
    assert log.size_bytes > 20 << 20
    assert os.pread(log.fd, 1, 0) == (b"x" if named else b"\0")
    assert named or os.fstat(log.fd).st_blocks * 512 < 12 << 20
    assert log.tail().endswith("\n19")
    assert log.tail(since=log.size_bytes - 3) == "19"
    log.close()


class FailsToUnpickle:
    def __getstate__(self) -> int:
        return 1

    def __setstate__(self, state: int) -> None:
        raise ValueError("broken")


@pytest.mark.parametrize(
    ("name", "path"),
    [("judger/0", "judger/0"), ("../../etc/passwd", "etc/passwd"), ("a b:c#2", "a_b:c#2"), ("..", "actor")],
)
def test_names_become_paths_that_stay_inside(name: str, path: str) -> None:
    assert safe_name(name) == path


def test_the_machine_is_what_this_process_may_use() -> None:
    assert 1 <= usable_milli_cpus() <= len(os.sched_getaffinity(0)) * 1000
    assert 1 << 20 < usable_memory_bytes() < 1 << 50
    assert tree_bytes(os.getpid(), exact_above=0) > 1 << 20
    assert tree_bytes(1 << 30, exact_above=0) == 0


def test_a_future_ends_once() -> None:
    future: CallFuture[int] = CallFuture("f()")
    seen: list[bool] = []
    future.when_done(lambda done: seen.append(done.done()))
    assert future.set_result(1)
    assert not future.set_exception(ValueError())
    assert not future.cancel()
    future.when_done(lambda done: seen.append(done.done()))
    assert future.result() == 1
    assert future.exception() is None
    assert seen == [True, True]


def test_waiting_in_a_thread_has_a_limit() -> None:
    with pytest.raises(TimeoutError, match="goes on"):
        CallFuture("f()").result(0.01)


async def test_a_future_may_be_awaited_by_many_and_ended_from_a_thread() -> None:
    future: CallFuture[int] = CallFuture("f()")
    waiting = [asyncio.ensure_future(future) for _ in range(3)]
    await asyncio.sleep(0)
    threading.Thread(target=future.set_result, args=(7,)).start()
    assert await asyncio.gather(*waiting) == [7, 7, 7]


async def test_cancelling_the_waiter_cancels_the_future_and_tells_whoever_watches() -> None:
    told: list[str] = []
    future: CallFuture[int] = CallFuture("f()")
    future.when_done(lambda done: told.append("cancelled" if done.cancelled() else "ended"))
    task = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()
    assert told == ["cancelled"]


async def test_asyncio_takes_it_as_a_future_of_the_loop_it_was_made_on() -> None:
    first, second, third = (CallFuture[int](f"f{index}()") for index in range(3))
    threading.Thread(target=first.set_result, args=(1,)).start()
    done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {first}
    assert pending == {second}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second, 0.01)
    assert second.cancelled()
    threading.Thread(target=third.set_exception, args=(ValueError("no"),)).start()
    assert [str(result) for result in await asyncio.gather(first, third, return_exceptions=True)] == ["1", "no"]


async def test_gather_is_cancelled_with_what_it_gathers_and_the_other_way_round() -> None:
    futures = [CallFuture[int](f"f{index}()") for index in range(2)]
    gathered = asyncio.gather(*futures)
    gathered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathered
    assert all(future.cancelled() for future in futures)
    futures = [CallFuture[int](f"f{index}()") for index in range(2)]
    futures[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.gather(*futures)


async def test_a_cancelled_scope_of_anyio_ends_its_own_wait_and_no_other() -> None:
    mine, others = CallFuture[int]("mine()"), CallFuture[int]("others()")
    results: list[int] = []

    async def wait() -> None:
        results.append(await others)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_soon(scope.cancel)
            await mine
        assert scope.cancelled_caught
        with anyio.move_on_after(0.01) as limit:
            await CallFuture[int]("never()")
        assert limit.cancelled_caught
        others.set_result(7)
    assert results == [7]


def test_it_can_be_awaited_on_another_loop_than_its_own() -> None:
    async def make() -> CallFuture[int]:
        return CallFuture("f()")

    async def wait(future: CallFuture[int]) -> int:
        threading.Timer(0.01, future.set_result, (7,)).start()
        return await future

    future = asyncio.run(make())
    assert asyncio.run(wait(future)) == 7


def test_threads_that_race_end_it_once_and_call_back_once() -> None:
    for _ in range(200):
        future: CallFuture[int] = CallFuture("f()")
        won: list[bool] = []
        told: list[int] = []
        start = threading.Barrier(4)

        def end(value: int, future: CallFuture[int] = future, won: list[bool] = won, start: Any = start) -> None:
            start.wait()
            won.append(future.set_result(value))

        def watch(future: CallFuture[int] = future, told: list[int] = told, start: Any = start) -> None:
            start.wait()
            future.when_done(lambda done: told.append(done.result()))

        threads = [threading.Thread(target=end, args=(value,)) for value in (1, 2)]
        threads += [threading.Thread(target=watch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False, True]
        assert told == [future.result()] * 2


async def test_a_result_that_does_not_unpickle_is_an_error_with_a_note() -> None:
    future: CallFuture[int] = CallFuture("f()")
    future.set_packed(pack(FailsToUnpickle(), name="value"))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken") as caught:
            await future
    assert "f()" in caught.value.__notes__[0]
