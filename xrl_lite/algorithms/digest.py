"""A digest of weights: equal on both sides of a transfer, or the transfer went wrong."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return a checksum (CRC-32) over names, shapes, types and bytes of CPU tensors, whatever their order."""
    total = 0
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        total = zlib.crc32(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode(), total)
        if tensor.numel():
            total = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
