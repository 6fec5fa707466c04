"""Sampling of next tokens, the same for a row whatever stands beside it.

B rows, V vocabulary. Randomness is counter-based: the number used for step t of a response is a function of the
response's seed and t alone, so no generator has to be carried along and the order of requests does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seeds: Tensor, step: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) from seed and step, both (B,) int64 -> (B,) float64.

    SplitMix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators) at position `step`; int64
    arithmetic wraps around as the algorithm wants.
    """
    value = seeds + (step + 1) * _signed(_GAMMA)
    value = (value ^ _shift_right(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift_right(value, 27)) * _signed(_MIX_2)
    value = value ^ _shift_right(value, 31)
    return _shift_right(value, 11).double() / (1 << 53)


def sample_tokens(logits: Tensor, random: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row and return it with its log-probability.

    Args:
        logits: (B, V) float32, filtered tokens at -inf.
        random: (B,) float64 in [0, 1).
        temperature: (B,) float32; 0 takes the likeliest token, whose log-probability is then that at temperature 1.

    Returns:
        Tokens (B,) int64, and their log-probabilities (B,) float32 with the temperature applied.
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    logprobs = scaled - scaled.logsumexp(dim=1, keepdim=True)
    # the inverse of the distribution function: in float64, so that rounding cannot reach a token of probability 0
    cumulative = logprobs.double().exp().cumsum(dim=1)
    threshold = (random * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Set all but the `top_k` largest logits of each row to -inf."""
    threshold = logits.topk(min(top_k, logits.shape[1]), dim=1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float, temperature: float) -> Tensor:
    """Set all tokens to -inf but the likeliest that hold `top_p` of the probability together."""
    ordered, order = (logits / (temperature or 1.0)).sort(dim=1, descending=True)
    probabilities = ordered.softmax(dim=1)
    dropped = probabilities.cumsum(dim=1) - probabilities >= top_p
    return logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # logical shift: torch shifts int64 arithmetically
    return (value >> bits) & ((1 << (64 - bits)) - 1)
