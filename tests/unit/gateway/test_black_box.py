"""Agents that are not ours, as async functions: what they are given, rewards, failures, settings."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from pydantic import ValidationError

from tests.unit.gateway.rig import END, QWEN3, answering, held
from xrl_lite.actors import CPUResourcesConfig
from xrl_lite.agent_loop import TaskSpecConfig
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, Row, SampleParams, Status
from xrl_lite.errors import ActorUnavailableError, ConfigError, PluginError, RolloutError
from xrl_lite.gateway import BlackBoxAgentsConfig, GatewayConfig, SessionHandle

HERE = "tests.unit.gateway.test_black_box"


async def say(session: SessionHandle, *texts: str) -> list[str]:
    """A conversation over HTTP."""
    messages: list[Any] = []
    async with httpx.AsyncClient(headers={"x-api-key": session.api_key}, verify=False) as client:
        for text in texts:
            messages.append({"role": "user", "content": text})
            body = {"model": session.model, "messages": messages}
            response = await client.post(f"{session.base_url}/chat/completions", json=body)
            response.raise_for_status()
            messages.append(response.json()["choices"][0]["message"])
    return [message["content"] for message in messages[1::2]]


async def returns_a_reward(session: SessionHandle, raw_prompt: list[Any], bonus: float = 0.0) -> float:
    await say(session, raw_prompt[0]["content"], "Sure?")
    return 0.5 + bonus


async def posts_a_reward(session: SessionHandle, **_: Any) -> None:
    await say(session, "hi")
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, verify=False) as client:
        await client.post(session.reward_info_url, json={"reward_info": {"reward": 1.0, "acc": True, "note": "x"}})


async def did_not_finish(session: SessionHandle) -> dict[str, Any]:
    await say(session, "hi")
    return {"reward": 0.5, "finished": False}


async def gives_no_reward(session: SessionHandle) -> None:
    await say(session, "hi")


async def begins_twice(session: SessionHandle) -> None:
    await say(session, "hi", "more")
    await say(session, "other")


async def asks_for_something_else(session: SessionHandle) -> None:
    body = {"model": session.model, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.1, "top_p": 0.5}
    async with httpx.AsyncClient(headers={"x-api-key": session.api_key}, verify=False) as client:
        await client.post(f"{session.base_url}/chat/completions", json={**body, "max_tokens": 7})


async def raises(session: SessionHandle) -> None:
    await say(session, "hi")
    raise KeyError("no such key in the agent")


async def awaits_what_was_cancelled(session: SessionHandle) -> float:
    await say(session, "hi")
    other = asyncio.ensure_future(anyio.sleep_forever())
    other.cancel()
    await other
    return 1.0


async def exits(session: SessionHandle) -> None:
    await say(session, "hi")
    raise SystemExit(0)


async def says_nothing(session: SessionHandle) -> float:
    return 1.0


async def returns_nonsense(session: SessionHandle) -> float:
    await say(session, "hi")
    return math.nan


async def swallows_errors(session: SessionHandle) -> float:
    with suppress(httpx.HTTPStatusError):
        await say(session, "hi")
    return 0.0


async def waits_for_ever(session: SessionHandle) -> None:
    await anyio.sleep_forever()


def not_async(session: SessionHandle) -> None:
    pass


class Agent:
    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    async def __call__(self, session: SessionHandle, *, sample_index: int, **_: Any) -> dict[str, Any]:
        await say(session, f"{self.greeting} {sample_index}")
        return {"reward": float(sample_index), "index": sample_index}


class Judger:
    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        rollout_state.reward = {"score": 0.25, "turns": len(rollout_state.extra_fields["messages"])}
        return rollout_state

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        return [await self.judge(state) for state in rollout_states]


def config_of(name: str, **fields: Any) -> BlackBoxAgentsConfig:
    agent = {key: fields.pop(key) for key in ("runner_kwargs", "wall_time_s", "max_concurrent") if key in fields}
    return BlackBoxAgentsConfig(agents={name: {"runner": f"{HERE}:{name}", **agent}}, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def loop_of(config: BlackBoxAgentsConfig, rollout: Any) -> AsyncIterator[Any]:
    loop = config.build(rollout, Judger(), tokenizer=QWEN3)
    try:
        yield loop
    finally:
        await loop.aclose()


async def run(config: BlackBoxAgentsConfig, rollout: Any = None, *, group_size: int = 1) -> list[RolloutState]:
    states = [
        RolloutState(message=[{"role": "user", "content": "3+4?"}], group_id=5, rollout_id=10 + index, prompt_ids=[1])
        for index in range(group_size)
    ]
    async with loop_of(config, rollout or answering()) as loop:
        return await loop.generate_group(states, sample_params=SampleParams(max_tokens=300))


async def test_a_function_is_given_what_it_names_and_its_reward_is_the_attempts() -> None:
    (state,) = await run(config_of("returns_a_reward", runner_kwargs={"bonus": 0.25}))
    assert (state.status, state.reward) == (Status.COMPLETED, {"score": 0.75})
    pairs = zip(state.response_ids or [], state.response_mask or [], strict=True)
    assert QWEN3.decode([token for token, mask in pairs if mask], False) == f"1{END}2{END}"
    assert "3+4?" in QWEN3.decode(state.prompt_ids or [], False)
    assert [message["role"] for message in state.extra_fields["messages"]] == ["user", "assistant"] * 2
    assert set(state.response_model_steps or []) == {3}


async def test_a_class_is_made_once_and_called_for_each_sample() -> None:
    states = await run(config_of("Agent", runner_kwargs={"greeting": "hello"}), group_size=3)
    assert [state.reward for state in states] == [{"score": float(n), "index": n} for n in range(3)]


async def test_a_posted_reward_goes_before_the_judger_and_else_the_judger_is_asked() -> None:
    (state,) = await run(config_of("posts_a_reward"))
    assert state.reward == {"score": 1.0, "acc": True}
    assert state.extra_fields["reward_info"] == {"acc": True, "note": "x"}
    (state,) = await run(config_of("gives_no_reward"))
    assert state.reward == {"score": 0.25, "turns": 2}


@pytest.mark.parametrize(("name", "is_trained"), [("did_not_finish", False), ("gives_no_reward", True)])
async def test_an_agent_may_say_that_it_did_not_finish(name: str, is_trained: bool) -> None:
    (state,) = await run(config_of(name, mask_unfinished_episode=True))
    assert (state.status, state.reward is None) == (Status.COMPLETED, False)
    assert any(state.response_mask or []) == is_trained


def test_the_bound_of_an_agent_holds_for_all_processes_together() -> None:
    resources = CPUResourcesConfig(num_workers=3, num_cpus_per_worker=0.1)
    config = config_of("Agent", max_concurrent=8, cpu_resources=resources)
    assert [config.share_of(number, 3).agents["Agent"].max_concurrent for number in range(3)] == [3, 3, 2]
    with pytest.raises(ValidationError, match=r"agents.Agent.max_concurrent is 2, fewer than the 3 processes"):
        config_of("Agent", max_concurrent=2, cpu_resources=resources)


@pytest.mark.parametrize(("selection", "num_turns"), [("all", [2, 1]), ("longest", [2]), ("last", [1])])
async def test_trajectories_of_a_session_share_its_reward(selection: str, num_turns: list[int]) -> None:
    states = await run(config_of("begins_twice", trajectory_selection=selection))
    assert [len(state.extra_fields["messages"]) // 2 for state in states] == num_turns
    assert {state.reward["score"] for state in states if state.reward} == {0.25}
    assert len({state.session_id for state in states}) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "agent 'raises' raised KeyError: 'no such key in the agent' at "),
        ("awaits_what_was_cancelled", "raised CancelledError:  at "),
        ("exits", "raised SystemExit: 0 at "),
        ("says_nothing", "the agent ended without an answer of the model"),
        ("returns_nonsense", "the agent's reward must be a finite number, got nan"),
        ("waits_for_ever", "agent 'waits_for_ever' took longer than 0.05 s (wall_time_s) and was ended"),
    ],
)
async def test_what_goes_wrong_costs_the_sample_and_is_named(name: str, message: str) -> None:
    (state,) = await run(config_of(name, wall_time_s=0.05 if name == "waits_for_ever" else 60))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert message in str(state.error_msg)
    assert "sample 10" in str(state.error_msg)


async def test_a_failure_of_the_engine_is_no_reward_though_the_agent_swallows_it() -> None:
    rollout = ScriptedRolloutCtl(lambda _: RolloutError("engine broke"))
    (state,) = await run(config_of("swallows_errors"), rollout)
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert "the engine could not make the last turn: engine broke" in str(state.error_msg)


async def test_calls_are_counted_as_those_of_our_own_tools() -> None:
    (state,) = await run(config_of("gives_no_reward"))
    assert state.extra_fields["tool_counts"] == {"calls": 0, "truncated": 0, "failures": {}}


async def test_what_ends_the_run_goes_through() -> None:
    rollout = ScriptedRolloutCtl(lambda _: ActorUnavailableError("all replicas are down"))
    with pytest.raises(ActorUnavailableError, match="all replicas are down"):
        await run(config_of("swallows_errors"), rollout)


async def test_an_attempt_that_is_aborted_is_made_again_as_from_the_start() -> None:
    (state,) = await run(config_of("returns_a_reward"), ScriptedRolloutCtl(lambda _: None))
    assert (state.status, state.reward, state.prompt_ids) == (Status.ABORTED, None, [1])


async def test_sessions_at_once_are_limited_and_closed_when_the_loop_is_cancelled() -> None:
    rollout = held()
    async with loop_of(config_of("gives_no_reward", max_concurrent=2), rollout) as loop:
        states = [
            RolloutState(message=[{"role": "user", "content": "x"}], group_id=0, rollout_id=index, prompt_ids=[1])
            for index in range(5)
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.generate_group, states)
            await rollout.begun(2)
            assert loop.gateway.num_sessions == 2
            tasks.cancel_scope.cancel()
        assert loop.gateway.num_sessions == 0
        assert rollout.num_ended == rollout.num_begun == 2


async def test_samples_have_seeds_of_their_own_and_the_same_in_every_run() -> None:
    ids: list[list[Any]] = []
    for _ in range(2):
        rollout = answering()
        await run(config_of("gives_no_reward"), rollout, group_size=3)
        ids.append(sorted(request.rollout_id for request in rollout.requests))
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3


async def test_a_port_that_is_taken_ends_the_run_before_its_first_attempt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await run(config_of("gives_no_reward", gateway=GatewayConfig(port=port)))


async def test_requests_of_agents_that_are_trained_do_not_choose_the_distribution() -> None:
    rollout = answering()
    await run(config_of("asks_for_something_else"), rollout)
    used = rollout.requests[0].sample_params
    assert (used.temperature, used.top_p, used.max_tokens) == (1.0, 1.0, 7)


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agents": {}}, "agents is empty"),
        ({"agents": {"a": {}}}, "give exactly one of runner"),
        ({"agents": {"a": {"command": []}}}, "command is empty"),
        ({"agents": {"a": {"command": ["x"], "runner_kwargs": {"a": 1}}}}, "runner_kwargs are for a runner"),
        ({"agents": {"a": {"command": ["x"]}, "b": {"command": ["x"]}}}, "default_agent: choose one of a, b"),
        ({"agents": {"coder": {"command": ["x"]}}, "default_agent": "codr"}, "Did you mean 'coder'?"),
        (
            {"agents": {"a": {"command": ["x"]}}, "gateway": {"request_params": ["temperature"]}},
            "with temperature an agent would choose the distribution",
        ),
        (
            {
                "agents": {"a": {"command": ["x"]}},
                "gateway": {"port": 8000},
                "cpu_resources": {"num_workers": 2, "num_cpus_per_worker": 1},
            },
            "gateway.port is 8000, and each of the 2 processes",
        ),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError), match=message):
        BlackBoxAgentsConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("agent", "error", "message"),
    [
        ({"command": ["no-such-program"]}, ConfigError, "there is no program 'no-such-program'"),
        ({"runner": f"{HERE}:not_async"}, ConfigError, "is not async"),
        ({"runner": f"{HERE}:nothing_here"}, PluginError, "has no 'nothing_here'"),
        ({"runner": f"{HERE}:Agent"}, ConfigError, "cannot be made"),
        ({"runner": f"{HERE}:gives_no_reward", "runner_kwargs": {"x": 1}}, ConfigError, "has no argument 'x'"),
    ],
)
def test_agents_that_cannot_be_started(agent: dict[str, Any], error: type[Exception], message: str) -> None:
    config = BlackBoxAgentsConfig.model_validate({"agents": {"a": agent}})
    with pytest.raises(error, match=message):
        config.check_rows([])


def test_a_row_that_names_an_unknown_agent_is_found_before_anything_starts() -> None:
    config = config_of("gives_no_reward")
    row = Row(index=7, prompt=[], ground_truth="1", agent_name="gives_no_rewrad")
    with pytest.raises(ConfigError, match="row 7: Unknown agent 'gives_no_rewrad'"):
        config.check_rows([row])


def test_a_run_config_names_the_loop(tmp_path: Path) -> None:
    task = TaskSpecConfig.model_validate(
        {
            "task_name": "t",
            "sampler_config": {"data": {"path": str(tmp_path / "rows.jsonl")}},
            "agent_loop_config": {
                "type": "black_box",
                "agents": {"a": {"command": ["x"]}},
                "prompt_length": 100,
                "sample_params": {"max_tokens": 20},
            },
        }
    )
    assert isinstance(task.agent_loop_config, BlackBoxAgentsConfig)
    assert task.agent_loop_config.max_row_tokens(5) == 120
    again = TaskSpecConfig.model_validate(task.model_dump(mode="json"))
    assert again.agent_loop_config == task.agent_loop_config
