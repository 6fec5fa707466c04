"""Python that the model wrote, run in a sandbox: a program of its own for every call; what it prints is the answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from xrl_lite.errors import PluginError, ToolError
from xrl_lite.registry import load_object
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.response import ToolResponse
from xrl_lite.tools.schema import OpenAIFunctionToolSchema, ToolSchema

SANDBOX = "xrl_lite.sandbox"
"""Where sandbox and limits are found, unless the settings say otherwise."""


class ProgramResult(Protocol):
    """What came of a program."""

    stdout: str
    stderr: str
    is_success: bool

    def explain(self) -> str:
        """Say how it ended, in a few words."""
        ...


class RunsPrograms(Protocol):
    """A sandbox."""

    async def run_async(
        self, command: Sequence[str], *, files: Mapping[str, str] | None = None, wall_time_s: float | None = None
    ) -> ProgramResult:
        """Run a command in an empty folder with these files."""
        ...


class PythonTool(BaseTool):
    """Runs Python programs.

    Settings (`config`):
        limits: Settings of the sandbox's `SandboxLimits`, such as ``{wall_time_s: 5, memory_bytes: ...}``.
        sandbox: Path of another sandbox, ``package.module:Class``, made without arguments.
        name: Name of the tool, "python" by default.

    Raises:
        ToolError: there is no sandbox, or it does not take the limits.
    """

    checks_arguments: ClassVar[bool] = True

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | ToolSchema | None = None,
    ) -> None:
        self.config = dict(config or {})
        super().__init__(config, tool_schema)
        self._sandbox = _make_sandbox(self.config.get("sandbox"), self.config.get("limits"))

    def get_openai_tool_schema(self) -> ToolSchema:
        code = {"type": "string", "description": "The program. What it prints is the answer."}
        return {
            "type": "function",
            "function": {
                "name": self.config.get("name", "python"),
                "description": "Run a Python program and return what it prints.",
                "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
            },
        }

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        command = [sys.executable, "-s", "-B", "main.py"]
        result = await self._sandbox.run_async(command, files={"main.py": parameters["code"]})
        parts = [result.stdout.rstrip()]
        if not result.is_success:
            parts += [result.stderr.rstrip(), result.explain()]
        text = "\n".join(part for part in parts if part) or "The program printed nothing."
        return ToolResponse(text=text), 0.0, {"succeeded": result.is_success}


def _make_sandbox(path: str | None, limits: Mapping[str, Any] | None) -> RunsPrograms:
    try:
        sandbox: Any = load_object(path or f"{SANDBOX}:Sandbox")
        if limits is None:
            return sandbox()
        return sandbox(load_object(f"{SANDBOX}:SandboxLimits")(**limits))
    except PluginError as error:
        raise ToolError(f"The python tool has no sandbox to run programs in: {error}") from error
    except (TypeError, ValueError) as error:
        raise ToolError(f"The limits {limits!r} do not fit the sandbox: {error}") from error
