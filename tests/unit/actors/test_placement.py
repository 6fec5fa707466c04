"""Placement groups and XTuner's ways of starting workers in them; the first two cases of its ``test_cpu_pg``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from xrl_lite.actors import (
    AcceleratorResourcesConfig,
    ActorHandle,
    ActorSystem,
    AutoAcceleratorWorkers,
    AutoCPUWorkers,
    CPUActorLauncher,
    CPUResourceManager,
    CPUResourcesConfig,
    Resources,
)
from xrl_lite.errors import ResourceError

GIB = 1 << 30
FOUR = CPUResourcesConfig(num_workers=4, num_cpus_per_worker=1, cpu_memory_per_worker=GIB)
TWO = CPUResourcesConfig(num_workers=2, num_cpus_per_worker=1, cpu_memory_per_worker=GIB)


class NaiveCPUWorker:
    def __init__(self, config: Any, num_cpus: float = 1) -> None:
        self.config = config
        self.num_cpus = num_cpus

    def told(self) -> tuple[Any, float]:
        return self.config, self.num_cpus


class Receiver:
    """Takes only a config: nobody tells it its CPUs."""

    def __init__(self, config: str) -> None:
        self.config = config
        self.messages: list[str] = []

    def receive(self, message: str) -> str:
        self.messages.append(message)
        return "success"

    def received(self) -> list[str]:
        return self.messages


class Sender:
    def __init__(self, config: ActorHandle) -> None:
        self.receiver: Any = config

    async def send(self, messages: list[str]) -> list[str]:
        return [await self.receiver.receive.remote(message) for message in messages]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=16, memory_bytes=64 * GIB, backend="inline", accelerators="0123") as system:
        yield system


async def test_workers_from_a_config(system: ActorSystem) -> None:
    workers, group = AutoCPUWorkers.from_config(NaiveCPUWorker, {"a": 1}, FOUR, system=system)
    assert len(workers) == 4
    assert group.bundle_specs == [{"CPU": 1.0, "memory": float(GIB)}] * 4
    assert await asyncio.gather(*(worker.told.remote() for worker in workers)) == [({"a": 1}, 1.0)] * 4
    assert system.num_cpus_free == 12


async def test_two_kinds_of_workers_in_one_group(system: ActorSystem) -> None:
    group = CPUActorLauncher.build_placement_group(TWO, system=system)
    (receiver,) = AutoCPUWorkers.from_placement_group(Receiver, "receiver", group, num_workers=1)
    (sender,) = AutoCPUWorkers.from_placement_group(Sender, receiver, group, num_workers=1)
    assert system.ledger.actors_in(group[0].name) == [receiver.name]
    assert system.ledger.actors_in(group[1].name) == [sender.name]
    assert await sender.send.remote(["a", "b", "c"]) == ["success"] * 3
    assert await receiver.received.remote() == ["a", "b", "c"]


async def test_a_bundle_is_free_again_when_its_actor_has_ended(system: ActorSystem) -> None:
    workers, group = AutoCPUWorkers.from_config(NaiveCPUWorker, None, TWO, system=system)
    with pytest.raises(ResourceError, match=r"not enough remaining bundles for 1 workers.*living actor are 0, 1"):
        AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group, num_workers=1)
    await workers[1].stop()
    (again,) = AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group, num_workers=1)
    assert system.ledger.actors_in(group[1].name) == [again.name]


async def test_workers_stand_in_bundles_in_a_row_from_where_they_are_told(system: ActorSystem) -> None:
    group = system.reserve(FOUR.bundles)
    AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group, num_workers=1, start_bundle_idx=1)
    rest = AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group, num_workers=2)
    assert [group.is_taken(index) for index in range(4)] == [False, True, True, True]
    assert len(rest) == 2
    assert len(AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group, num_workers=1)) == 1
    with pytest.raises(ValueError, match="At least one worker must be created"):
        AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group)
    with pytest.raises(ValueError, match="must be non-negative"):
        AutoCPUWorkers.from_placement_group(NaiveCPUWorker, None, group, start_bundle_idx=-1)


async def test_all_or_none_when_a_worker_does_not_fit(system: ActorSystem) -> None:
    group = system.reserve([Resources(num_cpus=2), Resources(num_cpus=1)])
    with pytest.raises(ResourceError, match="its bundle has not free"):
        CPUActorLauncher.build_actors(NaiveCPUWorker, None, pg=group, num_workers=2, actor_num_cpus_per_worker=2)
    assert not group.is_taken(0)
    with pytest.raises(ValueError, match="bundle_idx must be from 0 to 1, got 2"):
        CPUActorLauncher.build_actor(NaiveCPUWorker, None, pg=group, bundle_idx=2)


async def test_from_config_leaves_nothing_behind_when_it_fails(system: ActorSystem) -> None:
    with pytest.raises(ResourceError, match="20 x "):
        AutoCPUWorkers.from_config(NaiveCPUWorker, None, CPUResourcesConfig(num_workers=20), system=system)
    assert system.num_cpus_free == 16
    assert system.placement_groups == {}


async def test_without_a_group_the_system_gives(system: ActorSystem) -> None:
    handle = CPUActorLauncher.build_actor(NaiveCPUWorker, "c", actor_num_cpus=2.5, system=system)
    assert system.num_cpus_free == 13.5
    await handle.stop()
    assert system.num_cpus_free == 16


async def test_a_group_is_given_back_as_a_whole(system: ActorSystem) -> None:
    with system.reserve(FOUR.bundles, name="judgers") as group:
        worker = system.spawn(NaiveCPUWorker, None, bundle=group[0])
        assert system.num_cpus_free == 12
        with pytest.raises(ValueError, match="called 'judgers' already"):
            system.reserve(TWO.bundles, name="judgers")
    assert system.num_cpus_free == 15
    again = system.reserve(TWO.bundles, name="judgers")
    group.release()  # for the second time: it is not the new group's
    with pytest.raises(ResourceError, match="has been released"):
        system.spawn(NaiveCPUWorker, None, bundle=group[3])
    assert system.placement_groups == {"judgers": again}
    await worker.stop()
    assert system.num_cpus_free == 14


async def test_a_group_of_accelerators(system: ActorSystem) -> None:
    config = AcceleratorResourcesConfig(num_workers=2, num_cpus_per_worker=2, num_accelerators_per_worker=2)
    group = AutoAcceleratorWorkers.build_placement_group(config, system=system)
    assert [bundle.claim.accelerators for bundle in group.bundles] == [("0", "1"), ("2", "3")]
    assert group.bundle_specs == config.bundle_specs
    assert AutoAcceleratorWorkers.build_placement_group(config, system=system) is group
    manager = CPUResourceManager(group, capacity=system)
    with pytest.raises(ResourceError, match="accelerator_pg_reserved=4"):
        manager.register("judger", CPUResourcesConfig(num_workers=13))
    with pytest.raises(ResourceError, match=r"(?s)1 accelerators.*bundle train\[1\].*2,3"):
        system.spawn(NaiveCPUWorker, None, num_accelerators=1)


def test_totals_are_divided_among_workers() -> None:
    config = AcceleratorResourcesConfig.from_total(num_workers=4, total_cpus=6, total_cpu_memory=8 * GIB)
    assert config.resources == Resources(num_cpus=1.5, memory_bytes=2 * GIB, num_accelerators=1)
    with pytest.raises(ValueError, match="evenly"):
        AcceleratorResourcesConfig.from_total(
            num_workers=3, total_cpus=6, total_cpu_memory=8 * GIB, total_accelerators=4
        )


def test_parts_of_a_total_that_does_not_divide_fit_into_it() -> None:
    config = AcceleratorResourcesConfig.from_total(num_workers=3, total_cpus=8, total_cpu_memory=8 * GIB)
    with ActorSystem(num_cpus=8, backend="inline", accelerators=["0", "1", "2"]).reserve(config.bundles) as group:
        assert [spec["CPU"] for spec in group.bundle_specs] == [2.666] * 3


async def test_the_manager_tells_what_others_hold(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    system.spawn(NaiveCPUWorker, None, num_cpus=5)
    with caplog.at_level("INFO", logger="xrl_lite"):
        CPUResourceManager(capacity=system).log_initial_snapshot()
    assert any("held by others" in line and " 5 CPUs" in line for line in caplog.text.splitlines())


async def test_an_actor_whose_constructor_fails_holds_nothing(system: ActorSystem) -> None:
    with pytest.raises(TypeError):
        await system.spawn(NaiveCPUWorker, name="broken").ready()
    assert system.num_cpus_free == 16
    await system.spawn(NaiveCPUWorker, None, name="broken").ready()
