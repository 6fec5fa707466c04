"""Scored groups in, the trajectories of one step out, with every condition checked where it can still name the sample.

What a trajectory is (the first that holds)::

    input_ids and labels        rows that an agent built: prompt up to the first label, response from there
    train_prompt_ids            (in extra_fields) the prompt as the model saw it, images expanded
    prompt_ids, response_ids    prompt and response

Response, mask and log-probs have one length; the advantages that are estimated later have it too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from xrl_lite.agent_loop.failure import LOGPROBS_ARE_NEEDED
from xrl_lite.data import RolloutState, Status, find_uneven
from xrl_lite.data.rollout_state import UNKNOWN_VERSION
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import RunError
from xrl_lite.trainer.agent_metrics import agent_metrics

NOT_TRAINABLE = (Status.ABORTED, Status.FILTERED, Status.FAILED)
IGNORED = -100
"""Label of a token that is not trained on."""


@dataclass(frozen=True)
class _Tokens:
    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]


def prepare_train_data(
    groups: Sequence[Sequence[RolloutState]],
    *,
    max_tokens: int | None = None,
    reward_keys: Sequence[str] = (),
    needs_logprobs: bool = False,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the trajectories of all groups with their rewards, and metrics of the batch. Advantages are still 0.

    FAILED, ABORTED and FILTERED attempts are left out; their siblings stay, and are compared among
    themselves. Attempts of a group that share a `session_id` are one session: its reward is that of its last one, and
    earlier ones need none.

    Args:
        groups: Attempts at each prompt.
        max_tokens: Longest prompt and response together that the engine takes.
        reward_keys: Parts of the reward that each must have.
        needs_logprobs: Refuse attempts without log-probs, which otherwise are NaN where they are not known.

    Raises:
        RunError: an attempt that should be trained on lacks something; names sample and field.
    """
    kept = [(number, state) for number, group in enumerate(groups) for state in group if _is_trainable(state)]
    sessions = _number_sessions(kept)
    last = dict(zip(sessions, range(len(kept)), strict=True))
    for place, (_, state) in enumerate(kept):
        _check_reward(state, reward_keys, needed=last[sessions[place]] == place)
    tokens = [_tokens(state, max_tokens, needs_logprobs=needs_logprobs) for _, state in kept]
    rewards = [_reward(kept[last[session]][1]) for session in sessions]
    parts = {key: [_number(reward, key) for reward in rewards] for key in _numeric_keys(rewards)}
    batch = TrainBatch(
        prompts=[part.prompt for part in tokens],
        responses=[part.response for part in tokens],
        response_masks=[part.mask for part in tokens],
        rollout_logprobs=[part.logprobs for part in tokens],
        policy_versions=[part.versions for part in tokens],
        groups=[number for number, _ in kept],
        sessions=sessions,
        advantages=[[0.0] * len(part.response) for part in tokens],
        rewards=[float(reward["score"]) for reward in rewards],
        reward_parts=parts,
        temperature=_temperature([state for _, state in kept]),
    )
    return batch, _metrics(groups, batch, sorted(last.values()))


def _metrics(
    groups: Sequence[Sequence[RolloutState]], batch: TrainBatch, representatives: Sequence[int]
) -> dict[str, float]:
    states = [state for group in groups for state in group]
    lengths = [len(state.response_ids or []) for state in states]
    ended = [length for state, length in zip(states, lengths, strict=True) if state.finish_reason == "stop"]
    metrics = {
        "completions/mean_length": sum(lengths) / max(len(lengths), 1),
        "completions/min_length": float(min(lengths, default=0)),
        "completions/max_length": float(max(lengths, default=0)),
        "completions/mean_terminated_length": sum(ended) / max(len(ended), 1),
        "completions/clipped_ratio": sum(state.finish_reason == "length" for state in states) / max(len(states), 1),
        "completions/failed": float(sum(not _is_trainable(state) for state in states)),
        "prompts/mean_length": sum(map(len, batch.prompts)) / max(len(batch), 1),
        "num_tokens": float(sum(lengths)),
    }
    if not representatives:
        return metrics
    one_each = batch.select(list(representatives))
    return metrics | _reward_metrics(one_each) | _part_spreads(one_each) | agent_metrics(groups)


def _reward_metrics(sessions: TrainBatch) -> dict[str, float]:
    import torch

    from xrl_lite.algorithms.advantages.groups import zero_variance_groups  # loads torch

    rewards = torch.tensor(sessions.rewards, dtype=torch.float64)
    numbers = torch.tensor(sessions.groups)
    flat, num_groups = zero_variance_groups(rewards, numbers)
    spread = [rewards[numbers == number].std(correction=0).item() for number in sorted(set(sessions.groups))]
    return {
        "reward": rewards.mean().item(),
        "reward_std": sum(spread) / len(spread),
        "reward_min": rewards.min().item(),
        "reward_max": rewards.max().item(),
        "frac_reward_zero_std": flat / num_groups,
        "num_groups_zero_std": float(flat),
    }


def _part_spreads(sessions: TrainBatch) -> dict[str, float]:
    """Mean and deviation of every numeric part of the rewards over the samples that have it."""
    spreads: dict[str, float] = {}
    for name, values in sorted((sessions.reward_parts or {}).items()):
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            spreads |= {
                f"rewards/{name}/mean": statistics.fmean(finite),
                f"rewards/{name}/std": statistics.pstdev(finite),
            }
    return spreads


def _number_sessions(kept: Sequence[tuple[int, RolloutState]]) -> list[int]:
    """A number for each attempt; attempts of one group with the same session_id share it."""
    numbers: dict[object, int] = {}
    return [
        numbers.setdefault((group, state.session_id) if state.session_id is not None else place, len(numbers))
        for place, (group, state) in enumerate(kept)
    ]


def _is_trainable(state: RolloutState) -> bool:
    return state.status not in NOT_TRAINABLE


def _reward(state: RolloutState) -> dict[str, Any]:
    assert state.reward is not None, "checked before"
    return state.reward


def _numeric_keys(rewards: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({key for reward in rewards for key, value in reward.items() if isinstance(value, Real)})


def _number(reward: dict[str, Any], key: str) -> float:
    value = reward.get(key)
    return float(value) if isinstance(value, Real) else math.nan


def _temperature(states: list[RolloutState]) -> float:
    temperatures = {state.sample_params.temperature for state in states}
    if len(temperatures) > 1:
        raise RunError(f"All samples of a step must have one temperature, got {sorted(temperatures)}.")
    return temperatures.pop() if temperatures else 1.0


def _check_reward(state: RolloutState, keys: Sequence[str], *, needed: bool) -> None:
    reward = state.reward
    if reward is None:
        if not needed:
            return
        raise _unusable(state, "reward", "it is None. Does the task have a judger?")
    for key in ("score", *keys):
        value = reward.get(key)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise _unusable(state, f"reward[{key!r}]", f"it must be a finite number, got {value!r} in {reward!r}")


def _tokens(state: RolloutState, max_tokens: int | None, *, needs_logprobs: bool) -> _Tokens:
    if state.mm_info is not None and state.mm_info.pixel_values is not None:
        raise _unusable(state, "mm_info", "it has images, and the training engines take text only")
    if state.input_ids is not None or state.labels is not None:
        tokens = _agent_tokens(state)
    else:
        tokens = _response_tokens(state)
    if not tokens.prompt:
        raise _unusable(state, "prompt_ids", "it is empty: the first response token is predicted from the prompt")
    if needs_logprobs and not state.logprobs:
        raise _unusable(state, "logprobs", f"there are none. {LOGPROBS_ARE_NEEDED}")
    if state.logprobs and not all(map(math.isfinite, tokens.logprobs)):
        raise _unusable(state, "logprobs", "not all are finite; are the weights, or top_p and top_k, all right?")
    total = len(tokens.prompt) + len(tokens.response)
    if max_tokens is not None and total > max_tokens:
        raise _unusable(
            state,
            "prompt_ids and response_ids",
            f"together they have {total} tokens, more than engine.max_tokens_per_micro_batch={max_tokens}",
        )
    return tokens


def _response_tokens(state: RolloutState) -> _Tokens:
    response = list(state.response_ids or [])
    if not response:
        raise _unusable(state, "response_ids", "it is empty")
    _check_even(state)
    if state.response is None:  # "" is the text of a response that ends at once
        raise _unusable(state, "response", "it is None, though there are response tokens")
    mask = list(state.response_mask) if state.response_mask is not None else [1] * len(response)
    if not set(mask) <= {0, 1}:
        raise _unusable(state, "response_mask", f"it must hold 0 and 1 only, got {sorted(set(mask))}")
    prompt = state.extra_fields.get("train_prompt_ids") or state.prompt_ids or []
    logprobs = _under(mask, state.logprobs or [math.nan] * len(mask))
    return _Tokens(list(prompt), response, mask, logprobs, _versions(state, len(response)))


def _agent_tokens(state: RolloutState) -> _Tokens:
    """Rows with labels: everything from the first label on is response, what has no label has mask 0."""
    _check_even(state)
    ids, labels = state.input_ids or [], state.labels or []
    logprobs = state.logprobs or [math.nan] * len(ids)
    trained = [place for place, label in enumerate(labels) if label != IGNORED]
    if not trained:
        raise _unusable(state, "labels", f"all are {IGNORED}, so there is nothing to train on")
    for place in trained:
        if labels[place] != ids[place]:
            raise _unusable(
                state, "labels", f"at {place} it has {labels[place]}, input_ids has {ids[place]}: not shifted, please"
            )
    start = trained[0]
    mask = [int(label != IGNORED) for label in labels[start:]]
    return _Tokens(ids[:start], ids[start:], mask, _under(mask, logprobs[start:]), _versions(state, len(mask)))


def _check_even(state: RolloutState) -> None:
    if (uneven := find_uneven(state)) is not None:
        raise _unusable(state, *uneven)


def _under(mask: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """Log-probs of the trained tokens, 0 elsewhere: an engine has none, or NaN, for tokens that it did not sample."""
    return [value if bit else 0.0 for bit, value in zip(mask, logprobs, strict=True)]


def _versions(state: RolloutState, num_tokens: int) -> list[int]:
    """Policy version of each response token; -1 where an agent does not tell."""
    steps = state.response_model_steps or []
    if len(steps) == num_tokens:
        return list(steps)
    return [steps[0] if len(set(steps)) == 1 else UNKNOWN_VERSION] * num_tokens


def _unusable(state: RolloutState, field: str, problem: str) -> RunError:
    return RunError(
        f"Sample {state.rollout_id} of group {state.group_id} (status {state.status.value}) cannot be trained on: "
        f"{field}: {problem}"
    )
