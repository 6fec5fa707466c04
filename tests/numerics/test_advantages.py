"""Advantages against a slow float64 loop, and right at their edges."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xrl_lite.algorithms.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    rloo_advantages,
    zero_variance_groups,
)

REWARDS = st.lists(st.floats(-5, 5), min_size=2, max_size=8)
ESTIMATORS = [grpo_advantages, dr_grpo_advantages, rloo_advantages]


def one_group(rewards: list[float], estimate: Callable[[Tensor, Tensor], Tensor] = grpo_advantages) -> list[float]:
    return estimate(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)).tolist()


@given(REWARDS)
def test_grpo_is_what_a_loop_computes(rewards: list[float]) -> None:
    if max(rewards) - min(rewards) <= 1e-6:
        return
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert one_group(rewards) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-6, abs=1e-9)


@given(REWARDS)
def test_rloo_is_what_a_loop_computes(rewards: list[float]) -> None:
    if max(rewards) - min(rewards) <= 1e-6:
        return
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    wanted = [r - o for r, o in zip(rewards, others, strict=True)]
    assert one_group(rewards, rloo_advantages) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize(("reward", "size"), [(0.35, 8), (0.1, 7), (0.7, 12), (0.6, 9), (0.0, 4)])
def test_equal_rewards_give_exactly_zero(
    estimate: Callable[[Tensor, Tensor], Tensor], reward: float, size: int
) -> None:
    rewards = torch.full((size,), reward, dtype=torch.float32)
    assert estimate(rewards, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_group_of_one_gives_zero_not_nan(estimate: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert one_group([1.0], estimate) == [0.0]


def test_missing_rewards_are_left_out_of_the_statistics() -> None:
    values = one_group([1.0, 0.0, math.nan, 1.0])
    assert values == pytest.approx([0.577, -1.155, 0.0, 0.577], abs=1e-3)


@given(REWARDS, st.floats(-3, 3), st.floats(0.1, 4))
def test_grpo_does_not_see_shift_or_scale(rewards: list[float], shift: float, scale: float) -> None:
    if max(rewards) - min(rewards) < 0.1:
        return
    moved = [r * scale + shift for r in rewards]
    assert one_group(moved) == pytest.approx(one_group(rewards), abs=1e-3)


def test_groups_do_not_mix_and_order_does_not_matter() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0, 0.5, 6.0])
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    together = grpo_advantages(rewards, groups)
    assert together[groups == 0].tolist() == one_group([1.0, 0.0, 0.5])
    assert together[groups == 1].tolist() == one_group([5.0, 7.0, 6.0])


def test_groups_without_signal_are_counted() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, math.nan, 1.0])
    assert zero_variance_groups(rewards, torch.tensor([0, 0, 1, 1, 2, 2])) == (2, 3)
