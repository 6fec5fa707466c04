"""Scored groups in, one optimizer step out, with every condition checked where it can still name the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from xrl_lite.algorithms.estimators import AdvantageEstimator
from xrl_lite.data import RolloutState, Status
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import RunError

NOT_TRAINABLE = (Status.ABORTED, Status.FILTERED, Status.FAILED)


def prepare_train_data(
    groups: Sequence[Sequence[RolloutState]], *, estimator: AdvantageEstimator
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the trajectories of all groups with their advantages, and metrics of the batch.

    FAILED, ABORTED and FILTERED attempts are left out; their siblings stay, and are compared among themselves.

    Args:
        groups: Attempts at each prompt.
        estimator: Rewards and groups -> advantages.

    Raises:
        RunError: an attempt that should be trained on lacks something; names sample and field.
    """
    import torch

    kept = [(number, state) for number, group in enumerate(groups) for state in group if _is_trainable(state)]
    for _, state in kept:
        _check(state)
    rewards = torch.tensor([float(_reward(state)["score"]) for _, state in kept], dtype=torch.float64)
    numbers = torch.tensor([number for number, _ in kept], dtype=torch.int64)
    batch = TrainBatch(
        prompts=[list(state.prompt_ids or []) for _, state in kept],
        responses=[list(state.response_ids or []) for _, state in kept],
        response_masks=[_mask(state) for _, state in kept],
        rollout_logprobs=[list(state.logprobs or []) for _, state in kept],
        advantages=estimator(rewards, numbers).tolist(),
        groups=numbers.tolist(),
        temperature=_temperature([state for _, state in kept]),
    )
    return batch, _metrics(groups, rewards, numbers)


def _metrics(groups: Sequence[Sequence[RolloutState]], rewards: Any, numbers: Any) -> dict[str, float]:
    from xrl_lite.algorithms.advantages import zero_variance_groups  # loads torch

    states = [state for group in groups for state in group]
    lengths = [len(state.response_ids or []) for state in states]
    flat, num_groups = zero_variance_groups(rewards, numbers)
    spread = [rewards[numbers == number].std(correction=0).item() for number in numbers.unique()]
    metrics = {
        "reward": rewards.mean().item(),
        "reward_std": sum(spread) / len(spread),
        "frac_reward_zero_std": flat / num_groups,
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(state.finish_reason == "length" for state in states) / len(states),
        "completions/failed": float(sum(not _is_trainable(state) for state in states)),
        "num_tokens": float(sum(lengths)),
    }
    return metrics | _reward_parts([_reward(state) for state in states if _is_trainable(state)])


def _reward_parts(rewards: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of every numeric part of the rewards over the samples that have it."""
    parts: dict[str, float] = {}
    for name in sorted({name for reward in rewards for name in reward}):
        numbers = [float(reward[name]) for reward in rewards if isinstance(reward.get(name), Real)]
        values = [number for number in numbers if math.isfinite(number)]
        if values:
            parts[f"rewards/{name}/mean"] = sum(values) / len(values)
    return parts


def _is_trainable(state: RolloutState) -> bool:
    return state.status not in NOT_TRAINABLE


def _reward(state: RolloutState) -> dict[str, Any]:
    assert state.reward is not None, "checked before"
    return state.reward


def _mask(state: RolloutState) -> list[int]:
    return list(state.response_mask) if state.response_mask is not None else [1] * len(state.response_ids or [])


def _temperature(states: list[RolloutState]) -> float:
    temperatures = {state.sample_params.temperature for state in states}
    if len(temperatures) != 1:
        raise RunError(f"All samples of a step must have one temperature, got {sorted(temperatures)}.")
    return temperatures.pop()


def _check(state: RolloutState) -> None:
    reward = state.reward
    num_tokens = len(state.response_ids or [])
    if reward is None:
        raise _unusable(state, "reward", "it is None. Does the task have a judger?")
    score = reward.get("score")
    if not isinstance(score, Real) or not math.isfinite(score):
        raise _unusable(state, "reward['score']", f"it must be a finite number, got {score!r} in {reward!r}")
    if num_tokens == 0:
        raise _unusable(state, "response_ids", "it is empty")
    for field in ("response_mask", "logprobs"):
        value = getattr(state, field)
        if value is None and field == "response_mask":
            continue
        if value is None or len(value) != num_tokens:
            given = "None" if value is None else f"{len(value)} values"
            raise _unusable(state, field, f"it has {given} for {num_tokens} response tokens")
    if not all(map(math.isfinite, state.logprobs or ())):
        raise _unusable(state, "logprobs", "not all are finite; are the weights, or top_p and top_k, all right?")


def _unusable(state: RolloutState, field: str, problem: str) -> RunError:
    return RunError(
        f"Sample {state.rollout_id} of group {state.group_id} (status {state.status.value}) cannot be trained on: "
        f"{field}: {problem}"
    )
