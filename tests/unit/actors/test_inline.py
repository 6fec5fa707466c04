"""What only the inline backend can do: an order that a seed decides, and scripted faults."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorSystem, Fault, FaultPlan, RestartPolicy
from xrl_lite.errors import ActorDiedError, ActorTimeoutError

FORGIVING = RestartPolicy(max_restarts=10)


async def order_of(seed: int) -> list[str]:
    order: list[str] = []
    async with ActorSystem(num_cpus=8, backend="inline", seed=seed) as system:
        handles = [system.spawn(bodies.Stateful, name=name) for name in "abcd"]
        calls = [handle.add.remote() for _ in range(5) for handle in handles]
        for index, call in enumerate(calls):
            call.add_done_callback(lambda _, index=index: order.append("abcd"[index % 4]))
        await asyncio.gather(*calls)
    return order


async def test_one_seed_gives_one_order_and_another_seed_another() -> None:
    first = await order_of(1)
    assert await order_of(1) == first
    assert len({tuple(await order_of(seed)) for seed in range(5)}) > 1


def test_without_a_loop_a_call_runs_at_once() -> None:
    system = ActorSystem(num_cpus=2, backend="inline")
    assert system.spawn(bodies.Stateful).add.remote().result() == 1
    assert system.spawn(bodies.Concurrent).echo.remote(5).result() == 5
    system.shutdown_now()


async def faulty(*faults: Fault) -> tuple[ActorSystem, list[ActorDiedError]]:
    return ActorSystem(num_cpus=2, backend="inline", faults=FaultPlan(faults)), []


async def test_a_scripted_kill_hits_its_call_and_no_other() -> None:
    system, _ = await faulty(Fault(actor="a", action="kill", at_call=2))
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    outcomes = await asyncio.gather(*(handle.add.remote() for _ in range(4)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, ActorDiedError, int, int]
    assert outcomes[2:] == [1, 2]  # the successor starts anew
    assert handle.restarts == 1


async def test_a_scripted_kill_can_be_retried() -> None:
    system, _ = await faulty(Fault(actor="a", action="kill"))
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    assert await handle.add.options(max_task_retries=1).remote() == 1


@pytest.mark.parametrize("cls", [bodies.Stateful, bodies.Concurrent])
async def test_a_scripted_delay_takes_no_time_but_uses_up_the_limit(cls: type) -> None:
    system, _ = await faulty(Fault(actor="a", action="delay", delay_s=1000.0))
    handle = system.spawn(cls, name="a", restart=FORGIVING)
    with pytest.raises(ActorTimeoutError):
        await handle.echo.options(timeout_s=500.0).remote(1)
    assert await handle.echo.options(timeout_s=500.0).remote(2) == 2


@pytest.mark.parametrize("timeout_s", [None, 5.0])
async def test_a_lost_reply_still_ends_the_call(timeout_s: float | None) -> None:
    system, _ = await faulty(Fault(actor="a", action="drop_reply"))
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    with pytest.raises((ActorTimeoutError, ActorDiedError)):
        await handle.add.options(timeout_s=timeout_s).remote()
    assert await handle.add.remote() == 1


async def test_a_spawn_that_fails_is_tried_again_as_the_policy_says() -> None:
    system, _ = await faulty(*(Fault(actor=name, action="fail_spawn") for name in "ab"))
    with pytest.raises(ActorDiedError):
        await system.spawn(bodies.Stateful, name="a").ready()
    handle = system.spawn(bodies.Stateful, name="b", restart=FORGIVING)
    await handle.ready()
    assert handle.restarts == 1


def test_faults_are_for_the_inline_backend() -> None:
    with pytest.raises(ValueError, match="inline"):
        ActorSystem(faults=FaultPlan())
    with pytest.raises(ValueError, match="backend must be"):
        ActorSystem(backend="inlin")  # pyright: ignore[reportArgumentType]
