"""Tools that a model may call, and the formats it calls them in. Needs no torch.

Start with `function_tool` or `BaseTool`; `load_tools` reads files of tools, `Toolbox` runs calls, `ToolParser` finds
them in what a model sampled.
"""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.tools.base import BaseTool
    from xrl_lite.tools.config import McpServerConfig, ToolsConfig
    from xrl_lite.tools.functions import FunctionTool, function_tool
    from xrl_lite.tools.load import BUILTIN_TOOLS, ToolSource, load_function_tools, load_tools, read_tools
    from xrl_lite.tools.parsers import PARSERS, FunctionCall, ParsedResponse, ToolParser
    from xrl_lite.tools.response import ToolResponse, Truncation, truncate
    from xrl_lite.tools.schema import (
        OpenAIFunctionParametersSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolSchema,
        ToolSchema,
        schema_of_function,
    )
    from xrl_lite.tools.toolbox import Toolbox, ToolCounts, ToolResult, ToolSession, call_message, message_of

__all__ = [
    "BUILTIN_TOOLS",
    "PARSERS",
    "BaseTool",
    "FunctionCall",
    "FunctionTool",
    "McpServerConfig",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ParsedResponse",
    "ToolCounts",
    "ToolParser",
    "ToolResponse",
    "ToolResult",
    "ToolSchema",
    "ToolSession",
    "ToolSource",
    "Toolbox",
    "ToolsConfig",
    "Truncation",
    "call_message",
    "function_tool",
    "load_function_tools",
    "load_tools",
    "message_of",
    "read_tools",
    "schema_of_function",
    "truncate",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
