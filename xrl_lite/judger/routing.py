"""Which branches of a composed judger a sample goes to, by its data source. Pure; fails before any branch runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from xrl_lite.errors import did_you_mean


def select_branches(data_source: Any, branches: Sequence[str]) -> list[str]:
    """Return the names of the branches that a data source selects, in its order.

    Raises:
        ValueError: no data source, or an empty dict.
        KeyError: a branch that does not exist.
        TypeError: another type, or a key that is not a string.
    """
    if data_source is None:
        raise ValueError(
            f"ComposedJudger requires rollout_state.data_source to route judger branches. "
            f"Branches are {_quoted(branches)}."
        )
    if isinstance(data_source, str):
        return [_known(data_source, branches)]
    if not isinstance(data_source, Mapping):
        raise TypeError(
            f"RolloutState.data_source must be a branch name string or a dict of branch names, got {data_source!r}."
        )
    keys = list(cast("Mapping[Any, Any]", data_source))
    if not keys:
        raise ValueError("RolloutState.data_source dict must contain at least one judger branch.")
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"RolloutState.data_source dict keys must be strings, got {key!r}.")
    return [_known(key, branches) for key in keys]


def select_inside(key: str, data_source: Any, branches: Sequence[str]) -> list[str]:
    """Return what is selected inside a branch that is composed itself and was selected as `key`.

    The value under its key decides, if that is a name or a dict; otherwise the branch of the same name, if there is
    one; otherwise all branches.
    """
    inner = inner_source(key, data_source)
    if inner is not None:
        return select_branches(inner, branches)
    return [key] if key in branches else list(branches)


def inner_source(key: str, data_source: Any) -> Any:
    """Return the data source that is meant for the inside of a branch, or None; numbers are weights, not sources."""
    value = cast("Mapping[Any, Any]", data_source).get(key) if isinstance(data_source, Mapping) else None
    return cast("Any", value) if isinstance(value, str | Mapping) else None


def _known(key: str, branches: Sequence[str]) -> str:
    if key not in branches:
        raise KeyError(
            f"Unknown judger branch from data_source: {key!r}.{did_you_mean(key, branches)} "
            f"Branches are {_quoted(branches)}."
        )
    return key


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
