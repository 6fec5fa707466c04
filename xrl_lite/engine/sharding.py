# pyright: basic
"""A model that is spread over the ranks by torch's FSDP2, and the way back to whole weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xrl_lite.engine.base import WeightShard
from xrl_lite.engine.config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard_model(model: Any, config: EngineConfig, *, device_type: str) -> None:
    """Spread a model over all ranks in place: each layer by itself, and what is outside of the layers.

    Args:
        model: A model of transformers, the same weights on every rank.
        config: Says how layers compute and how gradients are summed.
        device_type: Where it computes, as torch calls it.
    """
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.compute_dtype] if config.compute_dtype else None,
        reduce_dtype=DTYPES[config.reduce_dtype],
        cast_forward_inputs=False,  # masks and positions are no activations
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)  # its backward pass begins at once


def layers_of(model: Any) -> list[nn.Module]:
    """Return the repeated blocks of a model of transformers, which names their classes."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights, after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be spread over the ranks; called on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_shard(name: str, parameter: Tensor) -> WeightShard:
    """Return the rows of a weight that this rank holds."""
    if not isinstance(parameter, DTensor):
        return WeightShard(name=name, shape=tuple(parameter.shape), first_row=0, values=parameter.detach())
    rank, size = dist.get_rank(), dist.get_world_size()
    first, _ = _rows_of(parameter, rank, size)
    return WeightShard(name=name, shape=tuple(parameter.shape), first_row=first, values=_local(parameter))


def _local(parameter: Tensor) -> Tensor:
    """Return the part of a sharded weight that this rank holds."""
    return cast("DTensor", parameter.detach()).to_local()


def gather_on_first(
    parameters: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights on rank 0, a bucket at a time, and nothing elsewhere; called on every rank.

    They are in CPU memory, where there is room for what a caller keeps. The device of rank 0 holds one bucket; no other
    rank ever holds a whole weight.
    """
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, parameter in parameters:
        if not isinstance(parameter, DTensor):
            if dist.get_rank() == 0:
                yield name, parameter.detach().cpu()
            continue
        if bucket and (size + _bytes(parameter) > bucket_bytes or parameter.dtype != bucket[0][1].dtype):
            yield from _gather(bucket, device)
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += _bytes(parameter)
    if bucket:
        yield from _gather(bucket, device)


def _gather(bucket: Sequence[tuple[str, DTensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [sum(_num_values(parameter, each, size) for _, parameter in bucket) for each in range(size)]
    own = torch.zeros(max(lengths), dtype=bucket[0][1].dtype, device=device)  # all parts have to be of one length
    start = 0
    for _, parameter in bucket:
        local = _local(parameter).flatten()
        own[start : start + len(local)].copy_(local)  # perhaps out of CPU memory
        start += len(local)
    parts = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
    dist.gather(own, parts, dst=0)
    if parts is None:
        return
    taken = [0] * size
    for name, parameter in bucket:
        pieces: list[Tensor] = []
        for each in range(size):
            count = _num_values(parameter, each, size)
            pieces.append(parts[each][taken[each] : taken[each] + count])
            taken[each] += count
        yield name, torch.cat(pieces).view(parameter.shape).cpu()


def _rows_of(parameter: DTensor, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows that a rank holds: FSDP2 cuts the first dimension as `torch.chunk` does."""
    rows = parameter.shape[0]
    chunk = -(-rows // size)
    first = min(rank * chunk, rows)
    return first, min(chunk, rows - first)


def _num_values(parameter: DTensor, rank: int, size: int) -> int:
    _, rows = _rows_of(parameter, rank, size)
    return rows * (parameter.numel() // max(parameter.shape[0], 1))


def _bytes(parameter: DTensor) -> int:
    return parameter.numel() * cast("int", parameter.element_size())
