"""Settings of tools: which there are, in what format the model calls them, and their limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from xrl_lite.settings import Settings
from xrl_lite.tools.parsers import PARSERS
from xrl_lite.tools.response import LengthUnit, TruncateSide, Truncation


def _known_format(name: str) -> str:
    PARSERS.check(name)
    return name


class McpServerConfig(Settings):
    """A server of tools: a command that is started, or the URL of one that runs. Needs xrl-lite[mcp]."""

    name: str
    """Name of the server in messages and of its process."""

    command: str | None = None
    """Program that speaks MCP on its standard input and output."""

    args: list[str] = Field(default_factory=list[str])
    """Arguments of the program."""

    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables of the program, on top of a few of ours (PATH, HOME and such)."""

    cwd: Path | None = None
    """Folder the program runs in."""

    url: str | None = None
    """Address of a running server (streamable HTTP)."""

    tools: list[str] | None = None
    """Use only these of its tools; all when not given."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """Limit for connecting and listing the tools."""

    num_cpus: float = Field(default=0.1, gt=0)
    """CPU slots of the process that holds the connection, the program included."""

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"MCP server {self.name!r}: give exactly one of command and url.")
        return self


class ToolsConfig(Settings):
    """Tools and how they are called."""

    function_tool_path: list[Path] | Path | None = None
    """Python file or files with functions under ``@function_tool``."""

    tool_config_path: list[Path] | Path | None = None
    """YAML file or files with a list ``tools`` of entries with `class_name`, `config` and `tool_schema`."""

    builtin: list[str] = Field(default_factory=list[str])
    """Built-in tools that need no settings: calculator."""

    mcp_servers: list[McpServerConfig] = Field(default_factory=list[McpServerConfig])
    """MCP servers whose tools are used, too."""

    format: Annotated[str, AfterValidator(_known_format)] = "hermes"
    """Format of tool calls: hermes, gpt-oss, qwen3_coder, glm, seed, minimax, kimi, deepseek, gemma, or your own."""

    max_parallel_calls: int = Field(default=1, gt=0)
    """Calls of one turn that are carried out; those beyond are left out of the conversation."""

    max_tool_response_length: int | None = Field(default=256, gt=0)
    """Longest text of a tool that the model sees; None does not cut."""

    tool_response_length_unit: LengthUnit = "characters"
    """What `max_tool_response_length` counts: characters or tokens."""

    tool_response_truncate_side: TruncateSide = "middle"
    """Which part of a long text is cut out: left, right or middle."""

    call_timeout_s: float = Field(default=30.0, gt=0)
    """Limit for one call; beyond it the model is told that the tool took too long."""

    @property
    def truncation(self) -> Truncation:
        """How texts of tools are cut."""
        return Truncation(
            max_length=self.max_tool_response_length,
            side=self.tool_response_truncate_side,
            unit=self.tool_response_length_unit,
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are no tools at all."""
        return not (self.function_tool_path or self.tool_config_path or self.builtin or self.mcp_servers)
