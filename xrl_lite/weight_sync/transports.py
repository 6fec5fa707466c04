"""Ways for weights from the trainer to the replicas, behind one interface; which one fits is a matter of placement.

=============  =====================================  ==========================================================
name           where                                  how
=============  =====================================  ==========================================================
shared_memory  either side on the CPU, or several     one anonymous segment that the driver holds: written once by
               GPUs of which they share some          the trainer while replicas still generate, read by all
cuda_ipc       all on one GPU                         buckets in GPU memory that the replicas map
process_group  each replica on GPUs of its own        broadcast from the trainer to all their workers
               (nccl), or CPUs (gloo)
folder         anything else                          safetensors files
=============  =====================================  ==========================================================
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xrl_lite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from xrl_lite.algorithms.weights import WeightSender

SHARED_MEMORY_FOLDER = Path("/dev/shm")


class Transport(ABC):
    """One way. Lives in the driver; its sender goes to the training ranks."""

    name: str
    keeps: bool = False
    """What was sent stays readable until the next transfer, so that a replica that is started later can have it."""
    simultaneous: bool = False
    """Sending and receiving are one act: all replicas must be there."""

    @abstractmethod
    def sender(self) -> WeightSender:
        """Make the trainer's end; it is pickled."""

    def close(self) -> None:
        """Give everything back."""


class SharedMemoryTransport(Transport):
    """An anonymous segment: it has no name in any folder, and the kernel frees it with the last process that maps it.

    Other processes of this user reach it through this process's entry in /proc.
    """

    name = "shared_memory"
    keeps = True

    def __init__(self) -> None:
        self._fd = os.memfd_create("xrl-lite-weights")

    def sender(self) -> WeightSender:
        from xrl_lite.weight_sync.senders import SharedMemorySender  # loads torch

        return SharedMemorySender(f"/proc/{os.getpid()}/fd/{self._fd}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FolderTransport(Transport):
    """Safetensors files in a folder.

    Args:
        folder: Where; a temporary folder in shared memory when not given.
        bucket_bytes: Size of a file, about.
    """

    name = "folder"
    keeps = True

    def __init__(self, folder: Path | None, *, bucket_bytes: int) -> None:
        parent = SHARED_MEMORY_FOLDER if SHARED_MEMORY_FOLDER.is_dir() else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            parent = folder
        self._folder = tempfile.TemporaryDirectory(prefix="xrl-lite-weights-", dir=parent)
        self._bucket_bytes = bucket_bytes

    def sender(self) -> WeightSender:
        from xrl_lite.weight_sync.senders import FolderSender  # loads torch

        return FolderSender(self._folder.name, bucket_bytes=self._bucket_bytes)

    def close(self) -> None:
        self._folder.cleanup()


class CudaIpcTransport(Transport):
    """Buckets in the trainer's GPU memory, mapped by replicas on the same GPU.

    Args:
        bucket_bytes: Size of the buffer, at least that of the largest tensor.
    """

    name = "cuda_ipc"

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def sender(self) -> WeightSender:
        from xrl_lite.weight_sync.senders import CudaIpcSender  # loads torch

        return CudaIpcSender(bucket_bytes=self._bucket_bytes)


class ProcessGroupTransport(Transport):
    """A broadcast in a group that is made for each transfer, so that it always has the replicas that are there.

    Args:
        bucket_bytes: Bytes that are broadcast at once, about.
        timeout_s: Limit of each of them.
    """

    name = "process_group"
    simultaneous = True

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s

    def sender(self) -> WeightSender:
        from xrl_lite.weight_sync.senders import ProcessGroupSender  # loads torch

        return ProcessGroupSender(bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s)


NAMES = ("shared_memory", "cuda_ipc", "process_group", "folder")


def choose_transport(source: frozenset[str], targets: Sequence[frozenset[str]]) -> str:
    """Return the transport that fits where trainer and replicas are.

    Args:
        source: Devices of the first rank, which hands the weights out: "cpu", or unique ids of GPUs.
        targets: Devices of each replica.
    """
    devices = source.union(*targets)
    if "cpu" in devices:
        return "shared_memory"
    if len(devices) == 1:  # the memory of a GPU can be mapped where that GPU is visible, and nowhere else
        return "cuda_ipc"
    # nccl takes one member for each GPU
    return "process_group" if len(devices) == sum(map(len, [source, *targets])) else "shared_memory"


def make_transport(name: str, *, folder: str | None, bucket_bytes: int, timeout_s: float) -> Transport:
    """Make the transport of a name.

    Raises:
        ConfigError: there is none of this name.
    """
    match name:
        case "shared_memory":
            return SharedMemoryTransport()
        case "folder":
            return FolderTransport(Path(folder) if folder else None, bucket_bytes=bucket_bytes)
        case "cuda_ipc":
            return CudaIpcTransport(bucket_bytes=bucket_bytes)
        case "process_group":
            return ProcessGroupTransport(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        case _:
            raise ConfigError(
                f"Unknown weight transport {name!r}.{did_you_mean(name, NAMES)} There are: {', '.join(NAMES)}."
            )
