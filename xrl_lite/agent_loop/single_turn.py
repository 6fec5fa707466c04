"""One prompt, one response, one judgement."""

from __future__ import annotations

import time
from collections.abc import Sequence

from xrl_lite.agent_loop.base import AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
from xrl_lite.data import RolloutState, SampleParams, Status


class SingleTurnAgentLoopConfig(AgentLoopConfig):
    """Settings of `SingleTurnAgentLoop`."""

    def build_local(self, rollout_ctl: RolloutCtl, judger: StateJudger | None) -> SingleTurnAgentLoop:
        """Make the loop."""
        return SingleTurnAgentLoop(
            rollout_ctl, judger, sample_params=self.sample_params, enable_batch_judge=self.enable_batch_judge
        )


class SingleTurnAgentLoop(AgentLoop):
    """Generates a response and has it judged.

    Every attempt gets ``extra_fields["timing"]``: seconds it waited for its response and for its judgement.
    """

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        started = time.perf_counter()
        state = await self.rollout_ctl.generate(rollout_state)
        generated = time.perf_counter()
        if self.judger is not None and not self.enable_batch_judge and state.status is Status.COMPLETED:
            state = await self.judger.judge(state)
        state.extra_fields["timing"] = {
            "generate_s": generated - started,
            "judge_s": time.perf_counter() - generated,
        }
        return state

    async def generate_group(
        self, rollout_states: Sequence[RolloutState], *, sample_params: SampleParams | None = None
    ) -> list[RolloutState]:
        group = await super().generate_group(rollout_states, sample_params=sample_params)
        if self.judger is not None and self.enable_batch_judge:
            places = [place for place, state in enumerate(group) if state.status is Status.COMPLETED]
            if places:
                judged = await self.judger.batch_judge([group[place] for place in places])
                for place, state in zip(places, judged, strict=True):
                    group[place] = state
        return group
