"""Estimators that look at the reward of each token and carry it back along the row.

verl's signature: (N, T) in, (N, T) out. Positions under the mask (tool results, padding) carry the sums of later tokens
through unchanged, so a row with a tool result in it has the values of the row without. Rows with a NaN reward get 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.masked import select, whiten
from xrl_lite.errors import ConfigError


def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    config: AlgorithmConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened over all trained tokens.

    Schulman et al. 2016 (arXiv 1506.02438): ``delta_t = r_t + gamma V_{t+1} - V_t``;
    ``A_t = delta_t + gamma lam A_{t+1}``; returns are ``A + V`` before the whitening.

    Args:
        token_level_rewards: (N, T).
        response_mask: (N, T).
        values: (N, T), the critic's value of the state in which each token was chosen.
        config: `gamma` and `lam`.
    """
    config = config or AlgorithmConfig()
    mask, scored = _masks(token_level_rewards, response_mask)
    rewards, values = select(token_level_rewards.double(), scored), select(values.double(), scored)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + config.gamma * next_value - values[:, t]
        here = scored[:, t]
        next_advantage = torch.where(here, delta + config.gamma * config.lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        columns.append(next_advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return whiten(advantages, scored), select(advantages + values, mask & scored)


def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, config: AlgorithmConfig | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Discounted reward to go, whitened over all trained tokens: ``G_t = r_t + gamma G_{t+1}``.

    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262). Returns are G.
    """
    scored = _masks(token_level_rewards, response_mask)[1]
    returns = _reward_to_go(token_level_rewards, scored, gamma=(config or AlgorithmConfig()).gamma)
    return whiten(returns, scored), returns


def remax(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Reward to go, minus the reward of a greedy response to the same prompt.

    Li et al. 2024, ReMax (arXiv 2310.10505). Rows whose baseline is missing (NaN) get 0.

    Args:
        token_level_rewards: (N, T).
        response_mask: (N, T).
        reward_baselines: (N,).
    """
    scored = _masks(token_level_rewards, response_mask)[1]
    if reward_baselines.shape != token_level_rewards.shape[:1]:
        raise ConfigError(
            f"reward_baselines must be (N,) for rewards (N, T), got {tuple(reward_baselines.shape)} for "
            f"{tuple(token_level_rewards.shape)}."
        )
    baselines = reward_baselines.double().unsqueeze(1)
    returns = _reward_to_go(token_level_rewards, scored, gamma=1.0)
    return select(returns - baselines, scored & ~baselines.isnan()), returns


def _masks(rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask, and the mask without rows that have no reward."""
    mask = response_mask.bool()
    return mask, mask & ~rewards.isnan().any(dim=1, keepdim=True)


def _reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    rewards = select(rewards.double(), mask)
    following = torch.zeros_like(rewards[:, 0])
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        columns.append(following)
    return select(torch.stack(columns[::-1], dim=1), mask)
