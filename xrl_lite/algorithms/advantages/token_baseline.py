"""A baseline for each position of a group, weighted by how much the gradient varies there.

Optimal token baseline (as in verl): a token of probability p under a policy of ``S = sum of squared probabilities`` has
a score function of squared length about ``w = 1 - 2 p + S``. With ``W_t`` the sum of w up to position t and ``G_t`` the
reward to go, the baseline of minimal variance is ``B_t = sum_g(G_t W_t) / sum_g(W_t)`` over the rows of the group that
reach position t. Past the second longest row there is nobody to compare with: the tail of a uniquely longest row has
baseline 0. Rows of groups of equal rewards get exactly 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.advantages.groups import group_numbers, has_signal, scored_groups
from xrl_lite.algorithms.masked import select

_TINY = 1e-8


def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Tensor | Sequence[Hashable],
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Reward to go minus the optimal baseline of its position in the response; returns are the reward to go.

    Args:
        token_level_rewards: (N, T).
        response_mask: (N, T).
        index: (N,), which group a row belongs to.
        old_log_probs: (N, T) of the sampled tokens.
        sum_pi_squared: (N, T), sum over the vocabulary of squared probabilities.
        rollout_is_weights: (N, T) importance weights; their squares weigh w.
    """
    rewards = token_level_rewards.double()
    mask = response_mask.bool()
    returns = select(select(rewards, mask).flip(1).cumsum(1).flip(1), mask)
    weights = 1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()
    if rollout_is_weights is not None:
        weights = weights * rollout_is_weights.double().square()
    weights = select(select(weights, mask).cumsum(1), mask)
    advantages = torch.zeros_like(returns)
    row_rewards = rewards.sum(dim=1)
    for members in scored_groups(row_rewards, group_numbers(index)):
        if has_signal(row_rewards[members]):
            baseline = _baseline(returns[members], weights[members], mask[members])
            advantages[members] = select(returns[members] - baseline, mask[members])
    return advantages, returns


def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Tensor | Sequence[Hashable],
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` for responses with tool results in them: positions count the trained tokens only."""
    order = (~response_mask.bool()).int().argsort(dim=1, stable=True)

    def compact(values: Tensor) -> Tensor:
        return values.gather(1, order)

    # the NaN of a missing reward may stand on an untrained position
    row_rewards = token_level_rewards.double().sum(dim=1, keepdim=True)
    under_mask = select(token_level_rewards.double(), response_mask)
    lost = torch.where(row_rewards.isnan(), row_rewards, torch.zeros_like(row_rewards))
    advantages, returns = optimal_token_baseline(
        compact(under_mask) + lost,
        compact(response_mask),
        index,
        old_log_probs=compact(old_log_probs),
        sum_pi_squared=compact(sum_pi_squared),
        rollout_is_weights=None if rollout_is_weights is None else compact(rollout_is_weights),
    )
    empty = torch.zeros_like(advantages)
    return empty.scatter(1, order, advantages), empty.scatter(1, order, returns)


def _baseline(returns: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """(G, T) of one group -> (G, T)."""
    baseline = (returns * weights).sum(dim=0) / (weights.sum(dim=0) + _TINY)
    positions = torch.arange(1, mask.shape[1] + 1)
    lengths = (mask * positions).amax(dim=1)  # up to the last trained token
    second = lengths.sort(descending=True).values[1]
    return torch.where(positions <= second, baseline, torch.zeros_like(baseline)).expand(mask.shape)
