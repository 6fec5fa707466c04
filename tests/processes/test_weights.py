"""The way of the weights: a dict of tensors out of one actor, through the driver, into others."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.processes import tensor_bodies as bodies
from xrl_lite.actors import ActorSystem, SharedValue
from xrl_lite.algorithms.weights import WeightBucket, WeightManifest
from xrl_lite.weight_sync import LocalWeights, WeightSync, make_transport

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


class OpenGate:
    """Nobody generates."""

    async def pause_generation(self) -> None: ...

    async def continue_generation(self) -> None: ...

    def restore_with(self, restore: Callable[[Any], Awaitable[None]]) -> None: ...


class Replica:
    """A replica of several workers, each of which takes the weights by itself."""

    is_live = True
    is_down = False

    def __init__(self, name: str, system: ActorSystem, num_workers: int) -> None:
        self.name = name
        self.workers = [system.spawn(bodies.Worker, number, preload=PRELOAD) for number in range(num_workers)]
        self.num_tensors_of_workers: list[int] = []
        self._version = 0

    async def wait_live(self) -> None: ...

    async def prepare(self, manifest: WeightManifest) -> int:
        self._version = manifest.version
        return len(self.workers)

    async def load(self, bucket: WeightBucket) -> dict[str, str]:
        held: list[dict[str, str]] = await asyncio.gather(*(worker.load.remote(bucket) for worker in self.workers))
        assert all(checksums == held[0] for checksums in held)
        self.num_tensors_of_workers = [len(checksums) for checksums in held]
        return held[0]

    async def finish(self) -> int:
        return self._version

    async def abandon(self, error: Exception) -> None: ...

    def replace(self, error: Exception) -> None:
        self.is_live = False


def make_sync(weights: dict[str, Any], replicas: list[Replica], *, timeout_s: float) -> WeightSync:
    return WeightSync(
        source=LocalWeights(lambda: weights),
        targets=replicas,
        gate=OpenGate(),
        transport=make_transport("process_group", folder=None, bucket_bytes=40, timeout_s=timeout_s),
    )


WEIGHTS = {"w": torch.arange(12.0), "b": torch.ones(3), "n": torch.zeros(2, dtype=torch.int32)}


async def test_every_worker_of_a_replica_is_a_member_of_the_group(system: ActorSystem) -> None:
    replicas = [Replica("rollout/0", system, 2), Replica("rollout/1", system, 1), Replica("rollout/2", system, 2)]
    sync = make_sync(WEIGHTS, replicas, timeout_s=10.0)
    for version in (1, 2):
        assert (await sync.sync(version)).num_replaced == 0
        assert [replica.num_tensors_of_workers for replica in replicas] == [[3, 3], [3], [3, 3]]
    for worker in [worker for replica in replicas for worker in replica.workers]:
        await worker.stop()


async def test_nobody_waits_for_a_worker_that_is_gone_before_the_group_is_formed(system: ActorSystem) -> None:
    replicas = [Replica("rollout/0", system, 2), Replica("rollout/1", system, 1)]
    for worker in [worker for replica in replicas for worker in replica.workers]:
        await worker.ready()
    replicas[0].workers[1].kill()
    sync = make_sync(WEIGHTS, replicas, timeout_s=1000.0)  # far beyond the limit of this test
    assert (await sync.sync(1)).num_replaced == 1
    assert replicas[1].num_tensors_of_workers == [3]
    for worker in [worker for replica in replicas for worker in replica.workers]:
        await worker.stop()
