# pyright: basic
"""What a transfer of weights is described by, and the checksum that proves each tensor arrived. No torch on import."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from xrl_lite.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1}
"""Bytes of an element, by name of its type."""

WHOLE_UP_TO_BYTES = 256 << 10
"""Every byte of a tensor of at most this size is checked; of a larger one, samples."""

_SAMPLE_BYTES = 16 << 10
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
    adapter: Mapping[str, Any] | None = None
    """Settings of a LoRA adapter (arXiv 2106.09685), as in adapter_config.json of peft, where its weights are sent,
    under the names of peft's files. The model's own weights stay; the adapter from before is forgotten."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class WeightBucket(Protocol):
    """Some of the tensors, on their way. Travels to replicas as a pickle."""

    def tensors(self, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors; a tensor is valid until the next is asked for.

        Args:
            worker: Which of the replica's processes takes them, counted from 0. Each of them has to.
        """
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

    def open(
        self,
        parameters: Iterator[tuple[str, Tensor]],
        *,
        version: int,
        num_updates: int,
        adapter: Mapping[str, Any] | None = None,
    ) -> WeightOffer:
        """Begin a transfer of the present weights, or of an adapter's with its settings (`WeightManifest.adapter`)."""
        ...

    def send(self, number: int, num_receivers: int) -> WeightBucket:
        """Make a bucket ready and return it; it stays so until the next one is asked for, or `close`.

        Args:
            number: Which one.
            num_receivers: Processes that take it, of all replicas together.
        """
        ...

    def interrupt(self) -> None:
        """Have a `send` that waits for receivers raise; called in another thread."""
        ...

    def close(self) -> None:
        """End the transfer."""
        ...


ADAPTER_PREFIX = "base_model.model."
"""What peft puts before the names of weights in an adapter's files."""


def adapted_layer(name: str) -> tuple[str, str]:
    """Return the layer that a weight of an adapter changes, and which side of the change it is, "A" or "B".

    Raises:
        WeightSyncError: it is no weight of a LoRA adapter.
    """
    layer, separator, rest = name.removeprefix(ADAPTER_PREFIX).rpartition(".lora_")
    side = rest.removesuffix(".weight")
    if not separator or side not in ("A", "B"):
        raise WeightSyncError(f"tensor {name!r} is no weight of a LoRA adapter: it has to end with lora_A or lora_B.")
    return layer, side


def adapter_scaling(settings: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's change: ``alpha / r``, or ``alpha / sqrt(r)`` with rslora (arXiv 2312.03732).

    Raises:
        WeightSyncError: layers have ranks or factors of their own.
    """
    if settings.get("rank_pattern") or settings.get("alpha_pattern"):
        raise WeightSyncError(
            "the adapter has layers with ranks or alphas of their own (rank_pattern, alpha_pattern), which replicas do "
            "not take. Set rollout.adapter_sync=merged."
        )
    rank = settings["r"]
    return settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def tensor_checksum(tensor: Tensor) -> str:
    """Return a CRC-32 over shape, type and bytes of a tensor on any device.

    Of a tensor larger than `WHOLE_UP_TO_BYTES` it takes 16 chunks of 1 KiB, spread evenly, the last at its end.
    """
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(0)
    parts = [flat]
    if flat.numel() > WHOLE_UP_TO_BYTES:
        stride = (flat.numel() - _CHUNK_BYTES) // (_SAMPLE_BYTES // _CHUNK_BYTES - 1)
        spread = flat.as_strided((_SAMPLE_BYTES // _CHUNK_BYTES, _CHUNK_BYTES), (stride, 1), flat.storage_offset())
        parts = [spread, flat[-_CHUNK_BYTES:]]  # the stride is rounded down, so the end is taken by itself
    total = zlib.crc32(f"{tuple(tensor.shape)}:{tensor.dtype}".encode())
    for part in parts:
        if part.numel():
            total = zlib.crc32(part.contiguous().cpu().numpy().data, total)
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
