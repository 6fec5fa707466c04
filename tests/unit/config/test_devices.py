"""Accelerators of a run: who gets which, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.build import run_settings
from xrl_lite.actors import ActorSystem
from xrl_lite.config import RunConfig
from xrl_lite.config.devices import plan_devices, reserve_devices, with_shared_devices
from xrl_lite.errors import ResourceError

ASYNC = {"type": "async", "max_staleness": 1}


def config_of(folder: Path, mode: str = "sync", **changes: Any) -> RunConfig:
    if mode != "sync":
        changes |= {"trainer.mode": mode, "task.produce_strategy_config": ASYNC}
    return RunConfig.model_validate(run_settings(folder, folder, **{"rollout.engine": "vllm", **changes}))


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_in_turns_one_accelerator_is_enough(mode: str, tmp_path: Path) -> None:
    plan = plan_devices(config_of(tmp_path, mode), 1)
    assert (plan.num_devices, plan.shared) == (1, True)
    assert not plan_devices(config_of(tmp_path, mode), 0).shared


def test_at_the_same_time_each_side_needs_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, "separate_async")
    with pytest.raises(ResourceError, match=r"(?s)and there are 1\. .*separate_async.*Use trainer.mode=colocate_async"):
        plan_devices(config, 1)
    plan = plan_devices(config, 2)
    assert (plan.num_devices, plan.shared) == (2, False)


@pytest.mark.parametrize(
    ("changes", "available", "text"),
    [
        ({"engine.num_ranks": 4}, 2, r"ask for 4 accelerators \(engine.num_ranks\).*there are 2"),
        ({"rollout.num_replicas": 3}, 2, r"for 3 \(rollout.num_replicas=3 times 1\).*there are 2"),
        ({"rollout.num_accelerators": 1}, 0, r"for 1 .*and there are 0"),
    ],
)
def test_more_than_there_are_is_refused(changes: dict[str, Any], available: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=text):
        plan_devices(config_of(tmp_path, **changes), available)


async def test_in_turns_both_sides_are_placed_on_the_same_accelerators(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"engine.num_ranks": 2, "rollout.num_replicas": 1, "rollout.num_accelerators": 3}
    async with ActorSystem(num_cpus=8, backend="inline", accelerators="abcd") as system:
        devices = reserve_devices(config_of(tmp_path, **changes), system)
        assert devices.shared
        assert devices.training is not None
        assert devices.training.claim.accelerators == ("a", "b", "c")
        assert devices.training.resources.num_cpus == 2 * 0.5 + 0.5


async def test_at_the_same_time_they_are_not(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"advantage": "gae"},
        "engine.num_cpus": 1,
        "critic": {"num_ranks": 2, "num_cpus": 1},
    }
    async with ActorSystem(num_cpus=8, backend="inline", accelerators="abcd") as system:
        devices = reserve_devices(config_of(tmp_path, "separate_async", **changes), system)
        assert not devices.shared
        assert devices.training is not None
        assert devices.rollout is not None
        assert devices.training.claim.accelerators == ("a", "b")  # policy and critic take turns
        assert devices.training.resources.num_cpus == 1 + 2
        assert devices.rollout.claim.accelerators == ("c",)


async def test_an_engine_without_accelerators_is_placed_beside_them(tmp_path: Path) -> None:
    async with ActorSystem(num_cpus=8, backend="inline", accelerators="a") as system:
        devices = reserve_devices(config_of(tmp_path, **{"rollout.engine": "torch"}), system)
        assert not devices.shared
        assert devices.rollout is None
    async with ActorSystem(num_cpus=8, backend="inline", accelerators="") as system:
        assert reserve_devices(config_of(tmp_path), system).training is None


def test_replicas_on_the_trainers_device_sleep_and_leave_it_room_unless_told_otherwise(tmp_path: Path) -> None:
    filled = with_shared_devices(config_of(tmp_path)).rollout
    assert (filled.sleep_level, filled.device_memory_share) == (1, 0.5)
    given: dict[str, Any] = {"rollout.sleep_level": 0, "rollout.device_memory_share": 0.3}
    filled = with_shared_devices(config_of(tmp_path, **given)).rollout
    assert (filled.sleep_level, filled.device_memory_share) == (0, 0.3)
