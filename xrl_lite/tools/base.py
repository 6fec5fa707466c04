"""The interface of tools, as verl's tools have it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from xrl_lite.errors import ToolError, did_you_mean
from xrl_lite.tools.response import ToolResponse
from xrl_lite.tools.schema import OpenAIFunctionToolSchema, ToolSchema, check_schema

Lifetime = Literal["call", "trajectory"]
"""Whether `create` and `release` are around every call, or around all calls of one trajectory."""


class BaseTool:
    """A tool with state. Override `execute`, and the rest where there is something to set up.

    ::

        create -> execute -> release                          lifetime "call"
        create -> execute -> execute -> ... -> release        lifetime "trajectory"; create at the first call

    `release` is called however the trajectory ends.

    Args:
        config: Settings of this tool, whatever it needs. ``lifetime`` is "call" (default) or "trajectory".
        tool_schema: What the model is told; None where the class says so itself, in `get_openai_tool_schema`.

    Raises:
        ToolError: no schema, or an unknown lifetime.
    """

    checks_arguments: ClassVar[bool] = False
    """Whether names of arguments are checked against the schema before `execute` is called."""
    limits_itself: ClassVar[bool] = False
    """Whether `execute` keeps to the time limit of a call on its own, from when it starts to run."""

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | ToolSchema | None = None,
    ) -> None:
        self.config = dict(config or {})
        self.tool_schema: Any = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        label = type(self).__name__
        if self.tool_schema is None:
            raise ToolError(f"{label} has no schema. Give tool_schema, or return one from get_openai_tool_schema().")
        self._schema = check_schema(self.tool_schema, label=label)
        self.name: str = self._schema["function"]["name"]
        """The name the model calls it by."""
        self.lifetime: Lifetime = _lifetime(self.config.get("lifetime", "call"), self.name)
        """Between which calls it keeps state."""

    @property
    def schema(self) -> ToolSchema:
        """The schema as plain data, for the chat template."""
        return self._schema

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | ToolSchema | None:
        """Return the schema; a class that knows its own overrides this."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Set up an instance and return its id.

        Args:
            instance_id: The id it is to have; a new one when not given.
            **kwargs: ``extra_info.tools_kwargs[<name of the tool>].create_kwargs`` of the row.
        """
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Do what the model asks for, and return the answer, a reward, and metrics.

        What it raises becomes a message for the model.

        Args:
            instance_id: From `create`.
            parameters: Arguments of the call.
            **kwargs: ``agent_data``: the trajectory that calls.
        """
        raise NotImplementedError(f"{type(self).__name__}.execute() is not implemented.")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance, for agent loops that ask for it."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Give back what `create` set up."""

    async def aclose(self) -> None:
        """Give back what the tool itself holds: processes, connections."""


def _lifetime(value: object, name: str) -> Lifetime:
    if value in ("call", "trajectory"):
        return value
    raise ToolError(
        f"Tool {name!r}: lifetime must be 'call' or 'trajectory', got {value!r}."
        f"{did_you_mean(str(value), ('call', 'trajectory'))}"
    )
