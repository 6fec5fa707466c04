"""Agents that are not ours as an agent loop: each attempt is a session of the gateway.

::

    state --> session --> runner: function or program --HTTP--> gateway --> rollout_ctl
                 '--- its end ---> trajectories, reward_info --> states --> judger, where there is no reward yet
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
from pydantic import Field, model_validator

from xrl_lite.agent_loop import AgentLoopConfig, AgentLoopOutput, RolloutCtl, SessionLoop, StateJudger
from xrl_lite.agent_loop.base import part_of
from xrl_lite.agent_loop.session_loop import row_of, tokenizer_of
from xrl_lite.data import RolloutState, Row, SampleParams
from xrl_lite.data.tokenizer import read_template
from xrl_lite.errors import ConfigError, RolloutError, did_you_mean, errors_as_themselves
from xrl_lite.gateway.config import TRAINING_PARAMS, GatewayConfig
from xrl_lite.gateway.gateway import Gateway, SessionHandle
from xrl_lite.gateway.runner import (
    AgentRunner,
    BlackBoxAgentConfig,
    ProgramRunner,
    as_reward_info,
    load_runner,
    read_reward,
)
from xrl_lite.gateway.session import SessionState
from xrl_lite.gateway.turn import SessionResult, Trajectory
from xrl_lite.tools.toolbox import ToolCounts

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.data.tokenizer import Tokenizer


class BlackBoxAgentsConfig(AgentLoopConfig):
    """Settings of agents that are not ours."""

    agents: dict[str, BlackBoxAgentConfig]
    """The agents by name; rows choose by `agent_name`."""

    default_agent: str | None = None
    """Agent of rows that name none; may be left out where there is only one."""

    gateway: GatewayConfig = GatewayConfig()
    """The endpoint they talk to. Requests may not change how is sampled: what is trained on is the run's policy."""

    prompt_length: int = Field(default=4096, gt=0)
    """Tokens for what the agent says before the first answer: a trajectory holds these and the next together."""

    response_length: int | None = Field(default=None, gt=0)
    """Tokens for all that follows; `sample_params.max_tokens` when not given."""

    session_timeout_s: float | None = Field(default=None, gt=0)
    """Limit for one session of any agent, judging not included; each agent has its `wall_time_s` besides."""

    max_initial_failures: int = Field(default=32, ge=0)
    """Stop the run when so many attempts raise the same before the first one does not; 0 never stops it."""

    trajectory_selection: Literal["all", "longest", "last"] = "all"
    """Which trajectories of a session are trained on; the reward is the session's for each of them."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.agents:
            raise ValueError("agents is empty: name at least one.")
        if self.default_agent is None and len(self.agents) > 1:
            raise ValueError(f"default_agent: choose one of {', '.join(sorted(self.agents))}.")
        if self.default_agent is not None:
            self.check_agent(self.default_agent)
        num_workers = self.cpu_resources.num_workers if self.cpu_resources else 1
        for name, agent in self.agents.items():
            if agent.max_concurrent < num_workers:
                raise ValueError(
                    f"agents.{name}.max_concurrent is {agent.max_concurrent}, fewer than the {num_workers} processes "
                    f"of cpu_resources.num_workers, which share them. Raise the one or lower the other."
                )
        if num_workers > 1 and self.gateway.port:
            raise ValueError(
                f"gateway.port is {self.gateway.port}, and each of the {num_workers} processes of "
                f"cpu_resources.num_workers has a gateway of its own. Leave the port out: each takes a free one."
            )
        biasing = sorted({*(self.gateway.request_params or ())} - {*TRAINING_PARAMS})
        if biasing:
            raise ValueError(
                f"gateway.request_params: with {', '.join(biasing)} an agent would choose the distribution it is "
                f"sampled from, and training would take it for another. Allow max_tokens and stop only."
            )
        return self

    @property
    def max_trajectory_tokens(self) -> int:
        """Prompt and response of a trajectory together."""
        longest = self.prompt_length + self.max_response_tokens
        return min(longest, self.gateway.max_trajectory_tokens or longest)

    @property
    def gateway_for_training(self) -> GatewayConfig:
        """Settings of the endpoint, with what follows from the others filled in."""
        params = self.gateway.request_params
        return self.gateway.model_copy(
            update={
                "max_trajectory_tokens": self.max_trajectory_tokens,
                "request_params": [*TRAINING_PARAMS] if params is None else params,
            }
        )

    @property
    def first_agent(self) -> str:
        """Agent of rows that name none."""
        return self.default_agent or next(iter(self.agents))

    def check_agent(self, name: str) -> None:
        """Raise ConfigError where there is no agent of this name."""
        if name not in self.agents:
            known = ", ".join(sorted(self.agents))
            raise ConfigError(f"Unknown agent {name!r}.{did_you_mean(name, self.agents)} Known: {known}.")

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check that there is an agent for every row, and that each can be started.

        Raises:
            ConfigError: a row names one that there is not, a program is missing, a function is not async.
            PluginError: a function cannot be loaded.
        """
        if self.gateway.chat_template is not None:
            read_template(self.gateway.chat_template)
        for name, agent in self.agents.items():
            agent.check(name)
        for row in rows:
            if row.agent_name is not None:
                try:
                    self.check_agent(row.agent_name)
                except ConfigError as error:
                    raise ConfigError(f"row {row.index}: {error}") from error

    @property
    def max_response_tokens(self) -> int:
        return self.response_length or self.sample_params.max_tokens

    def max_row_tokens(self, max_prompt_tokens: int | None) -> int:
        return self.max_trajectory_tokens

    def planned_actors(self) -> Iterator[tuple[str, float]]:
        yield from super().planned_actors()
        for name, agent in self.agents.items():
            for number in range(agent.max_concurrent if agent.command else 0):
                yield f"agent/{name}/{number}", agent.num_cpus

    def share_of(self, number: int, num_workers: int) -> Self:
        shares = {
            name: agent.model_copy(update={"max_concurrent": part_of(agent.max_concurrent, number, num_workers)})
            for name, agent in self.agents.items()
        }
        return self.model_copy(update={"agents": shares, "cpu_resources": None})

    def build_local(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> BlackBoxAgentLoop:
        """Make the loop."""
        return BlackBoxAgentLoop(self, rollout_ctl, judger, tokenizer=tokenizer, system=system)


class BlackBoxAgentLoop(SessionLoop):
    """Runs agents that are not ours against a gateway of its own, which is opened by `ready` or the first attempt.

    Args:
        config: Settings.
        rollout_ctl: Generates.
        judger: Scores attempts for which the agent gave no reward.
        tokenizer: The model's tokenizer; that of `config.hf_checkpoint` when not given.
        system: Where programs are started; the default system when not given.

    Raises:
        ConfigError: there is no tokenizer, or an agent cannot be started.
        TemplateError: the chat template fails its self-test.
        ResourceError: there are not enough CPU slots for the programs.
    """

    def __init__(
        self,
        config: BlackBoxAgentsConfig,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> None:
        tokenizer = tokenizer_of(config, tokenizer)
        super().__init__(
            config,
            rollout_ctl,
            judger,
            tokenizer=tokenizer,
            default_agent=config.first_agent,
            session_timeout_s=config.session_timeout_s,
            max_initial_failures=config.max_initial_failures,
        )
        self._config = config
        self.gateway = Gateway(
            rollout_ctl,
            tokenizer=tokenizer,
            config=config.gateway_for_training,
            sample_params=config.sample_params,
            resume_aborted=False,  # whoever aborts wants the attempt to end
        )
        """The endpoint."""
        self._places = {name: anyio.Semaphore(agent.max_concurrent) for name, agent in config.agents.items()}
        self._programs: list[ProgramRunner] = []
        self._runners: dict[str, AgentRunner] = {}
        for name, agent in config.agents.items():
            agent.check(name)
            self._runners[name] = self._program(agent, name, system) if agent.command else load_runner(agent, name)
        self._numbers = itertools.count()
        self._serving: asyncio.Task[None] | None = None
        self._opened = anyio.Event()
        self._closing = anyio.Event()

    def places_of(self, agent: str) -> anyio.Semaphore | None:
        return self._places.get(agent)

    async def ready(self) -> None:
        """Open the gateway."""
        if self._serving is None:
            # a task of its own: what is entered must be left by the same task, and `aclose` may be another's
            self._serving = asyncio.create_task(self._serve(), name="gateway")
        await self._opened.wait()
        if not self.gateway.is_open:
            await self._serving  # raises why

    async def aclose(self) -> None:
        """Close the gateway, and end the programs."""
        self._closing.set()
        if self._serving is not None:
            await self._serving
        for program in self._programs:
            await program.aclose()

    async def generate_group(
        self,
        rollout_states: Sequence[RolloutState],
        *,
        sample_params: SampleParams | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutState]:
        for index, state in enumerate(rollout_states):
            state.extra_fields.setdefault("sample_index", index)
        return await super().generate_group(rollout_states, sample_params=sample_params, timeout_s=timeout_s)

    async def run_session(self, agent: str, state: RolloutState) -> list[AgentLoopOutput]:
        self._config.check_agent(agent)
        handle = self.gateway.create_session(
            session_id=f"{state.group_id}-{state.rollout_id}-{next(self._numbers)}",
            sample_params=state.sample_params,
            seed_name=f"{state.group_id}/{state.rollout_id}",
            task_name=state.task_name,
        )
        session = self.gateway.session(handle.session_id)
        try:
            returned = await self._run_agent(agent, handle, state)
            if session.fatal is not None:
                raise session.fatal
            if session.state is SessionState.ABORTED:
                return [AgentLoopOutput.aborted(state.prompt_ids or [])]
            info = as_reward_info(returned)
            result = await self.gateway.finalize_session(handle.session_id)
        finally:
            if session.state is not SessionState.FINALIZED:
                await self.gateway.abort_session(handle.session_id)
        return self._outputs(result, {**result.reward_info, **info})

    async def _run_agent(self, agent: str, handle: SessionHandle, state: RolloutState) -> Any:
        """Run the agent until it is done, or its session cannot go on.

        Raises:
            RolloutError: it took too long.
            Exception: what it raised.
        """
        row = row_of(state)
        session = self.gateway.session(handle.session_id)
        limit_s = self._config.agents[agent].wall_time_s
        # programs keep the limit themselves; they are given the time to be ended
        returned: Any = None
        own_limit_s = limit_s if self._config.agents[agent].runner else None
        with anyio.move_on_after(own_limit_s) as limit, errors_as_themselves():
            async with anyio.create_task_group() as running:

                async def end_with_session() -> None:
                    await session.ended.wait()
                    running.cancel_scope.cancel()

                running.start_soon(end_with_session)
                returned = await self._runners[agent](
                    handle,
                    raw_prompt=row["raw_prompt"],
                    sample_index=state.extra_fields.get("sample_index", 0),
                    tools_kwargs=row["tools_kwargs"],
                    row=row,
                )
                running.cancel_scope.cancel()
        if limit.cancelled_caught:
            raise RolloutError(f"agent {agent!r} took longer than {limit_s:g} s (wall_time_s) and was ended")
        return returned

    def _outputs(self, result: SessionResult, info: dict[str, Any]) -> list[AgentLoopOutput]:
        if result.failure is not None:
            raise RolloutError(f"the engine could not make the last turn: {result.failure}")
        if not result.trajectories:
            raise RolloutError("the agent ended without an answer of the model")
        reward = read_reward(info)
        extra = {key: value for key, value in info.items() if key != "reward"}
        outputs = [_output(trajectory, result, extra) for trajectory in self._selected(result.trajectories)]
        outputs[-1].reward_score = reward
        return outputs

    def _selected(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        match self._config.trajectory_selection:
            case "all":
                return trajectories
            case "last":
                return trajectories[-1:]
            case "longest":
                return [max(reversed(trajectories), key=lambda each: sum(each.response_mask))]

    def _program(self, agent: BlackBoxAgentConfig, name: str, system: ActorSystem | None) -> ProgramRunner:
        program = ProgramRunner(agent, name, system=system)
        self._programs.append(program)
        return program

    async def _serve(self) -> None:
        try:
            async with self.gateway:
                self._opened.set()
                await self._closing.wait()
        finally:
            self._opened.set()


def _output(trajectory: Trajectory, result: SessionResult, info: dict[str, Any]) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        response_mask=trajectory.response_mask,
        response_logprobs=trajectory.response_logprobs,
        num_turns=result.num_turns,
        extra_fields={
            "policy_versions": trajectory.policy_versions,
            "messages": trajectory.messages,
            "reward_info": info,
            "reward_extra_info": {key: value for key, value in info.items() if isinstance(value, int | float)},
            "finish_reason": trajectory.finish_reason,
            "stop_reason": "completed",
            "ended_by": trajectory.ended_by,
            "tool_counts": _tool_counts(result),
            "was_truncated": result.was_truncated,
        },
    )


def _tool_counts(result: SessionResult) -> dict[str, Any]:
    """Return the calls of a session as those of our own tools are counted; what the agent's tools did is not known."""
    malformed = result.num_malformed_calls
    return ToolCounts(
        calls=result.num_calls + malformed, failures=Counter({"malformed": malformed} if malformed else {})
    ).as_dict()
