"""The buffer: order of admission, leases, eviction and refills, and waiting that is woken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.build import make_state
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import BufferStarvedError, ConfigError, LeaseError, RunError
from xrl_lite.replay_buffer import (
    BlockingReplayBuffer,
    GroupStatus,
    Lease,
    MemoryStore,
    PromptGroup,
    ReplayBuffer,
    ReplayBufferConfig,
    TrainerMode,
    build_replay_buffer,
)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_buffer(
    mode: TrainerMode = "sync", *, max_failed_groups: int | None = None, clock: Clock | None = None, **settings: Any
) -> ReplayBuffer:
    buffer = build_replay_buffer(ReplayBufferConfig(**settings), trainer_mode=mode)
    return buffer.configure(ReplayBufferConfig(**settings), max_failed_groups=max_failed_groups, clock=clock or Clock())


async def admit(buffer: ReplayBuffer, *uids: str, step: int = 1, partition: str = "train") -> dict[str, Lease]:
    for uid in uids:
        await buffer.admit(uid, partition_id=partition, global_steps=step)
    return {uid: buffer.start(uid) for uid in uids}


def failed() -> list[RolloutState]:
    return [make_state(status=Status.FAILED, error_msg="engine said no")]


def scored(*scores: float) -> list[RolloutState]:
    return [make_state(reward={"score": score}) for score in scores]


def uids(groups: Sequence[PromptGroup]) -> list[str]:
    return [group.uid for group in groups]


class Refiller:
    """Admits and finishes as many groups as it is asked for."""

    def __init__(self, buffer: ReplayBuffer, make: Callable[[int], list[RolloutState]], *, step: int = 1) -> None:
        self.buffer, self.make, self.step, self.asked = buffer, make, step, list[int]()
        buffer.refill_fn = self

    async def __call__(self, num_groups: int) -> None:
        self.asked.append(num_groups)
        for _ in range(num_groups):
            uid = f"r{sum(self.asked)}-{len(self.buffer)}-{self.buffer.num_waiting('train')}"
            leases = await admit(self.buffer, uid, step=self.step)
            states = self.make(len(self.asked))
            await self.buffer.finish(leases[uid], states)


# --- order and waiting


async def test_groups_are_taken_in_the_order_they_were_admitted() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a", "b", "c")
    for uid in ("c", "b", "a"):
        await buffer.finish(leases[uid], [make_state()])
    groups, metrics = await buffer.sample(1, "train", 2)
    assert uids(groups) == ["a", "b"]
    assert metrics["buffer/size"] == 1.0


@pytest.mark.parametrize(
    ("mode", "stragglers"), [("sync", "wait"), ("colocate_async", "pass"), ("separate_async", "wait")]
)
def test_only_where_the_slowest_are_interrupted_they_are_passed_by_default(mode: TrainerMode, stragglers: str) -> None:
    assert make_buffer(mode).policy.stragglers == stragglers
    assert make_buffer(mode, stragglers="wait").policy.stragglers == "wait"


async def test_sample_waits_for_the_oldest_even_when_younger_ones_are_done() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["b"], [make_state()])
    taken: list[PromptGroup] = []

    async def sample() -> None:
        taken.extend((await buffer.sample(1, "train", 1))[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample)
        await wait_all_tasks_blocked()
        assert taken == []
        await buffer.finish(leases["a"], [make_state()])
    assert uids(taken) == ["a"]


class SlowDisk(MemoryStore):
    """Keeps attempts, and gives them back when it is told to."""

    is_durable = True

    def __init__(self) -> None:
        self.may_read = anyio.Event()
        self.kept: dict[str, list[RolloutState]] = {}

    def write_states(self, group: PromptGroup) -> None:
        self.kept[group.uid] = group.states

    async def load_states(self, groups: Sequence[PromptGroup]) -> list[list[RolloutState]]:
        await self.may_read.wait()
        return [self.kept[group.uid] for group in groups]


async def test_what_is_being_read_from_the_disk_still_waits_and_makes_no_room() -> None:
    disk = SlowDisk()
    settings = ReplayBufferConfig.model_validate({"storage": {"max_memory_bytes": 1}})
    buffer = build_replay_buffer(settings, trainer_mode="separate_async", store=disk)
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], scored(1.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(buffer.sample, 1, "train", 1)
        await wait_all_tasks_blocked()
        assert buffer.num_waiting("train") == 1
        disk.may_read.set()
    assert buffer.num_waiting("train") == 0
    assert buffer.queue_metrics("train")["buffer/memory_mb"] == 0.0


async def test_partitions_do_not_mix() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "v", partition="val") | await admit(buffer, "t")
    for uid in ("v", "t"):
        await buffer.finish(leases[uid], [make_state()])
    assert uids((await buffer.sample(1, "train", 1))[0]) == ["t"]


async def test_validation_takes_failures_too() -> None:
    buffer = make_buffer("separate_async")
    leases = await admit(buffer, "a", "b", partition="val", step=1)
    await buffer.finish(leases["a"], failed())
    await buffer.finish(leases["b"], [make_state()])
    assert uids((await buffer.sample(99, "val", 2))[0]) == ["a", "b"]


async def test_cancelling_a_wait_leaves_the_buffer_as_it_was() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(buffer.sample, 1, "train", 1)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    await buffer.finish(leases["a"], [make_state()])
    assert len((await buffer.sample(1, "train", 1))[0]) == 1


async def test_the_age_of_what_was_taken_is_measured_by_its_tokens() -> None:
    buffer = make_buffer("separate_async")
    leases = await admit(buffer, "a", "b", step=3)
    await buffer.finish(leases["b"], [make_state(response_model_steps=[4, 4])])
    assert buffer.queue_metrics("train")["buffer/oldest_version"] == 4
    await buffer.finish(leases["a"], [make_state(response_model_steps=[2, 4])])
    assert buffer.queue_metrics("train")["buffer/oldest_version"] == 2
    _, metrics = await buffer.sample(6, "train", 1)
    assert metrics["training/off_policy/trajectory_spans/max"] == 3
    assert metrics["training/off_policy/trajectory_staleness/mean"] == 1
    assert metrics["training/off_policy/trajectory_staleness_worst/max"] == metrics["off_policy/max"] == 3
    assert metrics["buffer/oldest_version"] == 4


async def test_a_long_wait_says_what_for(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    buffer = make_buffer(clock=clock, report_wait_s=30)
    (lease,) = (await admit(buffer, "a")).values()
    await buffer.admit("b", global_steps=1)
    buffer.note(lease, "turn 3, tool search")
    with caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(buffer.sample, 1, "train", 2)
            await wait_all_tasks_blocked()
            assert not caplog.messages
            clock.now = 31.0
            await buffer.admit("c", global_steps=1)
            await wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    (text,) = caplog.messages
    assert "waiting for 2 groups of train; 0 are finished" in text
    assert "a: running for 31 s, driver, last: turn 3, tool search" in text
    assert "b: pending for 31 s, nobody works on it" in text


# --- leases


async def test_a_group_ends_once() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], [make_state()])
    with pytest.raises(LeaseError, match=r"driver no longer holds group 'a' \(lease 1\).*it is finished"):
        await buffer.fail(leases["a"], "late")
    with pytest.raises(RunError, match="in the buffer already"):
        await buffer.admit("a", partition_id="train", global_steps=1)
    with pytest.raises(RunError, match="not in the buffer"):
        buffer.start("b")
    with pytest.raises(RunError, match="it is finished, not pending"):
        buffer.start("a")


async def test_a_worker_that_overruns_its_deadline_fails_its_group_and_cannot_write_any_more() -> None:
    clock = Clock()
    buffer = make_buffer(clock=clock)
    await buffer.admit("a", global_steps=1)
    lease = buffer.start("a", worker="agent_loop/0", timeout_s=10)
    clock.now = 9.9
    assert buffer.end_overdue_leases() == []
    clock.now = 10.0
    with pytest.raises(LeaseError, match="it is failure: agent_loop/0 did not end it within its deadline"):
        await buffer.finish(lease, [make_state()])
    assert buffer.reason("a").endswith("last event: started on agent_loop/0")


async def test_a_waiting_sample_ends_an_overdue_lease_by_itself() -> None:
    config = ReplayBufferConfig()
    buffer = build_replay_buffer(config)  # on the clock of the loop
    refiller = Refiller(buffer, lambda _: [make_state()])
    await buffer.admit("a", global_steps=1)
    buffer.start("a", timeout_s=0.01)
    groups, metrics = await buffer.sample(1, "train", 1)
    assert refiller.asked == [1]
    assert uids(groups) != ["a"]
    assert metrics["training/rollout_failure/evicted_samples"] == 1


async def test_a_worker_that_dies_fails_all_it_holds_and_nothing_else() -> None:
    buffer = make_buffer()
    for uid in ("a", "b", "c"):
        await buffer.admit(uid, global_steps=1)
    held = [buffer.start(uid, worker="agent_loop/0") for uid in ("a", "b")]
    other = buffer.start("c", worker="agent_loop/1")
    await buffer.finish(held[1], [make_state()])
    assert buffer.fail_worker("agent_loop/0", "SIGKILL") == ["a"]
    assert buffer.status("a") is GroupStatus.FAILURE
    assert buffer.reason("a") == "agent_loop/0 died: SIGKILL"
    assert buffer.status("b") is GroupStatus.FINISHED
    await buffer.finish(other, [make_state()])


async def test_an_aborted_group_keeps_its_place_and_an_old_lease_is_refused() -> None:
    buffer = make_buffer("separate_async")
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["b"], [make_state()])
    await buffer.abort(leases["a"], [make_state(status=Status.ABORTED)])
    assert buffer.status("a") is GroupStatus.ABORTED
    again = buffer.start("a")
    with pytest.raises(LeaseError):
        await buffer.finish(leases["a"], [make_state()])
    await buffer.finish(again, [make_state()])
    assert uids((await buffer.sample(1, "train", 2))[0]) == ["a", "b"]


async def test_a_group_that_is_given_back_can_be_started_again() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a")
    buffer.put_back(leases["a"])
    assert buffer.status("a") is GroupStatus.ABORTED
    await buffer.finish(buffer.start("a"), [make_state()])
    buffer.put_back(leases["a"])
    assert buffer.status("a") is GroupStatus.FINISHED


# --- m of n


async def test_one_failed_member_does_not_cost_the_group() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a")
    assert await buffer.finish(leases["a"], [make_state(), *failed()]) is GroupStatus.FINISHED


async def test_a_group_closes_with_as_many_as_the_settings_ask_for() -> None:
    buffer = make_buffer(min_sessions=2)
    leases = await admit(buffer, "a", "b")
    assert await buffer.finish(leases["a"], [make_state(), make_state(), *failed()]) is GroupStatus.FINISHED
    assert await buffer.finish(leases["b"], [make_state(), *failed()]) is GroupStatus.FAILURE
    assert buffer.reason("b") == "1 of 2 attempts, 2 needed: engine said no"


# --- eviction and refills


async def test_failures_are_replaced_and_counted() -> None:
    buffer = make_buffer()
    refiller = Refiller(buffer, lambda _: [make_state()])
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["a"], failed())
    await buffer.finish(leases["b"], [make_state()])
    groups, metrics = await buffer.sample(1, "train", 2)
    assert uids(groups)[0] == "b"
    assert refiller.asked == [1]
    assert metrics["training/rollout_failure/evicted_samples"] == metrics["buffer/failed_groups"] == 1.0
    assert len(buffer) == 0


async def test_sync_without_refill_trains_on_fewer() -> None:
    buffer = make_buffer(sync_refill_failed_groups=False)
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["a"], failed())
    await buffer.finish(leases["b"], [make_state()])
    groups, _ = await buffer.sample(1, "train", 2)
    assert [(group.uid, group.num_rows) for group in groups] == [("a", 0), ("b", 1)]


async def test_a_batch_of_failures_alone_is_an_error() -> None:
    buffer = make_buffer(sync_refill_failed_groups=False)
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], failed())
    with pytest.raises(RunError, match=r"None of the 1 groups .* engine said no.*sync_refill_failed_groups"):
        await buffer.sample(1, "train", 1)


async def test_nobody_to_ask_for_replacements_is_an_error() -> None:
    buffer = make_buffer()
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], failed())
    with pytest.raises(RunError, match="no refill_fn"):
        await buffer.sample(1, "train", 1)


async def test_failing_for_ever_ends_with_the_reason() -> None:
    buffer = make_buffer(max_failed_groups=3)
    Refiller(buffer, lambda _: failed())
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], failed())
    with pytest.raises(BufferStarvedError, match=r"4 groups failed .* more than max_failed_groups=3.*engine said no"):
        await buffer.sample(1, "train", 1)


async def test_stale_uniform_and_failed_groups_are_refilled_once_each() -> None:
    filters = {"enable": True, "metric": "score"}
    buffer = make_buffer("colocate_async", max_off_policy_threshold=2, filter_groups=filters)
    refiller = Refiller(buffer, lambda _: scored(0, 1), step=3)
    leases = await admit(buffer, "stale", "both", step=1) | await admit(buffer, "uniform", "failed", "good", step=3)
    await buffer.finish(leases["stale"], scored(0, 1))
    await buffer.finish(leases["both"], scored(1, 1))
    await buffer.finish(leases["uniform"], scored(1, 1))
    await buffer.finish(leases["failed"], failed())
    await buffer.finish(leases["good"], scored(0, 1))
    groups, metrics = await buffer.sample(3, "train", 1)
    assert uids(groups) == ["good"]
    assert refiller.asked == [4]
    assert metrics["training/off_policy/evicted_samples"] == 2
    assert metrics["training/off_policy/evicted_samples_staleness/max"] == 3
    assert metrics["training/filter_groups/evicted_samples"] == 2
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert metrics["_dapo_filtered_reward_counts"] == {1.0: 2}


async def test_wait_holds_back_while_anything_unfinished_is_at_the_threshold() -> None:
    buffer = make_buffer(
        "separate_async", max_off_policy_threshold=3, max_off_policy_strategy="wait", stragglers="pass"
    )
    leases = await admit(buffer, "old", step=1) | await admit(buffer, "a", "b", step=3)
    for uid in ("a", "b"):
        await buffer.finish(leases[uid], [make_state()])
    taken: list[str] = []

    async def sample() -> None:
        taken.extend(uids((await buffer.sample(3, "train", 1))[0]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample)
        await wait_all_tasks_blocked()
        assert taken == []
        await buffer.finish(leases["old"], [make_state()])
    assert taken == ["old"]


async def test_sync_filter_earns_two_refills_drains_and_drops_the_surplus() -> None:
    buffer = make_buffer(filter_groups={"enable": True, "metric": "score", "max_inflight_gen_batches": 2})
    refiller = Refiller(buffer, lambda _: scored(0, 1))
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["a"], scored(1, 1))
    await buffer.finish(leases["b"], scored(0, 1))
    groups, metrics = await buffer.sample(1, "train", 2)
    assert refiller.asked == [2]
    assert uids(groups)[0] == "b"
    assert metrics["training/filter_groups/discarded_surplus_samples"] == 1
    assert len(buffer) == 0


async def test_sync_filter_waits_for_what_is_in_flight_once_there_is_enough() -> None:
    buffer = make_buffer(filter_groups={"enable": True, "metric": "score"})
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["b"], scored(0, 1))
    taken: list[str] = []

    async def sample() -> None:
        taken.extend(uids((await buffer.sample(1, "train", 1))[0]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample)
        await wait_all_tasks_blocked()
        assert taken == []
        await buffer.finish(leases["a"], scored(0, 1))
    assert taken == ["a"]
    assert len(buffer) == 0, "b was surplus"


async def test_a_group_with_one_row_is_not_filtered_and_a_failure_neither() -> None:
    buffer = make_buffer(filter_groups={"enable": True, "metric": "score"}, sync_refill_failed_groups=False)
    leases = await admit(buffer, "a", "b")
    await buffer.finish(leases["a"], [*scored(1), *failed()])
    await buffer.fail(leases["b"], "one session broke", scored(1, 1))
    assert uids((await buffer.sample(1, "train", 2))[0]) == ["a", "b"]


async def test_a_reward_without_the_metric_names_what_it_has() -> None:
    buffer = make_buffer(filter_groups={"enable": True, "metric": "acc"})
    leases = await admit(buffer, "a")
    with pytest.raises(RunError, match=r"filtered by 'acc'.*has only \['score'\]"):
        await buffer.finish(leases["a"], scored(1, 0))


def filtering(**settings: Any) -> ReplayBuffer:
    return make_buffer(filter_groups={"enable": True, "metric": "score", "max_filtered_batches": 2}, **settings)


async def test_starvation_ends_with_the_histogram_of_what_was_filtered() -> None:
    buffer = filtering()
    Refiller(buffer, lambda call: scored(float(call % 2), float(call % 2)))
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], scored(0, 0))
    with pytest.raises(BufferStarvedError, match=r"'score'. Value: groups \{0.0: \d, 1.0: 2\}. Is the task too easy"):
        await buffer.sample(1, "train", 1)


async def test_b5_four_asked_one_always_filtered_trains_on_three_if_the_settings_say_so() -> None:
    buffer = filtering(on_starvation="train_partial")
    refiller = Refiller(buffer, lambda _: scored(1, 1))
    leases = await admit(buffer, *"abcd")
    for uid in "abc":
        await buffer.finish(leases[uid], scored(0, 1))
    await buffer.finish(leases["d"], scored(1, 1))
    groups, metrics = await buffer.sample(1, "train", 4)
    assert uids(groups) == ["a", "b", "c"]
    assert metrics["training/filter_groups/evicted_samples"] > 8
    assert sum(refiller.asked) >= 8


async def test_what_the_producer_evicted_counts_when_a_batch_is_waited_for() -> None:
    buffer = make_buffer(
        "colocate_async",
        on_starvation="train_partial",
        filter_groups={"enable": True, "metric": "score", "max_filtered_batches": 1},
    )
    leases = await admit(buffer, *"abcd")
    await buffer.finish(leases.pop("a"), scored(0, 1))
    for lease in leases.values():
        await buffer.finish(lease, scored(1, 1))
    buffer.evict_unusable(1, "train")
    with anyio.fail_after(20):
        groups, _ = await buffer.sample(1, "train", 2)
    assert uids(groups) == ["a"]


async def test_starving_may_go_on(caplog: pytest.LogCaptureFixture) -> None:
    buffer = filtering(on_starvation="continue")
    refiller = Refiller(buffer, lambda call: scored(0, 1) if call > 5 else scored(1, 1))
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], scored(1, 1))
    groups, _ = await buffer.sample(1, "train", 1)
    assert len(groups) == 1
    assert len(refiller.asked) == 6
    assert any("Going on, as on_starvation=continue says" in message for message in caplog.messages)


async def test_everything_too_old_for_ever_is_explained() -> None:
    buffer = make_buffer("separate_async", max_off_policy_threshold=1, filter_groups={"max_filtered_batches": 2})
    Refiller(buffer, lambda _: [make_state()])
    leases = await admit(buffer, "a")
    await buffer.finish(leases["a"], [make_state()])
    with pytest.raises(BufferStarvedError, match=r"too old for step 9 .* Raise max_off_policy_threshold \(1\)"):
        await buffer.sample(9, "train", 1)


# --- subclasses


class YoungestFirst(BlockingReplayBuffer):
    """A sampler written like verl's."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        self.thread = threading.current_thread()
        while len(ready := self.groups(partition_id, GroupStatus.FINISHED)) < batch_size:
            self.wait_for_change(timeout_s=30)
        taken = self.take([group.uid for group in ready[-batch_size:]], global_steps)
        self.evict([group.uid for group in ready[:-batch_size]], "old", refill=False)
        return taken, {"mine": 1.0}


class WaitsWithoutLimit(BlockingReplayBuffer):
    """Takes its time between looking and waiting."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        while len(ready := self.groups(partition_id, GroupStatus.FINISHED)) < batch_size:
            self.has_looked.set()
            self.may_wait.wait(20)
            self.wait_for_change()
        return self.take([group.uid for group in ready], global_steps), {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.has_looked, self.may_wait = threading.Event(), threading.Event()


def custom(name: str, **settings: Any) -> ReplayBuffer:
    sampler = {"path": "tests.unit.replay_buffer.test_buffer", "name": name}
    return build_replay_buffer(ReplayBufferConfig(custom_sampler=sampler, **settings))  # type: ignore[arg-type]


async def test_a_change_between_looking_and_waiting_is_not_lost() -> None:
    buffer = custom("WaitsWithoutLimit")
    assert isinstance(buffer, WaitsWithoutLimit)
    leases = await admit(buffer, "a", "b")
    taken: list[Any] = []

    async def sample() -> None:
        taken.extend(await buffer.sample(1, "train", 2))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await anyio.to_thread.run_sync(buffer.has_looked.wait)
            for lease in leases.values():
                await buffer.finish(lease, [make_state()])
            buffer.may_wait.set()
    assert uids(taken[0]) == ["a", "b"]


async def test_a_blocking_sampler_of_the_users_is_awaited_woken_and_cancellable() -> None:
    buffer = custom("YoungestFirst", sampler_kwargs={"a": 1})
    assert buffer.sampler_kwargs == {"a": 1}
    leases = await admit(buffer, "a", "b")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(buffer.sample, 1, "train", 1)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    taken: list[Any] = []

    async def sample() -> None:
        taken.extend(await buffer.sample(1, "train", 2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample)
        await buffer.finish(leases["a"], [make_state()])
        await buffer.finish(leases["b"], [make_state()])
    assert uids(taken[0]) == ["a", "b"]
    assert taken[1] == {"mine": 1.0}
    assert buffer.thread is not threading.current_thread()  # type: ignore[attr-defined]
    assert len(buffer) == 0


def test_a_custom_sampler_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a subclass of ReplayBuffer"):
        custom("Clock")


def test_half_a_custom_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="give both path"):
        ReplayBufferConfig(custom_sampler={"path": "a.py"})  # type: ignore[arg-type]


# --- everything comes out once


@settings(deadline=None)
@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.integers(1, 3))
async def test_whatever_ends_when_every_group_comes_out_once_and_in_order(
    order: list[int], failing: set[int], batch_size: int
) -> None:
    buffer = make_buffer()
    buffer.refill_fn = lambda _: None
    leases = await admit(buffer, *map(str, range(6)))
    good = [str(n) for n in range(6) if n not in failing]
    taken: list[str] = []

    async def consume() -> None:
        for _ in range(len(good) // batch_size):
            taken.extend(uids((await buffer.sample(1, "train", batch_size))[0]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        for number in order:
            await checkpoint()
            await buffer.finish(leases[str(number)], failed() if number in failing else [make_state()])
    assert taken == good[: len(good) // batch_size * batch_size]
