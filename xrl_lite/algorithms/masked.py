"""Statistics over the entries of a mask. They select rather than multiply: 0 * NaN is NaN, a selected value is not."""

from __future__ import annotations

import torch
from torch import Tensor


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set, else 0; neither a NaN under the mask nor its gradient gets through."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, scalar; 0 where the mask is empty."""
    return select(values, mask).sum() / mask.sum().clamp(min=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over its mask, (N, T) -> (N,); 0 for an empty row."""
    return select(values, mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` over the mask with the unbiased variance; 0 elsewhere.

    Equal values, or fewer than two, give exactly 0.
    """
    used = values[mask.bool()]
    if len(used) < 2 or (used.max() - used.min()).item() <= EQUAL * max(1.0, used.abs().max().item()):
        return torch.zeros_like(values)
    return select((values - used.mean()) / (used.var() + 1e-8).sqrt(), mask)


EQUAL = 1e-9
"""Numbers (float64) that differ relatively by no more than this are the same number with another rounding."""
