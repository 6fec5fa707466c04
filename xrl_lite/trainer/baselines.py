"""Rewards of greedy responses, for estimators that compare with them (remax)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrl_lite.data import RolloutState, Status, reset_rollout_response

if TYPE_CHECKING:
    from xrl_lite.agent_loop import AgentLoopManager


async def greedy_rewards(manager: AgentLoopManager, groups: Sequence[Sequence[RolloutState]]) -> list[float]:
    """Answer each group's prompt once at temperature 0, by the replicas as they are, and return the scores.

    Args:
        manager: Runs attempts.
        groups: Finished attempts at each prompt; they are not changed.

    Returns:
        A score per group; NaN where the attempt or its judgement failed.
    """
    by_params: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        by_params.setdefault(group[0].sample_params.model_dump_json(), []).append(number)
    scores = [math.nan] * len(groups)
    for numbers in by_params.values():
        params = groups[numbers[0]][0].sample_params.model_copy(update={"temperature": 0.0})
        finished = await manager.evaluate([[_fresh(groups[number][0])] for number in numbers], sample_params=params)
        for number, states in zip(numbers, finished, strict=True):
            state = states[-1]  # what is judged of an attempt with several trajectories
            if state.status is Status.COMPLETED and state.reward is not None:
                scores[number] = float(state.reward["score"])
    return scores


def _fresh(state: RolloutState) -> RolloutState:
    copy = reset_rollout_response(state.model_copy(deep=True))
    copy.status = Status.INIT
    copy.uid = copy.rollout_id = f"{state.rollout_id}/greedy"
    return copy
