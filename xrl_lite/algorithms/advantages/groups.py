# pyright: basic
"""Groups of attempts at one prompt, and which of them give a signal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from xrl_lite.errors import ConfigError

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more than this count as equal: the group gives no signal."""


def group_numbers(index: Tensor | Sequence[Hashable]) -> Tensor:
    """Number groups by first appearance, (N,) of anything hashable -> (N,) int64."""
    keys: Iterable[Hashable] = index.tolist() if isinstance(index, Tensor) else index
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def per_group(rewards: Tensor, groups: Tensor, estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Estimate advantages group by group, (N,) float64.

    Groups of equal rewards, or with fewer than two, get exactly 0. Trajectories without a reward (NaN) get 0 and are
    left out.

    Args:
        rewards: (N,).
        groups: (N,) int64.
        estimate: Scored rewards of a group (float64) and their places in the batch -> advantages.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ConfigError(f"rewards and groups must be (N,), got {tuple(rewards.shape)} and {tuple(groups.shape)}.")
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    for members in scored_groups(rewards, groups):
        if has_signal(rewards[members]):
            advantages[members] = estimate(rewards[members], members)
    return advantages


def scored_groups(rewards: Tensor, groups: Tensor) -> list[Tensor]:
    """Places of the scored members of each group, by group number."""
    scored = ~rewards.isnan()
    return [((groups == group) & scored).nonzero().flatten() for group in groups.unique()]


def has_signal(scored: Tensor) -> bool:
    """Whether a group has two different rewards."""
    return len(scored) > 1 and (scored.max() - scored.min()).item() > EQUAL_REWARDS


def zero_variance_groups(rewards: Tensor, groups: Tensor) -> tuple[int, int]:
    """Return how many groups have equal rewards (or fewer than two), and how many groups there are."""
    members = scored_groups(rewards, groups)
    return sum(not has_signal(rewards[places]) for places in members), len(members)


def rows_with_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) bool: scored trajectories of groups with two different rewards."""
    with_signal = torch.zeros_like(rewards, dtype=torch.bool)
    for members in scored_groups(rewards, groups):
        with_signal[members] = has_signal(rewards[members])
    return with_signal
