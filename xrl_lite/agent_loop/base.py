"""What an agent loop is: it turns INIT states into judged ones, one attempt at a time or a group at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import anyio

from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.errors import RolloutError
from xrl_lite.registry import Registry
from xrl_lite.settings import Settings


class RolloutCtl(Protocol):
    """Generates. A loop does not know how, or where."""

    async def generate(self, state: RolloutState) -> RolloutState:
        """Generate the response of a state."""
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

    @abstractmethod
    def build_local(self, rollout_ctl: RolloutCtl, judger: StateJudger | None) -> AgentLoop:
        """Make the loop."""


class AgentLoop(ABC):
    """Base of agent loops.

    Args:
        rollout_ctl: Generates.
        judger: Scores; None leaves states without a reward.
        sample_params: How to sample where the state does not say.
        enable_batch_judge: Judge groups in one call.
    """

    def __init__(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        sample_params: SampleParams,
        enable_batch_judge: bool = False,
    ) -> None:
        self.rollout_ctl = rollout_ctl
        self.judger = judger
        self.sample_params = sample_params
        self.enable_batch_judge = enable_batch_judge

    @abstractmethod
    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        """Run one attempt: generate, and judge where judging is per attempt."""

    async def generate_group(
        self, rollout_states: Sequence[RolloutState], *, sample_params: SampleParams | None = None
    ) -> list[RolloutState]:
        """Run all attempts at one prompt at the same time and return them in the order given.

        Args:
            rollout_states: Fresh states of one prompt.
            sample_params: Instead of the loop's own, for evaluation.
        """
        finished: list[RolloutState] = list(rollout_states)

        async def run(index: int, state: RolloutState) -> None:
            try:
                finished[index] = await self.generate_sample(state)
            except RolloutError as error:
                state.status = Status.FAILED
                state.error_msg = f"sample {state.rollout_id}: {error}"

        async with anyio.create_task_group() as attempts:
            for index, state in enumerate(rollout_states):
                state.sample_params = sample_params or self.sample_params
                attempts.start_soon(partial(run, index, state))
        return finished


AGENT_LOOPS: Registry[type[AgentLoopConfig]] = Registry(
    "agent loop", {"single_turn": "xrl_lite.agent_loop.single_turn:SingleTurnAgentLoopConfig"}
)
"""Settings classes of the agent loops, by name."""
