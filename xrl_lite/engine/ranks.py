# pyright: basic, reportPrivateImportUsage=false
"""The ranks of a training engine: how they find each other, and how it shows that one of them is lost.

::

    TrainingController --> engine/0 .. engine/n-1 (actors) --> meet in a file of the machine --> process group

Waits for    the other ranks, in every collective
Is woken by  the last of them, its death (the connection breaks), or `collective_timeout_s`
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from xrl_lite.actors import SharedValue
from xrl_lite.errors import RankError
from xrl_lite.log import get_logger
from xrl_lite.platforms import PlatformBase, PlatformRegistry, current_platform

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank a process is, and where it meets the others."""

    rank: int = 0
    """Counted from 0."""
    num_ranks: int = 1
    """All of them, on this machine."""
    meeting: Path | None = None
    """A file that does not exist yet, the same for all ranks and for no other run; None where nobody else comes."""
    timeout_s: float = 600.0
    """Longest wait for the other ranks in one collective."""


class Placed(Protocol):
    """Knows which rank it is."""

    place: RankPlace


def platform_of_rank() -> PlatformBase:
    """Return the platform of this machine, or ``cpu`` where this process was given none of its devices."""
    platform = current_platform()
    if platform.is_available():
        return platform
    logger.info("this rank was given no device of platform %r: it computes on the CPU", platform.vendor_name)
    return PlatformRegistry.get("cpu")


def join(place: RankPlace, platform: PlatformBase, *, always: bool = False) -> None:
    """Enter the process group of all ranks; wait until every one of them has come.

    Args:
        place: Which rank this is.
        platform: Tells the backend.
        always: Also where there is a single rank, for an engine that shards whatever the number.

    Raises:
        RankError: not all of them came in time.
    """
    if (place.num_ranks == 1 and not always) or dist.is_initialized():
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _loopback())  # all ranks are on this machine: nobody else shall reach them
    store = dist.HashStore() if place.meeting is None else dist.FileStore(str(place.meeting), place.num_ranks)
    timeout = timedelta(seconds=place.timeout_s)
    with _told_as_rank_error(place, "joining the others"):
        dist.init_process_group(
            platform.communication_backend_name,
            store=store,
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=timeout,
        )


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def rank_here() -> int:
    """Return the number of this rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks_here() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_objects(value: R) -> list[R]:
    """Return the values of all ranks, in their order. Any picklable value."""
    if num_ranks_here() == 1:
        return [value]
    gathered: list[Any] = [None] * num_ranks_here()
    dist.all_gather_object(gathered, value)
    return gathered


def copy_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks the values of the first: what begins at random is to begin alike, whatever the number of ranks."""
    if num_ranks_here() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def on_all_ranks(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Mark a method that the controller calls on every rank: arguments may come shared, the first rank answers.

    What breaks because another rank is gone or does not come is told as a `RankError` that names rank and method.
    """

    @wraps(method)
    def call(self: Placed, *args: P.args, **kwargs: P.kwargs) -> Any:
        opened = [each.get() if isinstance(each, SharedValue) else each for each in args]
        with _told_as_rank_error(self.place, method.__name__):
            result = method(self, *opened, **kwargs)  # type: ignore[arg-type]
        return result if self.place.rank == 0 else None

    return call


@contextmanager
def _told_as_rank_error(place: RankPlace, phase: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        if not any(map(_is_of_a_collective, _causes(error))):
            raise
        raise RankError(
            f"Rank {place.rank} of {place.num_ranks} lost the others in {phase} (it waits up to "
            f"{place.timeout_s:g} s for them, engine.collective_timeout_s): {error}"
        ) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    # gloo raises plain RuntimeErrors; the place in its sources is part of their text
    return isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "process group" in str(error).lower())


def seed_device(platform: PlatformBase, seed: int) -> None:
    """Seed the random numbers of this rank, those of its device too."""
    torch.manual_seed(seed)
    platform.manual_seed(seed)
