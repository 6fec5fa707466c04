"""What a reward must be: a dict whose ``score`` is a finite number."""

from __future__ import annotations

import math
from typing import Any, cast

from xrl_lite.judger.outcome import RewardValueError

_SHOWN = 300


def check_reward(reward: Any, *, judger: str, sample: object, needs_score: bool = True) -> None:
    """Check the reward of one sample. A bool score counts as a number.

    Args:
        reward: What is to be checked.
        judger: Name of the judger, for the message.
        sample: Id of the sample, for the message.
        needs_score: Whether ``score`` must be there. A merge function may leave it out, and then nothing can be
            trained on the sample.

    Raises:
        RewardValueError: names judger, sample and value.
    """
    if not isinstance(reward, dict):
        raise _unusable("must be a dict", reward, judger, sample)
    values = cast("dict[Any, Any]", reward)
    if "score" not in values:
        if not needs_score:
            return
        raise _unusable("must have the key 'score'", values, judger, sample)
    score = values["score"]
    if type(score) is float and math.isfinite(score):  # nearly all are
        return
    try:
        is_finite = not isinstance(score, str | bytes) and math.isfinite(score)
    except (TypeError, ValueError, OverflowError):
        is_finite = False
    if not is_finite:
        raise _unusable(f"must have a finite number as 'score', got {_short(score)}", values, judger, sample)


def _unusable(rule: str, value: Any, judger: str, sample: object) -> RewardValueError:
    return RewardValueError(f"judger {judger!r}, sample {sample}: the reward {rule}; it is {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
