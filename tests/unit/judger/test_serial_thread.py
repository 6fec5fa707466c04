"""Calls run one after the other in a thread; what is dropped or runs too long holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from xrl_lite.judger.outcome import JudgementTimeoutError
from xrl_lite.judger.serial_thread import SerialThread


class Calls:
    """Notes what was called, and holds up who has the name of a lock."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []
        self.begun, self.let_go, self.last_begun = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, name: str) -> str:
        self.made.append((name, threading.get_ident()))
        if name == "held":
            self.begun.set()
            self.let_go.wait()
        elif name == "last":
            self.last_begun.set()
        return name


@pytest.fixture
def calls() -> Any:
    calls = Calls()
    yield calls
    calls.let_go.set()


async def test_calls_run_in_order_in_one_thread_that_is_not_the_callers(calls: Calls) -> None:
    thread = SerialThread("t")
    names = list("abcdefgh")
    assert await asyncio.gather(*(thread.run(calls, name, limit_s=10) for name in names)) == names
    assert [name for name, _ in calls.made] == names
    threads = {ident for _, ident in calls.made}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_what_is_cancelled_in_line_is_never_called(calls: Calls) -> None:
    thread = SerialThread("t")
    held = asyncio.create_task(thread.run(calls, "held", limit_s=10))
    await asyncio.to_thread(calls.begun.wait)
    dropped = asyncio.create_task(thread.run(calls, "dropped", limit_s=10))
    last = asyncio.create_task(thread.run(calls, "last", limit_s=10))
    await asyncio.sleep(0)
    dropped.cancel()
    await asyncio.wait([dropped])
    calls.let_go.set()
    assert [await held, await last] == ["held", "last"]
    assert [name for name, _ in calls.made] == ["held", "last"]


async def test_what_is_cancelled_at_work_is_left_behind_with_its_thread(calls: Calls) -> None:
    thread = SerialThread("t")
    held = asyncio.create_task(thread.run(calls, "held", limit_s=10))
    await asyncio.to_thread(calls.begun.wait)
    waiting = asyncio.create_task(thread.run(calls, "next", limit_s=10))
    await asyncio.sleep(0)
    held.cancel()
    assert await waiting == "next"
    (_, first), (_, second) = calls.made
    assert first != second


async def test_each_call_has_the_whole_limit_and_only_the_one_at_work_is_ended(calls: Calls) -> None:
    thread = SerialThread("t")
    held = asyncio.create_task(thread.run(calls, "held", limit_s=1.0))
    others = [asyncio.create_task(thread.run(calls, name, limit_s=1.0)) for name in "ab"]
    with pytest.raises(JudgementTimeoutError, match=r"no reward within 1 s"):
        await held
    assert [await other for other in others] == ["a", "b"]


async def test_what_ends_before_anybody_looks_at_its_limit_counts_and_nothing_is_called_twice(calls: Calls) -> None:
    thread = SerialThread("t")
    names = [*map(str, range(50)), "held", "last"]
    running = asyncio.gather(*(thread.run(calls, name, limit_s=0.5) for name in names))
    await asyncio.sleep(0)
    calls.begun.wait()  # the loop stands still until this call has run for longer than its limit, and ended
    threading.Event().wait(0.6)
    calls.let_go.set()
    calls.last_begun.wait()
    assert await running == names
    assert [name for name, _ in calls.made] == names


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("mine"), ValueError), (StopIteration(3), RuntimeError), (SystemExit(4), RuntimeError)],
)
async def test_what_a_call_raises_is_raised_to_who_asked(error: BaseException, raised: type[Exception]) -> None:
    def fail(_: Any) -> None:
        raise error

    thread = SerialThread("t")
    with pytest.raises(raised) as caught:
        await thread.run(fail, None, limit_s=10)
    assert error in (caught.value, caught.value.__cause__)
    assert await thread.run(str, 1, limit_s=10) == "1"


def test_it_serves_one_loop_after_the_other(calls: Calls) -> None:
    thread = SerialThread("t")
    assert [asyncio.run(thread.run(calls, name, limit_s=10)) for name in "ab"] == ["a", "b"]


async def test_its_thread_ends_with_it(calls: Calls) -> None:
    thread = SerialThread("a thread that ends")
    await thread.run(calls, "a", limit_s=10)
    (running,) = [one for one in threading.enumerate() if one.name == "a thread that ends"]
    del thread
    await asyncio.to_thread(running.join, 10)
    assert not running.is_alive()
