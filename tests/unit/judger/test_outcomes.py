"""Every judgement ends in one outcome, and the policy decides what becomes of the sample."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from tests.unit.judger.states import FakeActor, exact, make_state
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError, JudgerError
from xrl_lite.judger import (
    ComposedJudger,
    GSM8KJudgerConfig,
    Judger,
    JudgerConfig,
    JudgerPool,
    NativeJudger,
    RemoteJudger,
    SkipSampleError,
    judger_metrics,
)


def fragile(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    if response == "raise":
        raise ValueError("no such unit")
    if response == "skip":
        raise SkipSampleError("nothing to compare")
    if response == "exit":
        raise SystemExit(4)
    return {"score": 1.0}


@pytest.mark.parametrize("sync_in", ["thread", "loop"])
async def test_a_raising_function_costs_one_sample_and_names_the_line(sync_in: Any) -> None:
    judger = NativeJudger("mine", fragile, sync_in=sync_in)
    bad, good = make_state("raise", rollout_id=7), make_state("fine", rollout_id=8)
    judged = await asyncio.gather(judger.judge(bad), judger.judge(good))
    assert judged == [bad, good]
    assert (bad.status, bad.reward) == (Status.FAILED, None)
    assert bad.error_msg is not None
    assert "judger 'mine', sample 7: raised: ValueError: no such unit" in bad.error_msg
    assert f"{__file__}:{fragile.__code__.co_firstlineno + 2} in fragile" in bad.error_msg
    assert (good.status, good.reward) == (Status.COMPLETED, {"score": 1.0})
    assert judger.statistics()["mine"]["raised"] == 1
    assert judger.statistics()["mine"]["ok"] == 1


class OutOfTimeError(BaseException):
    """As libraries raise that want to pass every `except Exception`."""


async def ends_more_than_itself(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    if response == "cancelled":
        shared = asyncio.ensure_future(asyncio.sleep(10))
        shared.cancel()
        await shared
    raise {"exit": SystemExit(3), "base": OutOfTimeError("late"), "cancel": asyncio.CancelledError()}[response]


@pytest.mark.parametrize("response", ["cancelled", "cancel", "exit", "base"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_what_async_code_raises_costs_one_sample_whatever_it_is(response: str, is_async: bool) -> None:
    handler = ends_more_than_itself if is_async else lambda **given: ends_more_than_itself(**given)
    state = await NativeJudger("mine", handler).judge(make_state(response))
    assert (state.status, state.extra_fields["judgement"]["outcome"]) == (Status.FAILED, "raised")
    assert state.error_msg is not None
    assert "the reward code raised" in state.error_msg


async def test_cancelling_a_judgement_of_async_code_cancels_it() -> None:
    started = asyncio.Event()

    async def wait(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
        started.set()
        await asyncio.Event().wait()
        return {"score": 1.0}

    judging = asyncio.create_task(NativeJudger("mine", wait).judge(make_state()))
    await started.wait()
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging


async def test_the_outcome_is_kept_with_the_sample() -> None:
    judger = NativeJudger("mine", fragile)
    good, bad = await judger.judge(make_state("fine")), await judger.judge(make_state("raise"))
    record = good.extra_fields["judgement"]
    assert {**record, "run_s": 0.0, "queue_s": 0.0} == {
        "judger": "mine",
        "outcome": "ok",
        "run_s": 0.0,
        "queue_s": 0.0,
        "error": None,
    }
    assert bad.extra_fields["judgement"]["outcome"] == "raised"
    assert bad.extra_fields["judgement"]["error"] == bad.error_msg


async def test_zero_is_only_given_when_asked_for() -> None:
    state = await NativeJudger("mine", fragile, on_error="zero").judge(make_state("raise"))
    assert (state.status, state.reward) == (Status.COMPLETED, {"score": 0.0})
    assert state.extra_fields["judgement"]["outcome"] == "raised"


async def test_raise_raises_the_users_own_exception() -> None:
    with pytest.raises(ValueError, match="no such unit"):
        await NativeJudger("mine", fragile, on_error="raise").judge(make_state("raise"))


@pytest.mark.parametrize("on_error", ["fail_sample", "zero", "raise"])
async def test_a_skipped_sample_is_neither_zero_nor_an_error(on_error: Any) -> None:
    state = await NativeJudger("mine", fragile, on_error=on_error).judge(make_state("skip"))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert state.extra_fields["judgement"]["outcome"] == "skipped"


async def test_sys_exit_in_a_local_function_does_not_end_the_run() -> None:
    state = await NativeJudger("mine", fragile).judge(make_state("exit"))
    assert state.extra_fields["judgement"]["outcome"] == "raised"
    assert "SystemExit(4)" in str(state.error_msg)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ActorTimeoutError("ran longer"), "timeout"),
        (ActorDiedError("killed by SIGSEGV"), "crashed"),
        (KeyError("x"), "raised"),
        (TimeoutError("the user's own"), "raised"),
    ],
)
async def test_errors_of_workers_become_outcomes(error: Exception, outcome: str) -> None:
    judger = RemoteJudger(FakeActor(lambda _: error), "remote")
    state = await judger.judge(make_state())
    assert state.extra_fields["judgement"]["outcome"] == outcome
    assert state.status is Status.FAILED


async def test_a_payload_that_killed_its_worker_is_sent_once_more_and_not_again() -> None:
    actor = FakeActor(lambda _: ActorDiedError("killed by SIGSEGV"))
    judger = RemoteJudger(actor, "remote")
    await judger.judge(make_state(rollout_id=3))
    assert len(actor.payloads) == 2
    assert list(judger.ledger.poisoned) == [3]


async def test_a_payload_that_ran_too_long_is_not_sent_again() -> None:
    actor = FakeActor(lambda _: ActorTimeoutError("too long"))
    await RemoteJudger(actor, "remote").judge(make_state())
    assert len(actor.payloads) == 1


@pytest.mark.parametrize(
    ("error", "outcome", "sent"),
    [(ActorTimeoutError("too long"), "timeout", 2), (ActorDiedError("SIGSEGV"), "crashed", 2)],
)
async def test_what_has_ended_two_workers_ends_no_third(error: Exception, outcome: str, sent: int) -> None:
    actor = FakeActor(lambda payload: error if payload["response"] == "bad" else {"score": 1.0})
    judger = JudgerPool([RemoteJudger(actor, "p"), RemoteJudger(actor, "p")], "p")
    states = [await judger.judge(make_state("bad", rollout_id=index)) for index in range(4)]
    assert [state.extra_fields["judgement"]["outcome"] for state in states] == [outcome] * 4
    assert len(actor.payloads) == sent
    assert "not run again: this very payload has ended 2 workers" in str(states[-1].error_msg)
    assert (await judger.judge(make_state("good"))).reward == {"score": 1.0}
    assert judger.statistics()["p"]["poisoned"] == 1


async def test_payloads_with_functions_in_them_are_told_apart() -> None:
    actor = FakeActor(lambda payload: ActorDiedError("SIGSEGV") if payload["response"] == "bad" else {"score": 1.0})
    judger = RemoteJudger(actor, "p", NativeJudger("p", lambda extra_info: {}, signature="verl"))
    fields: dict[str, Any] = {"extra_fields": {"checker": lambda text: text}}
    bad, good = [await judger.judge(make_state(text, **fields)) for text in ("bad", "good")]
    assert [state.extra_fields["judgement"]["outcome"] for state in (bad, good)] == ["crashed", "ok"], good.error_msg


async def test_no_worker_left_stops_the_run() -> None:
    judger = RemoteJudger(FakeActor(lambda _: ActorUnavailableError("restarts are used up")), "remote")
    with pytest.raises(JudgerError, match=r"no worker process left.*restarts are used up"):
        await judger.judge(make_state())


async def test_a_pool_goes_on_without_a_replica_that_is_gone() -> None:
    gone = FakeActor(lambda _: ActorUnavailableError("restarts are used up"))
    alive = FakeActor(lambda _: {"score": 1.0})
    pool = JudgerPool([RemoteJudger(gone, "p"), RemoteJudger(alive, "p")], "p")
    states = [await pool.judge(make_state()) for _ in range(4)]
    assert [state.reward for state in states] == [{"score": 1.0}] * 4
    assert len(gone.payloads) == 1
    assert set(pool.get_worker_status().values()) == {0}


@pytest.mark.parametrize(
    "number",
    [
        numpy.bool_(True),
        numpy.float32(1),
        numpy.int64(1),
        numpy.array([1.0]),
        torch.tensor(1.0),
        torch.tensor([1]),
        Decimal("1"),
        Fraction(1),
        True,
    ],
)
@pytest.mark.parametrize("is_composed", [False, True])
async def test_numbers_of_every_kind_become_those_of_python(number: Any, is_composed: bool) -> None:
    given = {"score": number, "part": number, "text": "a", "parts": [1, 2], "none": None}
    one = NativeJudger("mine", lambda **_: given)

    def merge(state: RolloutState, outputs: dict[str, Any]) -> RolloutState:
        state.reward = outputs["a"]
        return state

    judger = ComposedJudger({"a": one, "b": one}, merge) if is_composed else one
    state = await judger.judge(make_state(data_source={"a": 1, "b": 1}))
    assert state.reward == {"score": 1, "part": 1, "text": "a", "parts": [1, 2], "none": None}, state.error_msg
    assert {type(state.reward[name]) for name in ("score", "part")} <= {float, int, bool}
    assert json.loads(json.dumps(state.reward)) == state.reward
    assert given["score"] is number  # the function's own dict stays as it is


@pytest.mark.parametrize("score", [torch.ones(2), numpy.array([]), 1j, Decimal("nan"), torch.tensor(math.inf)])
async def test_what_is_no_number_of_python_is_refused_with_the_sample(score: Any) -> None:
    state = await NativeJudger("mine", lambda **_: {"score": score}).judge(make_state(rollout_id=7))
    assert state.status is Status.FAILED
    assert "judger 'mine', sample 7" in str(state.error_msg)
    assert "finite number as 'score'" in str(state.error_msg)


async def test_a_pool_without_replicas_left_stops_the_run() -> None:
    gone = FakeActor(lambda _: ActorUnavailableError("restarts are used up"))
    pool = JudgerPool([RemoteJudger(gone, "p"), RemoteJudger(gone, "p")], "p")
    with pytest.raises(JudgerError, match="no worker process left"):
        await pool.judge(make_state())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "must have the key 'score'"),
        ({"acc": 1.0}, "must have the key 'score'"),
        ({"score": math.nan}, "finite number as 'score', got nan"),
        ({"score": math.inf}, "finite number as 'score', got inf"),
        ({"score": 10**400}, "finite number as 'score'"),
        ({"score": "1.0"}, "finite number as 'score', got '1.0'"),
        ({"score": None}, "finite number as 'score', got None"),
        ({"score": [1.0]}, "finite number as 'score'"),
        ([{"score": 1.0}], "must return a dict, but got <class 'list'>"),
        ("1.0", "must return a dict, but got <class 'str'>"),
        (math.nan, "finite number as 'score', got nan"),
        (1j, "finite number as 'score', got 1j"),
        (None, "Reward handler did not return a response."),
    ],
)
async def test_what_is_no_reward_is_refused_with_judger_sample_and_value(value: Any, says: str) -> None:
    judger = NativeJudger("mine", lambda **_: value)
    state = await judger.judge(make_state(rollout_id=11))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert "judger 'mine', sample 11" in str(state.error_msg)
    assert says in str(state.error_msg)


@pytest.mark.parametrize("score", [True, False, 0, -3, 0.5, Fraction(1, 4), numpy.float32(0.5), torch.tensor(2)])
async def test_finite_numbers_and_bools_are_scores_also_without_a_dict(score: Any) -> None:
    for value in ({"score": score}, score):
        state = await NativeJudger("mine", lambda value=value, **_: value).judge(make_state())
        assert state.reward == {"score": score}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response": None}, "RolloutState must have a response for judging"),
        ({"reward_model": None}, "RolloutState must have reward_model with 'ground_truth' for judging"),
        ({"reward_model": {"ground_truth": None}}, "RolloutState must have reward_model with 'ground_truth'"),
    ],
)
@pytest.mark.parametrize("on_error", ["fail_sample", "zero"])
async def test_misuse_is_raised_whatever_the_policy(fields: Any, message: str, on_error: Any) -> None:
    with pytest.raises(AssertionError, match=message):
        await NativeJudger("mine", exact, on_error=on_error).judge(make_state(**fields))


async def test_an_empty_response_and_a_label_of_zero_are_judged() -> None:
    state = await NativeJudger("mine", exact).judge(make_state("", label=0))
    assert state.reward == {"score": 0.0}


async def test_the_run_stops_when_the_first_judgements_all_fail() -> None:
    judger = JudgerConfig(judger_name="mine", reward_handler=fragile, max_initial_failures=3).build()
    for index in range(2):
        assert (await judger.judge(make_state("raise", rollout_id=index))).status is Status.FAILED
    with pytest.raises(JudgerError, match="The first 3 judgements of judger 'mine' all failed") as caught:
        await judger.judge(make_state("raise", rollout_id=2))
    assert "sample 0: raised: ValueError: no such unit" in str(caught.value)
    assert "Traceback" in str(caught.value)


async def test_one_success_or_a_limit_of_zero_keeps_the_run_going() -> None:
    judger = JudgerConfig(judger_name="mine", reward_handler=fragile, max_initial_failures=2).build()
    unlimited = JudgerConfig(judger_name="mine", reward_handler=fragile, max_initial_failures=0).build()
    await judger.judge(make_state("raise"))
    await judger.judge(make_state("fine"))
    for _ in range(5):
        await judger.judge(make_state("raise"))
        await unlimited.judge(make_state("raise"))
    assert judger.statistics()["mine"]["raised"] == 6


async def test_skipped_samples_do_not_stop_the_run() -> None:
    judger = JudgerConfig(judger_name="mine", reward_handler=fragile, max_initial_failures=2).build()
    for _ in range(5):
        await judger.judge(make_state("skip"))
    assert judger.statistics()["mine"]["skipped"] == 5


async def test_statistics_are_counts_and_times_and_can_be_reset() -> None:
    judger = NativeJudger("mine", exact)
    await judger.judge(make_state())
    names = {"ok", "timeout", "crashed", "raised", "skipped", "latency_p50", "latency_p99", "queue_p50", "queue_p99"}
    assert set(judger.statistics(reset=True)["mine"]) == names
    assert set(judger.statistics()["mine"].values()) == {0}
    assert set(judger_metrics(judger.statistics())) == {f"judger/mine/{name}" for name in names}


async def test_a_local_function_that_hangs_times_out_and_the_next_one_runs() -> None:
    let_go = threading.Event()

    def hang_once(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        if response == "hang":
            let_go.wait()
        return {"score": 1.0}

    judger = NativeJudger("mine", hang_once, request_timeout=1.0)
    states = [make_state("hang", rollout_id=0), *(make_state("fine") for _ in range(3))]
    await asyncio.gather(*map(judger.judge, states))
    assert [state.extra_fields["judgement"]["outcome"] for state in states] == ["timeout", "ok", "ok", "ok"]
    assert "no reward within 1 s" in str(states[0].error_msg)
    let_go.set()


async def test_an_async_function_that_hangs_times_out() -> None:
    async def hang(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    state = await NativeJudger("mine", hang, request_timeout=0.05).judge(make_state())
    assert state.extra_fields["judgement"]["outcome"] == "timeout"


async def test_a_judger_subclass_that_hangs_times_out() -> None:
    class Hanging(Judger):
        async def judge_payload(self, payload: Any) -> Any:
            await asyncio.Event().wait()

    class HangingConfig(JudgerConfig):
        judger_name: str = "hanging"

        def build_local(self) -> Judger:
            return Hanging()

    state = await HangingConfig(request_timeout=0.05).build().judge(make_state())
    assert state.extra_fields["judgement"]["outcome"] == "timeout"


async def test_cancelling_a_local_judgement_frees_the_thread_and_leaves_the_state() -> None:
    begun, let_go = threading.Event(), threading.Event()

    def wait(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        if response == "wait":
            begun.set()
            let_go.wait()
        return {"score": 1.0}

    judger = NativeJudger("mine", wait)
    state = make_state("wait")
    task = asyncio.create_task(judger.judge(state))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (state.reward, state.status, state.extra_fields) == (None, Status.COMPLETED, {})
    assert (await judger.judge(make_state("other"))).reward == {"score": 1.0}
    let_go.set()


async def test_judging_twice_gives_the_same_reward() -> None:
    judger = GSM8KJudgerConfig().build()
    state = make_state("#### 72")
    assert (await judger.judge(state)).reward == (await judger.judge(state)).reward == {"score": 1}
