"""Producer, manager and buffer over scripted agent loops: batches, weights, pausing, failing for ever, replacing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.build import ByText, make_state
from xrl_lite.actors import ActorSystem, VirtualClock
from xrl_lite.agent_loop import (
    AgentLoop,
    AgentLoopManager,
    AgentLoopManagerConfig,
    AsyncProduceStrategyConfig,
    ProduceLimits,
    Producer,
    ProducerTask,
    ProduceStrategyConfig,
    SingleTurnAgentLoopConfig,
    SyncProduceStrategyConfig,
    create_agent_loop_manager,
)
from xrl_lite.agent_loop.remote import RouterAgentLoop
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, Row, SampleParams, Sampler, Status
from xrl_lite.errors import ActorUnavailableError, ConfigError, RolloutError, RunError
from xrl_lite.replay_buffer import GroupStatus, PromptGroup, ReplayBuffer, ReplayBufferConfig, build_replay_buffer
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.controller import RolloutController

QUICK = ProduceLimits(max_failed_groups=4, backoff_s=0.001, max_backoff_s=0.01)


class Scripted(AgentLoop):
    """An agent loop without an engine; `make` says what becomes of a state."""

    def __init__(self, make: Callable[[RolloutState], Any] = lambda state: None) -> None:
        super().__init__(None, None, sample_params=SampleParams())  # type: ignore[arg-type]
        self.make = make
        self.made: list[tuple[Any, Any]] = []
        self.version = 0

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        state = rollout_state
        self.made.append((state.task_name, state.rollout_id))
        state.response_ids = [*(state.response_ids or []), 7]
        state.response_model_steps = [*(state.response_model_steps or []), self.version]
        state.logprobs = [*(state.logprobs or []), -0.5]
        state.status = Status.INIT
        outcome = self.make(state)
        if outcome is not None:
            await outcome
        if state.status is not Status.ABORTED:
            state.status, state.reward = Status.COMPLETED, {"score": 1.0}
        return state


class Requests:
    """Requests that hang until they are aborted."""

    def __init__(self) -> None:
        self.waiting: list[tuple[RolloutState, anyio.Event]] = []
        self.num_aborts = 0

    async def hang(self, state: RolloutState) -> None:
        ended = anyio.Event()
        self.waiting.append((state, ended))
        await ended.wait()

    async def abort_all(self) -> int:
        self.num_aborts += 1
        aborted, self.waiting = self.waiting, []
        for state, ended in aborted:
            state.status = Status.ABORTED
            ended.set()
        return len(aborted)


def make_producer(
    loop: AgentLoop,
    *,
    strategy: ProduceStrategyConfig | None = None,
    num_rows: int = 100,
    group_size: int = 2,
    weights: dict[str, float] | None = None,
    buffer: ReplayBuffer | None = None,
    requests: Any = None,
    limits: ProduceLimits = QUICK,
    is_valid: Any = None,
    interval: int = 1,
    needs_logprobs: bool = False,
    note: Callable[[str], None] = lambda _: None,
    **config: Any,
) -> Producer:
    weights = weights or {"t": 1.0}
    strategy = strategy or SyncProduceStrategyConfig()
    if buffer is None:
        buffer = build_replay_buffer(ReplayBufferConfig(), max_failed_groups=limits.max_failed_groups)
    rows = [Row(index=n, prompt=[{"role": "user", "content": "x"}], ground_truth="1") for n in range(num_rows)]
    manager = AgentLoopManager(
        dict.fromkeys(weights, loop),
        replay_buffer=buffer,
        config=AgentLoopManagerConfig(**config),
        requests=requests,
        partial_rollout=frozenset(weights) if strategy.enable_partial_rollout else frozenset(),
        is_valid=dict.fromkeys(weights, is_valid) if is_valid else None,
        needs_logprobs=needs_logprobs,
    )
    tasks = [
        ProducerTask(
            name=name,
            weight=weight,
            strategy=strategy,
            sampler=Sampler(rows, encode=lambda _: [1], group_size=group_size, shuffle=False, task_name=name),
        )
        for name, weight in weights.items()
    ]
    return Producer(
        tasks, manager=manager, replay_buffer=buffer, limits=limits, sync_weights_interval=interval, note=note
    )


async def one_batch(producer: Producer, size: int, *, step: int = 1) -> list[PromptGroup]:
    async with producer.running():
        await producer.produce_batch(size, train_step=step)
        groups, _ = await producer.replay_buffer.sample(step, "train", size)
    return groups


def rows_of(groups: Sequence[PromptGroup]) -> list[Any]:
    return [group.row for group in groups]


# --- sync


async def test_a_batch_is_generated_in_the_order_of_the_rows() -> None:
    producer = make_producer(Scripted())
    assert rows_of(await one_batch(producer, 3)) == [0, 1, 2]
    groups = await one_batch(producer, 2, step=2)
    assert rows_of(groups) == [3, 4]
    assert [group.uid for group in groups] == ["t-3", "t-4"]
    assert [group.global_steps for group in groups] == [2, 2]


async def test_a_group_that_fails_is_replaced_and_one_failed_member_is_not() -> None:
    def fail(state: RolloutState) -> None:
        row, place = state.extra_fields["row"], state.rollout_id % 2  # type: ignore[operator]
        if row == 1 or (row == 2 and place == 0):
            raise RolloutError("scripted")

    producer = make_producer(Scripted(fail))
    groups = await one_batch(producer, 3)
    assert rows_of(groups) == [0, 2, 3]
    assert [group.num_rows for group in groups] == [2, 1, 2]
    assert producer.manager.counts()["t"].num_failed == 1


@pytest.mark.parametrize("needed", [True, False])
async def test_an_attempt_without_logprobs_fails_where_they_are_needed_and_its_agent_is_named(needed: bool) -> None:
    def leave_out(state: RolloutState) -> None:
        if state.rollout_id % 2:  # type: ignore[operator]
            state.logprobs, state.extra_fields["agent_name"] = None, "forgetful"

    (group,) = await one_batch(make_producer(Scripted(leave_out), needs_logprobs=needed), 1)
    told, untold = group.states
    assert told.status is Status.COMPLETED
    assert (untold.status is Status.FAILED) is needed
    if needed:
        assert "agent 'forgetful' returned a trajectory without log-probs" in (untold.error_msg or "")
        assert "response_logprobs" in (untold.error_msg or "")
        assert untold.reward is None


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_mask": [1, 1]}, "response_mask: it has 2 values for 1 response tokens"),
        ({"logprobs": [-0.5] * 3}, "logprobs: it has 3 values for 1 response tokens"),
        ({"input_ids": [1, 2], "labels": [2]}, "labels: it has 1 values for 2 input_ids"),
    ],
)
async def test_an_attempt_whose_lists_do_not_fit_fails_and_its_agent_is_named(
    fields: dict[str, Any], wanted: str
) -> None:
    def spoil(state: RolloutState) -> None:
        if state.rollout_id % 2:  # type: ignore[operator]
            for name, value in fields.items():
                setattr(state, name, value)

    (group,) = await one_batch(make_producer(Scripted(spoil)), 1)
    good, bad = group.states
    assert (good.status, bad.status, bad.reward) == (Status.COMPLETED, Status.FAILED, None)
    assert (
        bad.error_msg == f"sample {bad.rollout_id}: the agent of task 't' returned a trajectory whose lists do not "
        f"fit: {wanted}."
    )


async def test_failing_for_ever_backs_off_and_stops_with_the_reason() -> None:
    def fail(state: RolloutState) -> None:
        raise RolloutError("no replica")

    loop = Scripted(fail)
    notes: list[str] = []
    producer = make_producer(loop, note=notes.append)
    with pytest.raises(RunError, match=r"more than max_failed_groups=4.*no replica"):
        await one_batch(producer, 2)
    assert re.match(r"the last [12] group\(s\) all failed; waiting .* s before .*The last one: .*no replica", notes[0])
    assert len(notes) > 1, "each wait is told"
    assert len({rollout for _, rollout in loop.made}) <= 2 * 6, "the data set was not eaten"


async def test_b5_a_filter_that_rejects_all_stops_too() -> None:
    producer = make_producer(Scripted(), is_valid=lambda samples: False)
    with pytest.raises(RunError, match=r"max_failed_groups=4.*refused by is_valid_sample_fn"):
        await one_batch(producer, 2)
    assert producer.manager.counts()["t"].num_filtered > 4


async def test_the_filter_sees_completed_groups_and_rewards_are_counted_before_it() -> None:
    seen: list[Any] = []

    def is_valid(samples: Sequence[RolloutState]) -> bool:
        seen.append(samples[0].extra_fields["row"])
        return samples[0].extra_fields["row"] != 0

    def fail(state: RolloutState) -> None:
        if state.extra_fields["row"] == 1:
            raise RolloutError("scripted")

    producer = make_producer(Scripted(fail), is_valid=is_valid)
    assert rows_of(await one_batch(producer, 2)) == [2, 3]
    assert sorted(seen) == [0, 2, 3]
    counts = producer.manager.counts(reset=True)["t"]
    assert (counts.num_filtered, counts.num_failed) == (1, 1)
    assert (counts.raw_rewards_sum, counts.raw_rewards_count) == (6.0, 6)
    assert producer.manager.counts() == {}
    assert counts.metrics("t")["produce/t/filtered_groups"] == 1.0


async def test_a_bug_in_a_loop_ends_the_run_with_its_error() -> None:
    def broken(state: RolloutState) -> None:
        if state.rollout_id == 2:
            raise KeyError("a bug in the third sample")

    async def hang(state: RolloutState) -> None:
        if state.rollout_id == 0:
            await anyio.sleep_forever()
        broken(state)

    producer = make_producer(Scripted(hang))
    with pytest.raises(KeyError, match="a bug in the third sample"):
        await one_batch(producer, 2)
    assert producer.manager.num_in_flight == 0
    assert producer.replay_buffer.count("train", GroupStatus.RUNNING) == 0


async def test_a_hanging_attempt_costs_itself_and_not_its_group() -> None:
    async def hang(state: RolloutState) -> None:
        if state.rollout_id == 0:
            await anyio.sleep_forever()

    producer = make_producer(Scripted(hang), group_timeout_s=1.0)
    (group,) = await one_batch(producer, 1)
    assert [state.status for state in group.states] == [Status.FAILED, Status.COMPLETED]
    assert group.states[0].error_msg == "sample 0: not ended within 1 s"


class Splits(Scripted):
    """Makes two trajectories of each attempt."""

    async def generate_sample(self, rollout_state: RolloutState) -> list[RolloutState]:  # type: ignore[override]
        last = await super().generate_sample(rollout_state)
        first = last.model_copy(deep=True, update={"uid": f"{last.rollout_id}.0"})
        for number, state in enumerate((first, last)):
            state.session_id, state.extra_fields["trajectory"] = str(last.rollout_id), {"number": number, "of": 2}
        return [first, last]


async def hang_first(state: RolloutState) -> None:
    if state.rollout_id == 0:
        await anyio.sleep_forever()


def test_a_group_that_had_its_time_keeps_attempts_whole() -> None:
    producer = make_producer(Splits(hang_first), group_timeout_s=60.0)
    (group,) = VirtualClock().run(one_batch(producer, 1))
    assert [state.status for state in group.states] == [Status.FAILED, Status.COMPLETED, Status.COMPLETED]
    assert [state.extra_fields.get("trajectory") for state in group.states[1:]] == [
        {"number": 0, "of": 2},
        {"number": 1, "of": 2},
    ]


class BatchJudger:
    """Judges groups in one call, which takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        raise NotImplementedError

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        await anyio.sleep(self.seconds)
        return [state.model_copy(update={"reward": {"score": 0.5}}) for state in rollout_states]


@pytest.mark.parametrize(("seconds", "status"), [(9.0, Status.COMPLETED), (11.0, Status.FAILED)])
def test_what_ended_in_time_is_judged_within_the_grace(seconds: float, status: Status) -> None:
    class Engine:
        async def generate(self, state: RolloutState) -> RolloutState:
            await hang_first(state)
            state.response_ids, state.status = [7], Status.COMPLETED
            return state

    config = SingleTurnAgentLoopConfig(enable_batch_judge=True, judge_grace_s=10.0)
    loop = config.build(Engine(), BatchJudger(seconds))
    late, judged = VirtualClock().run(loop.generate_group(make_states(2), timeout_s=60.0))  # type: ignore[arg-type]
    assert (late.status, late.error_msg) == (Status.FAILED, "sample 0: not ended within 60 s")
    assert (judged.status, judged.reward) == (status, {"score": 0.5} if status is Status.COMPLETED else None)


class KeepsNoLimit(Scripted):
    async def generate_group(self, rollout_states: Sequence[RolloutState], **kwargs: Any) -> list[RolloutState]:
        return await super().generate_group(rollout_states)


class HasNoLimit(Scripted):
    async def generate_group(self, rollout_states: Sequence[RolloutState]) -> list[RolloutState]:  # type: ignore[override]
        return await super().generate_group(rollout_states)


@pytest.mark.parametrize("loop", [KeepsNoLimit, HasNoLimit])
def test_a_group_whose_loop_keeps_no_limit_fails_as_a_whole(loop: type[Scripted]) -> None:
    producer = make_producer(loop(hang_first), group_timeout_s=60.0)
    (finished,) = VirtualClock().run(producer.manager.evaluate([make_states(2)]))
    assert {state.status for state in finished} == {Status.FAILED}


def test_a_hanging_attempt_does_not_keep_an_evaluation() -> None:
    manager = make_producer(Scripted(hang_first), group_timeout_s=60.0).manager
    (finished,) = VirtualClock().run(manager.evaluate([make_states(2)]))
    assert [state.status for state in finished] == [Status.FAILED, Status.COMPLETED]


def make_states(count: int) -> list[RolloutState]:
    return [make_state(rollout_id=number, status=Status.INIT, reward=None) for number in range(count)]


async def test_groups_run_only_inside_running() -> None:
    producer = make_producer(Scripted())
    with pytest.raises(RunError, match="inside `async with"):
        await producer.refill(1)


class Gone(Scripted):
    """A loop whose process is gone, or that notes that it was called."""

    def __init__(self, gone: bool) -> None:
        super().__init__()
        self.gone = gone
        self.calls: list[str] = []

    async def pause(self) -> None:
        await self._called("pause")

    async def resume(self) -> None:
        await self._called("resume")

    async def _called(self, name: str) -> None:
        if self.gone:
            raise ActorUnavailableError("agent_loop/0: restarts are used up")
        await wait_all_tasks_blocked()
        self.calls.append(name)


@pytest.mark.parametrize("num_loops", [1, 2])
async def test_a_pause_does_not_need_loops_whose_processes_are_gone(num_loops: int) -> None:
    loops = [Gone(gone=number == 0) for number in range(num_loops)]
    router = RouterAgentLoop(loops, SingleTurnAgentLoopConfig())  # type: ignore[arg-type]
    manager = AgentLoopManager({"t": router}, replay_buffer=ReplayBuffer())
    await manager.pause()
    assert [loop.calls for loop in loops] == [[], *[["pause", "resume"]] * (num_loops - 1)]


# --- several tasks


async def test_tasks_take_turns_by_their_weights_and_none_waits_for_ever() -> None:
    loop = Scripted()
    producer = make_producer(loop, weights={"big": 0.75, "small": 0.25}, group_size=1)
    counts = {"big": 0, "small": 0}
    for step in range(1, 9):
        for group in await one_batch(producer, 2, step=step):
            counts[group.task_name] += 1
    assert counts == {"big": 12, "small": 4}


async def test_a_producer_that_is_restored_goes_on_exactly() -> None:
    weights = {"a": 2.0, "b": 1.0}
    first = make_producer(Scripted(), weights=weights)
    await one_batch(first, 4)
    second = make_producer(Scripted(), weights=weights)
    second.load_state_dict(first.state_dict())
    assert [group.uid for group in await one_batch(first, 5, step=2)] == [
        group.uid for group in await one_batch(second, 5, step=2)
    ]
    with pytest.raises(RunError, match=r"of the tasks \['a', 'b'\], this run has \['t'\]"):
        make_producer(Scripted()).load_state_dict(first.state_dict())


def test_two_tasks_of_one_name_are_refused() -> None:
    producer = make_producer(Scripted())
    (task,) = producer.tasks.values()
    with pytest.raises(RunError, match="names of their own"):
        Producer([task, task], manager=producer.manager, replay_buffer=ReplayBuffer(), limits=QUICK)


# --- starving


class OneOfMany(Scripted):
    """Only the attempts at the first row differ, and something is always in flight."""

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        state = await super().generate_sample(rollout_state)
        for _ in range(7 * state.extra_fields["row"] % 11):
            await anyio.lowlevel.checkpoint()
        if state.extra_fields["row"] == 0:
            state.reward = {"score": float(state.rollout_id)}  # type: ignore[arg-type]
        return state


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
async def test_who_starves_trains_on_what_there_is_however_much_is_generated(mode: Any) -> None:
    settings = ReplayBufferConfig.model_validate(
        {
            "on_starvation": "train_partial",
            "filter_groups": {"enable": True, "metric": "score", "max_filtered_batches": 2},
        }
    )
    strategy = SyncProduceStrategyConfig() if mode == "sync" else AsyncProduceStrategyConfig(max_staleness=1)
    producer = make_producer(
        OneOfMany(), strategy=strategy, buffer=build_replay_buffer(settings, trainer_mode=mode), num_rows=10_000
    )
    async with producer.running(), anyio.create_task_group() as tasks:
        producer.advance(next_step=1, policy_version=0, num_wanted=3)
        with anyio.fail_after(20):
            if mode == "separate_async":
                tasks.start_soon(producer.produce_loop, 3)
            else:
                await producer.produce_batch(3, train_step=1)
            groups, _ = await producer.replay_buffer.sample(1, "train", 3)
        assert rows_of(groups) == [0]
        tasks.cancel_scope.cancel()


# --- more than a batch at a time


def over_sampling(share: float, **options: Any) -> dict[str, Any]:
    return {
        "strategy": AsyncProduceStrategyConfig(over_sample_threshold=share, **{"max_staleness": 3, **options}),
        "buffer": build_replay_buffer(ReplayBufferConfig(), trainer_mode="colocate_async", max_failed_groups=4),
    }


async def produce(producer: Producer, size: int, *, step: int) -> list[PromptGroup]:
    async with producer.running():
        await producer.produce_batch(size, train_step=step)
        groups, _ = await producer.replay_buffer.sample(step, "train", size)
        await producer.pause_produce()
    return groups


async def test_over_sampling_takes_the_first_to_end_and_stores_what_was_cut_short() -> None:
    requests = Requests()

    def slow(state: RolloutState) -> Any:
        return requests.hang(state) if state.extra_fields["row"] == 0 and not requests.num_aborts else None

    loop = Scripted(slow)
    producer = make_producer(
        loop, requests=requests, **over_sampling(0.5, enable_partial_rollout=True), abort_interval_s=0.01
    )
    assert rows_of(await produce(producer, 2, step=1)) == [1, 2]
    assert producer.replay_buffer.status("t-0") is GroupStatus.ABORTED
    assert producer.manager.num_in_flight == 0

    loop.version = 1
    groups = await produce(producer, 2, step=2)
    assert rows_of(groups) == [0, 3]
    assert [state.response_model_steps for state in groups[0].states] == [[0, 1], [0, 1]], "it went on from its tokens"
    assert rows_of(await produce(producer, 2, step=3)) == [4, 5], "one was over-sampled in step 2"


async def test_without_partial_rollout_only_what_was_cut_short_is_made_again() -> None:
    requests = Requests()

    def slow(state: RolloutState) -> Any:
        return requests.hang(state) if state.rollout_id == 0 and not requests.num_aborts else None

    loop = Scripted(slow)
    producer = make_producer(loop, requests=requests, **over_sampling(0.5), abort_interval_s=0.01)
    await produce(producer, 2, step=1)
    loop.version, loop.made = 1, []
    groups = await produce(producer, 1, step=2)
    assert [state.response_model_steps for state in groups[0].states] == [[1], [0]]
    assert ("t", 1) not in loop.made


async def test_what_does_not_stop_in_time_is_cancelled_and_not_lost() -> None:
    async def deaf(state: RolloutState) -> None:
        if state.extra_fields["row"] == 0:
            await anyio.sleep_forever()

    producer = make_producer(Scripted(deaf), **over_sampling(1.0), pause_timeout_s=0.02, abort_interval_s=0.01)
    assert rows_of(await produce(producer, 1, step=1)) == [1]
    assert producer.replay_buffer.status("t-0") is GroupStatus.ABORTED


async def test_what_had_ended_beside_an_attempt_that_was_cancelled_is_not_trained_on_too_late() -> None:
    async def deaf(state: RolloutState) -> None:
        if loop.version == 0 and state.rollout_id == 1:
            await anyio.sleep_forever()

    loop = Scripted(deaf)
    producer = make_producer(
        loop, **over_sampling(1.0, max_staleness=0), pause_timeout_s=0.02, abort_interval_s=0.01, num_rows=3
    )
    await produce(producer, 1, step=1)
    loop.version = 1
    producer.continue_produce(1)
    (group,) = await produce(producer, 1, step=2)
    assert [state.response_model_steps for state in group.states] == [[1], [1]]


async def test_an_attempt_of_several_trajectories_that_was_cut_short_is_run_again_as_one() -> None:
    requests = Requests()

    class Splits(Scripted):
        async def generate_sample(self, rollout_state: RolloutState) -> Any:
            state = await super().generate_sample(rollout_state)
            first = state.model_copy(deep=True)
            for number, each in enumerate((first, state)):
                each.session_id, each.extra_fields["trajectory"] = "s", {"number": number, "of": 2}
            return [first, state]

    def slow(state: RolloutState) -> Any:
        return requests.hang(state) if state.extra_fields["row"] == 0 and not requests.num_aborts else None

    loop = Splits(slow)
    producer = make_producer(loop, requests=requests, group_size=1, **over_sampling(0.5), abort_interval_s=0.01)
    assert rows_of(await produce(producer, 1, step=1)) == [1]
    loop.made = []
    groups = await produce(producer, 1, step=2)
    assert rows_of(groups) == [0]
    assert [name for name in loop.made if name == ("t", 0)] == [("t", 0)]
    assert len(groups[0].states) == 2


async def test_a_pause_gives_judgements_their_grace_and_no_more() -> None:
    class Slow(ByText):
        async def judge(self, rollout_state: RolloutState) -> RolloutState:
            if rollout_state.extra_fields["row"] == 0:
                await anyio.sleep_forever()
            return await super().judge(rollout_state)

    loop = SingleTurnAgentLoopConfig(judge_grace_s=0.01).build_local(ScriptedRolloutCtl(lambda _: [65]), Slow())
    producer = make_producer(loop, **over_sampling(1.0), pause_timeout_s=30.0)
    assert rows_of(await produce(producer, 1, step=1)) == [1]
    assert producer.replay_buffer.status("t-0") is GroupStatus.ABORTED
    (group,) = [group for group in producer.replay_buffer.table if group.uid == "t-0"]
    assert {(state.status, state.finish_reason, state.reward is None) for state in group.states} == {
        (Status.ABORTED, "abort", True)
    }


async def test_should_continue_fn_decides_when_a_batch_is_enough() -> None:
    strategy = AsyncProduceStrategyConfig(
        should_continue_fn="tests.contracts.test_producing:half_is_enough", over_sample_threshold=0.0, max_staleness=1
    )
    producer = make_producer(Scripted(), strategy=strategy)
    async with producer.running():
        await producer.produce_batch(4, train_step=1)
        assert producer.replay_buffer.count("train", GroupStatus.FINISHED) >= 2


def half_is_enough(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    return completed_count < batch_size / 2


async def test_a_stop_rule_that_wants_the_impossible_returns(caplog: pytest.LogCaptureFixture) -> None:
    strategy = SyncProduceStrategyConfig(should_continue_fn="tests.contracts.test_producing:always")
    producer = make_producer(Scripted(), strategy=strategy)
    async with producer.running():
        await producer.produce_batch(2, train_step=1)
    assert "wants more than 2 groups, and nothing runs" in caplog.text


def always(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    return True


async def test_expired_attempts_are_made_again_and_their_fresh_siblings_stay() -> None:
    loop = Scripted()
    producer = make_producer(
        loop, **over_sampling(1.0, max_staleness=0, max_token_staleness=0, tail_batch_trigger_size=0)
    )
    buffer = producer.replay_buffer
    await produce(producer, 1, step=1)  # leaves one group of version 0
    (left,) = [group for group in buffer.table if group.status is GroupStatus.FINISHED]
    with buffer.table.changing(left):
        left.states[1].response_model_steps = [4]
        left.measure()
    loop.version, loop.made = 4, []
    groups = await produce(producer, 1, step=5)
    assert groups[0].uid == left.uid
    assert [state.response_model_steps for state in groups[0].states] == [[4], [4]]
    assert ("t", left.states[0].rollout_id) in loop.made
    assert ("t", left.states[1].rollout_id) not in loop.made


@pytest.mark.parametrize(("trigger", "remade", "drawn"), [(2, 2, 0), (3, 0, 2), (0, 2, 1), (-1, 0, 2)])
async def test_tail_batches(trigger: int, remade: int, drawn: int) -> None:
    """Two groups are too old: how many are made again, and how many prompts are drawn, for one group + 100 %."""
    loop = Scripted()
    producer = make_producer(loop, **over_sampling(2.0, max_staleness=0, tail_batch_trigger_size=trigger))
    await produce(producer, 1, step=1)
    assert producer.replay_buffer.count("train", GroupStatus.FINISHED) == 2
    loop.version, loop.made = 4, []
    async with producer.running():
        await producer.refresh_staleness(5)
        producer.advance(next_step=5, policy_version=4)
        (task,) = producer.tasks.values()
        await producer._dispatch(task, min(2 + (trigger == 0), producer._target(task, 1) + 1))
        await wait_all_tasks_blocked()
    old = {0, 1, 2, 3, 4, 5}
    again = {rollout // 2 for _, rollout in loop.made if rollout in old}
    new = {rollout // 2 for _, rollout in loop.made if rollout not in old}
    assert (len(again), len(new)) == (remade, drawn)


async def test_tokens_that_are_too_old_are_masked() -> None:
    producer = make_producer(Scripted(), **over_sampling(0.0, max_token_staleness=1))
    group = PromptGroup(
        uid="t-0",
        partition_id="train",
        global_steps=1,
        task_name="t",
        states=[make_state(response_model_steps=[0, 4]), make_state(response_model_steps=[0, 4], response_mask=[1, 0])],
    )
    producer.mask_stale_tokens([group], 5)
    assert [state.response_mask for state in group.states] == [[0, 1], [0, 0]]


# --- for ever


async def test_b7_the_loop_runs_as_far_ahead_as_the_bound_allows_and_nothing_is_dropped() -> None:
    """Generation is always ahead of training: staleness stays within the bound, and no group is discarded."""
    loop = Scripted()
    buffer = build_replay_buffer(ReplayBufferConfig(), trainer_mode="separate_async", max_failed_groups=4)
    producer = make_producer(loop, strategy=AsyncProduceStrategyConfig(max_staleness=1), buffer=buffer)
    stale: list[float] = []
    async with anyio.create_task_group() as tasks, producer.running():
        tasks.start_soon(producer.produce_loop, 2)
        for step in range(1, 31):
            groups, metrics = await buffer.sample(step, "train", 2)
            producer.advance(next_step=step + 1, policy_version=step - 1)
            await wait_all_tasks_blocked()  # generation is done long before the update is
            stale.append(metrics["off_policy/max"])
            assert metrics["training/off_policy/evicted_samples"] == 0
            assert [group.ordinal for group in groups] == [2 * step - 2, 2 * step - 1]
            assert buffer.num_waiting("train") == 2
            loop.version = step
            producer.advance(next_step=step + 1, policy_version=step)
        tasks.cancel_scope.cancel()
    assert max(stale) == 1


async def test_the_loop_draws_nothing_while_paused() -> None:
    loop = Scripted()
    buffer = build_replay_buffer(ReplayBufferConfig(), trainer_mode="separate_async")
    producer = make_producer(loop, strategy=AsyncProduceStrategyConfig(max_staleness=4), buffer=buffer)
    async with anyio.create_task_group() as tasks, producer.running():
        await producer.pause_produce()
        tasks.start_soon(producer.produce_loop, 1)
        await wait_all_tasks_blocked()
        assert loop.made == []
        producer.continue_produce(0)
        await wait_all_tasks_blocked()
        assert buffer.count("train", GroupStatus.FINISHED) == 5
        tasks.cancel_scope.cancel()


async def test_the_loop_stops_when_everything_fails() -> None:
    def fail(state: RolloutState) -> None:
        raise RolloutError("no replica")

    buffer = build_replay_buffer(ReplayBufferConfig(), trainer_mode="separate_async")
    producer = make_producer(Scripted(fail), buffer=buffer)
    with pytest.raises(RunError, match=r"groups all failed, more than max_failed_groups=4. The last one: .*no replica"):
        async with producer.running():
            await producer.produce_loop(2)


# --- another manager


class Elsewhere:
    """Runs groups without agent loops, and knows only what it was promised."""

    def __init__(self, replay_buffer: ReplayBuffer, **rest: Any) -> None:
        self.buffer, self.rest = replay_buffer, rest
        self.prompts: list[PromptGroup] = []

    @classmethod
    async def create(cls, replay_buffer: ReplayBuffer, **kwargs: Any) -> Elsewhere:
        return cls(replay_buffer, **kwargs)

    def generate_sequences(self, prompts: Sequence[PromptGroup]) -> None:
        self.prompts += prompts


async def test_a_manager_of_the_users_takes_our_place() -> None:
    config = AgentLoopManagerConfig(agent_loop_manager_class="tests.contracts.test_producing:Elsewhere")
    ours = make_producer(Scripted())
    buffer = ours.replay_buffer
    manager = await create_agent_loop_manager(config, llm_client="client", replay_buffer=buffer, agent_loops={})
    assert manager.rest["llm_client"] == "client"
    producer = Producer(list(ours.tasks.values()), manager=manager, replay_buffer=buffer, limits=QUICK)
    taken: list[PromptGroup] = []

    async def consume() -> None:
        taken.extend(await one_batch(producer, 2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await wait_all_tasks_blocked()
        for group in manager.prompts:
            await buffer.finish(buffer.start(group.uid, worker="theirs", timeout_s=60), [make_state()])
    assert [group.uid for group in taken] == ["t-0", "t-1"]


async def test_the_manager_of_the_examples_runs_few_groups_at_once_and_gives_back_what_waits() -> None:
    config = AgentLoopManagerConfig(agent_loop_manager_class="examples.own_manager:LongestFirst")
    hold = anyio.Event()
    running: list[Any] = []

    def slow(state: RolloutState) -> Any:
        running.append(state.extra_fields["row"])
        return hold.wait() if state.extra_fields["row"] < 3 else None

    ours = make_producer(Scripted(slow), group_size=1)
    buffer = ours.replay_buffer
    manager = await create_agent_loop_manager(
        config, llm_client=None, replay_buffer=buffer, agent_loops={"t": Scripted(slow)}, judger=None
    )
    producer = Producer(list(ours.tasks.values()), manager=manager, replay_buffer=buffer, limits=QUICK)
    async with producer.running():
        await producer.produce_batch(4, train_step=1)
        await wait_all_tasks_blocked()
        assert running == [0, 1]
    assert buffer.count("train", GroupStatus.RUNNING) == 0
    hold.set()
    async with producer.running():
        await producer.produce_batch(4, train_step=1)
        groups, _ = await buffer.sample(1, "train", 4)
    assert rows_of(groups) == [0, 1, 2, 3]


async def test_a_manager_without_the_two_methods_is_refused() -> None:
    config = AgentLoopManagerConfig(agent_loop_manager_class="tests.contracts.test_producing:Requests")
    with pytest.raises(ConfigError, match="has no create and no generate_sequences"):
        await create_agent_loop_manager(config, llm_client=None, replay_buffer=ReplayBuffer(), agent_loops={})


# --- the settings


def test_carrying_over_needs_the_async_strategy() -> None:
    with pytest.raises(ValueError, match=r"over_sample_threshold, max_staleness need\(s\)"):
        SyncProduceStrategyConfig(over_sample_threshold=1.0, max_staleness=2)


def test_a_token_bound_above_the_sequence_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="can never be reached with max_staleness=1"):
        AsyncProduceStrategyConfig(max_staleness=1, max_token_staleness=2)


@pytest.mark.parametrize(("staleness", "interval", "threshold"), [(0, 1, 1), (0, 4, 4), (1, 4, 8)])
def test_thresholds(staleness: int, interval: int, threshold: int) -> None:
    strategy = AsyncProduceStrategyConfig(max_staleness=staleness, max_token_staleness=staleness)
    assert strategy.stale_threshold(interval) == strategy.token_stale_threshold(interval) == threshold
    assert AsyncProduceStrategyConfig().token_stale_threshold(interval) is None


# --- with the real controller and the scripted engine


@pytest.fixture(params=["inline", pytest.param("process", marks=pytest.mark.process)])
async def system(request: pytest.FixtureRequest) -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4, backend=request.param) as running:
        yield running


async def test_a_batch_is_generated_by_an_engine_and_judged(system: ActorSystem) -> None:
    options = {"responses": [[65], [66]], "fail_prompts": [2]}
    config = RolloutConfig(engine="fake", engine_options=options, num_threads=1)
    controller = RolloutController(
        system, config=config, model_path="none", decode=lambda ids, _: "".join(map(chr, ids)), seed=0
    )
    loop = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=4)).build_local(controller, ByText())
    buffer = build_replay_buffer(ReplayBufferConfig(), max_failed_groups=4)
    manager = AgentLoopManager({"t": loop}, replay_buffer=buffer, requests=controller)
    rows = [Row(index=n, prompt=[{"role": "user", "content": str(n)}], ground_truth="A") for n in range(8)]
    sampler = Sampler(
        rows,
        encode=lambda row: [int(row.prompt[0]["content"])],
        group_size=8,
        shuffle=False,
        seed=0,
        task_name="t",
    )
    producer = Producer([ProducerTask(name="t", sampler=sampler)], manager=manager, replay_buffer=buffer, limits=QUICK)
    async with controller:
        groups = await one_batch(producer, 4)
        assert rows_of(groups) == [0, 1, 3, 4]
        states = [state for group in groups for state in group.states]
        assert all(state.reward == {"score": float(state.response == "A")} for state in states)
        assert len({state.response for state in states}) == 2

        (evaluated,) = await manager.evaluate(
            [sampler.sample()], sample_params=SampleParams(temperature=0.0, max_tokens=2)
        )
        assert {state.status for state in evaluated} == {Status.COMPLETED}
        assert len(buffer) == 0
