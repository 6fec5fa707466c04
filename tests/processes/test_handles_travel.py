"""Handles inside other actors, and what happens when either side ends."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorSystem, RestartPolicy
from xrl_lite.errors import ActorDiedError, ActorError, ActorUnavailableError

LIMIT_S = 30.0
FORGIVING = RestartPolicy(max_restarts=10)


async def test_a_sync_method_may_wait_for_another_actor(system: ActorSystem) -> None:
    target, caller = system.spawn(bodies.Stateful), system.spawn(bodies.SyncCaller)
    assert [await caller.add.remote(target, 2) for _ in range(3)] == [2, 4, 6]
    await caller.stop()
    await target.stop()


async def test_only_the_owner_ends_an_actor(system: ActorSystem) -> None:
    target = system.spawn(bodies.Stateful)
    caller = system.spawn(bodies.Caller, target)
    with pytest.raises(ActorError, match="Only the process that spawned"):
        await caller.stop_it.remote()
    await target.stop()
    with pytest.raises(ActorUnavailableError):
        await caller.add.remote(1)
    await caller.stop()


async def test_the_death_of_a_caller_harms_nobody_else(system: ActorSystem) -> None:
    target = system.spawn(bodies.Concurrent, max_concurrency=4)
    caller = system.spawn(bodies.Caller, target, restart=FORGIVING)
    waiting = caller.pass_on.remote(1)
    assert await waiting == 1
    pid = caller.pid
    assert pid is not None
    os.kill(pid, 9)
    assert await caller.pass_on.remote(2) == 2  # its successor has the handle as well
    assert caller.restarts == 1
    assert await target.echo.remote(3) == 3
    await caller.stop()
    await target.stop()


async def test_calls_of_a_dead_caller_are_cancelled(system: ActorSystem) -> None:
    target = system.spawn(bodies.Concurrent, max_concurrency=4)
    caller = system.spawn(bodies.ForeverCaller, target)
    waiting = caller.forever.remote()
    async with asyncio.timeout(LIMIT_S):
        while target.statistics()["running"] == 0:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)
    assert caller.pid is not None
    os.kill(caller.pid, 9)
    with pytest.raises(ActorDiedError):
        await waiting
    async with asyncio.timeout(LIMIT_S):
        while target.pending:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)
    assert target.statistics()["num_cancelled"] == 1
    assert await target.echo.remote(1) == 1
    await target.stop()


async def test_the_handle_of_a_stopped_actor_never_reaches_another(system: ActorSystem) -> None:
    target = system.spawn(bodies.Stateful, 100)
    caller = system.spawn(bodies.Caller, target, restart=FORGIVING)
    assert await caller.add.remote(1) == 101
    await target.stop()
    others = [system.spawn(bodies.Stateful) for _ in range(4)]
    visitors = [system.spawn(bodies.Caller, other) for other in others]  # their doors may get the descriptors of his
    assert [await visitor.add.remote(1) for visitor in visitors] == [1] * 4
    assert caller.pid is not None
    os.kill(caller.pid, 9)
    with pytest.raises((ActorUnavailableError, ActorDiedError)):
        await caller.add.remote(1)
    with pytest.raises(ActorUnavailableError):
        await caller.add.remote(1)
    assert [await other.add.remote(0) for other in others] == [1] * 4
    await asyncio.gather(*(handle.stop() for handle in (caller, *others, *visitors)))
