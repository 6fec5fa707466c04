"""Losses that weigh the log-likelihood of the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from xrl_lite.algorithms.losses.ratio import clipped_surrogate
from xrl_lite.algorithms.losses.tokens import Metrics, Tokens, policy_loss


@policy_loss()
def gpg(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """``-A log p``. Chu et al. 2025, GPG (arXiv 2504.02546)."""
    return -tokens.advantages * tokens.log_prob, {}


@policy_loss()
def reinforce(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """``-A w log p`` with the importance weights w of rollout correction. Williams 1992."""
    return -tokens.advantages * tokens.log_prob, {}


@policy_loss()
def dro(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """``-(A log p - beta / 2 d^2)`` with ``beta = dro_beta``: a quadratic pull towards the old policy, not clamped.

    Richemond et al. 2024, Direct Reward Optimisation (arXiv 2405.19107).
    """
    beta = tokens.config.dro_beta
    if beta is None:
        raise ValueError("The policy loss dro needs dro_beta above 0.")
    distance = (tokens.log_prob - tokens.old_log_prob).square()
    return -(tokens.advantages * tokens.log_prob - beta / 2 * distance), {
        "dro_distance": tokens.share(distance.detach())
    }


@policy_loss(mode="token-mean")
def oreal(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Likelihood on the good tokens, policy loss on the bad ones, each averaged over its own.

    Lyu et al. 2025, OREAL (arXiv 2502.06781). With P tokens of A > 0 and M of A < 0 in the whole update: sum over the
    former of ``positive_loss_factor / P (pos_sft_loss_weight (-log p) + pos_policy_loss_weight L)``, plus sum over the
    latter of ``negative_loss_factor / M L``, where L is the clipped surrogate. A side without tokens adds 0 (XTuner's
    divides by their number).
    """
    config, batch = tokens.config, tokens.config.batch
    positive, negative = tokens.mask & (tokens.advantages > 0), tokens.mask & (tokens.advantages < 0)
    num_tokens = float(tokens.mask.sum()) if batch is None else float(batch.batch_num_tokens)
    num_positive = float(positive.sum()) if batch is None else float(batch.num_positive_tokens)
    num_negative = float(negative.sum()) if batch is None else float(batch.num_negative_tokens)
    surrogate, metrics = clipped_surrogate(tokens, tokens.ratio)
    bound = config.clip_ratio_c
    if bound is not None:
        capped = torch.minimum(surrogate, -tokens.advantages * bound)
        surrogate = torch.where(tokens.advantages < 0, capped, surrogate)
    good = config.pos_policy_loss_weight * surrogate - config.pos_sft_loss_weight * tokens.log_prob
    nothing = torch.zeros_like(surrogate)
    losses = torch.where(positive, good * (config.positive_loss_factor * num_tokens / max(num_positive, 1.0)), nothing)
    losses = losses + torch.where(
        negative, surrogate * (config.negative_loss_factor * num_tokens / max(num_negative, 1.0)), nothing
    )
    return losses, metrics
