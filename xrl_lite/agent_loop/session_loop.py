"""What loops of sessions have in common: a session an attempt, as many trajectories as it comes to.

::

    state --agent_name--> run_session --> outputs --> states --> judger (the last one)

Waits for    the session, at most `session_timeout_s`; its place, where the number of sessions is limited
Is woken by  its end, or the limit

What an agent raises costs its session: the state is FAILED and says where. What ends a run (a dead engine, a judger
that cannot go on) goes through.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.agent_loop.base import (
    AgentLoop,
    AgentLoopConfig,
    RolloutCtl,
    StateJudger,
    needs_judgement,
    spread_judgement,
)
from xrl_lite.agent_loop.failure import InitialFailures, describe_error
from xrl_lite.agent_loop.output import AgentLoopOutput
from xrl_lite.data import RolloutState, Status, failed
from xrl_lite.data.rows import copy_containers
from xrl_lite.errors import ActorError, ConfigError, JudgerError, RolloutError, RunError, WeightSyncError
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from xrl_lite.data.tokenizer import Tokenizer

logger = get_logger(__name__)

ENDS_THE_RUN = (ActorError, JudgerError, RunError, WeightSyncError)
"""Errors that are not the agent's, and that no other attempt would be spared."""


class SessionLoop(AgentLoop):
    """Base of loops whose attempts are sessions.

    Args:
        config: Settings that every loop has.
        rollout_ctl: Generates.
        judger: Scores.
        tokenizer: The model's tokenizer.
        default_agent: Agent of states that name none.
        session_timeout_s: Limit for one session, judging not included.
        max_initial_failures: Attempts that may raise the same before the first one succeeds; 0 for any number.
    """

    def __init__(
        self,
        config: AgentLoopConfig,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer,
        default_agent: str,
        session_timeout_s: float | None,
        max_initial_failures: int,
    ) -> None:
        super().__init__(
            rollout_ctl,
            judger,
            sample_params=config.sample_params,
            enable_batch_judge=config.enable_batch_judge,
            judge_grace_s=config.judge_grace_s,
            mask_unfinished_episode=config.mask_unfinished_episode,
        )
        self._tokenizer = tokenizer
        self._default_agent = default_agent
        self._session_timeout_s = session_timeout_s
        self._initial_failures = InitialFailures(max_initial_failures)

    @abstractmethod
    async def run_session(self, agent: str, state: RolloutState) -> list[AgentLoopOutput]:
        """Run one session and return its trajectories in order, one at least; the reward is that of the last.

        Raises:
            RolloutError: the attempt failed; says why.
            Exception: what the agent raised, which fails the attempt likewise.
        """

    def places_of(self, agent: str) -> anyio.Semaphore | None:
        """Return what a session of an agent takes a place of while it runs; None where any number may run at once."""
        return None

    async def generate_sample(self, rollout_state: RolloutState) -> list[RolloutState]:
        state = rollout_state
        name = state.extra_fields.get("agent_name") or self._default_agent
        await self.ready()
        try:
            async with self.places_of(name) or nullcontext():
                outputs = await self._run_within_limit(name, state)
            states = self._states(state, outputs)
        except ENDS_THE_RUN:
            raise
        except RolloutError as error:
            return [failed(state, str(error))]
        except (Exception, SystemExit) as error:
            logger.warning("sample %s: agent %r raised", state.rollout_id, name, exc_info=error)
            told = f"agent {name!r} raised {describe_error(error)}"
            self._initial_failures.raised(error, told)
            return [failed(state, told)]
        self._initial_failures.succeeded()
        if self.judger is not None and not self.enable_batch_judge and needs_judgement(states[-1]):
            states[-1] = await self.run_judger(states[-1])
        spread_judgement(states)
        return states

    async def _run_within_limit(self, name: str, state: RolloutState) -> list[AgentLoopOutput]:
        limit_s = self._session_timeout_s
        with anyio.move_on_after(limit_s):
            return await self.run_session(name, state)
        raise RolloutError(f"agent {name!r} took longer than {limit_s:g} s (session_timeout_s) and was ended")

    def _states(self, state: RolloutState, outputs: list[AgentLoopOutput]) -> list[RolloutState]:
        """Return a state per trajectory; the last is the one that was given."""
        states = [state.model_copy(deep=True) for _ in outputs[:-1]] + [state]
        for number, (each, output) in enumerate(zip(states, outputs, strict=True)):
            self._fill(each, output)
            each.session_id = None
            each.extra_fields.pop("trajectory", None)  # of a run that was cut short
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
        if output.reward_score is not None and not aborted:
            state.reward = {**extra.get("reward_extra_info", {}), "score": float(output.reward_score)}
        if not aborted and not sum(state.response_mask):
            failed(state, "the agent returned a trajectory without a token of the model")


def row_of(state: RolloutState) -> dict[str, Any]:
    """Return a state as the row that agents get, with verl's names of columns.

    Its containers are the agent's own: an attempt that is made again begins with what the first one was given.
    """
    fields = copy_containers(state.extra_fields)
    info = {key: value for key, value in fields.items() if key not in ("agent_name", "row")}
    return {
        **info,
        "raw_prompt": copy_containers(state.message),
        "uid": str(state.group_id),
        "index": fields.get("row"),
        "session_id": f"{state.group_id}/{state.rollout_id}",
        "agent_name": fields.get("agent_name"),
        "data_source": state.data_source,
        "reward_model": copy_containers(state.reward_model),
        "extra_info": info,
        "tools_kwargs": fields.get("tools_kwargs"),
    }


def tokenizer_of(config: AgentLoopConfig, given: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of a loop: the one that is given, or that of `hf_checkpoint`.

    Raises:
        ConfigError: there is neither.
    """
    from xrl_lite.data.tokenizer import Tokenizer

    if given is not None:
        return given
    if config.hf_checkpoint is None:
        raise ConfigError("Agents need a tokenizer: set hf_checkpoint to the model's folder, or hand one over.")
    return Tokenizer.load(config.hf_checkpoint)
