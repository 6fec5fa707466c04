"""Formats whose arguments are JSON: hermes (also Qwen 2.5 and 3), gpt-oss (harmony), kimi."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from xrl_lite.data.json_text import JsonTextError, read_json, read_json_at
from xrl_lite.tools.parsers.base import FunctionCall, Marks, ParsedResponse, ToolParser, call_of
from xrl_lite.tools.schema import ToolSchema

_SPACE = re.compile(r"\s*")


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times.

    The JSON decides where a call ends, so that a text with ``</tool_call>`` in it may be an argument, and a missing end
    tag does no harm.
    """

    call_marks = ("<tool_call>",)
    _opening: ClassVar[str] = "<tool_call>"
    _closing: ClassVar[str] = "</tool_call>"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        marks = Marks(text)
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        while (start := text.find(self._opening, place)) >= 0:
            content.append(text[place:start])
            found, place = self._read_block(text, marks, start + len(self._opening))
            calls += found
        content.append(text[place:])
        return ParsedResponse("".join(content).strip() if calls else text, tuple(calls))

    def render(self, calls: Sequence[FunctionCall]) -> str:
        blocks = (
            f'{self._opening}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{self._closing}'
            for call in calls
        )
        return "\n".join(blocks)

    def _read_block(self, text: str, marks: Marks, start: int) -> tuple[list[FunctionCall], int]:
        """Return the calls of one block, and where the text goes on."""
        try:
            value, end = read_json_at(text, _behind_space(text, start))
        except JsonTextError as error:
            return self._malformed(text, marks, start, f"the call is not valid JSON: {error}")
        behind = _behind_space(text, end)
        if text.startswith(self._closing, behind):
            end = behind + len(self._closing)
        elif behind not in (len(text), marks.first(self._opening, behind)) and marks.first(self._closing, behind) > 0:
            return self._malformed(text, marks, start, "there is text behind the JSON of the call")
        given = cast("list[Any]", value if isinstance(value, list) else [value])
        return [_call_of_object(each) for each in given], end

    def _malformed(self, text: str, marks: Marks, start: int, reason: str) -> tuple[list[FunctionCall], int]:
        ends = [place for mark in (self._closing, self._opening) if (place := marks.first(mark, start)) >= 0]
        end = min(ends, default=len(text))
        raw = text[start:end].strip()
        name = re.search(r'"name"\s*:\s*"([^"]+)"', raw)
        after = end + len(self._closing) if text.startswith(self._closing, end) else end
        return [FunctionCall(name.group(1) if name else "", raw, error=reason)], after


class HarmonyParser(ToolParser):
    """Messages on channels, where a call is a message to ``functions.<name>``.

    ::

        <|channel|>analysis<|message|>...<|end|>
        <|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>

    The recipient may also stand behind the channel. The analysis is left out of the content.
    """

    stop_texts = ("<|call|>", "<|return|>")
    keeps_special_tokens = True
    _opening = "<|message|>"
    _end = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
    _recipient = re.compile(r"\bto=(?P<recipient>[^\s<]+)")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        content: list[str] = []
        calls: list[FunctionCall] = []
        text = text.replace("<|endoftext|>", "")
        if self._opening not in text:
            return ParsedResponse(text)
        for header, body in self._messages(text):
            recipient = self._recipient.search(header)
            if recipient is not None:
                name = recipient.group("recipient").removeprefix("functions.")
                calls.append(call_of(name, body))
            elif "analysis" not in header:
                content.append(body)
        return ParsedResponse("".join(content), tuple(calls))

    def _messages(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield header and body of each message; what is behind the last is dropped."""
        place = 0
        while (opened := text.find(self._opening, place)) >= 0:
            begin = opened + len(self._opening)
            end = self._end.search(text, begin)
            assert end is not None, "the pattern matches at the end of the text"
            yield text[place:opened], text[begin : end.start()]
            place = end.end()

    def render(self, calls: Sequence[FunctionCall]) -> str:
        written = (
            f"to=functions.{call.name}<|channel|>commentary <|constrain|>json<|message|>{call.arguments}"
            for call in calls
        )
        return " " + "<|call|><|start|>assistant ".join(written) + "<|call|>"


class KimiParser(ToolParser):
    """A section of calls with ids, which are kept.

    ::

        <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"x": 1}
        <|tool_call_end|><|tool_calls_section_end|>

    The name is that in ``functions.<name>:<number>``; an id of another form stands for the tool of that name, else for
    the only tool whose name is in it, else for the only one whose required arguments are all there.
    """

    stop_texts = ("<|im_end|>",)
    keeps_special_tokens = True
    call_marks = ("<|tool_calls_section_begin|>",)
    _section = re.compile(r"<\|tool_calls_section_begin\|>(.*?)(?:<\|tool_calls_section_end\|>|\Z)", re.DOTALL)
    _call = re.compile(
        r"<\|tool_call_begin\|>(?P<id>.*?)(?:<\|tool_call_argument_begin\|>(?P<arguments>.*?))?"
        r"(?:<\|tool_call_end\|>|(?=<\|tool_call_begin\|>)|\Z)",
        re.DOTALL,
    )

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        sections = self._section.findall(text)
        calls = tuple(call for section in sections for call in self._calls(section, tools))
        if not calls:
            return ParsedResponse(text)
        return ParsedResponse(self._section.sub("", text).strip(), calls)

    def render(self, calls: Sequence[FunctionCall]) -> str:
        written = (
            f"<|tool_call_begin|>{call.tool_call_id or f'functions.{call.name}:{number}'}"
            f"<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
            for number, call in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"

    def _calls(self, section: str, tools: Sequence[ToolSchema]) -> Iterator[FunctionCall]:
        for match in self._call.finditer(section):
            call_id, arguments = match.group("id").strip(), match.group("arguments")
            if arguments is None:
                yield FunctionCall("", match.group(0), call_id, error="the call has no arguments")
                continue
            name = _name_in_id(call_id, arguments, tools)
            yield call_of(name, arguments, call_id=call_id)


def _behind_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None, "the pattern matches everywhere"
    return match.end()


def _call_of_object(value: object) -> FunctionCall:
    if not isinstance(value, Mapping):
        raw = json.dumps(value, ensure_ascii=False)
        return FunctionCall("", raw, error=f"a call must be a JSON object with name and arguments, got {raw[:100]}")
    call = cast("Mapping[str, Any]", value)
    inner = call.get("function")
    if "name" not in call and isinstance(inner, Mapping):  # the form of OpenAI's API
        call = cast("Mapping[str, Any]", inner)
    call_id = call.get("id")
    arguments = call.get("arguments", call.get("parameters", {}))
    return call_of(call.get("name"), arguments, call_id=call_id if isinstance(call_id, str) else None)


def _name_in_id(call_id: str, arguments: str, tools: Sequence[ToolSchema]) -> str:
    names = [tool["function"]["name"] for tool in tools]
    stem = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
    if call_id in names or stem in names:
        return call_id if call_id in names else stem
    inside = [name for name in names if name in call_id]
    if len(inside) == 1:
        return inside[0]
    try:
        given: object = read_json(arguments)
    except JsonTextError:
        return stem
    if not isinstance(given, dict):
        return stem
    fitting = [
        tool["function"]["name"]
        for tool in tools
        if (required := tool["function"]["parameters"].get("required")) and set(required) <= set(cast("Any", given))
    ]
    return fitting[0] if len(fitting) == 1 else stem
