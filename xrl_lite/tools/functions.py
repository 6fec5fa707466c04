"""Tools that are functions: no state, schema from type hints and docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, overload

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from xrl_lite.errors import ToolError
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.response import ToolResponse, read_return
from xrl_lite.tools.schema import OpenAIFunctionToolSchema, ToolSchema, schema_of_function

RunIn = Literal["thread", "process"]

MAX_THREADS = 64
"""Sync functions of all tools that run at once in threads of one process."""

_THREADS: RunVar[anyio.CapacityLimiter] = RunVar("xrl_lite.tools.threads")


class FunctionTool(BaseTool):
    """A function as a tool. It can still be called as the function it is.

    Async functions run on the loop, sync ones in a thread, which goes on where a call takes too long: nothing can stop
    it. What may hang or computes for long belongs in a process (``run_in="process"``), which is ended.

    Args:
        function: Sync or async. What it may return is in `read_return`.
        name: Instead of the function's own.
        schema: Instead of one made of the function.
        run_in: Where a sync function runs: thread or process.
        num_workers: Processes, if it runs in some.
        num_cpus: CPU slots of each of these.

    Raises:
        ToolError: no schema can be made of the function.
    """

    checks_arguments: ClassVar[bool] = True

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        schema: OpenAIFunctionToolSchema | ToolSchema | None = None,
        run_in: RunIn = "thread",
        num_workers: int = 1,
        num_cpus: float = 1.0,
    ) -> None:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        label = name or getattr(function, "__name__", "tool")
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
            raise ToolError(
                f"Tool {label!r} takes *args or **kwargs, which no schema can describe. Name its arguments."
            )
        if run_in not in ("thread", "process"):
            raise ToolError(f"Tool {label!r}: run_in must be 'thread' or 'process', got {run_in!r}.")
        super().__init__(tool_schema=schema or schema_of_function(function, name=name))
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self.run_in: RunIn = run_in
        self.num_workers = num_workers
        self.num_cpus = num_cpus
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or self.name, ToolResponse()  # there is nothing to tell apart

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if self.is_async:
            return read_return(await self.function(**parameters))
        call = functools.partial(self.function, **parameters)
        return read_return(await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=_threads()))


@overload
def function_tool(target: Callable[..., Any], /) -> FunctionTool: ...
@overload
def function_tool(
    target: str | None = None,
    /,
    *,
    schema: OpenAIFunctionToolSchema | ToolSchema | None = None,
    run_in: RunIn = "thread",
    num_workers: int = 1,
    num_cpus: float = 1.0,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def function_tool(
    target: Callable[..., Any] | str | None = None,
    /,
    *,
    schema: OpenAIFunctionToolSchema | ToolSchema | None = None,
    run_in: RunIn = "thread",
    num_workers: int = 1,
    num_cpus: float = 1.0,
) -> Any:
    """Make a tool of a function: ``@function_tool``, ``@function_tool("name")`` or ``@function_tool(schema=...)``.

    Arguments as for `FunctionTool`; errors as there.
    """
    if callable(target):
        return FunctionTool(target)

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            function, name=target, schema=schema, run_in=run_in, num_workers=num_workers, num_cpus=num_cpus
        )

    return decorate


def _threads() -> anyio.CapacityLimiter:
    """Return the limit on threads of the running loop."""
    try:
        return _THREADS.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(MAX_THREADS)
        _THREADS.set(limiter)
        return limiter
