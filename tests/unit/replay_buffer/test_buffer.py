"""The buffer: order of admission, failures, and waiting that is woken."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from tests.build import make_state
from xrl_lite.data import Status
from xrl_lite.errors import RunError
from xrl_lite.replay_buffer import GroupStatus, PromptGroup, ReplayBuffer


async def admit(buffer: ReplayBuffer, *uids: str, step: int = 1, partition: str = "train") -> None:
    for uid in uids:
        await buffer.admit(uid, partition_id=partition, global_steps=step)
        await buffer.start(uid)


def failed() -> list[object]:
    return [make_state(status=Status.FAILED, error_msg="engine said no")]


async def test_groups_are_taken_in_the_order_they_were_admitted() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a", "b", "c")
    for uid in ("c", "b", "a"):
        await buffer.finish(uid, [make_state()])
    groups, metrics = await buffer.sample(1, "train", 2)
    assert [group.uid for group in groups] == ["a", "b"]
    assert metrics["buffer/size"] == 1.0


async def test_sample_waits_for_the_oldest_even_when_younger_ones_are_done() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a", "b")
    await buffer.finish("b", [make_state()])
    taken: list[PromptGroup] = []

    async def sample() -> None:
        taken.extend((await buffer.sample(1, "train", 1))[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample)
        await wait_all_tasks_blocked()
        assert taken == []
        await buffer.finish("a", [make_state()])
    assert [group.uid for group in taken] == ["a"]


async def test_failures_are_passed_over_and_counted() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a", "b")
    await buffer.finish("a", failed())  # type: ignore[arg-type]
    await buffer.finish("b", [make_state()])
    assert buffer.status("a") is GroupStatus.FAILURE
    assert buffer.reason("a") == "engine said no"
    groups, metrics = await buffer.sample(1, "train", 1)
    assert [group.uid for group in groups] == ["b"]
    assert metrics["buffer/failed_groups"] == 1.0
    assert len(buffer) == 0


async def test_one_failed_member_does_not_cost_the_group() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a")
    await buffer.finish("a", [make_state(), *failed()])  # type: ignore[list-item]
    assert buffer.status("a") is GroupStatus.FINISHED


async def test_partitions_do_not_mix() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "v", partition="val")
    await admit(buffer, "t")
    for uid in ("v", "t"):
        await buffer.finish(uid, [make_state()])
    assert [group.uid for group in (await buffer.sample(1, "train", 1))[0]] == ["t"]


async def test_staleness_is_measured_from_admission() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a", step=3)
    await buffer.finish("a", [make_state()])
    assert (await buffer.sample(5, "train", 1))[1]["off_policy/max"] == 2.0


async def test_cancelling_a_wait_leaves_the_buffer_as_it_was() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(buffer.sample, 1, "train", 1)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    await buffer.finish("a", [make_state()])
    assert len((await buffer.sample(1, "train", 1))[0]) == 1


async def test_a_group_ends_once() -> None:
    buffer = ReplayBuffer()
    await admit(buffer, "a")
    await buffer.finish("a", [make_state()])
    with pytest.raises(RunError, match="it is finished, not running"):
        await buffer.fail("a", "late")
    with pytest.raises(RunError, match="in the buffer already"):
        await buffer.admit("a", partition_id="train", global_steps=1)
    with pytest.raises(RunError, match="not in the buffer"):
        await buffer.start("b")


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.integers(1, 3))
async def test_whatever_ends_when_every_group_comes_out_once_and_in_order(
    order: list[int], failing: set[int], batch_size: int
) -> None:
    buffer = ReplayBuffer()
    await admit(buffer, *map(str, range(6)))
    good = [str(n) for n in range(6) if n not in failing]
    taken: list[str] = []

    async def consume() -> None:
        for _ in range(len(good) // batch_size):
            taken.extend(group.uid for group in (await buffer.sample(1, "train", batch_size))[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        for number in order:
            await checkpoint()
            await buffer.finish(str(number), failed() if number in failing else [make_state()])  # type: ignore[arg-type]
    assert taken == good[: len(good) // batch_size * batch_size]
