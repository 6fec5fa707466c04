# pyright: basic, reportPrivateImportUsage=false
"""Both ends of each transport: the sender in the training rank, the bucket in the replica. Loads torch.

Weights come one by one, and where they are spread over ranks each is gathered as it comes. Shared memory and folder
take them in this way, so the first rank holds no more than it has to; the other two keep them, since every bucket of
theirs is made while replicas take it.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

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
_MAX_WRITE_BYTES = 1 << 30
_OUTCOME = "outcome"
_COMPLETE = "complete"

Parameters = list[tuple[str, Tensor]]
T = TypeVar("T")


class Inventory:
    """What a transfer brings, noted as it comes.

    Args:
        version: Policy version.
        num_updates: Optimizer updates made so far.
        adapter: Settings of the adapter that is sent, if it is one.
    """

    def __init__(self, *, version: int, num_updates: int, adapter: Mapping[str, Any] | None) -> None:
        self._of_all: dict[str, Any] = {"version": version, "num_updates": num_updates, "adapter": adapter}
        self.specs: list[TensorSpec] = []
        self._checksums: dict[str, str] = {}

    def note(self, name: str, tensor: Tensor) -> TensorSpec:
        """Add a tensor."""
        spec = spec_of(name, tensor)
        self.specs.append(spec)
        self._checksums[name] = tensor_checksum(tensor)
        return spec

    def offer(self, *, num_buckets: int, buckets: tuple[WeightBucket, ...] = ()) -> WeightOffer:
        """Describe all of it."""
        manifest = WeightManifest(tensors=tuple(self.specs), **self._of_all)
        return WeightOffer(manifest=manifest, checksums=self._checksums, num_buckets=num_buckets, buckets=buckets)


def in_runs(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield runs of at most `max_bytes`, one at a time; a larger item is a run of its own."""
    run: list[T] = []
    size = 0
    for item in items:
        if run and size + size_of(item) > max_bytes:
            yield run
            run, size = [], 0
        run.append(item)
        size += size_of(item)
    if run:
        yield run


def in_buckets(parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Parameters]:
    """Yield runs of weights of at most `bucket_bytes`."""
    return in_runs(parameters, lambda parameter: parameter[1].nbytes, bucket_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a run of bytes."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        """Where the next tensor may lie."""
        return self.offset + -(-self.spec.size_bytes // _ALIGN) * _ALIGN

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
        end = places[-1].end
    return places, max(end, _ALIGN)


# --- shared memory


@dataclass(frozen=True)
class SharedMemoryBucket:
    """All tensors, in a segment that the driver holds."""

    path: str
    inode: int
    size_bytes: int
    places: list[Place]

    def tensors(self, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        whole = map_readable(self.path, self.inode, self.size_bytes)
        for place in self.places:
            yield place.spec.name, place.of(whole)


@lru_cache(maxsize=1)
def map_readable(path: str, inode: int, size_bytes: int) -> Tensor:
    """Map a segment, (N,) uint8; whoever writes to it dies.

    The mapping is kept from one transfer to the next: to make it takes as long as to copy what is in it.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


class SharedMemorySender:
    """Writes weights into the driver's segment, which keeps its pages from one transfer to the next."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = 0
        self._places: list[Place] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(
        self,
        parameters: Iterator[tuple[str, Tensor]],
        *,
        version: int,
        num_updates: int,
        adapter: Mapping[str, Any] | None = None,
    ) -> WeightOffer:
        inventory = Inventory(version=version, num_updates=num_updates, adapter=adapter)
        self._places, end = [], 0
        fd = os.open(self._path, os.O_RDWR)
        try:
            for name, tensor in parameters:
                place = Place(inventory.note(name, tensor), end)
                self._write(fd, place, tensor.detach())
                self._places.append(place)
                end = place.end
            if end != len(self._memory):
                self._map(fd, max(end, _ALIGN))
        finally:
            os.close(fd)
        return inventory.offer(num_buckets=1)

    def send(self, number: int, num_receivers: int) -> SharedMemoryBucket:
        return SharedMemoryBucket(self._path, self._inode, len(self._memory), self._places)

    def interrupt(self) -> None:
        """Waits for nobody."""

    def close(self) -> None:
        """Keep what was written: a replica that is started later reads it."""

    def _write(self, fd: int, place: Place, tensor: Tensor) -> None:
        if place.end <= len(self._memory):
            place.of(self._memory).copy_(tensor)
            return
        # how much there will be is not known yet; fresh memory is filled twice as fast in this way than by page faults
        rest = tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(rest):
            done += os.pwrite(fd, rest[done : done + _MAX_WRITE_BYTES], place.offset + done)

    def _map(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)
        self._inode = os.fstat(fd).st_ino
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._memory = torch.frombuffer(mmap.mmap(fd, size_bytes, flags=flags), dtype=torch.uint8)


# --- folder


@dataclass(frozen=True)
class FolderBucket:
    """Tensors in one file."""

    path: str

    def tensors(self, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
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
        self._files: list[str] = []

    def open(
        self,
        parameters: Iterator[tuple[str, Tensor]],
        *,
        version: int,
        num_updates: int,
        adapter: Mapping[str, Any] | None = None,
    ) -> WeightOffer:
        from safetensors.torch import save_file

        for old in self._folder.glob("*.safetensors"):
            old.unlink()
        inventory = Inventory(version=version, num_updates=num_updates, adapter=adapter)
        self._files = []
        for number, bucket in enumerate(in_buckets(parameters, self._bucket_bytes)):
            for name, tensor in bucket:
                inventory.note(name, tensor)
            path = self._folder / f"version_{version}_{number}.safetensors"
            save_file({name: tensor.detach().contiguous().cpu() for name, tensor in bucket}, path)
            self._files.append(str(path))
        return inventory.offer(num_buckets=len(self._files))

    def send(self, number: int, num_receivers: int) -> FolderBucket:
        return FolderBucket(self._files[number])

    def interrupt(self) -> None:
        """Waits for nobody."""

    def close(self) -> None:
        """Keep what was written: a replica that is started later reads it."""


# --- CUDA IPC


@dataclass(frozen=True)
class CudaIpcBucket:
    """Tensors in a buffer of another process on the same GPU."""

    rebuild: Any
    arguments: tuple[Any, ...]
    places: list[Place]

    def tensors(self, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
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

    def open(
        self,
        parameters: Iterator[tuple[str, Tensor]],
        *,
        version: int,
        num_updates: int,
        adapter: Mapping[str, Any] | None = None,
    ) -> WeightOffer:
        inventory = Inventory(version=version, num_updates=num_updates, adapter=adapter)
        self._buckets = list(in_buckets(_noted(parameters, inventory), self._bucket_bytes))
        size = max(places_of([spec_of(*item) for item in bucket])[1] for bucket in self._buckets)
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        return inventory.offer(num_buckets=len(self._buckets))

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

    def interrupt(self) -> None:
        """Waits for nobody."""

    def close(self) -> None:
        self._buckets, self._buffer = [], None
        torch.cuda.empty_cache()  # the replicas are about to take memory of the same GPU


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
    """Of the replica's first worker; the trainer is rank 0."""
    size: int = 0

    def for_replica(self, num_before: int, num_receivers: int) -> Self:
        """Return the bucket of a replica whose workers come after `num_before` others."""
        return replace(self, rank=num_before + 1, size=num_receivers + 1)

    def connect(self) -> Any:
        """Return a connection to the store in which the group meets."""
        timeout = timedelta(seconds=self.timeout_s)
        return torch.distributed.TCPStore(self.host, self.port, is_master=False, timeout=timeout)

    def tensors(self, worker: int = 0) -> Iterator[tuple[str, Tensor]]:
        store = self.connect()
        meet(store, self.size)
        group = make_group(store, self.rank + worker, self.size, self.device, self.timeout_s)
        for run in _runs_of(self.specs, self.bucket_bytes):
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
        self._weights: dict[str, Tensor] = {}
        self._store: Any = None

    def open(
        self,
        parameters: Iterator[tuple[str, Tensor]],
        *,
        version: int,
        num_updates: int,
        adapter: Mapping[str, Any] | None = None,
    ) -> WeightOffer:
        inventory = Inventory(version=version, num_updates=num_updates, adapter=adapter)
        self._weights = dict(_noted(parameters, inventory))
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
        )
        self._bucket = BroadcastBucket(
            host="127.0.0.1",
            port=self._store.port,
            specs=tuple(inventory.specs),
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        return inventory.offer(num_buckets=1, buckets=(self._bucket,))

    def send(self, number: int, num_receivers: int) -> BroadcastBucket:
        device = self._bucket.device
        meet(self._store, num_receivers + 1)
        group = make_group(self._store, 0, num_receivers + 1, device, self._timeout_s)
        for run in _runs_of(self._bucket.specs, self._bucket_bytes):
            places, size = places_of(run)
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            for place in places:
                place.of(memory).copy_(self._weights[place.spec.name].detach())
            broadcast(group, memory)
        return self._bucket

    def interrupt(self) -> None:
        if self._store is not None:
            # a connection of its own: that of `send` is taken while it waits
            call_off(self._bucket.connect())

    def close(self) -> None:
        self._weights, self._store = {}, None


def _noted(parameters: Iterable[tuple[str, Tensor]], inventory: Inventory) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in parameters:
        inventory.note(name, tensor)
        yield name, tensor


def _runs_of(specs: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[list[TensorSpec]]:
    """Split into runs; both ends do, so they agree."""
    return in_runs(specs, lambda spec: spec.size_bytes, bucket_bytes)


def meet(store: Any, size: int) -> None:
    """Wait until all members of a group have come, so that whoever forms it waits for nobody who is gone.

    Raises:
        RuntimeError: the meeting was called off, or the store's time-out is over.
    """
    if store.add("num_present", 1) == size:
        store.compare_set(_OUTCOME, "", _COMPLETE)
    store.wait([_OUTCOME])
    outcome = store.get(_OUTCOME).decode()
    if outcome != _COMPLETE:
        raise RuntimeError(outcome)


def call_off(store: Any) -> None:
    """Let everybody who waits in `meet` go; nothing happens where all have come already."""
    store.compare_set(_OUTCOME, "", "a receiver failed before all had come")


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
