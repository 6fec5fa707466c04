"""What an agent loop is: it turns INIT states into judged ones, one attempt at a time or a group at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import anyio
from pydantic import Field

from xrl_lite.actors import CPUResourcesConfig
from xrl_lite.agent_loop.failure import describe_error, late, refuse_endless_score
from xrl_lite.data import EncodeRow, RolloutState, Row, SampleParams, Status, failed
from xrl_lite.errors import ConfigError, RolloutError, errors_as_themselves, is_being_cancelled
from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig, leaves
from xrl_lite.log import get_logger
from xrl_lite.registry import Registry
from xrl_lite.settings import Settings

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.data.tokenizer import Tokenizer
    from xrl_lite.tools.schema import ToolSchema


logger = get_logger(__name__)


class RolloutCtl(Protocol):
    """Generates. A loop does not know how, or where."""

    async def generate(self, state: RolloutState) -> RolloutState:
        """Generate the response of a state."""
        ...


class TokenChunk(Protocol):
    """Some tokens of a response."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        ...

    @property
    def logprobs(self) -> list[float]:
        """One per token."""
        ...


@runtime_checkable
class StreamsTokens(Protocol):
    """Generates, and tells the tokens while they are sampled."""

    def streaming(self, state: RolloutState) -> AbstractAsyncContextManager[AsyncIterable[TokenChunk]]:
        """Generate the response of a state while inside: yields new tokens, and ends once the state is filled."""
        ...


class StateJudger(Protocol):
    """Scores."""

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        """Score one finished state."""
        ...

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Score several at once."""
        ...


class AgentLoopConfig(Settings, ABC):
    """Settings that every agent loop has."""

    hf_checkpoint: str | None = None
    """Folder of the tokenizer; the run's model when not given."""

    sample_params: SampleParams = SampleParams()
    """How responses are sampled in training."""

    enable_batch_judge: bool = False
    """Judge a whole group in one call; the judger must support it."""

    judge_grace_s: float = Field(default=10.0, ge=0)
    """How long a judgement may still take once the loop is paused; then its attempts are ABORTED."""

    mask_unfinished_episode: bool = False
    """Do not train on attempts that were cut short, by a limit of tokens or turns or, as an agent says with
    ``finished: false`` about its reward, by itself. Their rewards count in their groups all the same."""

    cpu_resources: CPUResourcesConfig | None = None
    """Run the loops in so many processes of their own; in the driver when not given."""

    def build(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        model_path: str | None = None,
        system: ActorSystem | None = None,
    ) -> AgentLoop:
        """Make the loop: here, in one process, or behind a router over several. Returns at once.

        Args:
            rollout_ctl: Generates; stays in this process.
            judger: Scores; stays in this process.
            tokenizer: The run's tokenizer, for loops in this process.
            model_path: Where loops in other processes load it from, unless `hf_checkpoint` says.
            system: Where these processes run; the default system when not given.

        Raises:
            ConfigError: the loop needs a tokenizer and there is none.
            ResourceError: there are not enough CPU slots.
        """
        if self.cpu_resources is None:
            return self.build_local(rollout_ctl, judger, tokenizer=tokenizer, system=system)
        from xrl_lite.agent_loop.remote import build_remote

        return build_remote(self, self.cpu_resources, rollout_ctl, judger, model_path=model_path, system=system)

    @abstractmethod
    def build_local(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> AgentLoop:
        """Make the loop in this process; arguments as for `build`. `system` is for what the loop starts."""

    def share_of(self, number: int, num_workers: int) -> Self:
        """Return the settings of one of several processes: what is limited for all is shared out among them."""
        return self

    @property
    def max_response_tokens(self) -> int:
        """Tokens behind the prompt that an attempt may have."""
        return self.sample_params.max_tokens

    def max_row_tokens(self, max_prompt_tokens: int | None) -> int:
        """Return the most tokens, prompt and response together, that a row of this loop has.

        Args:
            max_prompt_tokens: Longest prompt of the data set, in tokens.
        """
        return self.max_response_tokens + (max_prompt_tokens or 1)

    def row_encoder(self, tokenizer: Tokenizer, *, tools: Sequence[ToolSchema] = ()) -> EncodeRow:
        """Return what makes tokens of the prompts of rows, as agents of this loop show them to the model.

        Args:
            tokenizer: The model's tokenizer.
            tools: What the model is told of the loop's tools (`AgentLoop.tool_schemas`).
        """
        return lambda row: tokenizer.encode(row.prompt)

    def planned_actors(self) -> Iterator[tuple[str, float]]:
        """Yield name and CPU slots of every actor that the loop will start.

        Raises:
            ConfigError: what there is to start cannot be told, since a file is missing or wrong.
        """
        for number in range(self.cpu_resources.num_workers if self.cpu_resources else 0):
            assert self.cpu_resources is not None, "there are workers"
            yield f"agent_loop/{number}", self.cpu_resources.num_cpus_per_worker

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Check that the loop can serve rows, before anything starts.

        Raises:
            ConfigError: a row asks for something that there is not.
        """


class AgentLoop(ABC):
    """Base of agent loops.

    Args:
        rollout_ctl: Generates.
        judger: Scores; None leaves states without a reward.
        sample_params: How to sample where the state does not say.
        enable_batch_judge: Judge groups in one call.
        judge_grace_s: How long a judgement may take once the loop is paused, or its group has had its time.
        mask_unfinished_episode: Give attempts that were cut short a mask of zeros.
    """

    def __init__(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        sample_params: SampleParams,
        enable_batch_judge: bool = False,
        judge_grace_s: float = 10.0,
        mask_unfinished_episode: bool = False,
    ) -> None:
        self.rollout_ctl = rollout_ctl
        self.judger = judger
        self.sample_params = sample_params
        self.enable_batch_judge = enable_batch_judge
        self.judge_grace_s = judge_grace_s
        self._mask_unfinished_episode = mask_unfinished_episode
        self._paused = anyio.Event()

    @abstractmethod
    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState | list[RolloutState]:
        """Run one attempt: generate, and judge where judging is per attempt.

        Returns:
            The state; or the states of all its trajectories in order, which share a `session_id`.
        """

    async def generate_group(
        self,
        rollout_states: Sequence[RolloutState],
        *,
        sample_params: SampleParams | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutState]:
        """Run all attempts at one prompt at the same time and return them in the order given.

        An attempt with several trajectories stands there with all of them, one after the other.

        Args:
            rollout_states: Fresh states of one prompt.
            sample_params: Instead of the loop's own, for evaluation.
            timeout_s: Seconds for the group. Attempts that have ended by then are returned whole, the others FAILED;
                where a group is judged in one call, that may still take `judge_grace_s`. None does not limit.
        """
        deadline = anyio.current_time() + (math.inf if timeout_s is None else timeout_s)
        ended: list[list[RolloutState] | None] = [None] * len(rollout_states)

        async def run(index: int, state: RolloutState) -> None:
            ended[index] = await self._run_attempt(state)

        with errors_as_themselves(), anyio.CancelScope(deadline=deadline):
            async with anyio.create_task_group() as attempts:
                for index, state in enumerate(rollout_states):
                    state.sample_params = sample_params or self.sample_params
                    attempts.start_soon(partial(run, index, state))
        if num_late := ended.count(None):
            group = rollout_states[0].group_id
            logger.warning("group %s: %d of %d attempts had not ended in time", group, num_late, len(ended))
        whole = [
            [late(state, timeout_s)] if made is None else made
            for state, made in zip(rollout_states, ended, strict=True)
        ]
        await self._judge_group(whole, deadline, timeout_s)
        for states in whole:
            refuse_endless_score(states)
        if self._mask_unfinished_episode:
            mask_unfinished(whole)
        return [state for states in whole for state in states]

    async def _run_attempt(self, state: RolloutState) -> list[RolloutState]:
        try:
            made = await self.generate_sample(state)
            return made if isinstance(made, list) else [made]
        except RolloutError as error:
            return [failed(state, str(error))]
        except (anyio.get_cancelled_exc_class(), SystemExit) as error:  # of the agent, which may do what it likes
            if not isinstance(error, SystemExit) and is_being_cancelled():
                raise
            return [failed(state, f"raised {describe_error(error)}")]

    async def run_judger(self, states: RolloutState | list[RolloutState]) -> Any:
        """Judge a state, or several in one call, and return what the judger returns.

        While the loop is paused, a judgement has `judge_grace_s`, counted from the pause or from its own beginning,
        whichever is later; then it is cancelled and the states come back ABORTED, without a reward. What the judger
        raises is raised.
        """
        assert self.judger is not None, "there is a judger"
        judge = self.judger.batch_judge if isinstance(states, list) else self.judger.judge
        judged: Any = None

        async def run_judge() -> None:
            nonlocal judged
            judged = await judge(states)  # pyright: ignore[reportArgumentType] - the method fits the states
            running.cancel_scope.cancel()

        async def run_grace() -> None:
            await self._paused.wait()
            await anyio.sleep(self.judge_grace_s)
            running.cancel_scope.cancel()

        with errors_as_themselves():
            async with anyio.create_task_group() as running:
                running.start_soon(run_judge)
                running.start_soon(run_grace)
        if judged is not None:
            return judged
        for state in states if isinstance(states, list) else [states]:
            state.status, state.finish_reason, state.reward = Status.ABORTED, "abort", None
            state.error_msg = f"paused while it was judged, and not done within {self.judge_grace_s:g} s"
        return states

    async def ready(self) -> None:
        """Wait until the loop can serve; raises what keeps it from that. Loops start without it, too."""

    async def tool_schemas(self) -> list[ToolSchema]:
        """Return what the model is told of the loop's tools, those of servers included; waits as `ready` does."""
        return []

    async def pause(self) -> None:
        """Give judgements no more than their grace, until `resume`. Whoever pauses ends requests of the engine himself.

        Called again, it changes nothing.
        """
        self._paused.set()

    async def resume(self) -> None:
        """Give judgements the time they need."""
        if self._paused.is_set():
            self._paused = anyio.Event()

    async def aclose(self) -> None:
        """Give back what the loop holds: processes, tools."""

    async def _judge_group(self, attempts: list[list[RolloutState]], deadline: float, timeout_s: float | None) -> None:
        """Judge a group in one call where that is asked for; only the last trajectory of an attempt is judged."""
        if self.judger is None or not self.enable_batch_judge:
            return
        waiting = [states for states in attempts if states and needs_judgement(states[-1])]
        if not waiting:
            return
        judged: list[RolloutState] | None = None
        with anyio.CancelScope(deadline=max(deadline, anyio.current_time() + self.judge_grace_s)):
            judged = await self.run_judger([states[-1] for states in waiting])
        for states, last in zip(waiting, judged or [late(states[-1], timeout_s) for states in waiting], strict=True):
            states[-1] = last
            spread_judgement(states)


def part_of(total: int, number: int, num_workers: int) -> int:
    """Return the part of one of several workers, such that the parts make up the total."""
    return total // num_workers + (number < total % num_workers)


def needs_judgement(state: RolloutState) -> bool:
    """Return whether a state is to be judged: it was generated, and the loop gave it no reward."""
    return state.status is Status.COMPLETED and state.reward is None


def spread_judgement(states: Sequence[RolloutState]) -> None:
    """Give all trajectories of an attempt the reward of the last one and, where it did not end well, its status."""
    *earlier, last = states
    for state in earlier:
        state.reward = None if last.reward is None else dict(last.reward)
        if last.status is not Status.COMPLETED:
            state.status, state.error_msg = last.status, last.error_msg


def mask_unfinished(attempts: Sequence[Sequence[RolloutState]]) -> None:
    """Give all trajectories of attempts that were cut short a mask of zeros: they are not trained on."""
    for states in attempts:
        if states and _is_unfinished(states[-1]):
            for state in states:
                state.response_mask = [0] * len(state.response_ids or ())


def _is_unfinished(last: RolloutState) -> bool:
    fields = last.extra_fields
    return last.status is Status.COMPLETED and (
        last.finish_reason == "length"
        or fields.get("stopped_by", "no_tool_call") != "no_tool_call"
        or bool(fields.get("was_truncated"))
        or not fields.get("reward_info", {}).get("finished", True)
    )


def is_to_be_run(state: RolloutState) -> bool:
    """Return whether an attempt is (still) to be run: not what is done, nor earlier trajectories of what was cut short.

    The last trajectory of an attempt is the state that it began with, so it stands for the whole.
    """
    trajectory = state.extra_fields.get("trajectory")
    return state.status is not Status.COMPLETED and (trajectory is None or trajectory["number"] == trajectory["of"] - 1)


def check_batch_judge(config: AgentLoopConfig, judger_config: JudgerConfig | ComposedJudgerConfig) -> None:
    """Check that a judger can judge a whole group in one call, if the loop is to do that.

    Raises:
        ConfigError: it cannot; names it.
    """
    if not config.enable_batch_judge:
        return
    from xrl_lite.judger import NativeJudger  # settings are read without it

    for leaf in leaves(judger_config):
        judger = leaf.build_local()
        if isinstance(judger, NativeJudger) and type(judger).judge_payload is NativeJudger.judge_payload:
            raise ConfigError(
                f"enable_batch_judge is set, but the judger {leaf.judger_name!r} judges one sample at a time. Leave "
                f"enable_batch_judge out, or write a Judger whose judge_payload takes a list."
            )


AGENT_LOOPS: Registry[type[AgentLoopConfig]] = Registry(
    "agent loop",
    {
        "single_turn": "xrl_lite.agent_loop.single_turn:SingleTurnAgentLoopConfig",
        "agents": "xrl_lite.agent_loop.sessions:AgentsConfig",
        "black_box": "xrl_lite.gateway.agent_loop:BlackBoxAgentsConfig",
    },
)
"""Settings classes of the agent loops, by name."""
