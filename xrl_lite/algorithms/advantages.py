"""Advantage estimators: one reward per trajectory in, one advantage per trajectory out.

N trajectories. All arithmetic is in float64: in float32 a group of equal rewards has a mean that is off by a rounding
error, and dividing that error by a standard deviation of about 0 makes advantages of up to 0.9 out of nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xrl_lite.errors import ConfigError

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more than this count as equal: the group gives no signal."""


def grpo_advantages(rewards: Tensor, groups: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: ``(r - mean) / (std + eps)`` over the attempts at one prompt.

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3 with outcome rewards; std is the unbiased one. Groups of
    equal rewards get exactly 0. Trajectories without a reward (NaN) get 0 and are left out of mean and std.
    """
    return _per_group(rewards, groups, lambda r: (r - r.mean()) / (r.std() + eps))


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Group-relative advantages without division: ``r - mean``.

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783): dividing by the standard deviation weighs
    questions by their difficulty. Leaves out that paper's length normalisation, which is the loss aggregation's part.
    """
    return _per_group(rewards, groups, lambda r: r - r.mean())


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Leave-one-out advantages: ``r_i - mean of the other rewards of the group``.

    Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740).
    """
    return _per_group(rewards, groups, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


def zero_variance_groups(rewards: Tensor, groups: Tensor) -> tuple[int, int]:
    """Return how many groups have equal rewards (or fewer than two), and how many groups there are."""
    ids = groups.unique()
    return sum(not _has_signal(_scored(rewards, groups == group)) for group in ids), len(ids)


def _per_group(rewards: Tensor, groups: Tensor, estimate: Callable[[Tensor], Tensor]) -> Tensor:
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ConfigError(f"rewards and groups must be (N,), got {tuple(rewards.shape)} and {tuple(groups.shape)}.")
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group
        scored = _scored(rewards, members)
        if _has_signal(scored):
            advantages[members & ~rewards.isnan()] = estimate(scored)
    return advantages


def _scored(rewards: Tensor, members: Tensor) -> Tensor:
    return rewards[members & ~rewards.isnan()]


def _has_signal(scored: Tensor) -> bool:
    return len(scored) > 1 and (scored.max() - scored.min()).item() > EQUAL_REWARDS
