"""What goes into a row, a micro-batch and a rank; nothing is lost, nothing counted twice."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xrl_lite.algorithms.packing import PackedGroup, collate, pack_groups
from xrl_lite.algorithms.planning import MicroBatch, cost, plan_micro_batches
from xrl_lite.algorithms.rows import pad_rows, unpad_rows

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def make_groups(lengths: list[int]) -> list[PackedGroup]:
    """Groups of one trajectory each; every token is unique."""
    start, groups = 0, []
    for index, length in enumerate(lengths):
        ids = list(range(start, start + length))
        start += length
        groups.append(
            PackedGroup(prompt_ids=ids[:1], responses=[ids[1:]], masks=[[1] * (length - 1)], trajectories=[index])
        )
    return groups


def width(batch: MicroBatch) -> int:
    return max(sum(group.num_tokens for group in row) for row in batch)


@settings(max_examples=50)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 200))
def test_a_plan_holds_every_group_once_within_the_limit_and_equally_often(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    plan = plan_micro_batches(make_groups(lengths), max_tokens=max_tokens, num_ranks=num_ranks)
    assert len(plan) == num_ranks
    assert len(set(map(len, plan))) == 1
    seen = [
        index for share in plan for batch in share for row in batch for group in row for index in group.trajectories
    ]
    assert sorted(seen) == list(range(len(lengths)))
    for batch in (batch for share in plan for batch in share if batch):
        assert width(batch) <= max(lengths) * 22 // 16, "attention spans hardly more than the longest group"
        assert len(batch) * width(batch) <= max_tokens or len(batch) == 1


@settings(max_examples=50)
@given(LENGTHS, st.integers(2, 5))
def test_ranks_differ_by_no_more_than_one_group(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(make_groups(lengths), max_tokens=10_000, num_ranks=num_ranks)
    loads = [sum(cost(group.num_tokens) for batch in share for row in batch for group in row) for share in plan]
    assert max(loads) - min(loads) <= max(map(cost, lengths)) + 1e-9


@pytest.mark.parametrize("num_groups", [32, 200])
def test_ragged_rows_leave_next_to_no_padding(num_groups: int) -> None:
    rng = random.Random(0)
    lengths = [rng.randint(20, 400) for _ in range(num_groups)]
    (share,) = plan_micro_batches(make_groups(lengths), max_tokens=8192)
    assert sum(lengths) / sum(len(batch) * width(batch) for batch in share) > 0.9


@settings(max_examples=25)
@given(LENGTHS, st.integers(60, 300))
def test_a_batch_says_where_each_trained_token_is_predicted(lengths: list[int], max_tokens: int) -> None:
    rng = random.Random(len(lengths))
    groups = make_groups(lengths)
    for group in groups:
        group.masks[0][:] = [rng.randint(0, 1) for _ in group.masks[0]]
    for rows in plan_micro_batches(groups, max_tokens=max_tokens)[0]:
        batch = collate(rows)
        flat = batch.input_ids.flatten()
        # tokens are numbered along each trajectory: the position before a token holds the number before it
        assert (flat[batch.predicted_at] + 1).tolist() == batch.targets.tolist()
        wanted = [
            token
            for row in rows
            for group in row
            for token, bit in zip(group.responses[0], group.masks[0], strict=True)
            if bit
        ]
        assert batch.targets.tolist() == wanted
        assert batch.num_tokens == sum(group.num_tokens for row in rows for group in row)
        visible = batch.attention_mask[:, 0]
        for number, row in enumerate(rows):
            begin = 0
            for group in row:
                end = begin + group.num_tokens
                own = torch.zeros(visible.shape[1], dtype=torch.bool)
                own[begin:end] = True
                assert not bool(visible[number, begin:end][:, ~own].any()), "a group sees itself only"
                begin = end


def test_groups_in_a_row_see_neither_each_other_nor_their_attempts_each_other() -> None:
    groups = pack_groups([[1, 2], [1, 2], [7]], [[3, 4], [5], [8]], max_tokens_per_row=9)
    batch = collate([groups])
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_attempts_beyond_the_limit_of_a_row_get_another() -> None:
    groups = pack_groups([[1, 2]] * 3, [[3, 4]] * 3, max_tokens_per_row=6)
    assert [group.trajectories for group in groups] == [[0, 1], [2]]


def test_a_rank_with_nothing_to_do_takes_part_with_one_token_of_padding() -> None:
    plan = plan_micro_batches(make_groups([5]), max_tokens=10, num_ranks=2)
    assert plan[1] == [[]]
    batch = collate(plan[1][0])
    assert (batch.input_ids.tolist(), len(batch.targets), batch.trajectories) == ([[0]], 0, [])


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=5))
def test_padding_comes_off_again(rows: list[list[int]]) -> None:
    assert unpad_rows(pad_rows(rows), list(map(len, rows))) == rows
