"""Formats whose arguments are tags: qwen3_coder, seed, minimax, glm, deepseek.

Values have no quotes, so a tool's schema says what they are; without one they are JSON where they can be, else text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.tools.arguments import read_text
from xrl_lite.tools.parsers.base import FunctionCall, Marks, ParsedResponse, ToolParser, properties_of
from xrl_lite.tools.schema import ToolSchema


class _TagParser(ToolParser):
    """What the formats have in common: blocks, in them functions, in these parameters; end tags may be missing."""

    _block_tags: ClassVar[tuple[str, str]]
    """Tags around one call or several."""
    _function: ClassVar[re.Pattern[str]]
    """Start of a function, with group ``name``; what is before it in the block is ignored."""
    _function_end: ClassVar[str]
    _parameter: ClassVar[re.Pattern[str]]
    """Start of a parameter, with group ``name``, and ``string`` where the format says what the value is."""
    _parameter_end: ClassVar[str]
    _parameter_mark: ClassVar[str]
    """How every parameter begins, well-formed or not."""
    _function_mark: ClassVar[str]
    """How every function begins, well-formed or not."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        opening, closing = self._block_tags
        marks = Marks(text)
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        while (start := text.find(opening, place)) >= 0:
            content.append(text[place:start])
            end = self._block_end(text, marks, start + len(opening))
            calls += self._calls(text[start + len(opening) : end], tools)
            place = end + len(closing) if text.startswith(closing, end) else end
        content.append(text[place:])
        return ParsedResponse("".join(content).strip() if calls else text, tuple(calls))

    def render(self, calls: Sequence[FunctionCall]) -> str:
        opening, closing = self._block_tags
        return "\n".join(f"{opening}\n{self._write(call.name, call.parameters)}\n{closing}" for call in calls)

    def _write(self, name: str, parameters: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _block_end(self, text: str, marks: Marks, start: int) -> int:
        """Return where a block ends: its end tag behind the function, the next block, or the end of the text."""
        opening, closing = self._block_tags
        function_end = marks.first(self._function_end, start)
        closed = marks.first(closing, max(function_end, start))
        following = marks.first(opening, max(function_end, start))
        ends = [place for place in (closed, following) if place >= 0]
        return min(ends, default=len(text))

    def _calls(self, block: str, tools: Sequence[ToolSchema]) -> Iterator[FunctionCall]:
        starts = [match.start() for match in re.finditer(re.escape(self._function_mark), block)]
        if not starts:
            yield FunctionCall("", block.strip(), error=f"the call has no {self._function_mark}...>")
        for start, following in pairwise([*starts, len(block)]):
            yield self._call(block[start:following], tools)

    def _call(self, text: str, tools: Sequence[ToolSchema]) -> FunctionCall:
        header = self._function.match(text)
        if header is None or not header.group("name").strip():
            return FunctionCall("", text.strip(), error="the name of the function is not complete")
        name = header.group("name").strip()
        body = text[header.end() :]
        end = body.rfind(self._function_end)
        body = body[:end] if end >= 0 else body
        properties = properties_of(name, tools)
        arguments: dict[str, Any] = {}
        starts = [match.start() for match in re.finditer(re.escape(self._parameter_mark), body)]
        for start, following in pairwise([*starts, len(body)]):
            parameter = self._parameter.match(body, start)
            if parameter is None:
                return FunctionCall(name, text.strip(), error="the name of a parameter is not complete")
            raw = body[parameter.end() : following]
            value_end = raw.rfind(self._parameter_end)
            raw = _without_line_breaks(raw[:value_end] if value_end >= 0 else raw)
            key = parameter.group("name").strip()
            arguments[key] = self._value(raw, properties.get(key, {}), parameter)
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    def _value(self, raw: str, schema: Mapping[str, Any], parameter: re.Match[str]) -> Any:
        return read_text(raw, schema)


class Qwen3CoderParser(_TagParser):
    """``<tool_call><function=add><parameter=x>1</parameter></function></tool_call>``."""

    call_marks = ("<tool_call>",)
    _block_tags = ("<tool_call>", "</tool_call>")
    _function_mark = "<function="
    _function = re.compile(r"<function=(?P<name>[^<>\n]*)>")
    _function_end = "</function>"
    _parameter_mark = "<parameter="
    _parameter = re.compile(r"<parameter=(?P<name>[^<>\n]*)>")
    _parameter_end = "</parameter>"

    def _write(self, name: str, parameters: Mapping[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in parameters.items())
        return f"<function={name}>\n{values}</function>"


class SeedParser(Qwen3CoderParser):
    """``<seed:tool_call><function=add><parameter=x>1</parameter></function></seed:tool_call>``."""

    call_marks = ("<seed:tool_call>",)
    _block_tags = ("<seed:tool_call>", "</seed:tool_call>")


class MinimaxParser(_TagParser):
    """``<minimax:tool_call><invoke name="add"><parameter name="x">1</parameter></invoke></minimax:tool_call>``."""

    call_marks = ("<minimax:tool_call>",)
    _block_tags = ("<minimax:tool_call>", "</minimax:tool_call>")
    _function_mark = "<invoke"
    _function = re.compile(r"""<invoke\s+name=["']?(?P<name>[^"'<>\n]*+)["']?\s*>""")
    _function_end = "</invoke>"
    _parameter_mark = "<parameter"
    _parameter = re.compile(r"""<parameter\s+name=["']?(?P<name>[^"'<>\n]*+)["']?\s*>""")
    _parameter_end = "</parameter>"

    def render(self, calls: Sequence[FunctionCall]) -> str:
        opening, closing = self._block_tags
        return f"{opening}\n{chr(10).join(self._write(call.name, call.parameters) for call in calls)}\n{closing}"

    def _block_end(self, text: str, marks: Marks, start: int) -> int:
        closed = marks.first(self._block_tags[1], start)
        return closed if closed >= 0 else len(text)

    def _write(self, name: str, parameters: Mapping[str, Any]) -> str:
        values = "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in parameters.items())
        return f'<invoke name="{name}">\n{values}</invoke>'


class DeepseekParser(MinimaxParser):
    """Tags with a mark of their own, several functions in a block, and values that say whether they are text.

    ::

        <｜DSML｜tool_calls><｜DSML｜invoke name="add"><｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>
        </｜DSML｜invoke></｜DSML｜tool_calls>

    The content is what stands behind the reasoning.
    """

    stop_texts = ("<｜end▁of▁sentence｜>",)
    keeps_special_tokens = True
    call_marks = ("<｜DSML｜tool_calls>",)
    _block_tags = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    _function_mark = "<｜DSML｜invoke"
    _function = re.compile(r"""<｜DSML｜invoke\s+name=["'](?P<name>[^"'<>\n]*)["']\s*>""")
    _function_end = "</｜DSML｜invoke>"
    _parameter_mark = "<｜DSML｜parameter"
    _parameter = re.compile(
        r"""<｜DSML｜parameter\s+name=["'](?P<name>[^"'<>\n]*)["'](?:\s+string=["'](?P<string>true|false)["'])?\s*>"""
    )
    _parameter_end = "</｜DSML｜parameter>"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        parsed = super().parse(text, tools)
        if not parsed.calls:
            return parsed
        return ParsedResponse(parsed.content.rpartition("</think>")[2].strip(), parsed.calls)

    def _write(self, name: str, parameters: Mapping[str, Any]) -> str:
        values = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_text(value)}'
            f"</｜DSML｜parameter>\n"
            for key, value in parameters.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>'

    def _value(self, raw: str, schema: Mapping[str, Any], parameter: re.Match[str]) -> Any:
        if parameter.group("string") == "true":
            return raw
        if parameter.group("string") == "false":
            try:
                return read_json(raw)
            except JsonTextError:
                return raw
        return read_text(raw, schema)


class GlmParser(_TagParser):
    """``<tool_call>add<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``; one call in a block."""

    stop_texts = ("<|observation|>", "<|user|>")
    call_marks = ("<tool_call>",)
    _block_tags = ("<tool_call>", "</tool_call>")
    _pair = re.compile(
        r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>(?=\s*(?:<arg_key>|\Z))|\Z)",
        re.DOTALL,
    )
    _think = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        parsed = super().parse(text, tools)
        return ParsedResponse(self._think.sub("", parsed.content), parsed.calls) if parsed.calls else parsed

    def _block_end(self, text: str, marks: Marks, start: int) -> int:
        opening, closing = self._block_tags
        following = marks.first(f"{closing}\n{opening}", start)
        next_block = following if following >= 0 else len(text)
        closed = marks.first(closing, max(marks.last("</arg_value>", start, next_block), start))
        return closed if closed >= 0 else next_block

    def _calls(self, block: str, tools: Sequence[ToolSchema]) -> Iterator[FunctionCall]:
        head, mark, rest = block.partition("<arg_key>")
        name = head.strip()
        if not name or re.search(r"[\s{}<>]", name):
            yield FunctionCall("", block.strip(), error="the call does not begin with the name of a function")
            return
        properties = properties_of(name, tools)
        arguments: dict[str, Any] = {}
        place, pairs = 0, (mark + rest).rstrip()
        while (match := self._pair.match(pairs, place)) is not None:
            key = match.group("name").strip()
            arguments[key] = read_text(match.group("value"), properties.get(key, {}))
            place = match.end()
        if pairs[place:].strip():
            yield FunctionCall(name, block.strip(), error="keys and values of the arguments do not pair up")
        else:
            yield FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    def _write(self, name: str, parameters: Mapping[str, Any]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>" for key, value in parameters.items()
        )
        return "\n".join([name, *pairs])

    def render(self, calls: Sequence[FunctionCall]) -> str:
        opening, closing = self._block_tags
        return "\n".join(f"{opening}{self._write(call.name, call.parameters)}\n{closing}" for call in calls)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _without_line_breaks(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
