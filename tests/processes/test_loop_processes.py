"""Agent loops in processes: generating and judging stay with the caller."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from xrl_lite.actors import (
    ActorSystem,
    CPUResourceManager,
    CPUResourcesConfig,
    clear_cpu_resource_manager,
    set_cpu_resource_manager,
)
from xrl_lite.agent_loop import AgentsConfig, SingleTurnAgentLoopConfig
from xrl_lite.agent_loop.remote import LoopHost, RemoteAgentLoop, RouterAgentLoop
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import ActorDiedError, RolloutError
from xrl_lite.gateway import BlackBoxAgentConfig, BlackBoxAgentsConfig

pytestmark = pytest.mark.process

AGENTS = """
import os
from functools import partial
import anyio
from xrl_lite.agent_loop import AgentLoopBase, AgentLoopOutput

class Where(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        if kwargs["extra_info"].get("deadly"):
            os._exit(3)
        if asked := kwargs["extra_info"].get("gives_up_once"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(self.server_manager.generate, "hangs", prompt_ids=[3], sampling_params={}))
                while not os.path.exists(asked):
                    await anyio.sleep(0.005)
                tasks.cancel_scope.cancel()
        output = await self.server_manager.generate("r", prompt_ids=[1, 2], sampling_params={"max_tokens": 3})
        return AgentLoopOutput(
            prompt_ids=[1, 2], response_ids=output.token_ids, response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs, extra_fields={"pid": os.getpid()},
        )
"""


class Judger:
    def __init__(self) -> None:
        self.judged = 0

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        self.judged += 1
        rollout_state.reward = {"score": float(os.getpid())}
        return rollout_state

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        return [await self.judge(state) for state in rollout_states]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4) as running:
        set_cpu_resource_manager(CPUResourceManager(capacity=running))
        yield running
        clear_cpu_resource_manager()


def settings(folder: Path, model: Path, num_workers: int) -> AgentsConfig:
    (folder / "agents.py").write_text(AGENTS)
    (folder / "agents.yaml").write_text(f"[{{name: where, _target_: '{folder}/agents.py:Where'}}]")
    return AgentsConfig(
        agent_loop_config_path=folder / "agents.yaml",
        default_agent_loop="where",
        hf_checkpoint=str(model),
        cpu_resources=CPUResourcesConfig(num_workers=num_workers, num_cpus_per_worker=0.1),
    )


def make_states(count: int = 2) -> list[RolloutState]:
    return [RolloutState(message=[{"role": "user", "content": "1"}], group_id=0, rollout_id=n) for n in range(count)]


BLACK_BOX = """
import os
import httpx

async def solve(session, raw_prompt):
    async with httpx.AsyncClient(headers={"x-api-key": session.api_key}, verify=False) as client:
        body = {"model": session.model, "messages": raw_prompt, "max_tokens": 3}
        (await client.post(session.base_url + "/chat/completions", json=body)).raise_for_status()
    return {"reward": 1.0, "pid": os.getpid()}
"""


@pytest.mark.slow
async def test_a_gateway_in_a_process_asks_back_for_the_group_of_its_session(
    system: ActorSystem, tmp_path: Path, tiny_model_folder: Path
) -> None:
    (tmp_path / "agent.py").write_text(BLACK_BOX)
    config = BlackBoxAgentsConfig(
        agents={"solver": BlackBoxAgentConfig(runner=f"{tmp_path}/agent.py:solve")},
        hf_checkpoint=str(tiny_model_folder),
        cpu_resources=CPUResourcesConfig(num_workers=1, num_cpus_per_worker=0.1),
    )
    loop = config.build(ScriptedRolloutCtl(lambda _: [5, 6, 7, 8]), None, system=system)
    await loop.ready()
    states = await loop.generate_group(make_states())
    await loop.aclose()
    assert [(state.error_msg, state.response_ids) for state in states] == [(None, [5, 6, 7])] * 2
    assert all(state.reward and state.reward["score"] == 1.0 and state.reward["pid"] != os.getpid() for state in states)


async def test_one_process_runs_the_loop_asks_back_and_is_replaced(
    system: ActorSystem, tmp_path: Path, tiny_model_folder: Path
) -> None:
    answers: Iterator[Any] = iter([[5, 6, 7, 8]] * 2 + [RolloutError("scripted failure"), [5], [5]])
    rollout, judger = ScriptedRolloutCtl(lambda _: next(answers)), Judger()
    loop = settings(tmp_path, tiny_model_folder, 1).build(rollout, judger, system=system)
    assert isinstance(loop, RemoteAgentLoop)
    await loop.ready()
    states = await loop.generate_group(make_states())
    assert [(state.rollout_id, state.response_ids, state.logprobs) for state in states] == [
        (0, [5, 6, 7], [-1.0, -2.0, -3.0]),
        (1, [5, 6, 7], [-1.0, -2.0, -3.0]),
    ]
    assert {state.extra_fields["pid"] for state in states} == {loop.host.pid}
    assert [state.reward for state in states] == [{"score": float(os.getpid())}] * 2
    assert judger.judged == len(rollout.requests) == 2
    # an error of the engine travels there, and costs one session
    states = await loop.generate_group(make_states())
    assert sorted(state.status.value for state in states) == ["completed", "failed"]
    assert "scripted failure" in str(next(s.error_msg for s in states if s.status is Status.FAILED))
    # a group that kills its process is begun anew once, then lost; the next one is served
    (lost,) = await loop.generate_group([make_states(1)[0].model_copy(update={"extra_fields": {"deadly": True}})])
    assert lost.status is Status.FAILED
    assert "agent_loop/0" in str(lost.error_msg)
    (state,) = await loop.generate_group(make_states(1))
    assert (state.response_ids, loop.host.restarts) == ([5], 2)


class HangingRolloutCtl(ScriptedRolloutCtl):
    """Answers one prompt never, and the others once that one was given up. Leaves a file when it is asked for it."""

    def __init__(self, asked: Path) -> None:
        super().__init__(lambda _: [5])
        self.asked = asked
        self.given_up = anyio.Event()

    async def generate(self, state: RolloutState) -> RolloutState:
        if state.prompt_ids == [3]:
            self.asked.touch()
            try:
                await anyio.sleep_forever()
            finally:
                self.given_up.set()
        await self.given_up.wait()
        return await super().generate(state)


async def test_what_an_agent_gives_up_is_withdrawn_while_its_group_goes_on(
    system: ActorSystem, tmp_path: Path, tiny_model_folder: Path
) -> None:
    rollout = HangingRolloutCtl(tmp_path / "asked")
    loop = settings(tmp_path, tiny_model_folder, 1).build(rollout, None, system=system)
    await loop.ready()
    impatient, patient = make_states()
    impatient.extra_fields["gives_up_once"] = str(rollout.asked)
    with anyio.fail_after(30):  # the whole group waits for it
        states = await loop.generate_group([impatient, patient])
    assert [state.response_ids for state in states] == [[5], [5]]
    assert rollout.given_up.is_set()
    await loop.aclose()


class TwiceAskedRolloutCtl(ScriptedRolloutCtl):
    """Answers each prompt with its text, once all of them were asked for `wanted` times."""

    def __init__(self, wanted: int) -> None:
        super().__init__(lambda _: [5])
        self.wanted = wanted
        self.asked = anyio.Event()
        self.num_asked = self.num_cancelled = 0

    async def generate(self, state: RolloutState) -> RolloutState:
        self.num_asked += 1
        if self.num_asked % self.wanted == 0:
            self.asked.set()
            self.asked = anyio.Event()
        try:
            while self.num_asked < 2 * self.wanted:
                await self.asked.wait()
        except anyio.get_cancelled_exc_class():
            self.num_cancelled += 1
            raise
        state.response_ids = list(state.prompt_ids or ())
        state.status = Status.COMPLETED
        return state


async def test_what_a_dead_process_asked_for_is_cancelled_and_its_groups_get_their_own_answers(
    system: ActorSystem, tmp_path: Path, tiny_model_folder: Path
) -> None:
    rollout = TwiceAskedRolloutCtl(wanted=4)
    config = SingleTurnAgentLoopConfig(
        hf_checkpoint=str(tiny_model_folder), cpu_resources=CPUResourcesConfig(num_workers=1, num_cpus_per_worker=0.1)
    )
    loop = config.build(rollout, None, system=system)
    assert isinstance(loop, RemoteAgentLoop)
    await loop.ready()
    responses: dict[int, Any] = {}

    async def run(number: int) -> None:
        state = make_states(1)[0].model_copy(update={"prompt_ids": [number]})
        responses[number] = (await loop.generate_group([state]))[0].response_ids

    with anyio.fail_after(60):
        async with anyio.create_task_group() as running:
            for number in range(4):
                running.start_soon(run, number)
            await rollout.asked.wait()
            assert loop.host.pid is not None
            os.kill(loop.host.pid, signal.SIGKILL)
    assert responses == {number: [number] for number in range(4)}
    assert rollout.num_cancelled == 4
    await loop.aclose()


async def test_a_group_that_had_its_time_comes_back_with_what_ended(
    system: ActorSystem, tmp_path: Path, tiny_model_folder: Path
) -> None:
    rollout = HangingRolloutCtl(tmp_path / "asked")
    rollout.given_up.set()
    config = SingleTurnAgentLoopConfig(
        hf_checkpoint=str(tiny_model_folder), cpu_resources=CPUResourcesConfig(num_workers=1, num_cpus_per_worker=0.1)
    )
    loop = config.build(rollout, None, system=system)
    await loop.ready()
    hanging, quick = (
        state.model_copy(update={"prompt_ids": ids}) for state, ids in zip(make_states(), ([3], [1]), strict=True)
    )
    states = await loop.generate_group([hanging, quick], timeout_s=2.0)
    assert [(state.status, state.response_ids) for state in states] == [
        (Status.FAILED, None),
        (Status.COMPLETED, [5]),
    ]
    await loop.aclose()


async def test_an_answer_to_another_process_is_dropped() -> None:
    old, new = (LoopHost(SingleTurnAgentLoopConfig(), has_judger=False) for _ in range(2))
    state = make_states(1)[0]
    wrong, right = (state.model_copy(update={"response_ids": ids}) for ids in ([1], [2]))
    finished: list[RolloutState] = []

    async def run(host: LoopHost) -> None:
        finished.extend(await host.generate_group("group", [state], None))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, old)
        ((old_id, *_),) = await old.take("group")
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, new)
        ((new_id, *_),) = await new.take("group")
        await new.answer(old_id, wrong, None)
        await new.answer(new_id, right, None)
    assert [each.response_ids for each in finished] == [[2]]


async def test_a_router_spreads_groups_and_a_dead_engine_ends_them(
    system: ActorSystem, tmp_path: Path, tiny_model_folder: Path
) -> None:
    dead = False
    rollout = ScriptedRolloutCtl(lambda _: ActorDiedError("rollout/0 died") if dead else [5])
    loop = settings(tmp_path, tiny_model_folder, 2).build(rollout, None, system=system)
    assert isinstance(loop, RouterAgentLoop)
    await loop.ready()
    pids: set[int] = set()

    async def run() -> None:
        pids.update(state.extra_fields["pid"] for state in await loop.generate_group(make_states(1)))

    async with anyio.create_task_group() as running:
        running.start_soon(run)
        running.start_soon(run)
    assert len(pids) == 2
    assert loop.get_worker_status() == {"agent_loop/0": 0, "agent_loop/1": 0}
    dead = True
    with pytest.raises(ActorDiedError, match="rollout/0 died"):
        await loop.generate_group(make_states(1))
    await loop.aclose()
