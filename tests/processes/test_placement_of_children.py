"""What a child gets of the resources that its actor was given."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from tests.processes.bodies import Victim
from xrl_lite.actors import ActorSystem, Resources, RestartPolicy
from xrl_lite.actors.zygote import CORES_VARIABLE
from xrl_lite.errors import ActorDiedError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=8, accelerators=("0", "GPU-1")) as system:
        yield system


async def test_a_child_sees_its_accelerators_and_no_other(system: ActorSystem) -> None:
    first = system.spawn(Victim, num_accelerators=1)
    second = system.spawn(Victim, num_accelerators=1)
    none = system.spawn(Victim)
    own_wish = system.spawn(Victim, env={VISIBLE: "7"})
    seen = [await handle.environment.remote(VISIBLE) for handle in (first, second, none, own_wish)]
    assert seen == ["0", "GPU-1", "", "7"]
    await first.stop()
    assert await system.spawn(Victim, num_accelerators=1).environment.remote(VISIBLE) == "0"


async def test_actors_of_a_bundle_share_its_accelerators(system: ActorSystem) -> None:
    group = system.reserve([Resources(num_cpus=2, num_accelerators=2)])
    for _ in range(2):
        handle = system.spawn(Victim, num_cpus=1, bundle=group[0])
        assert await handle.environment.remote(VISIBLE) == "0,GPU-1"


async def test_an_actor_of_a_bundle_sees_those_that_it_names(system: ActorSystem) -> None:
    group = system.reserve([Resources(num_cpus=2, num_accelerators=2)])
    for names in (["GPU-1"], ["0"], []):
        handle = system.spawn(Victim, num_cpus=0.5, bundle=group[0], accelerators=names)
        assert await handle.environment.remote(VISIBLE) == "".join(names)
    with pytest.raises(ValueError, match="out of a bundle"):
        system.spawn(Victim, accelerators=["0"])


async def test_without_accelerators_the_variable_is_left_alone() -> None:
    async with ActorSystem(num_cpus=1, accelerators=()) as system:
        assert await system.spawn(Victim).environment.remote(VISIBLE) is None


async def test_a_pinned_child_runs_on_its_cores_also_after_a_restart(system: ActorSystem) -> None:
    core = min(os.sched_getaffinity(0))
    handle = system.spawn(Victim, pin_cpus=True, restart=RestartPolicy())
    free = system.spawn(Victim)
    cores = "sorted(os.sched_getaffinity(0))"
    assert await handle.evaluate.remote(cores) == [core]
    assert await free.evaluate.remote(cores) == sorted(os.sched_getaffinity(0))
    assert await handle.environment.remote(CORES_VARIABLE) is None
    with pytest.raises(ActorDiedError):
        await handle.kill_itself.remote()
    assert await handle.evaluate.remote(cores) == [core]


async def test_a_child_in_the_background_takes_no_core_from_who_runs(system: ActorSystem) -> None:
    policy = "os.sched_getscheduler(0)"
    handle = system.spawn(Victim, background=True, restart=RestartPolicy())
    assert await handle.evaluate.remote(policy) == os.SCHED_BATCH
    with pytest.raises(ActorDiedError):
        await handle.kill_itself.remote()
    assert await handle.evaluate.remote(policy) == os.SCHED_BATCH
    assert await system.spawn(Victim).evaluate.remote(policy) == os.sched_getscheduler(0)
