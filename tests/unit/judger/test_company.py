"""Under load many are judged by one call, and each as if it had been alone."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.judger.states import make_state
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError, JudgerError
from xrl_lite.judger import ComposedJudger, Judger, JudgerPool, NativeJudger, RemoteJudger, weighted_merge
from xrl_lite.judger.gate import Gate
from xrl_lite.judger.outcome import JudgementPolicy
from xrl_lite.judger.stopwatch import Item

NUM_AT_ONCE = 40


class Bus:
    """A handle of a worker whose calls end when the test says so, and then as `answer` does for each response."""

    def __init__(self, answer: Callable[[str], Any] = len) -> None:
        self.answer = answer
        self.journeys: list[list[str]] = []
        self.alone: list[str] = []
        self.error: Exception | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.has_sent_one, self.has_sent_many = asyncio.Event(), asyncio.Event()

    @property
    def judge_payload(self) -> _Method:
        return _Method(self._judge)

    @property
    def judge_each(self) -> _Method:
        return _Method(self._judge_each)

    async def _judge(self, payload: Any) -> dict[str, Any]:
        self.alone.append(payload["response"])
        self.has_sent_one.set()
        await self._arrive()
        value, is_output, _ = self._item(payload["response"])
        if is_output:
            return value
        raise value

    async def _judge_each(self, payloads: Sequence[Any]) -> list[Item]:
        self.journeys.append([payload["response"] for payload in payloads])
        self.has_sent_many.set()
        await self._arrive()
        if self.error is not None:
            raise self.error
        return [self._item(payload["response"]) for payload in payloads]

    async def _arrive(self) -> None:
        await asyncio.sleep(0)
        await self.is_open.wait()

    def _item(self, response: str) -> Item:
        answer = self.answer(response)
        is_output = not isinstance(answer, BaseException)
        return {"score": float(answer)} if is_output else answer, is_output, 1e-6


class _Method:
    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.remote = call

    def options(self, *, timeout_s: float) -> _Method:
        return self


class Odd(NativeJudger):
    """Raises for some responses where payloads are made and outputs are read."""

    def __init__(self) -> None:
        super().__init__("odd", lambda: {}, signature="trl")
        self.made: dict[str, BaseException] = {}
        self.read: dict[str, BaseException] = {}

    def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
        _raise(self.made.get(str(rollout_state.response)))
        return {"response": rollout_state.response, "label": "72"}

    def postprocess(self, rollout_state: RolloutState, output: dict[str, Any]) -> RolloutState:
        _raise(self.read.get(str(rollout_state.response)))
        return super().postprocess(rollout_state, output)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def make_pool(*buses: Bus, odd: NativeJudger | None = None, policy: JudgementPolicy | None = None) -> JudgerPool:
    replicas: list[Judger] = [
        RemoteJudger(bus, "p", odd or Odd(), policy=policy, max_concurrency=1, can_take_many=True) for bus in buses
    ]
    return JudgerPool(replicas, "p")


async def judge_all(judger: Judger, responses: Sequence[str]) -> list[RolloutState]:
    return await asyncio.gather(*(judger.judge(make_state(response)) for response in responses))


async def make_quick(judger: Judger, *buses: Bus) -> None:
    """Judge until it is known that judgements are short."""
    async with asyncio.timeout(60):
        while not any(len(journey) > NUM_AT_ONCE // 8 for bus in buses for journey in bus.journeys):
            await judge_all(judger, ["warm"] * NUM_AT_ONCE * 4)
    for bus in buses:
        bus.journeys.clear()
        bus.alone.clear()
        bus.has_sent_one.clear()
        bus.has_sent_many.clear()


@asynccontextmanager
async def crowd(judger: Judger, bus: Bus, responses: Sequence[str]) -> AsyncIterator[list[asyncio.Task[RolloutState]]]:
    """Have the worker held by two, and these in line behind them; let it go on at the end."""
    bus.is_open.clear()
    states = [make_state(response) for response in ("first", *responses)]
    judging = [asyncio.create_task(judger.judge(state)) for state in states]
    async with asyncio.timeout(60):
        await bus.has_sent_one.wait()
    await asyncio.sleep(0)
    yield judging[1:]
    bus.is_open.set()
    await asyncio.wait(judging)


def outcomes(tasks: Sequence[asyncio.Task[RolloutState]]) -> list[str]:
    return [task.result().extra_fields["judgement"]["outcome"] for task in tasks]


async def test_many_go_by_one_call_and_each_gets_its_own_reward() -> None:
    buses = Bus(), Bus()
    pool = make_pool(*buses)
    await make_quick(pool, *buses)
    responses = ["x" * length for length in range(1, 200)]
    judged = await judge_all(pool, responses)
    assert [state.reward for state in judged] == [{"score": float(len(response))} for response in responses]
    journeys = [journey for bus in buses for journey in bus.journeys]
    assert len(journeys) < len(responses) / 4
    assert sorted([*buses[0].alone, *buses[1].alone, *(one for each in journeys for one in each)]) == responses
    assert pool.statistics()["p"]["ok"] >= len(responses)
    assert set(pool.get_worker_status().values()) == {0}
    assert all(state.extra_fields["judgement"]["run_s"] == 1e-6 for state in judged if state.response in journeys[-1])


async def test_all_workers_have_a_journey_before_one_has_all() -> None:
    bus, other = Bus(), Bus()
    pool = make_pool(bus, other)
    await make_quick(pool, bus, other)
    bus.is_open.clear()
    other.is_open.clear()
    judging = asyncio.create_task(judge_all(pool, ["x"] * NUM_AT_ONCE))
    async with asyncio.timeout(60):
        await bus.has_sent_one.wait()
        await other.has_sent_one.wait()
    bus.is_open.set()
    other.is_open.set()
    await judging
    assert max(len(journey) for each in (bus, other) for journey in each.journeys) <= NUM_AT_ONCE / 2


async def test_branches_of_composed_judgers_have_company_too() -> None:
    bus = Bus()
    pool = make_pool(bus)
    await make_quick(pool, bus)
    composed = ComposedJudger({"a": pool, "b": pool}, weighted_merge({"a": 1.0, "b": 1.0}))
    sources: list[Any] = ["a", {"a": 1.0, "b": 1.0}] * (NUM_AT_ONCE // 2)
    judged = await asyncio.gather(*(composed.judge(make_state("xyz", data_source=source)) for source in sources))
    assert [state.reward and state.reward["score"] for state in judged] == [3.0, 6.0] * (NUM_AT_ONCE // 2)
    assert len(bus.journeys) + len(bus.alone) < NUM_AT_ONCE / 2


async def test_no_more_payloads_are_made_than_may_be_pending() -> None:
    bus = Bus()
    pool = make_pool(bus)
    await make_quick(pool, bus)
    pool.gate = Gate(5)
    judged = await judge_all(pool, ["x" * length for length in range(NUM_AT_ONCE)])
    assert [state.reward for state in judged] == [{"score": float(length)} for length in range(NUM_AT_ONCE)]
    assert max(map(len, bus.journeys)) <= 5
    assert all(pool.gate.enter_now() for _ in range(5))


async def test_what_one_raises_on_the_way_out_or_back_costs_nobody_else_anything() -> None:
    bus, odd = Bus(), Odd()
    pool = make_pool(bus, odd=odd)
    await make_quick(pool, bus)
    odd.made["b"], odd.read["d"] = ValueError("no payload"), ValueError("no state")
    bus.answer = lambda response: KeyError("mine") if response == "c" else 1.0
    async with crowd(pool, bus, "abcdef") as judging:
        pass
    assert outcomes(judging) == ["ok", "raised", "raised", "raised", "ok", "ok"]
    assert [str(task.result().error_msg).partition("raised: ")[2][:20] for task in judging[1:4]] == [
        "ValueError: no paylo",
        "KeyError: 'mine'",
        "ValueError: no state",
    ]
    assert [task.result().status for task in judging[1:4]] == [Status.FAILED] * 3
    assert set(pool.get_worker_status().values()) == {0}


class OutOfTime(BaseException):
    """As libraries raise that want to pass every `except Exception`."""


@pytest.mark.parametrize("culprit", ["a", "c"])
async def test_a_payload_that_cannot_be_made_fails_its_own_state_whatever_is_raised(culprit: str) -> None:
    bus, odd = Bus(), Odd()
    pool = make_pool(bus, odd=odd)
    await make_quick(pool, bus)
    odd.made[culprit] = OutOfTime("no payload")
    async with crowd(pool, bus, "abcdef") as judging:
        pass
    assert outcomes(judging) == ["raised" if response == culprit else "ok" for response in "abcdef"]
    assert set(pool.get_worker_status().values()) == {0}


async def test_payloads_are_made_once_and_time_in_line_is_kept_also_when_a_journey_fails() -> None:
    made: list[str] = []

    class Notes(Odd):
        def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
            made.append(str(rollout_state.response))
            return super().preprocess(rollout_state)

    bus = Bus()
    pool = make_pool(bus, odd=Notes())
    await make_quick(pool, bus)
    made.clear()
    bus.error = ActorDiedError("SIGSEGV")
    async with crowd(pool, bus, "abcdef") as judging:
        began = perf_counter()
        for _ in range(100):
            await asyncio.sleep(0)
        waited_s = perf_counter() - began
    assert sorted(made) == ["a", "b", "c", "d", "e", "f", "first"]
    assert all(task.result().extra_fields["judgement"]["queue_s"] >= waited_s for task in judging)


async def test_without_workers_left_every_judgement_says_so() -> None:
    bus = Bus()
    pool = make_pool(bus)
    await make_quick(pool, bus)
    bus.answer = lambda _: ActorUnavailableError("restarts are used up")
    async with asyncio.timeout(60):
        for _ in range(3):
            with pytest.raises(JudgerError, match="no worker process left"):
                await pool.judge(make_state())


async def test_a_copy_judges_under_its_own_name() -> None:
    judger = NativeJudger("original", lambda response, label, extra_info: {"score": 1.0})
    await judge_all(judger, ["warm"] * NUM_AT_ONCE)
    twin = copy.copy(judger)
    twin._judger_name, twin._ledger = "twin", None  # pyright: ignore[reportPrivateUsage]
    judged = await judge_all(twin, ["x"] * NUM_AT_ONCE)
    assert {state.extra_fields["judgement"]["judger"] for state in judged} == {"twin"}
    assert twin.statistics()["twin"]["ok"] == judger.statistics()["original"]["ok"] == NUM_AT_ONCE


def test_a_judger_in_a_thread_serves_two_loops_at_once_and_the_next_after_one_was_closed() -> None:
    judger = NativeJudger("t", lambda response, label, extra_info: {"score": 1.0}, request_timeout=60)

    async def judge_many() -> int:
        async with asyncio.timeout(60):
            return sum(state.reward == {"score": 1.0} for state in await judge_all(judger, ["x"] * 200))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(asyncio.run, [judge_many(), judge_many()])) == [200, 200]
    loop = asyncio.new_event_loop()
    judging = loop.create_task(judge_all(judger, ["x"] * NUM_AT_ONCE))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert not judging.done()
    assert asyncio.run(judge_many()) == 200
    judging.cancel()
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(judging)
    loop.close()


async def test_reward_code_in_a_thread_may_ask_another_judger_that_is_busy_here() -> None:
    inner = NativeJudger("inner", lambda response, label, extra_info: {"score": 1.0})

    def asks(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        return dict(asyncio.run(inner.judge(make_state())).reward or {})

    outer = NativeJudger("outer", asks)
    async with asyncio.timeout(60):
        judged = await asyncio.gather(judge_all(outer, ["x"] * NUM_AT_ONCE), judge_all(inner, ["x"] * NUM_AT_ONCE))
    assert all(state.reward == {"score": 1.0} for states in judged for state in states)


@pytest.mark.parametrize("is_leader", [True, False])
async def test_what_ends_more_than_a_judgement_ends_the_task_that_raised_it_only(is_leader: bool) -> None:
    bus, odd = Bus(), Odd()
    pool = make_pool(bus, odd=odd)
    await make_quick(pool, bus)
    odd.read["a" if is_leader else "c"] = OutOfTime()
    async with crowd(pool, bus, "abcd") as judging:
        pass
    assert [type(task.exception()) for task in judging] == [
        OutOfTime if response == ("a" if is_leader else "c") else type(None) for response in "abcd"
    ]
    assert set(pool.get_worker_status().values()) == {0}


async def test_the_users_own_exception_is_raised_where_that_was_asked_for() -> None:
    bus = Bus(lambda response: {"b": StopIteration(3), "c": KeyError("mine")}.get(response, 1.0))
    pool = make_pool(bus, policy=JudgementPolicy(on_error="raise"))
    await make_quick(pool, bus)
    async with crowd(pool, bus, "abcd") as judging:
        pass
    assert [type(task.exception()) for task in judging] == [type(None), RuntimeError, KeyError, type(None)]
    assert "StopIteration(3)" in repr(judging[1].exception())


async def test_who_is_cancelled_in_company_stays_as_it_was_and_the_others_go_on() -> None:
    bus = Bus()
    pool = make_pool(bus)
    await make_quick(pool, bus)
    async with crowd(pool, bus, "abcdef") as judging:
        judging[1].cancel()
        bus.is_open.set()
        async with asyncio.timeout(60):
            await bus.has_sent_many.wait()
        bus.is_open.clear()
        judging[3].cancel()
    assert [task.cancelled() for task in judging] == [False, True, False, True, False, False]
    assert "b" not in [one for journey in bus.journeys for one in journey]
    assert set(pool.get_worker_status().values()) == {0}


async def test_a_leader_that_is_cancelled_leaves_nobody_behind() -> None:
    bus = Bus()
    pool = make_pool(bus)
    await make_quick(pool, bus)
    async with crowd(pool, bus, "abcdef") as judging:
        bus.is_open.set()
        async with asyncio.timeout(60):
            await bus.has_sent_many.wait()
        bus.is_open.clear()
        leader = "abcdef".index(bus.journeys[0][0])
        judging[leader].cancel()
    assert [task.cancelled() for task in judging] == [place == leader for place in range(6)]
    assert set(pool.get_worker_status().values()) == {0}


@pytest.mark.parametrize(
    ("error", "outcome"), [(ActorTimeoutError("too long"), "timeout"), (ActorDiedError("SIGSEGV"), "crashed")]
)
async def test_after_a_journey_that_failed_each_goes_alone_and_the_culprit_once(error: Exception, outcome: str) -> None:
    bus = Bus(lambda response: error if response == "c" else 1.0)
    pool = make_pool(bus)
    await make_quick(pool, bus)
    bus.error = error
    async with crowd(pool, bus, "abcdef") as judging:
        pass
    assert outcomes(judging) == [outcome if response == "c" else "ok" for response in "abcdef"]
    assert "c" in bus.journeys[0]
    assert sorted(bus.alone) == ["a", "b", "c", "d", "e", "f", "first"]


@pytest.mark.parametrize("on_error", ["raise", "fail_sample"])
async def test_a_hang_ends_also_after_judgements_that_were_raised_or_cancelled(on_error: Any) -> None:
    let_go = threading.Event()

    def score(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        if response == "bad":
            raise ValueError("mine")
        if response == "hang":
            let_go.wait()
        return {"score": 1.0}

    judger = NativeJudger("t", score, request_timeout=0.5, on_error=on_error)
    try:
        await asyncio.gather(*(judger.judge(make_state("bad")) for _ in range(3)), return_exceptions=True)
        with pytest.raises(AssertionError, match="must have a response"):
            await judger.judge(make_state(None))
        cancelled = asyncio.create_task(judger.judge(make_state()))
        await asyncio.sleep(0)
        cancelled.cancel()
        async with asyncio.timeout(60):
            hanging, behind = (asyncio.create_task(judger.judge(make_state(name))) for name in ("hang", "fine"))
            await asyncio.wait([hanging, behind])
    finally:
        let_go.set()
    assert behind.result().reward == {"score": 1.0}
    assert judger.statistics()["t"]["timeout"] == 1


@pytest.mark.parametrize("is_local", [True, False])
async def test_reading_an_output_may_cancel_the_judgements_around_it(is_local: bool) -> None:
    judging: list[asyncio.Task[RolloutState]] = []

    class Stops(NativeJudger):
        def postprocess(self, rollout_state: RolloutState, output: dict[str, Any]) -> RolloutState:
            if rollout_state.response == "c":
                judging[2].cancel()
                judging[3].cancel()
            return super().postprocess(rollout_state, output)

    bus, local = Bus(lambda _: 1.0), Stops("stops", lambda response, label, extra_info: {"score": 1.0})
    judger: Judger = local
    if not is_local:
        judger = make_pool(bus, odd=local)
        await make_quick(judger, bus)
    judging += [asyncio.create_task(judger.judge(make_state(name))) for name in "abcdef"]
    async with asyncio.timeout(60):
        await asyncio.wait(judging)
    assert [task.cancelled() for task in judging] == [False, False, True, True, False, False]


@pytest.mark.parametrize("sync_in", ["thread", "loop"])
async def test_any_dict_is_a_reward_and_what_is_awaited_for_counts_as_run(sync_in: Any) -> None:
    async def later() -> dict[str, Any]:
        began = perf_counter()
        for _ in range(100):
            await asyncio.sleep(0)
        took_s.append(perf_counter() - began)
        return {"score": 2.0}

    took_s: list[float] = []
    judger = NativeJudger(
        "t", lambda response, label, extra_info: OrderedDict(score=1.0) if response == "a" else later(), sync_in=sync_in
    )
    first, second = await judge_all(judger, ["a", "b"])
    assert (first.reward, second.reward) == ({"score": 1.0}, {"score": 2.0})
    assert second.extra_fields["judgement"]["run_s"] >= took_s[0]


async def test_a_pool_of_judgers_that_are_not_in_workers_fails_one_sample_whatever_is_raised() -> None:
    async def score(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        if response == "b":
            raise SystemExit(3)
        return {"score": 1.0}

    judged = await judge_all(JudgerPool([NativeJudger("p", score)], "p"), list("abc"))
    assert [state.extra_fields["judgement"]["outcome"] for state in judged] == ["ok", "raised", "ok"]


async def test_of_many_states_with_one_payload_that_hangs_two_are_run_alone() -> None:
    bus = Bus(lambda response: ActorTimeoutError("too long") if response == "hang" else 1.0)
    pool = make_pool(bus)
    await make_quick(pool, bus)
    bus.error = ActorTimeoutError("too long")
    async with crowd(pool, bus, ["hang"] * NUM_AT_ONCE) as judging:
        pass
    assert outcomes(judging) == ["timeout"] * NUM_AT_ONCE
    assert bus.alone.count("hang") == 2


async def test_what_hangs_in_a_thread_costs_itself_alone_and_is_not_run_twice() -> None:
    begun: list[str] = []
    let_go = threading.Event()

    def score(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        begun.append(response)
        if response == "hang":
            let_go.wait()
        return {"score": 1.0}

    judger = NativeJudger("t", score, request_timeout=1.0)
    try:
        await judge_all(judger, ["warm"] * 400)
        judged = await judge_all(judger, [*"abcdef", "hang", *"ghijkl"])
    finally:
        let_go.set()
    found = {state.response: state.extra_fields["judgement"]["outcome"] for state in judged}
    assert found == {name: "timeout" if name == "hang" else "ok" for name in ("hang", *"abcdefghijkl")}
    assert begun.count("hang") == 1


@settings(max_examples=60, deadline=None)
@given(
    num_workers=st.integers(1, 3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["judge", "judge", "merge", "cancel", "open", "shut", "break", "mend"]), st.integers(0, 9)
        ),
        max_size=60,
    ),
)
def test_whatever_happens_every_judgement_ends_once(num_workers: int, steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        buses = [Bus() for _ in range(num_workers)]
        pool = make_pool(*buses)
        await make_quick(pool, *buses)
        composed = ComposedJudger({"a": pool, "b": pool}, weighted_merge({"a": 1.0, "b": 1.0}))
        before = pool.statistics()["p"]["ok"]
        judging: list[asyncio.Task[RolloutState]] = []
        cancelled: list[asyncio.Task[RolloutState]] = []
        for step, number in steps:
            match step:
                case "judge" | "merge":
                    source: Any = "a" if step == "judge" else {"a": 1.0, "b": 1.0}
                    states = [make_state("x" * number, data_source=source) for _ in range(number)]
                    judging += [asyncio.create_task(composed.judge(state)) for state in states]
                case "cancel" if judging:
                    cancelled.append(judging.pop(number % len(judging)))
                    cancelled[-1].cancel()
                case "open" | "shut":
                    (asyncio.Event.set if step == "open" else asyncio.Event.clear)(buses[number % num_workers].is_open)
                case "break" | "mend":
                    buses[number % num_workers].error = ActorDiedError("SIGSEGV") if step == "break" else None
                case _:
                    pass
            for _ in range(number):
                await asyncio.sleep(0)
        for bus in buses:
            bus.is_open.set()
        async with asyncio.timeout(60):
            judged = await asyncio.gather(*judging)
            await asyncio.gather(*cancelled, return_exceptions=True)
        num_branches = [1 if state.data_source == "a" else 2 for state in judged]
        scores = [state.reward and state.reward["score"] for state in judged]
        assert scores == [len(str(state.response)) * num for state, num in zip(judged, num_branches, strict=True)]
        assert cancelled or pool.statistics()["p"]["ok"] - before == sum(num_branches)
        assert set(pool.get_worker_status().values()) == {0}

    asyncio.run(run())
