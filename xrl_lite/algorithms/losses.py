"""Policy loss, KL estimators and their aggregation to one number.

T response tokens, flat over all trajectories of a micro-batch. The weights of `token_weights` already hold the
normalisation over the *whole* optimizer step, so a loss is a plain weighted sum: its gradient does not depend on how
the step is split into micro-batches or spread over ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from xrl_lite.errors import ConfigError

LossAggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
KLEstimator = Literal["k1", "k2", "k3", "abs"]

_MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says nothing and float32 nears its end."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped surrogate loss, summed with `weights`.

    ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` with ``r = exp(logp - old)`` (Schulman et al. 2017, arXiv
    1707.06347; separate bounds: Yu et al. 2025, DAPO, arXiv 2503.14476). Where A < 0 the loss is at most
    ``-A dual_clip`` (Ye et al. 2020, arXiv 1912.09729); None leaves that bound out.

    Args:
        logprobs: (T,) under the policy being trained; the only argument with a gradient.
        old_logprobs: (T,) under the policy the ratio is taken to.
        advantages: (T,).
        weights: (T,) from `token_weights`; tokens with weight 0 do not count, whatever their other values.
        clip_low: Lower bound of the ratio is 1 - clip_low.
        clip_high: Upper bound of the ratio is 1 + clip_high.
        dual_clip: Upper bound of the ratio where the advantage is negative; more than 1, or None.

    Returns:
        The loss (scalar), and sums over the weighted tokens: ``clip_low``, ``clip_high`` (tokens clipped) and ``kl``.
    """
    # select rather than multiply: NaN under a mask must not reach the loss (0 * NaN = NaN)
    used = weights > 0
    logprobs, old_logprobs, advantages, weights = (
        value[used] for value in (logprobs, old_logprobs, advantages, weights)
    )
    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    with torch.no_grad():
        was_clipped = clipped > unclipped
        sums = {
            "clip_low": float((was_clipped & (advantages < 0)).sum()),
            "clip_high": float((was_clipped & (advantages > 0)).sum()),
            "kl": float((ratio - 1 - log_ratio).sum()),
        }
    return (loss * weights).sum(), sums


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference), (T,).

    With x = log p, y = log p_ref: k1 = x - y; k2 = (x - y)^2 / 2; k3 = e^(y-x) - (y-x) - 1; abs = |x - y|
    (Schulman 2020, http://joschu.net/blog/kl-approx.html). k3 is clamped to 10.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "abs":
            return difference.abs()
        case "k3":
            log_ratio = (-difference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            return (log_ratio.exp() - log_ratio - 1).clamp(max=10.0)
        case _:
            raise ConfigError(f"kl estimator must be k1, k2, k3 or abs, got {estimator!r}.")


def token_weights(masks: list[list[int]], aggregation: LossAggregation) -> list[list[float]]:
    """Return the weight of each response token of a whole optimizer step, so that a weighted sum is the aggregate.

    Args:
        masks: Per trajectory, 1 for each token that is trained on.
        aggregation: token_mean: every token counts the same (DAPO); seq_mean_token_mean: every trajectory counts the
            same, its tokens share (GRPO as published); seq_mean_token_sum: longer trajectories count more.

    Returns:
        One weight per token; 0 where the mask is 0.
    """
    num_tokens = sum(map(sum, masks))
    num_trajectories = sum(any(mask) for mask in masks)
    if not num_tokens:
        return [[0.0] * len(mask) for mask in masks]
    match aggregation:
        case "token_mean":
            shares = [1.0 / num_tokens for _ in masks]
        case "seq_mean_token_mean":
            shares = [1.0 / (num_trajectories * max(sum(mask), 1)) for mask in masks]
        case "seq_mean_token_sum":
            shares = [1.0 / num_trajectories for _ in masks]
        case _:
            raise ConfigError(
                f"loss aggregation must be token_mean, seq_mean_token_mean or seq_mean_token_sum, got {aggregation!r}."
            )
    return [[share if bit else 0.0 for bit in mask] for share, mask in zip(shares, masks, strict=True)]
