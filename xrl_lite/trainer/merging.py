"""Metrics of a step that was sampled and trained in parts, put together as if it had been one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_COUNT_OF = "num_"
"""What the last word of a count's name begins with."""
_COUNTED = ("/failed", "_groups", "/groups", "/samples", "/tokens", "_samples", "_dropped")
"""What the names of other counts end with."""
_COUNTS_BY_KIND = "tools/failures/"
_STATES = ("buffer/", "learning_rate")
"""What is as it was last."""
_IN_ALL = "skipped_step"


def merge_metrics(parts: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """Return the metrics of all parts together.

    Counts are summed, maxima and minima are those of all parts, states of the buffer and the learning rate are the last
    ones, the rest are means over the parts that have them.

    Args:
        parts: Metrics of each part, and its weight: trajectories that it was trained on.
    """
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    merged = {name: _merge(name, [(m[name], weight) for m, weight in parts if name in m]) for name in names}
    if not all(_IN_ALL in metrics for metrics, _ in parts):
        merged.pop(_IN_ALL, None)
    return merged


def _merge(name: str, values: Sequence[tuple[Any, float]]) -> Any:
    last = values[-1][0]
    if isinstance(last, Mapping):  # value -> groups
        return dict(sum((Counter[str](counts) for counts, _ in values), Counter[str]()))
    if not isinstance(last, int | float) or len(values) == 1:
        return last
    numbers = [value for value, _ in values]
    if _is_count(name):
        return sum(numbers)
    if name.startswith(_STATES):
        return last
    if name.endswith(("max", "max_length")):
        return max(numbers)
    if name.endswith(("min", "min_length")):
        return min(numbers)
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else sum(numbers) / len(numbers)


def _is_count(name: str) -> bool:
    if name.startswith("time/"):
        return False
    last_word = name.rpartition("/")[2]
    return last_word.startswith(_COUNT_OF) or name.endswith(_COUNTED) or name.startswith(_COUNTS_BY_KIND)
