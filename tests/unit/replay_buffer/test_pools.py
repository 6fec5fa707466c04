"""Pools of a task: FIFO and staleness, expiry by sequence and by token, retryable or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.build import make_state
from xrl_lite.data import (
    RolloutState,
    Status,
    calculate_group_effective_response_masks,
    expire_stale_states,
    reset_rollout_response,
    version_range,
)
from xrl_lite.replay_buffer import (
    GroupStatus,
    ReplayBuffer,
    ReplayBufferConfig,
    SQLiteStore,
    TaskPools,
    build_replay_buffer,
)

COMPLETED, ABORTED, EXPIRED, FAILED = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED


def make_buffer(policy: str = "fifo", folder: Path | None = None) -> ReplayBuffer:
    store = SQLiteStore(folder / "buffer.sqlite") if folder else None
    config = ReplayBufferConfig(replay_policy=policy)  # type: ignore[arg-type]
    return build_replay_buffer(config, trainer_mode="colocate_async", store=store)


@pytest.fixture(params=["memory", "disk"])
async def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ReplayBuffer]:
    opened = make_buffer(folder=tmp_path if request.param == "disk" else None)
    yield opened
    await opened.close()


@pytest.fixture
def pools(buffer: ReplayBuffer) -> TaskPools:
    return TaskPools(buffer)


def state(number: int, steps: Sequence[int] = (), **fields: Any) -> RolloutState:
    ids = list(range(10, 10 + len(steps)))
    defaults: dict[str, Any] = {
        "rollout_id": number,
        "prompt_ids": [1, 2],
        "response_ids": ids,
        "response_mask": None,
        "logprobs": [-0.5] * len(ids),
        "response_model_steps": list(steps),
        "response": f"response {number}",
    }
    return make_state(**(defaults | fields))


def ids(groups: Sequence[Sequence[RolloutState]]) -> list[Any]:
    return [member.rollout_id for group in groups for member in group]


async def test_counting_and_taking_by_task_and_status(pools: TaskPools) -> None:
    for number in (1, 2):
        await pools.put([state(number)], "a")
    await pools.put([state(3, status=FAILED)], "a")
    await pools.put([state(4)], "b")
    assert await pools.count_statuses(["a", "b"], [COMPLETED, FAILED]) == {
        "a": {COMPLETED: 2, FAILED: 1},
        "b": {COMPLETED: 1, FAILED: 0},
    }
    assert await pools.is_ready({"a": 2, "b": 1})
    assert not await pools.is_ready({"a": 3})
    taken, counts = await pools.take_batch({"a": 1, "b": 1, "c": 0})
    assert counts == {"a": 1, "b": 1, "c": 0}
    assert taken["c"] == []
    assert [await pools.count(task, COMPLETED) for task in ("a", "b")] == [1, 0]
    assert await pools.count("a", FAILED) == 1


async def test_nothing_is_nothing(buffer: ReplayBuffer, pools: TaskPools) -> None:
    await pools.put([], "a")
    assert len(buffer) == 0
    assert await pools.get(0, "a", COMPLETED) == []
    assert await pools.count("a", COMPLETED) == 0
    assert await pools.is_ready({"a": 0})
    assert await pools.take_batch({"a": 0}) == ({"a": []}, {"a": 0})


async def test_putting_stamps_version_and_age(pools: TaskPools) -> None:
    given = state(1, response_ids=[11, 12], logprobs=[-0.5] * 2, seq_staleness=99)
    await pools.put([given], "a", model_step=3, current_train_step=5)
    ((stored,),) = await pools.get(1, "a", COMPLETED)
    for one in (given, stored):
        assert one.response_model_steps == [3, 3]
        assert one.seq_staleness == 1


async def test_what_is_too_old_and_not_retryable_is_discarded(buffer: ReplayBuffer, pools: TaskPools) -> None:
    old = state(1, [1, 1], session_id=101, extra_fields={"a": 1}, tokens=[1, 2])
    await pools.put([old], "a", current_train_step=5, stale_threshold=3, expired_groups_retryable=False)
    assert (old.status, old.prompt_ids, old.tokens, old.mm_info, old.extra_fields) == (EXPIRED, None, None, None, {})
    assert len(buffer) == 0


async def test_what_is_too_old_and_retryable_loses_its_response_only(pools: TaskPools) -> None:
    old = state(1, [1, 1], extra_fields={"a": 1}, error_msg="e")
    await pools.put([old], "a", current_train_step=5, stale_threshold=3)
    ((stored,),) = await pools.get(1, "a", EXPIRED)
    assert stored.seq_staleness == 3
    assert stored.prompt_ids == stored.tokens == [1, 2]
    assert (stored.response, stored.response_ids, stored.response_model_steps, stored.logprobs) == ("", [], [], [])
    assert (stored.reward, stored.error_msg, stored.finish_reason, stored.response_mask) == (None,) * 4
    assert stored.extra_fields == {"a": 1}


@pytest.mark.parametrize(
    ("stale", "token", "steps"), [(10, 4, ([0, 0], [4, 4])), (4, None, ([0], [4]))], ids=["token", "sequence"]
)
async def test_expiry_keeps_fresh_members(
    stale: int, token: int | None, steps: tuple[list[int], list[int]], pools: TaskPools
) -> None:
    group = [state(number, steps[number]) for number in (0, 1)]
    await pools.put(group, "a", current_train_step=5, stale_threshold=stale, token_stale_threshold=token)
    ((first, second),) = await pools.get(1, "a", EXPIRED)
    assert [first.status, second.status] == [EXPIRED, COMPLETED]
    assert [first.response, second.response] == ["", "response 1"]
    assert second.reward == {"score": 1.0}


async def test_a_group_that_an_agent_built_itself_has_no_token_expiry(pools: TaskPools) -> None:
    built = state(1, [0], input_ids=[1, 10], labels=[-100, 10])
    await pools.put([built], "a", current_train_step=5, stale_threshold=10, token_stale_threshold=4)
    assert (built.status, built.response) == (COMPLETED, "response 1")


async def test_a_mixed_group_that_is_not_retryable_is_dropped_whole(buffer: ReplayBuffer, pools: TaskPools) -> None:
    group = [state(0, [0]), state(1, [4])]
    await pools.put(group, "a", current_train_step=5, stale_threshold=4, expired_groups_retryable=False)
    assert len(buffer) == 0
    assert [(member.status, member.prompt_ids) for member in group] == [(EXPIRED, None)] * 2


async def test_refreshing_moves_a_mixed_group(buffer: ReplayBuffer, pools: TaskPools) -> None:
    await pools.put([state(0, [0]), state(1, [4])], "a", current_train_step=1)
    moved = await pools.refresh_staleness(
        current_train_step=5, task_stale_thresholds={"a": 10}, task_token_stale_thresholds={"a": 4}
    )
    assert moved == {"a": 1}
    assert [await pools.count("a", status) for status in (COMPLETED, EXPIRED)] == [0, 1]
    ((first, second),) = await pools.get(1, "a", EXPIRED)
    assert (first.response_ids, second.response_ids, second.reward) == ([], [10], {"score": 1.0})


async def test_refreshing_drops_only_what_is_not_retryable(buffer: ReplayBuffer, pools: TaskPools) -> None:
    dropped = state(1, [1])
    await pools.put([dropped], "a", current_train_step=2)
    await pools.put([state(2, [1])], "b", current_train_step=2)
    expired = await pools.refresh_staleness(
        current_train_step=4,
        task_stale_thresholds={"a": 2, "b": 2},
        expired_groups_retryable_by_task={"a": False, "b": True},
    )
    assert expired == {"a": 1, "b": 1}
    assert len(buffer) == 1
    assert ids(await pools.get(1, "b", EXPIRED)) == [2]


async def test_refreshing_looks_at_the_statuses_it_is_told(pools: TaskPools) -> None:
    await pools.put([state(1, [1])], "a", current_train_step=2)
    await pools.put([state(2, [1], status=ABORTED)], "a", current_train_step=2)
    some = await pools.refresh_staleness(current_train_step=4, task_stale_thresholds={"a": 2}, statuses=[ABORTED])
    assert some == {"a": 1}
    assert await pools.count("a", COMPLETED) == 1
    assert await pools.refresh_staleness(current_train_step=4, task_stale_thresholds={"a": 2}) == {"a": 2}
    assert await pools.count("a", EXPIRED) == 2


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_failed_sibling_keeps_nobody_young(retryable: bool, buffer: ReplayBuffer, pools: TaskPools) -> None:
    await buffer.admit("g", global_steps=1, task_name="a")
    await buffer.finish(buffer.start("g"), [state(1, [1]), state(2, [3]), state(3, status=FAILED)])
    expired = await pools.refresh_staleness(
        current_train_step=4, task_stale_thresholds={"a": 2}, expired_groups_retryable_by_task={"a": retryable}
    )
    assert expired == {"a": 1}
    assert buffer.count("train", GroupStatus.FINISHED) == 0
    if retryable:
        ((old, fresh, failed),) = await pools.get(1, "a", EXPIRED)
        assert [member.status for member in (old, fresh, failed)] == [EXPIRED, COMPLETED, FAILED]


async def test_the_age_of_what_failed_decides_nothing(buffer: ReplayBuffer, pools: TaskPools) -> None:
    await buffer.admit("g", global_steps=1, task_name="a")
    await buffer.finish(buffer.start("g"), [state(1, [3]), state(2, [1], status=FAILED)])
    assert await pools.refresh_staleness(current_train_step=4, task_stale_thresholds={"a": 2}) == {"a": 0}
    assert buffer.status("g") is GroupStatus.FINISHED


async def test_what_had_ended_in_a_group_that_was_given_back_grows_old(pools: TaskPools, buffer: ReplayBuffer) -> None:
    states = [state(1, [1]), state(2, status=Status.INIT)]
    await buffer.admit("g", global_steps=1, task_name="a", states=states)
    buffer.put_back(buffer.start("g"))
    assert await pools.refresh_staleness(current_train_step=4, task_stale_thresholds={"a": 2}) == {"a": 1}
    assert [member.response_ids for member in states] == [[], []]


async def test_fifo_gives_back_in_order(pools: TaskPools) -> None:
    await pools.put([state(1, [5]), state(2, [5])], "a")
    await pools.put([state(3, [1])], "a")
    await pools.put([state(9, status=FAILED)], "a")
    assert ids(await pools.get(5, "a", COMPLETED)) == [1, 2, 3]
    assert ids(await pools.get(5, "a", FAILED)) == [9]


async def test_the_oldest_tokens_go_first_and_ties_in_order() -> None:
    pools = TaskPools(make_buffer("staleness"))
    for number, version in ((1, 6), (2, 1), (3, 6), (4, 6)):
        await pools.put([state(number, [version])], "a")
    assert ids(await pools.get(4, "a", COMPLETED)) == [2, 1, 3, 4]


@pytest.mark.parametrize("policy", ["fifo", "staleness"])
async def test_order_and_content_survive_a_restart(policy: str, tmp_path: Path) -> None:
    before = make_buffer(policy, tmp_path)
    for number, version in ((1, 6), (2, 1), (3, 3)):
        await TaskPools(before).put([state(number, [version])], "a", current_train_step=7)
    await before.close()
    after = make_buffer(policy, tmp_path)
    await after.restore(0, keep_newer=True)
    groups = await TaskPools(after).get(3, "a", COMPLETED)
    assert ids(groups) == ([1, 2, 3] if policy == "fifo" else [2, 3, 1])
    assert groups[0][0].seq_staleness == (0 if policy == "fifo" else 5)
    assert groups[0][0].response_model_steps == ([6] if policy == "fifo" else [1])
    await after.close()


async def test_an_expired_group_is_waited_for_by_nobody_until_it_is_started_again() -> None:
    buffer = make_buffer()
    pools = TaskPools(buffer)
    await pools.put([state(1, [0])], "a", current_train_step=2)
    await pools.put([state(2, [4])], "a", current_train_step=5)
    await pools.refresh_staleness(current_train_step=5, task_stale_thresholds={"a": 2})
    assert buffer.num_waiting("train") == 1
    groups, _ = await buffer.sample(5, "train", 1)
    assert ids([group.states for group in groups]) == [2]
    (parked,) = buffer.table
    await buffer.admit("young", global_steps=6)
    lease = buffer.start(parked.uid, global_steps=7)
    assert list(buffer.table.partition("train").order) == ["young", parked.uid]
    assert parked.global_steps == 7
    assert await buffer.finish(lease, [state(1, [6])]) is GroupStatus.FINISHED


# --- masks


@pytest.mark.parametrize(
    ("mask", "steps", "threshold", "effective"),
    [
        (None, [0, 4], 4, [0, 1]),
        (None, [0, 4], 8, [1, 1]),
        ([1, 0], [0, 4], 4, [0, 0]),
        ([0, 0], [4, 4], 4, None),
        (None, [-1, 0], 4, [1, 0]),
        ([1, 0], [-1, -1], 4, [1, 0]),
        (None, [0, 4], None, None),
        (None, [], 4, None),
    ],
)
def test_effective_masks(
    mask: list[int] | None, steps: list[int], threshold: int | None, effective: list[int] | None
) -> None:
    one = state(1, steps, response_mask=mask)
    masks = calculate_group_effective_response_masks([one], current_train_step=5, token_stale_threshold=threshold)
    assert masks == [effective]
    assert one.response_mask == mask


def test_a_mask_that_does_not_fit_its_response_names_the_sample() -> None:
    one = state(17, [0, 4], response_mask=[1])
    with pytest.raises(ValueError, match="sample 17: response_mask: it has 1 values for 2 response tokens"):
        calculate_group_effective_response_masks([one], current_train_step=5, token_stale_threshold=4)


@pytest.mark.parametrize("steps", [None, [], [0], [-1, -1]])
def test_a_response_whose_versions_are_not_known_is_never_too_old(steps: list[int] | None) -> None:
    one = state(1, [0, 0], response_mask=[0, 1])
    one.response_model_steps = steps
    masks = calculate_group_effective_response_masks([one], current_train_step=5, token_stale_threshold=4)
    assert masks == [[0, 1]]
    expired = expire_stale_states([one], current_train_step=50, stale_threshold=51, token_stale_threshold=4)
    assert (expired, one.status) == (False, COMPLETED)


def test_the_oldest_version_is_that_of_the_tokens_that_tell_one() -> None:
    assert version_range(state(1, [-1, 3, 4])) == (3, 4)
    assert version_range(state(1, [-1, -1])) is None


def test_a_response_that_was_made_again_is_whole() -> None:
    one = reset_rollout_response(state(1, [0, 0]))
    one.response_ids, one.response_model_steps = [30, 31], [4, 4]
    masks = calculate_group_effective_response_masks([one], current_train_step=5, token_stale_threshold=4)
    assert (one.response_mask, masks) == (None, [[1, 1]])
