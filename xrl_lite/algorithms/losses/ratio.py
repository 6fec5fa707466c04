"""Losses of clipped or gated probability ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from xrl_lite.algorithms.losses.tokens import Metrics, Tokens, policy_loss
from xrl_lite.algorithms.masked import row_mean


@policy_loss()
def vanilla(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Clipped surrogate: ``max(-A r, -A clip(r, 1 - low, 1 + high))``, where A < 0 at most ``-A c``.

    Schulman et al. 2017 (arXiv 1707.06347); separate bounds: Yu et al. 2025, DAPO (arXiv 2503.14476); dual clip with
    ``c = clip_ratio_c``: Ye et al. 2020 (arXiv 1912.09729).
    """
    losses, metrics = clipped_surrogate(tokens, tokens.ratio)
    bound = tokens.config.clip_ratio_c
    if bound is not None:
        capped = torch.minimum(losses, -tokens.advantages * bound)
        metrics["clip_dual"] = tokens.share((tokens.advantages < 0) & (losses > -tokens.advantages * bound))
        losses = torch.where(tokens.advantages < 0, capped, losses)
    return losses, metrics


@policy_loss(mode="seq-mean-token-mean")
def gspo(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of the ratio of whole sequences: s = geometric mean of r over the row.

    Zheng et al. 2025, GSPO (arXiv 2507.18071), the token form: ``s_t = exp(min(log p - sg(log p) + sg(mean d), 10))``,
    so each token has the value of its sequence and its own gradient. Always averaged by seq-mean-token-mean.
    """
    mean = row_mean(tokens.log_prob - tokens.old_log_prob, tokens.mask).detach().unsqueeze(1)
    ratio = (tokens.log_prob - tokens.log_prob.detach() + mean).clamp(max=10.0).exp()
    return clipped_surrogate(tokens, ratio)


@policy_loss(mode="seq-mean-token-mean")
def sapo(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """A soft gate instead of a clip: ``-A (4 / tau) sigmoid(tau (r - 1))``.

    Gao et al. 2025, SAPO (arXiv 2511.20347); tau is ``tau_pos`` where A > 0, else ``tau_neg``. Always averaged by
    seq-mean-token-mean.
    """
    config, advantages = tokens.config, tokens.advantages
    tau = torch.where(advantages > 0, advantages.new_tensor(config.tau_pos), advantages.new_tensor(config.tau_neg))
    return -tokens.advantages * (4 / tau) * torch.sigmoid(tau * (tokens.ratio - 1)), {}


@policy_loss()
def cispo(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """The clipped ratio as a constant weight: ``-A sg(clip(r, 1 - low, 1 + high)) log p``; no token is left out.

    MiniMax 2025, MiniMax-M1 (arXiv 2506.13585).
    """
    ratio = tokens.ratio.detach()
    clipped = tokens.clip(ratio)
    metrics = {"clip_low": tokens.share(ratio < clipped), "clip_high": tokens.share(ratio > clipped)}
    return -tokens.advantages * clipped * tokens.log_prob, metrics


@policy_loss(mode="seq-mean-token-mean", weighs_itself=True)
def geo_mean(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Geometric mean of the ratios of a row, clipped in log space.

    Zhao et al. 2025, GMPO (arXiv 2507.20673): ``-mean(A) exp(mean(sgn(A) min(sgn(A) d, sgn(A) clamp(d, -low, high))))``
    of each row, averaged over the rows of the whole update (verl averages those of a micro-batch). Importance weights
    enter by their geometric mean.
    """
    sign = tokens.advantages.sign()
    low, high = tokens.config.clip_ratio_low, tokens.config.clip_ratio_high
    clamped = tokens.log_ratio.clamp(-low, high)
    kept = sign * torch.minimum(sign * tokens.log_ratio, sign * clamped)
    rows = -row_mean(tokens.advantages, tokens.mask) * row_mean(kept, tokens.mask).exp()
    if tokens.weights is not None:
        rows = rows * row_mean(tokens.weights.log(), tokens.mask).exp()  # a weight of 0 takes the row out
    was_clipped = sign * tokens.log_ratio > sign * clamped
    metrics = {
        "clip_low": tokens.share(was_clipped & (sign < 0)),
        "clip_high": tokens.share(was_clipped & (sign > 0)),
    }
    return rows.unsqueeze(1).expand(tokens.mask.shape), metrics


def clipped_surrogate(tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Metrics]:
    """``max(-A r, -A clip(r))`` and the shares of tokens clipped from either side."""
    unclipped, clipped = -tokens.advantages * ratio, -tokens.advantages * tokens.clip(ratio)
    was_clipped = clipped > unclipped
    metrics = {
        "clip_low": tokens.share(was_clipped & (tokens.advantages < 0)),
        "clip_high": tokens.share(was_clipped & (tokens.advantages > 0)),
    }
    return torch.maximum(unclipped, clipped), metrics
