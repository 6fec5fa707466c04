"""Reward code as it is given in a setting: a callable, a path to one, or a URL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from xrl_lite.errors import ConfigError, PluginError
from xrl_lite.registry import load_object

RewardHandler = Callable[..., Any]
"""Any callable that scores a response; the signature is told by the adapter that calls it."""

SyncIn = Literal["thread", "loop"]
"""Where a sync function of a judger without workers runs."""

DEFAULT_CONCURRENCY = 64
"""Async judgements of one judger that run at the same time."""

_FORMS = "Give a callable, 'package.module:name', 'file.py:name' or 'http://host/path'."


def is_url(handler: object) -> bool:
    """Return whether a handler is the address of a scoring service."""
    return isinstance(handler, str) and handler.startswith(("http://", "https://"))


def load_handler(handler: object, *, judger: str) -> RewardHandler:
    """Return the callable that a setting stands for.

    Raises:
        ConfigError: a path that leads nowhere, or something that cannot be called; names the judger.
    """
    found = handler
    if isinstance(handler, str):
        if ":" not in handler:
            raise ConfigError(f"judger {judger!r}: reward_handler {handler!r} is neither a path nor a URL. {_FORMS}")
        try:
            found = load_object(handler)
        except PluginError as error:
            raise ConfigError(f"judger {judger!r}: reward_handler: {error}") from error
    if isinstance(found, type):
        raise ConfigError(
            f"judger {judger!r}: reward_handler is the class {found.__name__}. Give an instance: {found.__name__}(...)."
        )
    if not callable(found):
        raise ConfigError(f"judger {judger!r}: reward_handler {found!r} is not callable. {_FORMS}")
    return found


def load_handlers(handler: object, *, judger: str) -> RewardHandler | list[RewardHandler]:
    """Do the same for a setting that may be a list of them."""
    if isinstance(handler, list | tuple):
        return [load_handler(one, judger=judger) for one in cast("Sequence[object]", handler)]
    return load_handler(handler, judger=judger)


def handler_name(handler: object) -> str:
    """Return a name for any kind of handler: partials and instances have no ``__name__``."""
    if isinstance(handler, str):
        return handler
    if isinstance(handler, functools.partial):
        return handler_name(cast("functools.partial[Any]", handler).func)
    return getattr(handler, "__name__", None) or type(handler).__name__


def is_async(handler: object) -> bool:
    """Return whether calling the handler gives a coroutine; looks through partials and at ``__call__``."""
    handler = _without_partials(handler)
    declared = getattr(handler, "is_async", None)
    if isinstance(declared, bool):
        return declared
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - the method is asked for, not whether there is one


def wraps_async(handler: object) -> bool:
    """Return whether a sync function is wrapped around an async one by `functools.wraps`; it may give its coroutine."""
    function = _without_partials(handler)
    if is_async(function) or inspect.isgeneratorfunction(function) or not callable(function):
        return False
    return is_async(inspect.unwrap(function, stop=is_async))


def code_file(handler: object) -> str | None:
    """Return the file that a handler's code is written in, or None for what is not written in Python."""
    if isinstance(handler, functools.partial):
        return code_file(cast("functools.partial[Any]", handler).func)
    function = handler if inspect.isroutine(handler) else getattr(type(handler), "__call__", None)  # noqa: B004 - as above
    code = getattr(function, "__code__", None)
    return getattr(code, "co_filename", None)


def _without_partials(handler: object) -> object:
    while isinstance(handler, functools.partial):
        handler = cast("functools.partial[Any]", handler).func
    return handler


class Parameters:
    """What a callable takes by keyword.

    Args:
        function: Any callable.
    """

    def __init__(self, function: RewardHandler) -> None:
        self.required: list[str] = []
        """Names without a default."""
        self.names: dict[str, None] = {}
        """All names, in their order."""
        self._known = frozenset[str]()
        self.takes_any = False
        """Whether it has ``**kwargs``, or cannot be looked at."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some builtins have no signature
            self.takes_any = True
            return
        for parameter in parameters:
            match parameter.kind:
                case inspect.Parameter.VAR_KEYWORD:
                    self.takes_any = True
                case inspect.Parameter.VAR_POSITIONAL:
                    pass
                case _:
                    self.names[parameter.name] = None
                    if parameter.default is parameter.empty:
                        self.required.append(parameter.name)
        self._known = frozenset(self.names)

    def takes(self, name: str) -> bool:
        """Return whether the callable takes an argument of this name."""
        return self.takes_any or name in self.names

    def choose(self, offered: dict[str, Any]) -> dict[str, Any]:
        """Return those of the offered arguments that the callable takes."""
        if self.takes_any or self._known.issuperset(offered):
            return offered
        return {name: offered[name] for name in self.names if name in offered}
