"""One prompt, one response, one judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrl_lite import actors
from xrl_lite.agent_loop.base import AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
from xrl_lite.data import RolloutState, Status

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.data.tokenizer import Tokenizer


class SingleTurnAgentLoopConfig(AgentLoopConfig):
    """Settings of `SingleTurnAgentLoop`."""

    def build_local(
        self,
        rollout_ctl: RolloutCtl,
        judger: StateJudger | None,
        *,
        tokenizer: Tokenizer | None = None,
        system: ActorSystem | None = None,
    ) -> SingleTurnAgentLoop:
        """Make the loop."""
        return SingleTurnAgentLoop(
            rollout_ctl,
            judger,
            sample_params=self.sample_params,
            enable_batch_judge=self.enable_batch_judge,
            judge_grace_s=self.judge_grace_s,
            mask_unfinished_episode=self.mask_unfinished_episode,
        )


class SingleTurnAgentLoop(AgentLoop):
    """Generates a response and has it judged.

    Every attempt gets ``extra_fields["timing"]``: seconds it waited for its response and for its judgement.
    """

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        started = actors.now()
        state = await self.rollout_ctl.generate(rollout_state)
        generated = actors.now()
        if self.judger is not None and not self.enable_batch_judge and state.status is Status.COMPLETED:
            state = await self.run_judger(state)
        state.extra_fields["timing"] = {
            "generate_s": generated - started,
            "judge_s": actors.now() - generated,
        }
        return state
