"""Losses that drop a token once the policy has moved far enough in the direction its advantage asks for.

``-A sg(min(r, cap)) log p`` on the tokens that are kept; how far is measured by the two probabilities of the sampled
token, p and p_old. Qi et al. 2026, DPPO (arXiv 2602.04879). ``clip_ratio_low`` and ``clip_ratio_high`` are the
thresholds of the divergence, the cap is ``dppo_ratio_cap``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xrl_lite.algorithms.losses.tokens import Metrics, Tokens, policy_loss

_TINY = 1e-8


@policy_loss()
def dppo_tv(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Total variation: kept where ``p - p_old <= high`` (A > 0), or ``p - p_old >= -low`` (else)."""
    with torch.no_grad():
        moved = tokens.log_prob.exp() - tokens.old_log_prob.exp()
        kept = torch.where(
            tokens.advantages > 0, moved <= tokens.config.clip_ratio_high, moved >= -tokens.config.clip_ratio_low
        )
    return _masked(tokens, kept)


@policy_loss()
def dppo_kl(tokens: Tokens) -> tuple[Tensor, Metrics]:
    """Binary KL(p_old || p): kept while it is within ``high`` (A > 0) or ``low`` (else), or the token moves back."""
    with torch.no_grad():
        new, old = tokens.log_prob.exp(), tokens.old_log_prob.exp()
        kl = old * (tokens.old_log_prob - tokens.log_prob)
        kl = kl + (1 - old) * ((1 - old + _TINY) / (1 - new + _TINY)).log()
        kept = torch.where(
            tokens.advantages > 0,
            (kl <= tokens.config.clip_ratio_high) | (new <= old),
            (kl <= tokens.config.clip_ratio_low) | (new >= old),
        )
    return _masked(tokens, kept)


def _masked(tokens: Tokens, kept: Tensor) -> tuple[Tensor, Metrics]:
    weight = tokens.ratio.detach().clamp(max=tokens.config.dppo_ratio_cap) * kept
    metrics = {
        "clip_low": tokens.share(~kept & (tokens.advantages < 0)),
        "clip_high": tokens.share(~kept & (tokens.advantages > 0)),
    }
    return -tokens.advantages * weight * tokens.log_prob, metrics
