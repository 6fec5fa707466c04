"""Accuracy on held-out rows: every row, in order, always with the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from xrl_lite.agent_loop import AgentLoopManager
from xrl_lite.data import EncodePrompt, RolloutState, Row, SampleParams, Status, each_row_once


class Evaluator:
    """Runs the held-out rows through the agent loop of the task.

    Args:
        manager: Runs groups.
        rows: Held-out rows.
        encode: Renders and encodes a prompt.
        sample_params: Ways of sampling, by name.
        success_score: A score above this counts as right.
    """

    def __init__(
        self,
        manager: AgentLoopManager,
        *,
        rows: Sequence[Row],
        encode: EncodePrompt,
        sample_params: dict[str, SampleParams],
        success_score: float,
    ) -> None:
        self._manager = manager
        self._rows = rows
        self._encode = encode
        self._sample_params = sample_params
        self._success_score = success_score

    async def evaluate(self) -> dict[str, float]:
        """Return, for each way of sampling, accuracy, mean score, length, and how many samples failed.

        A sample that failed counts as wrong, and is counted.
        """
        metrics: dict[str, float] = {}
        for name, params in self._sample_params.items():
            # rollout seeds are made of the task name and the row, so each evaluation draws the same numbers
            groups = list(each_row_once(self._rows, encode=self._encode, task_name=f"eval/{name}"))
            states = list(chain.from_iterable(await self._manager.evaluate(groups, sample_params=params)))
            metrics |= {f"eval/{name}/{key}": value for key, value in self._summarise(states).items()}
        return metrics

    def _summarise(self, states: list[RolloutState]) -> dict[str, float]:
        scores = [float(state.reward["score"]) if state.reward else 0.0 for state in states]
        return {
            "accuracy": sum(score > self._success_score for score in scores) / len(states),
            "score": sum(scores) / len(states),
            "mean_length": sum(len(state.response_ids or []) for state in states) / len(states),
            "failed": float(sum(state.status is not Status.COMPLETED for state in states)),
        }
