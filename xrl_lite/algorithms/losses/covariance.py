"""Losses that treat a few tokens apart: those where advantage and log-prob vary together most.

``cov = (A - mean A) (log p - mean log p)``, means over the trained tokens of the whole update. Such tokens make the
entropy collapse. Cui et al. 2025, The Entropy Mechanism of RL (arXiv 2505.22617). Which tokens are chosen depends on
all of the update, so the choice is a function of its own; a loss that is given no choice makes one from its rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xrl_lite.algorithms.config import PolicyLossConfig
from xrl_lite.algorithms.losses.ratio import clipped_surrogate
from xrl_lite.algorithms.losses.tokens import MAX_LOG_RATIO, LossConfig, Metrics, Tokens, policy_loss


@policy_loss()
def clip_cov(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """``max(-A r, -A clip(r))``, and 0 for the chosen tokens."""
    chosen = _chosen(tokens, clip_cov_selection)
    losses, metrics = clipped_surrogate(tokens, tokens.ratio)
    return torch.where(chosen, torch.zeros_like(losses), losses), metrics | {"cov_selected": tokens.share(chosen)}


@policy_loss()
def kl_cov(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """``-A r``, plus ``ppo_kl_coef |d|`` on the chosen tokens."""
    chosen = _chosen(tokens, kl_cov_selection)
    distance = (tokens.log_prob - tokens.old_log_prob).abs()
    losses = -tokens.advantages * tokens.ratio
    penalised = losses + tokens.config.ppo_kl_coef * distance
    return torch.where(chosen, penalised, losses), {"cov_selected": tokens.share(chosen)}


def clip_cov_selection(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: LossConfig | PolicyLossConfig,
    seed: int,
) -> Tensor:
    """Choose ``clip_cov_ratio`` of the trained tokens (at least one) at random among the candidates, (N, T) bool.

    Candidates are not clipped, and their covariance is between ``clip_cov_lb`` and ``clip_cov_ub``.
    """
    mask = response_mask.bool()
    ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) > -advantages * ratio
    covariance = _covariance(log_prob, advantages, mask)
    candidates = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub) & ~clipped[mask]
    places = candidates.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(places), generator=generator)[: _number(config.clip_cov_ratio, mask)]
    return _at(mask, places[order.to(places.device)])


def kl_cov_selection(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: LossConfig | PolicyLossConfig,
    seed: int,
) -> Tensor:
    """Choose ``kl_cov_ratio`` of the trained tokens (at least one): those of the largest covariance, (N, T) bool."""
    mask = response_mask.bool()
    covariance = _covariance(log_prob, advantages, mask)
    order = covariance.argsort(descending=True, stable=True)
    return _at(mask, order[: _number(config.kl_cov_ratio, mask)])


def _chosen(tokens: Tokens, selection: Callable[..., Tensor]) -> Tensor:
    selected = tokens.options.get("selected")
    if selected is not None:
        return selected.bool() & tokens.mask
    values = (tokens.old_log_prob, tokens.log_prob.detach(), tokens.advantages, tokens.mask)
    return selection(*values, tokens.config, tokens.options.get("seed", 0))


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Of the trained tokens, flat."""
    log_prob, advantages = log_prob[mask].double(), advantages[mask].double()
    return (advantages - advantages.mean()) * (log_prob - log_prob.mean())


def _number(ratio: float, mask: Tensor) -> int:
    return max(int(ratio * int(mask.sum())), 1)


def _at(mask: Tensor, places: Tensor) -> Tensor:
    """Places among the trained tokens -> (N, T) bool."""
    flat = torch.zeros(int(mask.sum()), dtype=torch.bool, device=mask.device)
    flat[places] = True
    chosen = torch.zeros_like(mask)
    chosen[mask] = flat
    return chosen
