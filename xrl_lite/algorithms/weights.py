"""What a transfer of weights is described by, and the checksum that proves each tensor arrived. No torch on import."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1}
"""Bytes of an element, by name of its type."""

WHOLE_BELOW_BYTES = 32 << 20
"""Every byte of a smaller model is checked; of a larger one, samples of each tensor."""

_SAMPLE_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a transfer."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch type, "float32"."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """Everything that one transfer brings."""

    version: int
    """Policy version that a replica has afterwards."""
    tensors: tuple[TensorSpec, ...]
    """In the order in which they are sent."""
    num_updates: int = 0
    """Optimizer updates that the trainer has made since it started."""
    partial: bool = False
    """Only some of the model's weights are sent (an adapter); the others stay."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def sampled(self) -> bool:
        """Whether checksums cover samples instead of every byte."""
        return self.size_bytes >= WHOLE_BELOW_BYTES


class WeightBucket(Protocol):
    """Some of the tensors, on their way. Travels to replicas as a pickle."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; a tensor is valid until the next is asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class WeightOffer:
    """What a sender has ready."""

    manifest: WeightManifest
    checksums: dict[str, str]
    """Of every tensor, by name."""
    num_buckets: int
    buckets: tuple[WeightBucket, ...] = ()
    """All of them, where replicas must have begun to receive before they are sent."""


class WeightSender(Protocol):
    """The trainer's end of a transfer; lives in the process of each training rank."""

    def open(self, parameters: Iterator[tuple[str, Tensor]], *, version: int, num_updates: int) -> WeightOffer:
        """Begin a transfer of the present weights."""
        ...

    def send(self, number: int, num_receivers: int) -> WeightBucket:
        """Make a bucket ready and return it; it stays so until the next one is asked for, or `close`."""
        ...

    def close(self) -> None:
        """End the transfer."""
        ...


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def tensor_checksum(tensor: Tensor, *, sampled: bool) -> str:
    """Return a CRC-32 over shape, type and bytes of a tensor.

    Args:
        tensor: On any device.
        sampled: Take 64 chunks of 1 KiB, spread evenly, instead of all bytes, if the tensor is larger than they are.
    """
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(0)
    parts = [flat]
    if sampled and flat.numel() > _SAMPLE_BYTES:
        stride = (flat.numel() - _CHUNK_BYTES) // (_SAMPLE_BYTES // _CHUNK_BYTES - 1)
        spread = flat.as_strided((_SAMPLE_BYTES // _CHUNK_BYTES, _CHUNK_BYTES), (stride, 1), flat.storage_offset())
        parts = [spread, flat[-_CHUNK_BYTES:]]  # the stride is rounded down, so the end is taken by itself
    total = zlib.crc32(f"{tuple(tensor.shape)}:{tensor.dtype}".encode())
    for part in parts:
        if part.numel():
            total = zlib.crc32(part.contiguous().cpu().numpy(), total)
    return f"{total:08x}"


def devices_of(tensors: Iterable[Tensor]) -> list[str]:
    """Return where tensors are: "cpu", or the unique ids of GPUs, which are the same in every process."""
    import torch

    devices = {tensor.device for tensor in tensors}
    names = {
        str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
        for device in devices
    }
    return sorted(names)
