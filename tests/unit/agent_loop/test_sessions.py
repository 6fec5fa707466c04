"""Agents: the tool loop and its stop rules, agents by name, several trajectories, and what a failure costs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from tests.chat_templates import make_tokenizer
from xrl_lite.actors import CPUResourcesConfig
from xrl_lite.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentsConfig,
    SingleTurnAgentLoopConfig,
    TaskSpecConfig,
    register,
)
from xrl_lite.agent_loop.base import check_batch_judge
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, Row, SampleParams, Status
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import ActorDiedError, ConfigError, PluginError, RolloutError, RunError, TemplateError
from xrl_lite.judger import JudgerConfig
from xrl_lite.rollout.controller import response_seed
from xrl_lite.tools import FunctionCall, McpServerConfig, ToolParser, ToolsConfig

QWEN3 = Tokenizer(make_tokenizer("qwen3"))
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4"}}\n</tool_call><|im_end|>'
ANSWER = "It is 7.<|im_end|>"
CALCULATOR = ToolsConfig(builtin=["calculator"])


class Judger:
    """Scores by the response; notes what it was asked."""

    def __init__(self) -> None:
        self.judged: list[RolloutState] = []
        self.batches: list[int] = []

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        self.judged.append(rollout_state)
        rollout_state.reward = {"score": float("7" in (rollout_state.response or ""))}
        return rollout_state

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        self.batches.append(len(rollout_states))
        return [await self.judge(state) for state in rollout_states]


def make_state(index: int = 0, **extra: Any) -> RolloutState:
    return RolloutState(
        message=[{"role": "user", "content": "What is 3 + 4?"}],
        group_id=0,
        rollout_id=index,
        prompt_ids=[1],
        extra_fields=extra,
        sample_params=SampleParams(max_tokens=400),
    )


def scripted(*texts: str) -> ScriptedRolloutCtl:
    return ScriptedRolloutCtl.of_texts(texts, QWEN3.encode_text, policy_version=3)


async def run(config: AgentsConfig, rollout: ScriptedRolloutCtl, **extra: Any) -> list[RolloutState]:
    loop = config.build(rollout, Judger(), tokenizer=QWEN3)
    return await loop.generate_group([make_state(**extra)], sample_params=SampleParams(max_tokens=400))


def trained_text(state: RolloutState) -> str:
    pairs = zip(state.response_ids or [], state.response_mask or [], strict=True)
    return QWEN3.decode([token for token, mask in pairs if mask], False)


# --- prompts


async def test_a_prompt_is_as_long_as_its_agent_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    (tmp_path / "text.txt").write_text("Paris", encoding="utf-8")
    source = {"class_name": "search_folder", "config": {"folder": str(tmp_path)}}  # its class knows the schema
    file.write_text(json.dumps({"tools": [source]}), encoding="utf-8")
    config = AgentsConfig(tools=ToolsConfig(builtin=["calculator"], tool_config_path=file))
    loop = config.build(scripted(), None, tokenizer=QWEN3)
    encode = config.row_encoder(QWEN3, tools=await loop.tool_schemas())

    def shown(agent_name: str | None = None, **extra_info: Any) -> str:
        prompt = [{"role": "user", "content": "What is 3 + 4?"}]
        row = Row(index=0, prompt=prompt, ground_truth="7", agent_name=agent_name, extra_info=extra_info)
        return QWEN3.decode(encode(row), False)

    assert "calculator" in shown()
    assert "search" in shown()
    assert "search" not in shown(tool_selection=["calculator"])
    assert "calculator" not in shown("single_turn_agent")


async def test_the_prompt_that_is_measured_is_the_one_that_is_sampled_from() -> None:
    config = AgentsConfig(tools=CALCULATOR, template_kwargs={"enable_thinking": False})
    loop = config.build(scripted(ANSWER), Judger(), tokenizer=QWEN3)
    (state,) = await loop.generate_group([make_state()])
    row = Row(index=0, prompt=make_state().message, ground_truth="7")
    assert config.row_encoder(QWEN3, tools=await loop.tool_schemas())(row) == state.prompt_ids


# --- the tool loop


async def test_tools_are_called_until_there_is_an_answer() -> None:
    rollout = scripted(CALL, ANSWER)
    (state,) = await run(AgentsConfig(tools=CALCULATOR), rollout)
    assert (state.status, state.reward, state.finish_reason) == (Status.COMPLETED, {"score": 1.0}, "stop")
    assert trained_text(state) == CALL + ANSWER
    whole = QWEN3.decode(state.response_ids or [], False)
    assert whole == (
        CALL + "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n" + ANSWER
    )
    assert state.extra_fields["num_turns"] == 4
    assert state.extra_fields["stopped_by"] == "no_tool_call"
    assert state.extra_fields["tool_rewards"] == [0.0]
    assert [message["role"] for message in state.extra_fields["messages"]] == ["user", "assistant", "tool", "assistant"]


async def test_the_second_request_holds_the_first_turn_as_sampled() -> None:
    odd = '<tool_call>{"name":   "calculator", "arguments": {"expression":"3+4"}}</tool_call><|im_end|>'
    rollout = scripted(odd, ANSWER)
    (state,) = await run(AgentsConfig(tools=CALCULATOR), rollout)
    first, second = (request.prompt_ids or [] for request in rollout.requests)
    sampled = QWEN3.encode_text(odd)
    assert second[len(first) : len(first) + len(sampled)] == sampled
    assert [*(state.prompt_ids or []), *(state.response_ids or [])][: len(second)] == second


async def test_masks_logprobs_and_versions_belong_to_the_sampled_tokens() -> None:
    (state,) = await run(AgentsConfig(tools=CALCULATOR), scripted(CALL, ANSWER))
    for mask, logprob in zip(state.response_mask or [], state.logprobs or [], strict=True):
        assert (logprob < 0) == bool(mask)
    assert set(state.response_model_steps or []) == {3}


@pytest.mark.parametrize(
    ("family", "call_format", "end_of_call", "answer"),
    [
        ("qwen2.5", "hermes", "<|im_end|>", "It is 7.<|im_end|>"),
        ("qwen3", "qwen3_coder", "<|im_end|>", "<think>\nEasy.\n</think>\n\nIt is 7.<|im_end|>"),
        ("glm", "glm", "<|observation|>", "\n<think></think>\nIt is 7.<|user|>"),
        ("harmony", "gpt-oss", "", "<|channel|>final<|message|>It is 7.<|return|>"),
    ],
)
async def test_formats_and_templates_go_together(family: str, call_format: str, end_of_call: str, answer: str) -> None:
    tokenizer = Tokenizer(make_tokenizer(family))
    call = FunctionCall("calculator", json.dumps({"expression": "3+4"}))
    texts = [ToolParser.get_tool_parser(call_format).render([call]) + end_of_call, answer]
    rollout = ScriptedRolloutCtl.of_texts(texts, tokenizer.encode_text)
    config = AgentsConfig(tools=ToolsConfig(builtin=["calculator"], format=call_format))
    (state,) = await config.build(rollout, Judger(), tokenizer=tokenizer).generate_group([make_state()])
    assert state.status is Status.COMPLETED, state.error_msg
    assert [message["role"] for message in state.extra_fields["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert state.extra_fields["messages"][2]["content"] == "7"
    sampled = [token for text in texts for token in tokenizer.encode_text(text)]
    pairs = zip(state.response_ids or [], state.response_mask or [], strict=True)
    assert [token for token, mask in pairs if mask] == sampled
    second = rollout.requests[1].prompt_ids or []
    assert [*(state.prompt_ids or []), *(state.response_ids or [])][: len(second)] == second


@pytest.mark.parametrize(
    ("limits", "texts", "stopped_by", "num_turns"),
    [
        ({}, [ANSWER], "no_tool_call", 2),
        ({"response_length": 8}, [CALL], "response_length", 2),
        ({"max_assistant_turns": 2}, [CALL, CALL], "max_assistant_turns", 4),
        ({"max_assistant_turns": 2}, [CALL, ANSWER], "no_tool_call", 4),
        ({"max_user_turns": 1}, [CALL, CALL], "max_user_turns", 4),
    ],
)
async def test_stop_rules(limits: dict[str, int], texts: list[str], stopped_by: str, num_turns: int) -> None:
    (state,) = await run(AgentsConfig(tools=CALCULATOR, **limits), scripted(*texts))
    assert state.extra_fields["stopped_by"] == stopped_by
    assert state.extra_fields["num_turns"] == num_turns
    assert (state.response_mask or [])[-1] == 1


@pytest.mark.parametrize(
    ("limits", "texts", "is_trained"),
    [
        ({}, [CALL, ANSWER], True),
        ({"max_assistant_turns": 2}, [CALL, ANSWER], True),
        ({"max_assistant_turns": 1}, [CALL], False),
        ({"max_user_turns": 1}, [CALL, CALL], False),
        ({"response_length": 8}, [CALL], False),
    ],
)
async def test_what_was_cut_short_is_judged_but_not_trained_on(
    limits: dict[str, int], texts: list[str], is_trained: bool
) -> None:
    config = AgentsConfig(tools=CALCULATOR, mask_unfinished_episode=True, **limits)
    (state,) = await run(config, scripted(*texts))
    assert (state.status, state.reward is None) == (Status.COMPLETED, False)
    assert len(state.response_mask or []) == len(state.response_ids or [])
    assert any(state.response_mask or []) == is_trained


async def test_a_single_response_that_was_cut_is_not_trained_on() -> None:
    config = SingleTurnAgentLoopConfig(mask_unfinished_episode=True)
    loop = config.build(scripted("too long", ANSWER), Judger())
    params = SampleParams(max_tokens=len(QWEN3.encode_text(ANSWER)) - 1)
    cut, *_ = await loop.generate_group([make_state()], sample_params=params)
    whole, *_ = await loop.generate_group([make_state()], sample_params=SampleParams(max_tokens=400))
    assert [any(state.response_mask or []) for state in (cut, whole)] == [False, True]
    assert cut.reward is not None


async def test_an_answer_of_a_tool_without_room_to_be_answered_is_left_out() -> None:
    room = len(QWEN3.encode_text(CALL)) + 5
    (state,) = await run(AgentsConfig(tools=CALCULATOR, response_length=room), scripted(CALL))
    assert (state.extra_fields["stopped_by"], state.finish_reason) == ("response_length", "length")
    assert state.response_mask == [1] * len(QWEN3.encode_text(CALL))


async def test_each_turn_may_use_what_is_left() -> None:
    rollout = scripted(CALL, ANSWER)
    (state,) = await run(AgentsConfig(tools=CALCULATOR, response_length=300), rollout)
    used = len(rollout.requests[1].prompt_ids or []) - len(rollout.requests[0].prompt_ids or [])
    assert [request.sample_params.max_tokens for request in rollout.requests] == [300, 300 - used]
    assert state.status is Status.COMPLETED


async def test_a_malformed_call_is_answered_with_what_is_wrong() -> None:
    broken = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"<|im_end|>'
    (state,) = await run(AgentsConfig(tools=CALCULATOR), scripted(broken, ANSWER))
    assert state.status is Status.COMPLETED
    assert "The tool call cannot be read: the call is not valid JSON" in QWEN3.decode(state.response_ids or [], False)
    assert state.extra_fields["tool_counts"] == {"calls": 1, "truncated": 0, "failures": {"malformed": 1}}


async def test_reasoning_that_is_dropped_after_a_users_turn_gives_two_trajectories() -> None:
    @register("test_asks_again")
    class AsksAgain(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
            tokens = self.start(kwargs["raw_prompt"])
            for turn in range(2):
                output = await self.server_manager.generate(
                    "id", prompt_ids=tokens.context_ids, sampling_params=sampling_params
                )
                tokens.add_sampled(output.token_ids, output.log_probs or [])
                if not turn:
                    tokens.add_messages([{"role": "user", "content": "Sure?"}])
            return [AgentLoopOutput.of_row(row) for row in tokens.rows()]

    texts = ["<think>\nEasy.\n</think>\n\n7<|im_end|>", "<think>\nYes.\n</think>\n\n7<|im_end|>"]
    states = await run(AgentsConfig(default_agent_loop="test_asks_again"), scripted(*texts))
    assert [trained_text(state) for state in states] == texts
    assert len({state.session_id for state in states}) == 1
    assert [state.rollout_id for state in states] == ["0.0", 0]
    assert [state.reward for state in states] == [{"score": 1.0}] * 2


# --- agents by name


class Ends(AgentLoopBase):
    """Returns or raises what its entry says."""

    def __init__(self, server_manager: Any, how: str = "answer", **kwargs: Any) -> None:
        super().__init__(server_manager=server_manager, **kwargs)
        self.how = how

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        match self.how:
            case "raise":
                raise KeyError("nothing here")
            case "exit":
                raise SystemExit(0)
            case "stray":
                other = asyncio.ensure_future(anyio.sleep_forever())
                other.cancel()
                await other
            case "nan":
                return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], reward_score=math.nan)
            case "nan, later":
                output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0])
                output.reward_score = math.nan
                return output
            case "hang":
                await anyio.sleep_forever()
            case "nothing":
                return None
            case "dead":
                raise ActorDiedError("rollout/0 died")
            case "scored":
                return AgentLoopOutput(
                    prompt_ids=[1],
                    response_ids=[2],
                    response_mask=[1],
                    response_logprobs=[-1.0],
                    reward_score=0.5,
                    extra_fields={"reward_extra_info": {"acc": 1}},
                )
            case "half" | "half, chokes" | "half, scores":
                output = await self.server_manager.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 4})
                if self.how == "half, chokes":
                    raise ValueError("no answer in the response")
                ids = output.token_ids
                return AgentLoopOutput(
                    prompt_ids=[1],
                    response_ids=ids,
                    response_mask=[1] * len(ids),
                    response_logprobs=output.log_probs,
                    reward_score=0.0 if self.how == "half, scores" else None,
                )
            case "one id" | "colder" | "colder, not trained":
                params = {"max_tokens": 4} if self.how == "one id" else {"temperature": 0.5}
                output = await self.server_manager.generate("id", prompt_ids=[1], sampling_params=params)
                again = await self.server_manager.generate("id", prompt_ids=[1], sampling_params={})
                trained = 0 if self.how == "colder, not trained" else 1
                ids, more = output.token_ids, again.token_ids
                return AgentLoopOutput(
                    prompt_ids=[1],
                    response_ids=[*ids, *more],
                    response_mask=[trained] * len(ids) + [1] * len(more),
                    response_logprobs=[*(output.log_probs or []), *(again.log_probs or [])],
                )
            case "empty":
                return AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[], response_logprobs=[])
            case _:
                return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0])


def agents_file(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "agents.yaml"
    path.write_text(json.dumps(list(entries)), encoding="utf-8")
    return path


def ends(folder: Path, how: str) -> AgentsConfig:
    entry = {"name": "ends", "_target_": f"{__name__}.Ends", "how": how}
    return AgentsConfig(agent_loop_config_path=agents_file(folder, entry), default_agent_loop="ends")


async def requests_of(config: AgentsConfig) -> list[RolloutState]:
    rollout = scripted(*[ANSWER] * 4)
    await config.build(rollout, Judger(), tokenizer=QWEN3).generate_group([make_state(0), make_state(1)])
    return rollout.requests


async def test_attempts_draw_other_numbers_whatever_their_agent_calls_its_requests(tmp_path: Path) -> None:
    requests, again = [await requests_of(ends(tmp_path, "one id")) for _ in range(2)]
    assert {request.session_id for request in requests} == {"id"}
    seeds = {response_seed(0, request, 1) for request in requests}
    assert len(seeds) == 4
    assert {response_seed(0, request, 1) for request in again} == seeds


async def test_tokens_of_another_temperature_are_not_trained_on(tmp_path: Path) -> None:
    def loop(how: str) -> Any:
        return ends(tmp_path, how).build(scripted(ANSWER, ANSWER), Judger(), tokenizer=QWEN3)

    trained, masked = [(await loop(how).generate_group([make_state()]))[0] for how in ("colder", "colder, not trained")]
    assert trained.status is Status.FAILED
    assert "the agent asked for temperature=0.5 (not 1.0)" in str(trained.error_msg)
    assert masked.status is Status.COMPLETED
    evaluated = await loop("colder").generate_group([make_state()], sample_params=SampleParams(max_tokens=30))
    assert evaluated[0].status is Status.COMPLETED


async def test_a_row_chooses_its_agent(tmp_path: Path) -> None:
    config = ends(tmp_path, "answer").model_copy(update={"default_agent_loop": "single_turn_agent"})
    loop = config.build(scripted(ANSWER), Judger(), tokenizer=QWEN3)
    states = await loop.generate_group([make_state(0), make_state(1, agent_name="ends")])
    assert [state.response_ids for state in states] == [QWEN3.encode_text(ANSWER), [2]]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"sample 0: agent 'ends' raised KeyError: 'nothing here' at .*test_sessions.py:\d+ in run"),
        ("exit", r"sample 0: agent 'ends' raised SystemExit: 0 at .*test_sessions.py:\d+ in run"),
        ("stray", r"sample 0: raised CancelledError:  at .*test_sessions.py:\d+ in run"),
        ("nan", r"(?s)raised ValidationError: .*finite number.*test_sessions.py:\d+ in run"),
        ("nan, later", "sample 0: its score is nan, and must be a finite number"),
        ("nothing", r"run\(\) must return an AgentLoopOutput"),
        ("hang", r"agent 'ends' took longer than 1 s \(session_timeout_s\)"),
        ("empty", "a trajectory without a token of the model"),
    ],
)
async def test_a_failure_costs_its_session_alone(tmp_path: Path, how: str, message: str) -> None:
    config = ends(tmp_path, how).model_copy(update={"session_timeout_s": 1.0 if how == "hang" else 60.0})
    loop = config.build(scripted(ANSWER), Judger(), tokenizer=QWEN3)
    failed, fine = await loop.generate_group([make_state(0), make_state(1, agent_name="single_turn_agent")])
    assert failed.status is Status.FAILED
    assert failed.reward is None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.error_msg)
    assert fine.status is Status.COMPLETED


@pytest.mark.parametrize("how", ["raise", "exit"])
async def test_an_agent_that_never_works_ends_the_run_with_the_first_traceback(tmp_path: Path, how: str) -> None:
    config = ends(tmp_path, how).model_copy(update={"max_initial_failures": 3})
    loop = config.build(scripted(), None, tokenizer=QWEN3)
    states = await loop.generate_group([make_state(0), make_state(1)])
    assert [state.status for state in states] == [Status.FAILED, Status.FAILED]
    with pytest.raises(
        RunError, match=r"(?s)first 3 attempts .*agent 'ends' raised .*Traceback .*max_initial_failures"
    ):
        await loop.generate_group([make_state(2), make_state(3)])


async def test_an_agent_that_works_at_times_or_fails_in_several_ways_is_not_stopped(tmp_path: Path) -> None:
    entries = [{"name": how, "_target_": f"{__name__}.Ends", "how": how} for how in ("raise", "exit", "answer")]
    config = AgentsConfig(agent_loop_config_path=agents_file(tmp_path, *entries), max_initial_failures=2)
    for other in ("exit", "answer"):
        loop = config.build(scripted(), None, tokenizer=QWEN3)
        for number, name in enumerate(["raise", other, *4 * ["raise"]]):
            (state,) = await loop.generate_group([make_state(number, agent_name=name)])
            assert (state.status is Status.FAILED) == (name != "answer")


async def test_no_number_of_failures_ends_a_run_that_is_told_so(tmp_path: Path) -> None:
    config = ends(tmp_path, "raise").model_copy(update={"max_initial_failures": 0})
    loop = config.build(scripted(), None, tokenizer=QWEN3)
    states = await loop.generate_group([make_state(number) for number in range(40)])
    assert {state.status for state in states} == {Status.FAILED}


@pytest.mark.parametrize("how", ["stray", "hang"])
async def test_an_attempt_that_is_cancelled_has_not_failed(tmp_path: Path, how: str) -> None:
    state = make_state()
    loop = ends(tmp_path, how).build(scripted(), None, tokenizer=QWEN3)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await loop.generate_group([state])
    assert scope.cancelled_caught
    task = asyncio.create_task(ends(tmp_path, "hang").build(scripted(), None, tokenizer=QWEN3).generate_group([state]))
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (state.status, state.error_msg) == (Status.INIT, None)


async def test_a_dead_engine_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ActorDiedError, match="rollout/0 died"):
        await run(ends(tmp_path, "dead"), scripted())


async def test_an_engine_error_costs_one_session() -> None:
    rollout = ScriptedRolloutCtl(lambda _: RolloutError("scripted failure"))
    (state,) = await run(AgentsConfig(), rollout)
    assert (state.status, state.error_msg) == (Status.FAILED, "sample 0: scripted failure")


async def test_an_attempt_that_is_made_again_is_given_what_the_first_one_was() -> None:
    given: list[Any] = []

    @register("test_empties")
    class Empties(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            given.append(dict(kwargs["tools_kwargs"]))
            kwargs["tools_kwargs"].clear()
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0])

    loop = AgentsConfig(default_agent_loop="test_empties").build(scripted(), None, tokenizer=QWEN3)
    (state,) = await loop.generate_group([make_state(tools_kwargs={"search": {}})])
    await loop.generate_group([state])
    assert given == [{"search": {}}] * 2


async def test_an_aborted_response_makes_an_aborted_session() -> None:
    (state,) = await run(AgentsConfig(), ScriptedRolloutCtl(lambda _: None))
    assert (state.status, state.reward, state.finish_reason) == (Status.ABORTED, None, "abort")


class CutShort(ScriptedRolloutCtl):
    """Has two tokens of every response when it is aborted."""

    async def generate(self, state: RolloutState) -> RolloutState:
        state = await super().generate(state)
        state.status, state.finish_reason = Status.ABORTED, "abort"
        return state


@pytest.mark.parametrize("how", ["half", "half, chokes", "half, scores"])
async def test_whatever_an_agent_makes_of_an_aborted_response_its_session_is_aborted(tmp_path: Path, how: str) -> None:
    judger = Judger()
    loop = ends(tmp_path, how).build(CutShort(lambda _: [5, 6]), judger, tokenizer=QWEN3)
    (state,) = await loop.generate_group([make_state()])
    assert (state.status, state.reward, state.finish_reason) == (Status.ABORTED, None, "abort")
    assert judger.judged == []


async def test_a_reward_of_the_agent_is_not_judged_again(tmp_path: Path) -> None:
    judger = Judger()
    loop = ends(tmp_path, "scored").build(scripted(), judger, tokenizer=QWEN3)
    (state,) = await loop.generate_group([make_state()])
    assert state.reward == {"score": 0.5, "acc": 1}
    assert judger.judged == []


async def test_only_so_many_sessions_run_at_once() -> None:
    running: list[int] = []
    most: list[int] = []

    @register("test_counts")
    class Counts(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            running.append(1)
            most.append(len(running))
            await anyio.lowlevel.checkpoint()
            running.pop()
            return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], response_logprobs=[-1.0])

    config = AgentsConfig(default_agent_loop="test_counts", max_concurrent_sessions=2)
    await config.build(scripted(), None, tokenizer=QWEN3).generate_group([make_state(n) for n in range(6)])
    assert max(most) == 2


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_the_bound_of_sessions_holds_for_all_processes_together(num_workers: int) -> None:
    resources = CPUResourcesConfig(num_workers=num_workers, num_cpus_per_worker=0.1)
    config = AgentsConfig(max_concurrent_sessions=5, cpu_resources=resources)
    shares = [config.share_of(number, num_workers).max_concurrent_sessions or 0 for number in range(num_workers)]
    assert (sum(shares), max(shares) - min(shares) <= 1, min(shares) > 0) == (5, True, True)


async def test_a_group_is_judged_in_one_call_where_that_is_asked_for(tmp_path: Path) -> None:
    judger = Judger()
    config = ends(tmp_path, "answer").model_copy(update={"enable_batch_judge": True})
    states = [make_state(n, agent_name="single_turn_agent" if n else "ends") for n in range(3)]
    rollout = scripted(ANSWER, ANSWER)
    group = await config.build(rollout, judger, tokenizer=QWEN3).generate_group(states)
    assert judger.batches == [3]
    assert [state.reward for state in group] == [{"score": 0.0}, {"score": 1.0}, {"score": 1.0}]


# --- bad input


def test_processes_without_a_session_are_refused() -> None:
    resources = CPUResourcesConfig(num_workers=3, num_cpus_per_worker=0.1)
    with pytest.raises(ValidationError, match="max_concurrent_sessions is 2, fewer than the 3 processes"):
        AgentsConfig(max_concurrent_sessions=2, cpu_resources=resources)


def one_at_a_time(response: str, label: Any, extra_info: Any) -> dict[str, float]:
    return {"score": 0.0}


def refuses(match: str, error: type[Exception] = ConfigError) -> Any:
    return pytest.raises(error, match=match)


def test_an_unknown_agent_is_named_with_its_row() -> None:
    rows = [Row(index=4, prompt=[], ground_truth="", agent_name="tool_agnt")]
    with refuses(r"row 4: Unknown agent 'tool_agnt'. Did you mean 'tool_agent'\?"):
        AgentsConfig().check_rows(rows)
    with refuses(r"Unknown agent 'nobody'"):
        AgentsConfig(default_agent_loop="nobody").build(scripted(), None, tokenizer=QWEN3)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"tool_selection": ["calculatr"]}, r"row 4: it names the tool 'calculatr'.*Did you mean 'calculator'\?"),
        ({"tool_selection": "calculator"}, r"row 4: tool_selection must be a list of names of tools"),
        ({"tools_kwargs": {"calculator": 7}}, r"row 4: tools_kwargs must be"),
    ],
)
def test_what_a_row_says_about_tools_is_checked_with_the_settings(info: dict[str, Any], message: str) -> None:
    rows = [Row(index=4, prompt=[], ground_truth="", extra_info=info)]
    with refuses(message):
        AgentsConfig(tools=CALCULATOR).check_rows(rows)


def test_tools_that_cannot_be_had_are_refused_with_the_settings(tmp_path: Path) -> None:
    with refuses("there is no file"):
        AgentsConfig(tools=ToolsConfig(function_tool_path=tmp_path / "nowhere.py")).check_rows([])


def test_processes_of_loops_and_tools_are_planned(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text(
        "from xrl_lite.tools import function_tool\n"
        "@function_tool(run_in='process', num_workers=2, num_cpus=0.5)\n"
        "def work(x: int) -> str:\n    'Work.\\n\\n    Args:\\n        x: How much.'\n    return ''\n"
    )
    config = AgentsConfig(
        tools=ToolsConfig(
            function_tool_path=tools, mcp_servers=[McpServerConfig(name="files", url="http://localhost:1")]
        ),
        cpu_resources=CPUResourcesConfig(num_workers=2, num_cpus_per_worker=0.25),
    )
    of_tools = [("tool/work/0", 0.5), ("tool/work/1", 0.5), ("tool/mcp/files/0", 0.1)]
    assert list(config.planned_actors()) == [("agent_loop/0", 0.25), ("agent_loop/1", 0.25), *of_tools, *of_tools]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "must hold a list"),
        ("[{name: a}]", "entry 0: needs name and _target_"),
        ("[{name: a, _target_: b.C}, {name: a, _target_: b.C}]", "entry 1: the name 'a' is taken"),
        ("[", "is not YAML"),
    ],
)
def test_a_wrong_file_of_agents_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "agents.yaml"
    path.write_text(text)
    with refuses(message):
        AgentsConfig(agent_loop_config_path=path).check_rows([])


def test_a_missing_file_of_agents_is_refused(tmp_path: Path) -> None:
    with refuses("there is no file"):
        AgentsConfig(agent_loop_config_path=tmp_path / "nowhere.yaml").check_rows([])


async def test_a_target_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = agents_file(tmp_path, {"name": "gone", "_target_": "no.such.Agent"})
    (state,) = await run(AgentsConfig(agent_loop_config_path=path, default_agent_loop="gone"), scripted())
    assert "agent 'gone': Cannot load 'no.such.Agent'" in str(state.error_msg)


def test_two_agents_of_one_name_are_refused() -> None:
    register("test_twice")(type("One", (Ends,), {}))
    with pytest.raises(PluginError, match="'test_twice' is taken"):
        register("test_twice")(type("Two", (Ends,), {}))


def test_agents_need_a_tokenizer() -> None:
    with refuses("set hf_checkpoint"):
        AgentsConfig().build(scripted(), None)


async def test_tools_for_a_model_without_tool_support_are_refused() -> None:
    smollm = Tokenizer(make_tokenizer("smollm2"))
    loop = AgentsConfig(tools=CALCULATOR).build(scripted(), None, tokenizer=smollm)
    with pytest.raises(TemplateError, match="does not know tools"):
        await loop.ready()


def test_a_template_that_drops_reasoning_may_be_refused() -> None:
    with pytest.raises(TemplateError, match="First differing token"):
        AgentsConfig(on_rewrite="refuse").build(scripted(), None, tokenizer=QWEN3)


def test_a_judger_without_batches_is_refused_when_the_settings_are_read() -> None:
    loop = AgentsConfig(enable_batch_judge=True)
    judger = JudgerConfig(judger_name="single", reward_handler=one_at_a_time)
    with refuses("'single' judges one sample at a time"):
        check_batch_judge(loop, judger)
    with pytest.raises(ValidationError, match="judges one sample at a time"):
        TaskSpecConfig(
            task_name="t",
            sampler_config={"data": {"task": "addition"}},  # pyright: ignore[reportArgumentType]
            agent_loop_config=loop,
            judger_config=judger,
        )


def test_lengths_must_agree() -> None:
    with pytest.raises(ValidationError, match="response_ids 2, response_mask 1"):
        AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1])


def test_the_reward_stands_on_the_last_token_of_the_model() -> None:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3, 4], response_mask=[1, 1, 0], reward_score=0.5)
    columns = output.as_dict()
    assert columns["rm_scores"] == [0.0, 0.5, 0.0]
    assert set(columns) == {"prompts", "responses", "response_mask", "rm_scores"}


async def test_images_for_a_text_model_cost_the_session() -> None:
    loop = AgentsConfig().build(scripted(), None, tokenizer=QWEN3)
    state = make_state()
    state.message = [{"role": "user", "content": [{"type": "image", "image": "pixels"}]}]
    (failed,) = await loop.generate_group([state])
    assert failed.error_msg == "sample 0: the prompt holds a part of type 'image', but the model takes text only."


async def test_an_image_of_a_tool_costs_the_session_and_names_the_tool(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "from xrl_lite.tools import ToolResponse, function_tool\n"
        "@function_tool\n"
        "def calculator(expression: str) -> ToolResponse:\n"
        "    'Draw it.\\n\\n    Args:\\n        expression: What.'\n"
        "    return ToolResponse(text='here', image=['pixels'])\n"
    )
    (state,) = await run(AgentsConfig(tools=ToolsConfig(function_tool_path=tmp_path / "tools.py")), scripted(CALL))
    assert state.status is Status.FAILED
    assert "the answer of the tool 'calculator' holds a part of type 'image', but the model takes" in str(
        state.error_msg
    )


async def test_a_row_that_selects_a_tool_that_is_not_there_costs_its_session() -> None:
    (state,) = await run(AgentsConfig(tools=CALCULATOR), scripted(), tool_selection=["calculatr"])
    assert state.status is Status.FAILED
    assert "tool_selection names 'calculatr'" in str(state.error_msg)


# --- judging and pausing


class Slow(Judger):
    """Judges when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go_on = anyio.Event(), anyio.Event()

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        self.started.set()
        await self.go_on.wait()
        return await super().judge(rollout_state)


async def paused_group(
    during: Callable[[Slow], None], *, batch: bool, grace_s: float, before: bool = False
) -> Sequence[RolloutState]:
    judger = Slow()
    config = AgentsConfig(default_agent_loop="single_turn_agent", enable_batch_judge=batch, judge_grace_s=grace_s)
    loop = config.build(scripted(ANSWER, ANSWER), judger, tokenizer=QWEN3)
    groups: list[list[RolloutState]] = []

    async def generate() -> None:
        groups.append(await loop.generate_group([make_state(0), make_state(1)]))

    async with anyio.create_task_group() as running:
        if before:
            await loop.pause()
        running.start_soon(generate)
        await judger.started.wait()
        await loop.pause()
        during(judger)
    await loop.resume()
    assert not loop._paused.is_set()
    return groups[0]


@pytest.mark.parametrize(("batch", "before"), [(False, False), (True, False), (True, True)])
async def test_a_judgement_that_outlasts_the_pause_is_given_up(batch: bool, before: bool) -> None:
    group = await paused_group(lambda _: None, batch=batch, grace_s=0.01, before=before)
    assert [(state.rollout_id, state.status, state.finish_reason, state.reward) for state in group] == [
        (0, Status.ABORTED, "abort", None),
        (1, Status.ABORTED, "abort", None),
    ]


@pytest.mark.parametrize("batch", [False, True])
async def test_a_judgement_within_the_grace_counts(batch: bool) -> None:
    group = await paused_group(lambda judger: judger.go_on.set(), batch=batch, grace_s=30.0)
    assert [state.reward for state in group] == [{"score": 1.0}] * 2
