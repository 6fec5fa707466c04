"""What a reward must be: a dict whose ``score`` is a finite number."""

from __future__ import annotations

import math
from numbers import Number
from typing import Any, cast

from xrl_lite.judger.outcome import RewardValueError

_SHOWN = 300
_PLAIN = frozenset((float, int, bool, str, type(None), dict, list))


def check_reward(reward: Any, *, judger: str, sample: object, needs_score: bool = True) -> dict[str, Any]:
    """Return the reward of one sample with numbers of Python in the place of those of other libraries.

    Arrays and tensors with one element count as numbers, and so does a bool.

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
    values = cast("dict[str, Any]", reward)
    for value in values.values():  # a loop costs less than one call would
        if type(value) not in _PLAIN:
            values = {name: _as_plain(value) for name, value in values.items()}
            break
    if "score" not in values:
        if not needs_score:
            return values
        raise _unusable("must have the key 'score'", values, judger, sample)
    score = values["score"]
    try:
        is_usable = isinstance(score, (int, float)) and math.isfinite(score)  # a union would be made anew each time
    except OverflowError:  # an int that no float can be
        is_usable = False
    if not is_usable:
        raise _unusable(f"must have a finite number as 'score', got {_short(score)}", values, judger, sample)
    return values


def _as_plain(value: Any) -> Any:
    """Return a number of numpy, torch, decimal or fractions as one of Python, and anything else as it is."""
    if type(value) in _PLAIN:
        return value
    try:
        if hasattr(value, "dtype"):
            return value.item()
        return float(cast("Any", value)) if isinstance(value, Number) and not isinstance(value, int) else value
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several elements, or none; complex numbers
        return value


def _unusable(rule: str, value: Any, judger: str, sample: object) -> RewardValueError:
    return RewardValueError(f"judger {judger!r}, sample {sample}: the reward {rule}; it is {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
