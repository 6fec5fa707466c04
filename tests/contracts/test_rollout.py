"""Controller, agent loop and weight sync over the scripted engine, on both backends of the actor layer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import torch

from tests.build import make_state
from xrl_lite.actors import ActorSystem
from xrl_lite.algorithms.digest import weights_digest
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import WeightSyncError
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.weight_sync import WeightSync

BACKENDS = ["inline", pytest.param("process", marks=pytest.mark.process)]
WEIGHTS = {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}


@pytest.fixture(params=BACKENDS)
async def system(request: pytest.FixtureRequest) -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4, backend=request.param) as running:
        yield running


def make_controller(system: ActorSystem, **options: Any) -> RolloutController:
    replicas = options.pop("num_replicas", 1)
    timeout = options.pop("request_timeout_s", 30.0)
    config = RolloutConfig(
        engine="fake", engine_options=options, num_replicas=replicas, request_timeout_s=timeout, num_threads=1
    )
    return RolloutController(
        system, config=config, model_path="none", decode=lambda ids, _: "".join(map(chr, ids)), seed=0
    )


def fresh(**fields: Any) -> RolloutState:
    defaults = {"status": Status.INIT, "reward": None, "response": None, "response_ids": None, "logprobs": None}
    return make_state(**(defaults | fields))


class Trainer:
    """Something to take weights from."""

    async def export_weights(self) -> dict[str, torch.Tensor]:
        return WEIGHTS


async def test_a_response_fills_the_state(system: ActorSystem) -> None:
    controller = make_controller(system, responses=[[65]])
    state = fresh()
    assert await controller.generate(state) is state
    assert (state.status, state.response, state.response_ids) == (Status.COMPLETED, "A", [65])
    assert (state.logprobs, state.response_mask, state.response_model_steps) == ([-0.5], [1], [0])
    assert set(controller.statistics().values()) == {0}


async def test_a_request_that_fails_is_data_and_its_sibling_goes_on(system: ActorSystem) -> None:
    controller = make_controller(system, fail_prompts=[9])
    bad, good = fresh(prompt_ids=[9], rollout_id=1), fresh(rollout_id=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(controller.generate, bad)
        tasks.start_soon(controller.generate, good)
    assert bad.status is Status.FAILED
    assert bad.error_msg == "sample 1 on rollout/0: scripted failure of prompt [9]"
    assert good.status is Status.COMPLETED


async def test_closed_gate_holds_requests_until_it_opens(system: ActorSystem) -> None:
    controller = make_controller(system)
    await controller.pause_generation()
    state = fresh()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(controller.generate, state)
        await anyio.wait_all_tasks_blocked()
        assert state.status is Status.INIT
        await controller.continue_generation()
    assert state.status is Status.COMPLETED


async def test_abort_ends_what_hangs(system: ActorSystem) -> None:
    controller = make_controller(system, hang_prompts=[5])
    state = fresh()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(controller.generate, state)
        while not await controller.abort_all():
            await anyio.lowlevel.checkpoint()
    assert state.status is Status.ABORTED


async def test_one_that_gives_up_takes_nobody_along_and_frees_its_place(system: ActorSystem) -> None:
    controller = make_controller(system, hang_prompts=[5])
    states = [fresh(rollout_id=number) for number in range(3)]
    async with anyio.create_task_group() as tasks:
        first = anyio.CancelScope()

        async def give_up() -> None:
            with first:
                await controller.generate(states[0])

        tasks.start_soon(give_up)  # the first of a tick sends and collects for the others
        for state in states[1:]:
            tasks.start_soon(controller.generate, state)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        while controller.statistics()["rollout/0"] > 2:
            await anyio.lowlevel.checkpoint()
        while await controller.abort_all() != 2:
            await anyio.lowlevel.checkpoint()
    assert [state.status for state in states] == [Status.INIT, Status.ABORTED, Status.ABORTED]


async def test_requests_go_to_the_least_loaded_replica(system: ActorSystem) -> None:
    controller = make_controller(system, num_replicas=2, hang_prompts=[5])
    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(controller.generate, fresh(rollout_id=number))
        await anyio.wait_all_tasks_blocked()
        assert controller.statistics() == {"rollout/0": 2, "rollout/1": 2}
        tasks.cancel_scope.cancel()
    assert controller.statistics() == {"rollout/0": 0, "rollout/1": 0}


async def test_weights_reach_every_replica_with_their_version(system: ActorSystem) -> None:
    controller = make_controller(system, num_replicas=2)
    sync = WeightSync(source=Trainer(), targets=controller.adapters, gate=controller)
    await sync.sync(3)
    assert sync.policy_version == 3
    state = await controller.generate(fresh())
    assert state.response_model_steps == [3]


async def test_a_replica_with_other_weights_is_named_and_the_gate_opens_again(system: ActorSystem) -> None:
    controller = make_controller(system)

    class Liar:
        name = "rollout/1"

        async def update_weights(self, version: int, weights: dict[str, torch.Tensor]) -> str:
            return weights_digest({**weights, "b": weights["b"] + 1})

    sync = WeightSync(source=Trainer(), targets=[*controller.adapters, Liar()], gate=controller)
    with pytest.raises(WeightSyncError, match=r"rollout/1 holds other weights .* version 1"):
        await sync.sync(1)
    assert sync.policy_version == -1
    assert (await controller.generate(fresh())).status is Status.COMPLETED
