"""What is particular to the Ray backend: what it refuses, deaths that nobody waits for, the cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorSystem, Resources, RestartPolicy, VirtualClock
from xrl_lite.errors import ActorDiedError, ActorUnavailableError, ResourceError

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
LIMIT_S = 60.0
pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def system(ray_cluster: None) -> Iterator[ActorSystem]:
    system = ActorSystem(num_cpus=8, backend="ray")
    yield system
    system.shutdown_now()


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'xrl-lite\[ray\]'"):
        ActorSystem(backend="ray")


@needs_ray
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": 1 << 30}, "memory_bytes is not possible.*ceiling"),
        ({"on_cancel": "interrupt"}, "on_cancel='interrupt' is not possible"),
        ({"pin_cpus": True}, "pin_cpus=True is not possible"),
    ],
)
def test_what_ray_cannot_is_refused_and_holds_nothing(
    system: ActorSystem, options: dict[str, Any], message: str
) -> None:
    held = system.statistics()["num_cpus_held"]
    with pytest.raises(ValueError, match=message):
        system.spawn(bodies.Stateful, name="refused", **options)
    assert system.statistics()["num_cpus_held"] == held
    with pytest.raises(ValueError, match="placement group holds CPUs only"):
        system.reserve([Resources(num_accelerators=1)])


@needs_ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_system_that_ray_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="virtual clock"):
        ActorSystem(backend="ray", clock=VirtualClock())
    with pytest.raises(ResourceError, match="has 64 CPUs"):
        ActorSystem(backend="ray", num_cpus=65)


@needs_ray
async def test_a_group_of_cpus_is_reserved(system: ActorSystem) -> None:
    with system.reserve([Resources(num_cpus=2)] * 2) as group:
        handle = system.spawn(bodies.Stateful, bundle=group[0])
        assert await handle.add.remote() == 1
        with pytest.raises(ResourceError):
            system.spawn(bodies.Stateful, bundle=group[0])
        await handle.stop()


@needs_ray
async def test_a_fraction_above_one_and_a_kill_before_the_start(system: ActorSystem) -> None:
    odd = system.spawn(bodies.Stateful, num_cpus=1.5)
    assert await odd.add.remote() == 1
    await odd.stop()
    short_lived = system.spawn(bodies.Stateful)
    short_lived.kill()
    with pytest.raises(ActorUnavailableError, match="killed by its owner"):
        await short_lived.ready()


@needs_ray
async def test_a_kill_is_noticed_with_and_without_a_call(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful, restart=RestartPolicy(max_restarts=5, backoff_s=0.0))
    await handle.ready()
    deaths: list[ActorDiedError] = []
    died = asyncio.Event()
    loop = asyncio.get_running_loop()
    handle.on_death(lambda error: (deaths.append(error), loop.call_soon_threadsafe(died.set)))
    for call in (None, handle.wait.remote(60.0)):
        died.clear()
        if call is not None:
            await asyncio.sleep(0)
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            await died.wait()
            await handle.ready()
        if call is not None:
            with pytest.raises(ActorDiedError, match=r"its process ended.* while it ran wait\(\)"):
                await call
    assert handle.restarts == 2
    await handle.stop()


@needs_ray
async def test_the_last_lines_of_a_child_are_told(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stateful)

    def speak() -> None:
        import sys

        sys.stderr.write("last words\n")
        raise SystemExit(7)

    with pytest.raises(ActorDiedError, match=r"(?s)code 7 while it ran call\(\).*last words"):
        await handle.call.remote(speak)
