"""Both ends of each transport: the sender in the training rank, the bucket in the replica. Loads torch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from xrl_lite.algorithms.weights import (
    TensorSpec,
    WeightBucket,
    WeightManifest,
    WeightOffer,
    spec_of,
    tensor_checksum,
)

_ALIGN = 64

Parameters = list[tuple[str, Tensor]]


def offer_of(
    parameters: Parameters, *, version: int, num_updates: int, num_buckets: int, buckets: tuple[WeightBucket, ...] = ()
) -> WeightOffer:
    """Describe weights, with their checksums."""
    manifest = WeightManifest(
        version=version, tensors=tuple(spec_of(name, tensor) for name, tensor in parameters), num_updates=num_updates
    )
    checksums = {name: tensor_checksum(tensor, sampled=manifest.sampled) for name, tensor in parameters}
    return WeightOffer(manifest=manifest, checksums=checksums, num_buckets=num_buckets, buckets=buckets)


def fill_buckets(parameters: Parameters, bucket_bytes: int) -> list[Parameters]:
    """Split into runs of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    buckets: list[Parameters] = []
    size = 0
    for name, tensor in parameters:
        if not buckets or size + tensor.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a run of bytes."""

    spec: TensorSpec
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of the bytes (N,) uint8."""
        view = memory[self.offset : self.offset + self.spec.size_bytes]
        return view.view(getattr(torch, self.spec.dtype)).view(self.spec.shape)


def places_of(specs: Sequence[TensorSpec]) -> tuple[list[Place], int]:
    """Lay tensors out one behind the other; return their places and the bytes in sum."""
    places: list[Place] = []
    end = 0
    for spec in specs:
        places.append(Place(spec, end))
        end += -(-spec.size_bytes // _ALIGN) * _ALIGN
    return places, max(end, _ALIGN)


# --- shared memory


@dataclass(frozen=True)
class SharedMemoryBucket:
    """All tensors, in a segment that the driver holds."""

    path: str
    size_bytes: int
    places: list[Place]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            # a private mapping: torch wants memory that it could write to
            memory = mmap.mmap(fd, self.size_bytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for place in self.places:
            yield place.spec.name, place.of(whole)


class SharedMemorySender:
    """Writes all weights into the driver's segment, which keeps its pages from one transfer to the next."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._memory: Tensor | None = None

    def open(self, parameters: Iterator[tuple[str, Tensor]], *, version: int, num_updates: int) -> WeightOffer:
        weights = list(parameters)
        offer = offer_of(weights, version=version, num_updates=num_updates, num_buckets=1)
        self._places, size_bytes = places_of(offer.manifest.tensors)
        if self._memory is None or len(self._memory) != size_bytes:
            self._memory = self._map(size_bytes)
        for (_, tensor), place in zip(weights, self._places, strict=True):
            place.of(self._memory).copy_(tensor.detach())
        return offer

    def send(self, number: int, num_receivers: int) -> SharedMemoryBucket:
        assert self._memory is not None, "open comes first"
        return SharedMemoryBucket(self._path, len(self._memory), self._places)

    def close(self) -> None:
        """Keep what was written: a replica that is started later reads it."""

    def _map(self, size_bytes: int) -> Tensor:
        fd = os.open(self._path, os.O_RDWR)
        try:
            os.ftruncate(fd, size_bytes)
            return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        finally:
            os.close(fd)


# --- folder


@dataclass(frozen=True)
class FolderBucket:
    """Tensors in one file."""

    path: str

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        opener: Any = safe_open
        with opener(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


class FolderSender:
    """Writes safetensors files; those of the transfer before are removed when the next one begins."""

    def __init__(self, folder: str, *, bucket_bytes: int) -> None:
        self._folder = Path(folder)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Parameters] = []
        self._version = 0

    def open(self, parameters: Iterator[tuple[str, Tensor]], *, version: int, num_updates: int) -> WeightOffer:
        weights = list(parameters)
        for old in self._folder.glob("*.safetensors"):
            old.unlink()
        self._version = version
        self._buckets = fill_buckets(weights, self._bucket_bytes)
        return offer_of(weights, version=version, num_updates=num_updates, num_buckets=len(self._buckets))

    def send(self, number: int, num_receivers: int) -> FolderBucket:
        from safetensors.torch import save_file

        path = self._folder / f"version_{self._version}_{number}.safetensors"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in self._buckets[number]}, path)
        return FolderBucket(str(path))

    def close(self) -> None:
        self._buckets = []


# --- CUDA IPC


@dataclass(frozen=True)
class CudaIpcBucket:
    """Tensors in a buffer of another process on the same GPU."""

    rebuild: Any
    arguments: tuple[Any, ...]
    places: list[Place]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        memory: Tensor = self.rebuild(*self.arguments)
        for place in self.places:
            yield place.spec.name, place.of(memory)
        # the trainer writes the next bucket into the same buffer: copies out of it must have ended
        torch.cuda.synchronize()
        del memory
        torch.cuda.ipc_collect()


class CudaIpcSender:
    """Copies buckets into one buffer on the GPU and hands out its handle."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Parameters] = []
        self._buffer: Tensor | None = None

    def open(self, parameters: Iterator[tuple[str, Tensor]], *, version: int, num_updates: int) -> WeightOffer:
        weights = list(parameters)
        self._buckets = fill_buckets(weights, self._bucket_bytes)
        size = max(places_of([spec_of(*item) for item in bucket])[1] for bucket in self._buckets)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=weights[0][1].device)
        return offer_of(weights, version=version, num_updates=num_updates, num_buckets=len(self._buckets))

    def send(self, number: int, num_receivers: int) -> CudaIpcBucket:
        from torch.multiprocessing.reductions import reduce_tensor

        assert self._buffer is not None, "open comes first"
        bucket = self._buckets[number]
        places, _ = places_of([spec_of(*item) for item in bucket])
        for (_, tensor), place in zip(bucket, places, strict=True):
            place.of(self._buffer).copy_(tensor.detach(), non_blocking=True)
        torch.cuda.synchronize()
        rebuild, arguments = reduce_tensor(self._buffer)
        return CudaIpcBucket(rebuild, arguments, places)

    def close(self) -> None:
        self._buckets, self._buffer = [], None


# --- process group


@dataclass(frozen=True)
class BroadcastBucket:
    """All tensors, received in a group with the trainer and the other replicas."""

    host: str
    port: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    timeout_s: float
    device: str
    rank: int = 0
    size: int = 0

    def for_receiver(self, number: int, num_receivers: int) -> Self:
        """Return the bucket of one of the receivers; the trainer is rank 0."""
        return replace(self, rank=number + 1, size=num_receivers + 1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        store = torch.distributed.TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s)
        )
        group = make_group(store, self.rank, self.size, self.device, self.timeout_s)
        for run in runs_of(self.specs, self.bucket_bytes):
            places, size = places_of(run)
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            broadcast(group, memory)
            for place in places:
                yield place.spec.name, place.of(memory)


class ProcessGroupSender:
    """Broadcasts all weights, a run of bytes at a time."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._weights: Parameters = []
        self._store: Any = None

    def open(self, parameters: Iterator[tuple[str, Tensor]], *, version: int, num_updates: int) -> WeightOffer:
        self._weights = list(parameters)
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
        )
        bucket = BroadcastBucket(
            host="127.0.0.1",
            port=self._store.port,
            specs=tuple(spec_of(*item) for item in self._weights),
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            device=self._weights[0][1].device.type,
        )
        return offer_of(self._weights, version=version, num_updates=num_updates, num_buckets=1, buckets=(bucket,))

    def send(self, number: int, num_receivers: int) -> None:  # type: ignore[override] - replicas have the bucket
        device = self._weights[0][1].device
        group = make_group(self._store, 0, num_receivers + 1, device.type, self._timeout_s)
        tensors = dict(self._weights)
        for run in runs_of([spec_of(*item) for item in self._weights], self._bucket_bytes):
            places, size = places_of(run)
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            for place in places:
                place.of(memory).copy_(tensors[place.spec.name].detach())
            broadcast(group, memory)

    def close(self) -> None:
        self._weights, self._store = [], None


def runs_of(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Split into runs of at most `bucket_bytes`; both ends do, so they agree."""
    runs: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not runs or size + spec.size_bytes > bucket_bytes:
            runs.append([])
            size = 0
        runs[-1].append(spec)
        size += spec.size_bytes
    return runs


def make_group(store: Any, rank: int, size: int, device: str, timeout_s: float) -> Any:
    """Join a group that is independent of the process's own, if it has one."""
    timeout = timedelta(seconds=timeout_s)
    if device == "cuda":
        options: Any = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


def broadcast(group: Any, memory: Tensor) -> None:
    """Send from rank 0 to all."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([memory], options).wait()
    if memory.is_cuda:
        torch.cuda.synchronize()
