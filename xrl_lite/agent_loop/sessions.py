"""Runs agents over states: one session an attempt, as many trajectories as the agent returns.

::

    state --agent_name--> agent.run(sampling_params, **row) --> outputs --> states --> judger (the last one)

Waits for    the agent, at most `session_timeout_s`; its place, where `max_concurrent_sessions` is set
Is woken by  its end, or the limit

What an agent raises costs its session: the state is FAILED and says where. What ends a run (a dead engine, a judger
that cannot go on) goes through.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from pydantic import Field

from xrl_lite.agent_loop.agents import AgentParts, AgentSettings, AgentTable
from xrl_lite.agent_loop.base import (
    AgentLoop,
    AgentLoopConfig,
    RolloutCtl,
    StateJudger,
    needs_judgement,
    spread_judgement,
)
from xrl_lite.agent_loop.client import StateClient
from xrl_lite.agent_loop.output import AgentLoopOutput
from xrl_lite.data import RolloutState, Row, SampleParams, Status
from xrl_lite.data.token_builder import OnRewrite
from xrl_lite.errors import ActorError, ConfigError, JudgerError, RolloutError, RunError, WeightSyncError
from xrl_lite.log import get_logger
from xrl_lite.settings import UserPath
from xrl_lite.tools import Toolbox, ToolParser, ToolsConfig, load_tools

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.data.chat_template import ChatTemplate
    from xrl_lite.data.tokenizer import Tokenizer

logger = get_logger(__name__)

_ENDS_THE_RUN = (ActorError, JudgerError, RunError, WeightSyncError)


class AgentsConfig(AgentLoopConfig):
    """Settings of agents: which, with which tools, within which limits."""

    agent_loop_config_path: UserPath | None = None
    """YAML file of agents: a list of entries with name, `_target_` and settings of the agent."""

    default_agent_loop: str = "tool_agent"
    """Agent of rows that name none: tool_agent, single_turn_agent, or one of yours."""

    tools: ToolsConfig = ToolsConfig()
    """Tools and the format they are called in."""

    response_length: int | None = Field(default=None, gt=0)
    """Tokens behind the prompt at most, those of tools included; `sample_params.max_tokens` when not given."""

    max_assistant_turns: int | None = Field(default=None, gt=0)
    """Turns of the model at most."""

    max_user_turns: int | None = Field(default=None, gt=0)
    """Turns of tools and users at most."""

    on_rewrite: OnRewrite = "fork"
    """Where the chat template changes earlier turns (reasoning that is dropped): fork into a second trajectory, refuse
    to start, or keep the turns as they were sampled."""

    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the chat template, for example {enable_thinking: false}."""

    end_token_ids: list[int] = Field(default_factory=list[int])
    """Tokens that end a turn, where neither tokenizer nor template tell."""

    max_concurrent_sessions: int | None = Field(default=None, gt=0)
    """Sessions at once; those beyond wait."""

    session_timeout_s: float | None = Field(default=None, gt=0)
    """Limit for one session, judging not included; beyond it the attempt is FAILED."""

    def build_local(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> SessionsAgentLoop:
        """Make the loop."""
        return SessionsAgentLoop(self, rollout_ctl, judger, tokenizer=tokenizer, system=system)

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check that there is an agent for every row.

        Raises:
            ConfigError: a row names one that there is not; says which row.
        """
        table = AgentTable(self.agent_loop_config_path)
        table.check(self.default_agent_loop)
        for row in rows:
            if row.agent_name is not None:
                try:
                    table.check(row.agent_name)
                except ConfigError as error:
                    raise ConfigError(f"row {row.index}: {error}") from error


class SessionsAgentLoop(AgentLoop):
    """Runs agents.

    Args:
        config: Settings.
        rollout_ctl: Generates.
        judger: Scores.
        tokenizer: The model's tokenizer; that of `config.hf_checkpoint` when not given.
        system: Where tools run that have processes; the default system when not given.

    Raises:
        ConfigError: there is no tokenizer, or no agent of the default's name.
        TemplateError: the chat template fails its self-test.
    """

    def __init__(
        self,
        config: AgentsConfig,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> None:
        super().__init__(
            rollout_ctl,
            judger,
            sample_params=config.sample_params,
            enable_batch_judge=config.enable_batch_judge,
            judge_grace_s=config.judge_grace_s,
        )
        self._config = config
        self._system = system
        self._table = AgentTable(config.agent_loop_config_path)
        self._table.check(config.default_agent_loop)
        self._tokenizer = _with_template_kwargs(_load_tokenizer(config, tokenizer), config)
        self._parser = ToolParser.get_tool_parser(config.tools.format, self._tokenizer)
        self._template = self._make_template()
        self._toolbox: Toolbox | None = None
        self._loading: anyio.Lock | None = None
        self._places: anyio.Semaphore | None = None

    async def generate_sample(self, rollout_state: RolloutState) -> list[RolloutState]:
        state = rollout_state
        name = state.extra_fields.get("agent_name") or self._config.default_agent_loop
        toolbox = await self._tools()
        try:
            async with self._place():
                outputs = await self._run_within_limit(name, state, toolbox)
            states = self._states(state, outputs)
        except _ENDS_THE_RUN:
            raise
        except RolloutError as error:
            return [_failed(state, str(error))]
        except Exception as error:
            logger.warning("sample %s: agent %r raised", state.rollout_id, name, exc_info=error)
            return [_failed(state, f"agent {name!r} raised {describe_error(error)}")]
        if self.judger is not None and not self.enable_batch_judge and needs_judgement(states[-1]):
            states[-1] = await self.run_judger(states[-1])
        spread_judgement(states)
        return states

    async def ready(self) -> None:
        """Load the tools and check the chat template with them, before the first session."""
        await self._tools()

    async def aclose(self) -> None:
        """Give back what the tools hold."""
        if self._toolbox is not None:
            await self._toolbox.aclose()

    async def _run_within_limit(self, name: str, state: RolloutState, toolbox: Toolbox) -> list[AgentLoopOutput]:
        limit_s = self._config.session_timeout_s
        with anyio.move_on_after(limit_s):
            return await self._run(name, state, toolbox)
        raise RolloutError(f"agent {name!r} took longer than {limit_s:g} s (session_timeout_s) and was ended")

    async def _run(self, name: str, state: RolloutState, toolbox: Toolbox) -> list[AgentLoopOutput]:
        agent = self._table.make(name, self._parts(state, toolbox))
        returned = await agent.run(sampling_params_of(state.sample_params), **row_of(state))
        outputs = returned if isinstance(returned, list) else [returned]
        if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"run() must return an AgentLoopOutput or a list of them, got {returned!r:.200}")
        return outputs

    def _parts(self, state: RolloutState, toolbox: Toolbox) -> AgentParts:
        config, params = self._config, state.sample_params
        return AgentParts(
            llm_client=StateClient(self.rollout_ctl, sample_params=params, task_name=state.task_name),
            tokenizer=self._tokenizer,
            template=self._template,
            toolbox=toolbox,
            parser=self._parser,
            settings=AgentSettings(
                response_length=config.response_length or params.max_tokens,
                max_assistant_turns=config.max_assistant_turns,
                max_user_turns=config.max_user_turns,
                on_rewrite=config.on_rewrite,
            ),
        )

    def _states(self, state: RolloutState, outputs: list[AgentLoopOutput]) -> list[RolloutState]:
        """Return a state per trajectory; the last is the one that was given."""
        states = [state.model_copy(deep=True) for _ in outputs[:-1]] + [state]
        for number, (each, output) in enumerate(zip(states, outputs, strict=True)):
            self._fill(each, output)
            if len(outputs) > 1:
                each.session_id = f"{state.group_id}/{state.rollout_id}"
                each.extra_fields["trajectory"] = {"number": number, "of": len(outputs)}
        for number, each in enumerate(states[:-1]):
            each.rollout_id = each.uid = f"{state.rollout_id}.{number}"
        return states

    def _fill(self, state: RolloutState, output: AgentLoopOutput) -> None:
        extra = dict(output.extra_fields)
        versions = extra.pop("policy_versions", None)
        aborted = extra.get("stop_reason") == "aborted"
        state.prompt_ids, state.num_tokens = list(output.prompt_ids), len(output.prompt_ids)
        state.response_ids = list(output.response_ids)
        state.response_mask = list(output.response_mask)
        state.logprobs = None if output.response_logprobs is None else list(output.response_logprobs)
        state.response_model_steps = list(versions) if versions is not None else None
        state.routed_experts = output.routed_experts
        state.response = self._tokenizer.decode(state.response_ids, state.sample_params.skip_special_tokens)
        state.finish_reason = "abort" if aborted else extra.pop("finish_reason", None) or "stop"
        state.status = Status.ABORTED if aborted else Status.COMPLETED
        state.tokens = None
        state.extra_fields = {
            **state.extra_fields,
            **extra,
            "num_turns": output.num_turns,
            "timing": {
                "generate_s": output.metrics.generate_sequences,
                "tools_s": output.metrics.tool_calls,
                "judge_s": output.metrics.compute_score,
            },
        }
        if output.reward_score is not None:
            state.reward = {**extra.get("reward_extra_info", {}), "score": float(output.reward_score)}
        if not aborted and not sum(state.response_mask):
            _failed(state, "the agent returned a trajectory without a token of the model")

    async def _tools(self) -> Toolbox:
        if self._toolbox is None:
            self._loading = self._loading or anyio.Lock()
            async with self._loading:
                if self._toolbox is None:
                    self._toolbox = await self._load_tools()
        return self._toolbox

    async def _load_tools(self) -> Toolbox:
        config = self._config.tools
        tools = await load_tools(config, system=self._system)
        toolbox = Toolbox(
            tools,
            call_timeout_s=config.call_timeout_s,
            max_parallel_calls=config.max_parallel_calls,
            truncation=config.truncation,
            encode=self._tokenizer.encode_text,
            decode=lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False),
        )
        if tools:
            from xrl_lite.data.template_check import check_template

            check_template(self._template, tools=[tool.schema for tool in tools], on_rewrite=self._config.on_rewrite)
        return toolbox

    def _make_template(self) -> ChatTemplate:
        from xrl_lite.data.chat_template import ChatTemplate
        from xrl_lite.data.template_check import check_template

        stops = self._tokenizer.token_ids_of(self._parser.stop_texts)
        template = ChatTemplate(self._tokenizer, end_ids=stops | frozenset(self._config.end_token_ids))
        check_template(template, on_rewrite=self._config.on_rewrite)
        return template

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        if self._config.max_concurrent_sessions is None:
            yield
            return
        self._places = self._places or anyio.Semaphore(self._config.max_concurrent_sessions)
        async with self._places:
            yield


def row_of(state: RolloutState) -> dict[str, Any]:
    """Return a state as the row that agents get, with verl's names of columns."""
    fields = state.extra_fields
    info = {key: value for key, value in fields.items() if key not in ("agent_name", "row")}
    return {
        **info,
        "raw_prompt": [dict(message) for message in state.message],
        "uid": str(state.group_id),
        "index": fields.get("row"),
        "session_id": f"{state.group_id}/{state.rollout_id}",
        "agent_name": fields.get("agent_name"),
        "data_source": state.data_source,
        "reward_model": state.reward_model,
        "extra_info": info,
        "tools_kwargs": fields.get("tools_kwargs"),
    }


def sampling_params_of(params: SampleParams) -> dict[str, Any]:
    """Return sample parameters as agents get them."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "repetition_penalty": params.repetition_penalty,
    }


def describe_error(error: BaseException) -> str:
    """Return type, message, file, line and function of an error in user code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    place = (own or frames)[-1] if frames else None
    where = f" at {place.filename}:{place.lineno} in {place.name}" if place else ""
    return f"{type(error).__name__}: {error}{where}"


def _failed(state: RolloutState, reason: str) -> RolloutState:
    state.status = Status.FAILED
    state.error_msg = f"sample {state.rollout_id}: {reason}"
    return state


def _load_tokenizer(config: AgentsConfig, given: Tokenizer | None) -> Tokenizer:
    from xrl_lite.data.tokenizer import Tokenizer

    if given is not None:
        return given
    if config.hf_checkpoint is None:
        raise ConfigError("Agents need a tokenizer: set hf_checkpoint to the model's folder, or hand one over.")
    return Tokenizer.load(config.hf_checkpoint)


def _with_template_kwargs(tokenizer: Tokenizer, config: AgentsConfig) -> Tokenizer:
    from xrl_lite.data.tokenizer import Tokenizer

    if not config.template_kwargs:
        return tokenizer
    return Tokenizer(tokenizer.hf, template_kwargs={**tokenizer.template_kwargs, **config.template_kwargs})
