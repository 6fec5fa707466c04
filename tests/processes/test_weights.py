"""The way of the weights: a dict of tensors out of one actor, through the driver, into others."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

from tests.processes import tensor_bodies as bodies
from xrl_lite.actors import ActorSystem, SharedValue

torch = pytest.importorskip("torch")


PRELOAD = ("torch",)


@pytest.fixture(scope="module", autouse=True)
def fork_server_with_torch(system: ActorSystem) -> None:
    """Import torch once for all children, before the first test counts processes."""
    first = system.spawn(bodies.Weights, 50, 1, preload=PRELOAD)
    first.ready().result(60.0)
    first.stop().result(60.0)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def digest(weights: dict[str, Any]) -> float:
    return float(sum(tensor.double().sum() for tensor in weights.values()))


@pytest.mark.parametrize("num_parameters", [500_000, 20_000_000])
async def test_weights_arrive_everywhere_and_leave_nothing_behind(system: ActorSystem, num_parameters: int) -> None:
    trainer = system.spawn(bodies.Weights, num_parameters, 1, preload=PRELOAD)
    replicas = [system.spawn(bodies.Weights, num_parameters, 2, preload=PRELOAD) for _ in range(2)]
    expected = await trainer.digest.remote()
    blocks = 2 * len(replicas)  # memory that is used again: for each replica one that it may hold still, and one more
    open_before = num_open()
    for _ in range(2 * blocks):
        weights = await trainer.weights.remote()
        assert digest(weights) == expected
        await asyncio.gather(*(replica.load.remote(weights) for replica in replicas))
        weights["p0"] += 1  # a private copy: nobody else sees it
        assert [await replica.digest.remote() for replica in replicas] == [expected] * 2

        shared: SharedValue = await trainer.shared_weights.remote()
        await asyncio.gather(*(replica.load_shared.remote(shared) for replica in replicas))
        assert [await replica.digest.remote() for replica in replicas] == [expected] * 2
        del weights, shared

        await trainer.step.remote()
        expected = await trainer.digest.remote()
        # a thread of the system closes them; what is never closed ends at the time limit
        while num_open() > open_before + blocks:
            gc.collect()
            await asyncio.sleep(0.01)
    for handle in (trainer, *replicas):
        await handle.stop()


async def test_torch_uses_the_threads_that_the_actor_was_given(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Weights, 100, 1, num_cpus=0.5, preload=PRELOAD)
    assert await handle.num_threads.remote() == 1
    await handle.stop()
