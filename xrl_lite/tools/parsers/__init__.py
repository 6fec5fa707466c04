"""Formats of tool calls."""

from xrl_lite.tools.parsers.base import PARSERS, FunctionCall, ParsedResponse, ToolParser, call_of

__all__ = ["PARSERS", "FunctionCall", "ParsedResponse", "ToolParser", "call_of"]
