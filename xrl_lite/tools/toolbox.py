"""Carries out calls: the right tool, its time limit, its state, and an answer in every case.

::

    Toolbox                     the tools of a run, by name
      '- session(...)           those of one trajectory: selection, create_kwargs, instances that live as long as it
           '- run(calls)        at most max_parallel_calls at once --> one result per call, in order

Waits for    a tool, at most `call_timeout_s`
Is woken by  its answer, its error, or the limit

Whatever a tool does, and whatever the model writes, `run` returns results: a failure is a text for the model and is
counted. Only cancellation goes through.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import anyio

from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError, ToolError, did_you_mean
from xrl_lite.log import get_logger
from xrl_lite.tools.arguments import ArgumentsError, fit_arguments
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.parsers import FunctionCall
from xrl_lite.tools.response import ToolResponse, Truncation
from xrl_lite.tools.schema import ToolSchema

logger = get_logger(__name__)

Failure = Literal["malformed", "unknown_tool", "arguments", "raised", "timeout", "died"]
"""Why a call has no answer of its tool: the model wrote it wrong (the first three), or the tool failed."""

RELEASE_TIMEOUT_S = 10.0
QUEUE_TIMEOUT_S = 120.0
"""How long a call may wait for a worker of a tool that runs in processes, on top of its own limit."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What came of one call."""

    call: FunctionCall
    """The call."""
    response: ToolResponse
    """What the model is told."""
    reward: float = 0.0
    """Reward of the tool; 0.0 for a failure."""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever the tool measured."""
    failure: Failure | None = None
    """Why the tool gave no answer; None if it did."""
    duration_s: float = 0.0
    """Wall time."""
    truncated: bool = False
    """Whether the model sees only a part of the answer."""


@dataclass
class ToolCounts:
    """How calls ended, over a trajectory or a run."""

    calls: int = 0
    """All calls."""
    truncated: int = 0
    """Calls whose answer was cut."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Calls without an answer of their tool, by `Failure`."""

    def add(self, result: ToolResult) -> None:
        """Count one result."""
        self.calls += 1
        self.truncated += result.truncated
        if result.failure is not None:
            self.failures[result.failure] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {"calls": self.calls, "truncated": self.truncated, "failures": dict(self.failures)}

    @classmethod
    def total(cls, counts: Iterable[Mapping[str, Any]]) -> ToolCounts:
        """Return the sum of counts that `as_dict` returned."""
        total = cls()
        for each in counts:
            total.calls += each["calls"]
            total.truncated += each["truncated"]
            total.failures.update(each["failures"])
        return total

    def metrics(self) -> dict[str, float]:
        """Return ``tools/...`` metrics."""
        failed = sum(self.failures.values())
        return {
            "tools/num_calls": float(self.calls),
            "tools/failure_frequency": failed / self.calls if self.calls else 0.0,
            "tools/num_truncated": float(self.truncated),
            **{f"tools/failures/{kind}": float(number) for kind, number in sorted(self.failures.items())},
        }


class Toolbox:
    """The tools of a run.

    Args:
        tools: The tools; no two may have one name.
        call_timeout_s: Limit for one call.
        max_parallel_calls: Calls of one turn that are carried out.
        truncation: How answers are cut.
        encode: Makes tokens of a text, where answers are cut by tokens.
        decode: The reverse.

    Raises:
        ToolError: two tools have one name, or answers are to be cut by tokens and there is no tokenizer.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool],
        *,
        call_timeout_s: float = 30.0,
        max_parallel_calls: int = 1,
        truncation: Truncation | None = None,
        encode: Callable[[str], list[int]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.tools = by_name(tools)
        self.call_timeout_s = call_timeout_s
        self.max_parallel_calls = max_parallel_calls
        self.counts = ToolCounts()
        """Calls of all trajectories."""
        self._truncate = partial(truncation or Truncation(), encode=encode, decode=decode)
        self._truncate("")  # refuses tokens without a tokenizer now and not at the first call

    @asynccontextmanager
    async def session(
        self,
        *,
        selection: Sequence[str] | None = None,
        create_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> AsyncGenerator[ToolSession]:
        """Yield the tools of one trajectory; on leaving, however that is, what they set up is released.

        Args:
            selection: Names of the tools it may use; all when not given.
            create_kwargs: Keyword arguments of `BaseTool.create`, by name of the tool.

        Raises:
            ToolError: a name that no tool has.
        """
        session = ToolSession(self, self.select(selection), dict(create_kwargs or {}))
        try:
            yield session
        finally:
            # shield: what tools set up must be given back also when the trajectory is cancelled
            with anyio.CancelScope(shield=True):
                await session.release_all()

    def select(self, names: Sequence[str] | None) -> dict[str, BaseTool]:
        """Return the tools of these names; all of them for None.

        Raises:
            ToolError: a name that no tool has.
        """
        if names is None:
            return self.tools
        for name in names:
            if name not in self.tools:
                raise ToolError(
                    f"tool_selection names {name!r}, which is no tool of this run.{did_you_mean(name, self.tools)} "
                    f"There are: {', '.join(self.tools) or 'none'}."
                )
        return {name: self.tools[name] for name in names}

    def cut(self, response: ToolResponse) -> tuple[ToolResponse, bool]:
        """Return a response as the model sees it, and whether something is missing."""
        if response.text is None:
            return response, False
        text = self._truncate(response.text)
        return ToolResponse(text=text, image=response.image, video=response.video), text != response.text

    async def aclose(self) -> None:
        """Give back what the tools hold."""
        for tool in self.tools.values():
            await tool.aclose()


class ToolSession:
    """The tools of one trajectory. Made by `Toolbox.session`."""

    def __init__(
        self, toolbox: Toolbox, tools: Mapping[str, BaseTool], create_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._toolbox = toolbox
        self._tools = tools
        self._create_kwargs = create_kwargs
        self._instances: dict[str, str] = {}
        self._creating: dict[str, anyio.Lock] = {}
        self.counts = ToolCounts()
        """Calls of this trajectory."""

    @property
    def schemas(self) -> list[ToolSchema]:
        """What the model is told about its tools."""
        return [tool.schema for tool in self._tools.values()]

    async def run(self, calls: Sequence[FunctionCall], *, agent_data: Any = None) -> list[ToolResult]:
        """Carry out calls at the same time, at most `max_parallel_calls` of them, and return results in their order.

        Args:
            calls: What the model called; those beyond the limit are left out.
            agent_data: Handed to tools: the trajectory that calls.

        Cancelling ends the calls.
        """
        taken = list(calls[: self._toolbox.max_parallel_calls])
        results: dict[int, ToolResult] = {}

        async def run_one(place: int, call: FunctionCall) -> None:
            results[place] = await self._run_one(call.checked(), agent_data)

        if len(taken) == 1:
            await run_one(0, taken[0])
        else:
            async with anyio.create_task_group() as running:
                for place, call in enumerate(taken):
                    running.start_soon(run_one, place, call)
        ordered = [results[place] for place in range(len(taken))]
        for result in ordered:
            self.counts.add(result)
            self._toolbox.counts.add(result)
        return ordered

    async def release_all(self) -> None:
        """Release the instances that live as long as the trajectory. Errors of tools are logged."""
        while self._instances:
            name, instance_id = self._instances.popitem()
            await self._release(self._tools[name], instance_id)

    async def _run_one(self, call: FunctionCall, agent_data: Any) -> ToolResult:
        started = time.perf_counter()
        if call.error is not None:
            return _failed(call, "malformed", f"The tool call cannot be read: {call.error}")
        tool = self._tools.get(call.name)
        if tool is None:
            available = ", ".join(self._tools) or "none"
            guess = did_you_mean(call.name, self._tools)
            return _failed(call, "unknown_tool", f"unknown tool {call.name}; available: {available}.{guess}")
        result = await self._execute(tool, call, agent_data)
        response, truncated = self._toolbox.cut(result.response)
        return ToolResult(
            call=call,
            response=response,
            reward=result.reward,
            metrics=result.metrics,
            failure=result.failure,
            duration_s=time.perf_counter() - started,
            truncated=truncated,
        )

    async def _execute(self, tool: BaseTool, call: FunctionCall, agent_data: Any) -> ToolResult:
        limit_s = self._toolbox.call_timeout_s
        deadline = anyio.CancelScope(
            deadline=anyio.current_time() + limit_s + (QUEUE_TIMEOUT_S if tool.limits_itself else 0.0)
        )
        try:
            parameters = fit_arguments(call.parameters, tool.schema, strict=tool.checks_arguments)
            with deadline:
                return await self._execute_unlimited(tool, call, parameters, agent_data)
        except ArgumentsError as error:
            return _failed(call, "arguments", str(error))
        except (ActorDiedError, ActorUnavailableError) as error:
            logger.warning("the process of tool %s died: %s", tool.name, error)
            return _failed(call, "died", f"{tool.name} failed: its process ended.")
        except ActorTimeoutError:
            return _failed(call, "timeout", f"{tool.name} took longer than {limit_s:g} s and was ended.")
        except Exception as error:
            logger.info("tool %s raised", tool.name, exc_info=error)
            return _failed(call, "raised", f"{tool.name} failed: {type(error).__name__}: {error}")
        return _failed(call, "timeout", f"{tool.name} took longer than {limit_s:g} s and was ended.")

    async def _execute_unlimited(
        self, tool: BaseTool, call: FunctionCall, parameters: dict[str, Any], agent_data: Any
    ) -> ToolResult:
        options = {"timeout_s": self._toolbox.call_timeout_s} if tool.limits_itself else {}
        kwargs = self._create_kwargs.get(tool.name, {})
        if tool.lifetime == "trajectory":
            instance_id, greeting = await self._lasting_instance(tool, kwargs)
            response, reward, metrics = await tool.execute(instance_id, parameters, agent_data=agent_data, **options)
        else:
            instance_id, greeting = await tool.create(**kwargs)
            try:
                response, reward, metrics = await tool.execute(
                    instance_id, parameters, agent_data=agent_data, **options
                )
            finally:
                await self._release(tool, instance_id)
        if not greeting.is_empty:
            response = greeting.followed_by(response)
        return ToolResult(call=call, response=response, reward=float(reward or 0.0), metrics=metrics)

    async def _lasting_instance(self, tool: BaseTool, kwargs: Mapping[str, Any]) -> tuple[str, ToolResponse]:
        async with self._creating.setdefault(tool.name, anyio.Lock()):  # parallel calls share one instance
            if tool.name in self._instances:
                return self._instances[tool.name], ToolResponse()
            instance_id, greeting = await tool.create(**kwargs)
            self._instances[tool.name] = instance_id
            return instance_id, greeting

    async def _release(self, tool: BaseTool, instance_id: str) -> None:
        if type(tool).release is BaseTool.release:
            return  # there is nothing that it could give back
        try:
            # shield: what tools set up must be given back also when the call is cancelled
            with anyio.fail_after(RELEASE_TIMEOUT_S, shield=True):
                await tool.release(instance_id)
        except Exception:  # the answer is there already; what cannot be released is for a person
            logger.exception("tool %s: instance %s could not be released", tool.name, instance_id)


def by_name(tools: Sequence[BaseTool]) -> dict[str, BaseTool]:
    """Return tools by name.

    Raises:
        ToolError: two have one name.
    """
    found: dict[str, BaseTool] = {}
    for tool in tools:
        if tool.name in found:
            raise ToolError(
                f"Two tools are called {tool.name!r}: {_origin(found[tool.name])} and {_origin(tool)}. "
                f'Rename one, for example with @function_tool("other_name").'
            )
        found[tool.name] = tool
    return found


def message_of(result: ToolResult) -> dict[str, Any]:
    """Return the message of the role tool that tells the model about a result."""
    text = result.response.text or ""
    content: Any = text
    if result.response.image:
        content = [{"type": "image", "image": image} for image in result.response.image]
        content += [{"type": "text", "text": text}] if text else []
    message: dict[str, Any] = {"role": "tool", "content": content}
    if result.call.name:
        message["name"] = result.call.name
    if result.call.tool_call_id is not None:
        message["tool_call_id"] = result.call.tool_call_id
    return message


def call_message(call: FunctionCall) -> dict[str, Any]:
    """Return a call as part of an assistant message; a malformed one has no arguments."""
    return {
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.name or "invalid", "arguments": json.loads(call.arguments) if not call.error else {}},
    }


def _failed(call: FunctionCall, failure: Failure, text: str) -> ToolResult:
    return ToolResult(call=call, response=ToolResponse(text=f"Error: {text}"), failure=failure)


def _origin(tool: BaseTool) -> str:
    module = getattr(tool, "__module__", "")
    return f"{module}.{getattr(tool, '__qualname__', type(tool).__qualname__)}"
