"""How many CPU workers a component wants, and whether all of them together fit beside the trainer.

A component registers what it will start while it is built. If the sum does not fit, that is an error at once, with a
list of who asked for what, rather than workers that wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, Self, get_args, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, field_validator

from xrl_lite.actors.ledger import Resources
from xrl_lite.actors.machine import MILLI, milli_cpus, usable_memory_bytes, usable_milli_cpus
from xrl_lite.errors import ResourceError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

GIB = 1024**3
PackStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class _ResourcesConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)


class CPUResourcesConfig(_ResourcesConfig):
    """CPU workers of one component, outside what the accelerator workers hold."""

    num_workers: Annotated[int, Field(ge=1)] = 1
    """How many workers."""

    num_cpus_per_worker: Annotated[float, Field(gt=0)] = 1
    """CPUs of each; may be a fraction."""

    cpu_memory_per_worker: Annotated[int, Field(gt=0)] = GIB
    """Bytes of memory of each, with what it starts: programs of a sandbox count."""

    pg_pack_strategy: str = "SPREAD"
    """Kept for configs that come from a cluster: on one machine all strategies are the same."""

    @field_validator("pg_pack_strategy")
    @classmethod
    def _check_strategy(cls, value: str) -> str:
        known = get_args(PackStrategy)
        if value not in known:
            raise ValueError(f"pg_pack_strategy must be one of {', '.join(known)}, got {value!r}.")
        return value

    @property
    def resources(self) -> Resources:
        """What each worker gets."""
        return Resources(num_cpus=self.num_cpus_per_worker, memory_bytes=self.cpu_memory_per_worker)

    @property
    def bundles(self) -> list[Resources]:
        """One bundle for each worker, for `ActorSystem.reserve`."""
        return [self.resources] * self.num_workers


class AcceleratorResourcesConfig(_ResourcesConfig):
    """Workers that hold accelerators, and the CPUs and memory that go with them."""

    accelerator: Literal["GPU", "NPU"] = "GPU"
    """Kind of accelerator."""

    num_workers: Annotated[int, Field(ge=1)]
    """How many workers."""

    num_cpus_per_worker: Annotated[float, Field(gt=0)] = 12
    """CPUs of each; may be a fraction."""

    cpu_memory_per_worker: Annotated[int, Field(gt=0)] = 16 * GIB
    """Bytes of memory of each."""

    num_accelerators_per_worker: Annotated[int, Field(ge=1)] = 1
    """Accelerators of each."""

    num_accelerators_per_node: Annotated[int, Field(ge=1)] = 8
    """Kept for configs that come from a cluster: what this machine has is looked up."""

    pg_pack_strategy: PackStrategy = "PACK"
    """Kept for configs that come from a cluster: on one machine all strategies are the same."""

    @classmethod
    def from_total(
        cls,
        *,
        num_workers: int,
        total_cpus: float,
        total_cpu_memory: int,
        total_accelerators: int | None = None,
        accelerator: Literal["GPU", "NPU"] = "GPU",
        pg_pack_strategy: PackStrategy = "PACK",
    ) -> Self:
        """Return the config that divides totals among `num_workers`. `total_accelerators` is by default one for each.

        CPUs are divided in thousandths and rounded down, so that the parts fit into the whole.

        Raises:
            ValueError: the accelerators cannot be divided evenly.
        """
        total = num_workers if total_accelerators is None else total_accelerators
        if num_workers < 1 or total % num_workers:
            raise ValueError(f"{total} accelerators cannot be divided evenly among {num_workers} workers.")
        return cls(
            accelerator=accelerator,
            num_workers=num_workers,
            num_cpus_per_worker=milli_cpus(total_cpus) // num_workers / MILLI,
            cpu_memory_per_worker=total_cpu_memory // num_workers,
            num_accelerators_per_worker=total // num_workers,
            pg_pack_strategy=pg_pack_strategy,
        )

    @property
    def resources(self) -> Resources:
        """What each worker gets."""
        return Resources(
            num_cpus=self.num_cpus_per_worker,
            memory_bytes=self.cpu_memory_per_worker,
            num_accelerators=self.num_accelerators_per_worker,
        )

    @property
    def bundles(self) -> list[Resources]:
        """One bundle for each worker, for `ActorSystem.reserve`."""
        return [self.resources] * self.num_workers

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """What each worker holds."""
        bundle = {"CPU": self.num_cpus_per_worker, "memory": float(self.cpu_memory_per_worker)}
        return [{**bundle, self.accelerator: float(self.num_accelerators_per_worker)} for _ in range(self.num_workers)]


@runtime_checkable
class HasBundles(Protocol):
    """A set of reserved resources: one mapping per worker, keys ``CPU`` and ``memory`` (bytes)."""

    @property
    def bundle_specs(self) -> Sequence[Any]: ...


class HasCapacity(Protocol):
    """What an `ActorSystem` tells about its size."""

    @property
    def num_cpus(self) -> float: ...

    @property
    def memory_bytes(self) -> int: ...


@runtime_checkable
class HasAvailability(Protocol):
    """What an `ActorSystem` tells about what nobody holds."""

    @property
    def num_cpus_free(self) -> float: ...

    @property
    def memory_bytes_free(self) -> int: ...


class CPUResourceManager:
    """Keeps the CPU pools that components have registered, and refuses those that do not fit.

    What counts is the capacity, not what is free at the moment: a pool whose workers have started is not counted twice.

    Args:
        accelerator_placement_groups: What accelerator workers hold already: one object with `bundle_specs`, or several.
        capacity: The system in which the workers will run; by default what this process may use of the machine.
    """

    def __init__(
        self,
        accelerator_placement_groups: HasBundles | Sequence[HasBundles] | None = None,
        *,
        capacity: HasCapacity | None = None,
    ) -> None:
        groups = accelerator_placement_groups
        if groups is None:
            self.accelerator_placement_groups: tuple[HasBundles, ...] = ()
        elif isinstance(groups, HasBundles):
            self.accelerator_placement_groups = (groups,)
        else:
            self.accelerator_placement_groups = tuple(groups)
        self.pools: dict[str, CPUResourcesConfig] = {}
        self._capacity = capacity
        self._registration_counts: dict[str, int] = {}

    def get(self, name: str) -> CPUResourcesConfig:
        """Return the pool called `name`.

        Raises:
            KeyError: there is none.
        """
        if name not in self.pools:
            raise KeyError(f"Unknown external CPU resource pool {name!r}. Available pools: {list(self.pools)}")
        return self.pools[name]

    def register(self, name: str, config: CPUResourcesConfig) -> None:
        """Add a pool. A name that is taken becomes ``name#2``, ``name#3`` and so on.

        Raises:
            ResourceError: it does not fit beside the others; then it is not added.
        """
        unique = self._unique_name(name)
        self.pools[unique] = config
        try:
            self.validate_or_raise()
        except BaseException:
            del self.pools[unique]
            raise
        self._registration_counts[name] = self._registration_counts.get(name, 0) + 1

    def unregister(self, name: str) -> None:
        """Remove a pool, so that others may use what it held. `name` as in `pools`.

        Raises:
            KeyError: there is none.
        """
        self.get(name)
        del self.pools[name]

    def validate_or_raise(self) -> None:
        """Check that all pools together fit. Changes nothing.

        Raises:
            ResourceError: they do not; the message lists every shortage and every pool.
        """
        summary = self._build_resource_summary()
        problems = self._problems(summary)
        if not problems:
            return
        pools = [
            f"  {name}: {pool.num_workers} workers x {pool.num_cpus_per_worker:g} CPUs, "
            f"{pool.cpu_memory_per_worker / GIB:.2f} GB"
            for name, pool in self.pools.items()
        ]
        raise ResourceError(
            "\n".join(
                [
                    "Insufficient PG-external Ray resources for registered external CPU pools:",
                    *(f"  {problem}" for problem in problems),
                    "Registered pools:",
                    *pools,
                    "Lower num_workers or num_cpus_per_worker, or give the system more: ActorSystem(num_cpus=...).",
                ]
            )
        )

    def log_initial_snapshot(self) -> None:
        """Log what the machine has before anything is registered."""
        self._log_summary("CPU resources before components are built")

    def log_registered_summary(self) -> None:
        """Log what is left after everything has been registered."""
        self._log_summary("CPU resources after components were built")

    def _unique_name(self, name: str) -> str:
        if name not in self.pools and name not in self._registration_counts:
            return name
        number = 2
        while f"{name}#{number}" in self.pools:
            number += 1
        return f"{name}#{number}" if name in self.pools else name

    def _problems(self, summary: dict[str, float]) -> list[str]:
        problems: list[str] = []
        if milli_cpus(summary["registered_external_cpus"]) > milli_cpus(summary["external_capacity_cpus"]):
            problems.append(_shortage("CPU", summary, "cpus", 1, ""))
        wanted_memory = summary["registered_external_memory"]
        if wanted_memory > 0 and wanted_memory > summary["external_capacity_memory"]:
            problems.append(_shortage("memory", summary, "memory", GIB, " GB"))
        largest = summary["max_node_external_cpus"]
        problems += [
            f"pool {name!r} requests {pool.num_cpus_per_worker:g} CPUs per worker, "
            f"but the largest node has only {largest:g}."
            for name, pool in self.pools.items()
            if milli_cpus(pool.num_cpus_per_worker) > milli_cpus(largest)
        ]
        return problems

    def _build_resource_summary(self) -> dict[str, float]:
        cpus, memory = self._totals()
        free_cpus, free_memory = self._free()
        bundles = [bundle for group in self.accelerator_placement_groups for bundle in group.bundle_specs]
        accelerator_cpus = sum(float(bundle.get("CPU", 0)) for bundle in bundles)
        accelerator_memory = sum(float(bundle.get("memory", 0)) for bundle in bundles)
        registered_cpus = sum(pool.num_workers * milli_cpus(pool.num_cpus_per_worker) for pool in self.pools.values())
        registered_memory = float(sum(pool.num_workers * pool.cpu_memory_per_worker for pool in self.pools.values()))
        external_cpus, external_memory = cpus - accelerator_cpus, memory - accelerator_memory
        return {
            "cluster_cpus": cpus,
            "available_cpus": free_cpus,
            "accelerator_cpus": accelerator_cpus,
            "external_capacity_cpus": external_cpus,
            "ray_external_in_use_cpus": max(0.0, external_cpus - free_cpus),
            "registered_external_cpus": registered_cpus / MILLI,
            "remaining_after_registered_cpus": external_cpus - registered_cpus / MILLI,
            "cluster_memory": memory,
            "available_memory": free_memory,
            "accelerator_memory": accelerator_memory,
            "external_capacity_memory": external_memory,
            "ray_external_in_use_memory": max(0.0, external_memory - free_memory),
            "registered_external_memory": registered_memory,
            "remaining_after_registered_memory": external_memory - registered_memory,
            "max_node_external_cpus": max(0.0, external_cpus),
        }

    def _totals(self) -> tuple[float, float]:
        if self._capacity is not None:
            return self._capacity.num_cpus, float(self._capacity.memory_bytes)
        return usable_milli_cpus() / MILLI, float(usable_memory_bytes())

    def _free(self) -> tuple[float, float]:
        if isinstance(self._capacity, HasAvailability):
            return self._capacity.num_cpus_free, float(self._capacity.memory_bytes_free)
        return self._totals()

    def _log_summary(self, title: str) -> None:
        summary = self._build_resource_summary()
        rows = [
            (item, f"{summary[f'{key}_cpus']:g}", f"{summary[f'{key}_memory'] / GIB:.2f}")
            for item, key in (
                ("total", "cluster"),
                ("held by accelerator workers", "accelerator"),
                ("held by others", "ray_external_in_use"),
                ("registered", "registered_external"),
                ("left", "remaining_after_registered"),
            )
        ]
        table = "\n".join(f"  {item:<28} {cpus:>8} CPUs {memory:>10} GB" for item, cpus, memory in rows)
        logger.info("%s:\n%s", title, table)


def _shortage(what: str, summary: dict[str, float], suffix: str, unit: int, name: str) -> str:
    requested, available, total, reserved = (
        f"{summary[f'{key}_{suffix}'] / unit:.2f}".rstrip("0").rstrip(".") + name
        for key in ("registered_external", "external_capacity", "cluster", "accelerator")
    )
    return (
        f"{what} requested={requested}, available_outside_accelerator_pg={available}, "
        f"cluster_total={total}, accelerator_pg_reserved={reserved}"
    )


_lock = threading.Lock()
_manager: list[CPUResourceManager] = []


def set_cpu_resource_manager(manager: CPUResourceManager | None) -> None:
    """Make `manager` the one of this process; None removes it."""
    with _lock:
        _manager[:] = [manager] if manager is not None else []


def get_cpu_resource_manager() -> CPUResourceManager | None:
    """Return the manager of this process. Children have none."""
    return _manager[0] if _manager else None


def clear_cpu_resource_manager() -> None:
    """Remove the manager of this process."""
    set_cpu_resource_manager(None)


def register_cpu_resources(name: str, config: CPUResourcesConfig) -> str:
    """Register a pool with the manager of this process and return the name under which it is kept.

    Raises:
        ValueError: there is no manager.
        ResourceError: the pool does not fit.
    """
    manager = get_cpu_resource_manager()
    if manager is None:
        raise ValueError(
            f"{name} sets cpu_resources, but CPUResourceManager is not initialized. Initialize it explicitly before "
            f"building components with CPU workers: set_cpu_resource_manager(CPUResourceManager(capacity=system))."
        )
    before = set(manager.pools)
    manager.register(name, config)
    return next(iter(manager.pools.keys() - before))


def unregister_cpu_resources(name: str) -> None:
    """Give back a pool, if there is a manager and it knows the pool. `name` as `register_cpu_resources` returned it."""
    manager = get_cpu_resource_manager()
    if manager is not None and name in manager.pools:
        manager.unregister(name)
