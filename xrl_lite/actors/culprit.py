"""Finds the part of an object that cannot be pickled, so that an error can name it: ``config.extra_info['lock']``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

_MAX_DEPTH = 24
_MAX_PARTS = 10_000


def locate(value: object, path: str, pickles: Callable[[object], bool]) -> tuple[str, object]:
    """Return the path and the value of the innermost part of `value` for which `pickles` says no."""
    seen = {id(value)}
    for _ in range(_MAX_DEPTH):
        found = _failing_part(value, path, pickles, seen)
        if found is None:
            break
        path, value = found
        seen.add(id(value))
    return path, value


def _failing_part(
    value: object, path: str, pickles: Callable[[object], bool], seen: set[int]
) -> tuple[str, object] | None:
    for count, (part_path, part) in enumerate(_parts(value, path)):
        if count >= _MAX_PARTS:
            return None
        if id(part) not in seen and not pickles(part):
            return part_path, part
    return None


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield f"{path}[{key!r}]", item
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(cast("list[object]", value)):
            yield f"{path}[{index}]", item
    elif isinstance(value, functools.partial):
        partial = cast("functools.partial[object]", value)
        yield f"{path}.func", partial.func
        yield from _parts(partial.args, f"{path}.args")
        yield from _parts(partial.keywords, f"{path}.keywords")
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _variables(value, path)
    elif isinstance(value, type):
        for name, item in list(vars(value).items()):
            if isinstance(item, types.FunctionType):
                yield from _variables(item, f"{path}.{name}")
            elif not name.startswith("__"):
                yield f"{path}.{name}", item
    elif not isinstance(value, types.ModuleType):
        yield from _attributes(value, path)


def _variables(function: types.FunctionType, path: str) -> Iterator[tuple[str, object]]:
    """The variables that a function takes with it: its closure, its defaults, the globals it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{path}.<variable {name}>", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from _parts(function.__defaults__ or (), f"{path}.__defaults__")
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{path}.<global {name}>", function.__globals__[name]


def _attributes(value: object, path: str) -> Iterator[tuple[str, object]]:
    names: dict[str, None] = dict.fromkeys(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots: Any = owner.__dict__.get("__slots__", ())
        names.update(dict.fromkeys([slots] if isinstance(slots, str) else slots))
    for name in names:
        if name not in ("__dict__", "__weakref__") and hasattr(value, name):
            yield f"{path}.{name}", getattr(value, name)
