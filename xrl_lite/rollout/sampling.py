# pyright: basic
"""Sampling of next tokens, the same for a row whatever stands beside it.

B rows, V vocabulary. Randomness is counter-based: the number used for step t of a response is a function of the
response's seed and t alone, so no generator has to be carried along and the order of requests does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 128
"""Tokens of the vocabulary whose probabilities are summed first."""
_FEW_TOKENS = 512
"""A vocabulary of at most this size is summed at once."""
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
    # not log_softmax: over a large vocabulary its sum in float32 is off by 1e-5, always to one side
    total = scaled.logsumexp(dim=1)
    tokens = _invert_distribution((scaled - total.unsqueeze(1)).exp(), random)
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(dim=1), tokens)
    return tokens, scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - total


def _invert_distribution(probabilities: Tensor, random: Tensor) -> Tensor:
    """The token whose share of [0, 1) holds the random number: first its block of the vocabulary, then the token.

    Sums are float64, so that rounding cannot reach a token of probability 0.
    """
    num_rows, num_tokens = probabilities.shape
    if num_tokens <= _FEW_TOKENS:
        return _invert_sums(probabilities.double().cumsum(dim=1), random)
    blocks = functional.pad(probabilities, (0, -num_tokens % _BLOCK)).view(num_rows, -1, _BLOCK)
    ends = blocks.sum(dim=2).double().cumsum(dim=1)
    wanted = (random * ends[:, -1]).minimum(ends[:, -1] * (1 - 1e-12)).unsqueeze(1)
    block = torch.searchsorted(ends, wanted, right=True)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows), block.squeeze(1)].double().cumsum(dim=1)
    # the sum of the block and the sums inside it round differently: never go beyond the last token with a share
    within = (wanted - before).clamp_(min=0.0).minimum(inside[:, -1:] * (1 - 1e-12))
    return (block * _BLOCK + torch.searchsorted(inside, within, right=True)).squeeze(1).clamp_(max=num_tokens - 1)


def _invert_sums(sums: Tensor, random: Tensor) -> Tensor:
    whole = sums[:, -1:]
    wanted = (random.unsqueeze(1) * whole).minimum(whole * (1 - 1e-12))
    return torch.searchsorted(sums, wanted, right=True).squeeze(1)


def penalise(
    logits: Tensor, seen: Tensor, response: Tensor, *, repetition: float, presence: float, frequency: float
) -> None:
    """Lower the logits (1, V) of tokens that occurred, in place.

    Args:
        logits: Of the next token.
        seen: Tokens of prompt and response.
        response: Tokens of the response.
        repetition: Divides positive logits of seen tokens and multiplies negative ones (Keskar et al. 2019, CTRL).
        presence: Subtracted once for a token of the response.
        frequency: Subtracted for each occurrence in the response.
    """
    if repetition != 1.0:
        tokens = seen.unique()
        values = logits[0, tokens]
        logits[0, tokens] = torch.where(values > 0, values / repetition, values * repetition)
    if len(response) and (presence or frequency):
        tokens, counts = response.unique(return_counts=True)
        logits[0, tokens] -= presence + frequency * counts


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
