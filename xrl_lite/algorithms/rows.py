# pyright: basic
"""Lists of different lengths to padded rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


def pad_rows(rows: Sequence[Sequence[float]], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (N, T) of the longest row's length, 0 behind the end of each."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    width = int(lengths.max()) if len(rows) else 0
    inside = torch.arange(width) < lengths.unsqueeze(1)
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return torch.zeros(len(rows), width, dtype=dtype).masked_scatter_(inside, values)


def unpad_rows(padded: Tensor, lengths: Sequence[int]) -> list[list[float]]:
    """Return the first `lengths` entries of each row of (N, T)."""
    return [row[:length] for row, length in zip(padded.tolist(), lengths, strict=True)]
