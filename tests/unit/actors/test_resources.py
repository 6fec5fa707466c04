"""The cases of XTuner's ``test_cpu_pg``, and what it lacks: giving back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from xrl_lite.actors import (
    AcceleratorResourcesConfig,
    ActorSystem,
    CPUResourceManager,
    CPUResourcesConfig,
    clear_cpu_resource_manager,
    get_cpu_resource_manager,
    register_cpu_resources,
    set_cpu_resource_manager,
    unregister_cpu_resources,
)

GIB = 1024**3


class Capacity:
    def __init__(self, num_cpus: float = 8, memory_bytes: int = 16 * GIB) -> None:
        self.num_cpus = num_cpus
        self.memory_bytes = memory_bytes


@pytest.fixture(autouse=True)
def no_manager() -> Iterator[None]:
    clear_cpu_resource_manager()
    yield
    clear_cpu_resource_manager()


def test_a_name_that_is_taken_gets_a_number() -> None:
    manager = CPUResourceManager(capacity=Capacity())
    config = CPUResourcesConfig()
    manager.register("judger", config)
    manager.register("judger", config)
    assert list(manager.pools) == ["judger", "judger#2"]
    assert all(pool is config for pool in manager.pools.values())


@pytest.mark.parametrize(
    ("capacity", "config", "message"),
    [
        (Capacity(1), CPUResourcesConfig(num_workers=2), "CPU requested=2, available_outside_accelerator_pg=1"),
        (Capacity(8, GIB), CPUResourcesConfig(cpu_memory_per_worker=2 * GIB), "memory requested=2 GB"),
        (Capacity(1), CPUResourcesConfig(num_cpus_per_worker=2), "the largest node has only 1"),
    ],
)
def test_what_does_not_fit_is_refused_and_taken_back(
    capacity: Capacity, config: CPUResourcesConfig, message: str
) -> None:
    manager = CPUResourceManager(capacity=capacity)
    with pytest.raises(RuntimeError, match=message):
        manager.register("judger", config)
    assert "judger" not in manager.pools
    manager.register("judger", CPUResourcesConfig(cpu_memory_per_worker=1))
    assert list(manager.pools) == ["judger"]  # a refusal uses up no number


def test_exactly_full_fits() -> None:
    manager = CPUResourceManager(capacity=Capacity(1, GIB))
    manager.register("judger", CPUResourcesConfig(num_workers=10, num_cpus_per_worker=0.1, cpu_memory_per_worker=1))


def test_a_check_after_the_machine_shrank_changes_nothing() -> None:
    capacity = Capacity(2)
    manager = CPUResourceManager(capacity=capacity)
    config = CPUResourcesConfig(num_workers=2)
    manager.register("judger", config)
    capacity.num_cpus = 1
    with pytest.raises(RuntimeError, match="available_outside_accelerator_pg"):
        manager.validate_or_raise()
    assert manager.pools == {"judger": config}
    assert manager.pools["judger"] is config


def test_what_accelerator_workers_hold_is_not_there_for_others() -> None:
    held = AcceleratorResourcesConfig(num_workers=2, num_cpus_per_worker=3, cpu_memory_per_worker=GIB)
    manager = CPUResourceManager(held, capacity=Capacity(8))
    manager.register("judger", CPUResourcesConfig(num_workers=2))
    with pytest.raises(RuntimeError, match=r"(?s)accelerator_pg_reserved=6.*judger: 2 workers x 1 CPUs"):
        manager.register("more", CPUResourcesConfig())
    assert CPUResourceManager([held, held]).accelerator_placement_groups == (held, held)


def test_a_pool_that_is_given_back_makes_room() -> None:
    manager = CPUResourceManager(capacity=Capacity(1))
    manager.register("judger", CPUResourcesConfig())
    manager.unregister("judger")
    manager.register("judger", CPUResourcesConfig())
    with pytest.raises(KeyError, match=r"Unknown external CPU resource pool 'other'\. Available pools"):
        manager.unregister("other")


def test_the_manager_of_the_process() -> None:
    with pytest.raises(ValueError, match="x sets cpu_resources, but CPUResourceManager is not init"):
        register_cpu_resources("judger:x", CPUResourcesConfig())
    manager = CPUResourceManager(capacity=Capacity())
    set_cpu_resource_manager(manager)
    assert get_cpu_resource_manager() is manager
    assert register_cpu_resources("judger:x", CPUResourcesConfig()) == "judger:x"
    assert register_cpu_resources("judger:x", CPUResourcesConfig()) == "judger:x#2"
    unregister_cpu_resources("judger:x#2")
    unregister_cpu_resources("judger:x#2")
    assert list(manager.pools) == ["judger:x"]


def test_the_capacity_may_be_that_of_a_system() -> None:
    manager = CPUResourceManager(capacity=ActorSystem(num_cpus=3, backend="inline"))
    manager.register("judger", CPUResourcesConfig(num_workers=3, cpu_memory_per_worker=1))
    with pytest.raises(RuntimeError, match="cluster_total=3"):
        manager.register("more", CPUResourcesConfig())


def test_the_snapshots_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    manager = CPUResourceManager(capacity=Capacity())
    with caplog.at_level("INFO", logger="xrl_lite"):
        manager.log_initial_snapshot()
        manager.register("judger", CPUResourcesConfig(num_workers=3))
        manager.log_registered_summary()
    assert "registered" in caplog.text
    assert "3 CPUs" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"num_workers": 0}, {"num_cpus_per_worker": 0}, {"cpu_memory_per_worker": 0}, {"pg_pack_strategy": "X"}, {"x": 1}],
)
def test_nonsense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CPUResourcesConfig(**settings)
