"""XTuner's way of starting workers, on `ActorSystem`: with or without a placement group, one worker in each bundle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xrl_lite.actors.default import default_system
from xrl_lite.actors.handle import ActorHandle, end_together
from xrl_lite.actors.placement import PlacementGroup
from xrl_lite.errors import ResourceError

if TYPE_CHECKING:
    from xrl_lite.actors.resources import AcceleratorResourcesConfig, CPUResourcesConfig
    from xrl_lite.actors.system import ActorSystem


class CPUActorLauncher:
    """Starts actors with or without a placement group.

    Differs from XTuner: the classes are plain classes, so there is no `to_actor_class` and no `get_pg_options`; a
    reservation is made or refused at once, so there is nothing to wait for; and what cannot be is a `ValueError` or a
    `ResourceError` instead of an assertion.
    """

    @staticmethod
    def build_placement_group(cpu_config: CPUResourcesConfig, *, system: ActorSystem | None = None) -> PlacementGroup:
        """Reserve one bundle for each worker.

        Raises:
            ResourceError: not that much is left.
        """
        return (system or default_system()).reserve(cpu_config.bundles)

    @staticmethod
    def build_actor(
        worker_cls: Callable[..., Any],
        *args: Any,
        pg: PlacementGroup | None = None,
        bundle_idx: int = 0,
        actor_num_cpus: float | None = None,
        actor_memory: int | None = None,
        system: ActorSystem | None = None,
        **kwargs: Any,
    ) -> ActorHandle:
        """Start one actor of `worker_cls`, constructed with `args` and `kwargs`.

        Args:
            worker_cls: The class.
            *args: Arguments of its constructor.
            pg: Where it is placed; without it, its resources are claimed from the system.
            bundle_idx: Which bundle of `pg`.
            actor_num_cpus: CPUs; by default all that the bundle has, or 1.
            actor_memory: Bytes, also a ceiling; by default all that the bundle has, or none.
            system: By default that of `pg`, or the default system.
            **kwargs: Keyword arguments of its constructor.

        Raises:
            ValueError: there is no such bundle.
            ResourceError: the bundle, or the system, has not that much left.
        """
        if pg is not None and not 0 <= bundle_idx < len(pg):
            raise ValueError(f"bundle_idx must be from 0 to {len(pg) - 1}, got {bundle_idx}: {pg.name} has no other.")
        place = pg.system if pg is not None else system or default_system()
        return place.spawn(
            worker_cls,
            *args,
            kwargs=kwargs,
            bundle=pg[bundle_idx] if pg is not None else None,
            num_cpus=actor_num_cpus,
            memory_bytes=actor_memory or None,
        )

    @classmethod
    def build_actors(
        cls,
        worker_cls: Callable[..., Any],
        *args: Any,
        pg: PlacementGroup,
        start_bundle_idx: int = 0,
        num_workers: int = 1,
        actor_num_cpus_per_worker: float | None = None,
        actor_memory_per_worker: int | None = None,
        **kwargs: Any,
    ) -> list[ActorHandle]:
        """Start one actor in each of `num_workers` bundles in a row, all or none. Arguments as for `build_actor`."""
        workers: list[ActorHandle] = []
        try:
            for index in range(start_bundle_idx, start_bundle_idx + num_workers):
                worker = cls.build_actor(
                    worker_cls,
                    *args,
                    pg=pg,
                    bundle_idx=index,
                    actor_num_cpus=actor_num_cpus_per_worker,
                    actor_memory=actor_memory_per_worker,
                    **kwargs,
                )
                workers.append(worker)
        except BaseException:
            end_together(workers)
            raise
        return workers


class AutoCPUWorkers(CPUActorLauncher):
    """Starts workers of one class, which are constructed with ``(config, num_cpus=<CPUs of the bundle>)``.

    `num_cpus` is left out where the constructor does not take it.
    """

    @classmethod
    def from_config(
        cls,
        worker_cls: Callable[..., Any],
        config: object,
        cpu_config: CPUResourcesConfig,
        *,
        system: ActorSystem | None = None,
    ) -> tuple[list[ActorHandle], PlacementGroup]:
        """Reserve a group and start a worker in each of its bundles.

        Raises:
            ResourceError: not that much is left; then nothing is reserved and nothing started.
        """
        group = cls.build_placement_group(cpu_config, system=system)
        try:
            return cls.from_placement_group(worker_cls, config, group), group
        except BaseException:
            group.release()
            raise

    @classmethod
    def from_placement_group(
        cls,
        worker_cls: Callable[..., Any],
        config: object,
        pg: PlacementGroup,
        num_workers: int = -1,
        start_bundle_idx: int | None = None,
    ) -> list[ActorHandle]:
        """Start a worker in each of `num_workers` bundles in a row.

        Args:
            worker_cls: The class.
            config: First argument of its constructor.
            pg: The group.
            num_workers: How many; 0 or less for all from the first one on.
            start_bundle_idx: The first bundle; by default the first where so many in a row hold no living actor.

        Raises:
            ValueError: `start_bundle_idx` is negative, or there is no bundle to start in.
            ResourceError: there are not so many bundles left.
        """
        if start_bundle_idx is not None and start_bundle_idx < 0:
            raise ValueError(f"start_bundle_idx must be non-negative. Got {start_bundle_idx}.")
        with pg.placing:  # choosing and placing are one step, also for another thread
            start = pg.first_free(max(1, num_workers)) if start_bundle_idx is None else start_bundle_idx
            wanted = num_workers if num_workers > 0 else len(pg) - start
            if wanted < 1:
                raise ValueError(f"At least one worker must be created, but {pg.name} has no bundle left.")
            if start + wanted > len(pg):
                taken = ", ".join(str(index) for index in range(len(pg)) if pg.is_taken(index)) or "none"
                raise ResourceError(
                    f"{pg.name} has not enough remaining bundles for {wanted} workers in a row: it has {len(pg)}, "
                    f"and those with a living actor are {taken}. Stop some, or reserve a larger group."
                )
            return _start_each(cls, worker_cls, config, pg, range(start, start + wanted))


class AutoAcceleratorWorkers:
    """Reserves accelerators for a group of workers."""

    @staticmethod
    def build_placement_group(
        resources_config: AcceleratorResourcesConfig, name: str = "train", *, system: ActorSystem | None = None
    ) -> PlacementGroup:
        """Reserve one bundle for each worker; a living group of the same name is returned as it is.

        Raises:
            ResourceError: not that much is left.
        """
        place = system or default_system()
        existing = place.placement_groups.get(name)
        return existing or place.reserve(resources_config.bundles, name=name, kind=resources_config.accelerator)


def _start_each(
    launcher: type[CPUActorLauncher],
    worker_cls: Callable[..., Any],
    config: object,
    group: PlacementGroup,
    indices: Sequence[int],
) -> list[ActorHandle]:
    told = _takes_num_cpus(worker_cls)
    workers: list[ActorHandle] = []
    try:
        for index in indices:
            more: dict[str, Any] = {"num_cpus": group[index].spec["CPU"]} if told else {}
            workers.append(launcher.build_actor(worker_cls, config, pg=group, bundle_idx=index, **more))
    except BaseException:
        end_together(workers)
        raise
    return workers


def _takes_num_cpus(worker_cls: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(worker_cls).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "num_cpus" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
