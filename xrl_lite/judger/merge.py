"""Making one reward out of those of several branches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.judger.base import JudgerOutput, JudgerOutputBatch

RolloutStates: TypeAlias = RolloutState | list[RolloutState]

JudgerMergeFn: TypeAlias = Callable[[Any, dict[str, Any]], RolloutStates | Awaitable[RolloutStates]]
"""``merge(state, {branch: output}) -> state``; for a batch, lists in both places. May be async."""


class WeightedMerge:
    """A merge function: ``score`` is the weighted sum of the scores, and each branch's score is kept by its name.

    Args:
        weights: Factor for each branch. All selected branches must have one.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)

    def __call__(self, original: RolloutStates, judged: Mapping[str, JudgerOutputBatch]) -> RolloutStates:
        """Write the merged reward into each state.

        Raises:
            KeyError: a branch has no weight.
        """
        if isinstance(original, list):
            columns = cast("Mapping[str, list[JudgerOutput]]", judged)
            for index, state in enumerate(original):
                self._merge(state, {name: outputs[index] for name, outputs in columns.items()})
            return original
        return self._merge(original, cast("Mapping[str, JudgerOutput]", judged))

    def _merge(self, state: RolloutState, outputs: Mapping[str, JudgerOutput]) -> RolloutState:
        unweighted = [name for name in outputs if name not in self.weights]
        if unweighted:
            raise KeyError(f"branch {unweighted[0]!r} has no weight; weights are given for {sorted(self.weights)}")
        scores = {name: output["score"] for name, output in outputs.items()}
        state.reward = with_parts(sum(self.weights[name] * score for name, score in scores.items()), scores)
        return state


def with_parts(score: float, parts: Mapping[str, float | None]) -> dict[str, Any]:
    """Return a reward with its parts beside it; a part that is called ``score`` is kept as ``score/score``."""
    return {"score": score, **{f"score/{name}" if name == "score" else name: part for name, part in parts.items()}}


def weighted_merge(weights: Mapping[str, float]) -> WeightedMerge:
    """Return a merge function that sums the branches' scores with these weights."""
    return WeightedMerge(weights)
