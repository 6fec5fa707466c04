"""The format of Gemma 4: ``<|tool_call>call:add{x:1,y:<|"|>two<|"|>}<tool_call|>``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from xrl_lite.data.json_text import MAX_DEPTH, JsonTextError, read_json
from xrl_lite.tools.parsers.base import FunctionCall, ParsedResponse, ToolParser
from xrl_lite.tools.schema import ToolSchema

_QUOTE = '<|"|>'


class GemmaParser(ToolParser):
    """Keys without quotes, texts between quote tokens, and objects and lists of these."""

    stop_texts = ("<tool_call|>", "<|tool_response>", "<turn|>")
    keeps_special_tokens = True
    call_marks = ("<|tool_call>",)
    _opening, _closing = "<|tool_call>", "<tool_call|>"
    _behind = re.compile(r"\s*<tool_call\|>")
    _header = re.compile(r"\s*call:(?P<name>[\w.\-]+)\s*(?=\{)")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        content: list[str] = []
        calls: list[FunctionCall] = []
        place = 0
        while (start := text.find(self._opening, place)) >= 0:
            content.append(text[place:start])
            call, place = self._read(text, start + len(self._opening))
            calls.append(call)
        content.append(text[place:])
        return ParsedResponse("".join(content).strip() if calls else text, tuple(calls))

    def render(self, calls: Sequence[FunctionCall]) -> str:
        return "".join(f"{self._opening}call:{call.name}{_write(call.parameters)}{self._closing}" for call in calls)

    def _read(self, text: str, start: int) -> tuple[FunctionCall, int]:
        header = self._header.match(text, start)
        if header is None:
            return self._malformed(text, start, "", "the call does not begin with call:name{")
        reader = _Reader(text, header.end())
        try:
            arguments = reader.object()
        except _NotReadableError as error:
            return self._malformed(text, start, header.group("name"), f"the arguments cannot be read: {error}")
        end = reader.place
        if (closed := self._behind.match(text, end)) is not None:
            end = closed.end()
        return FunctionCall(header.group("name"), json.dumps(arguments, ensure_ascii=False)), end

    def _malformed(self, text: str, start: int, name: str, reason: str) -> tuple[FunctionCall, int]:
        end = text.find(self._closing, start)
        after = len(text) if end < 0 else end + len(self._closing)
        return FunctionCall(name, text[start : end if end >= 0 else len(text)].strip(), error=reason), after


class _NotReadableError(ValueError):
    """The text is not in the format."""


class _Reader:
    """Reads values from a place in a text."""

    def __init__(self, text: str, place: int, depth: int = 0) -> None:
        self._text = text
        self.place = place
        self._depth = depth

    def object(self) -> dict[str, Any]:
        self._enter("{")
        found: dict[str, Any] = {}
        while not self._skip("}"):
            key = self._quoted() if self._at(_QUOTE) else self._until(":").strip()
            if not key or not self._skip(":"):
                raise _NotReadableError(f"a key is missing at {self._rest()}")
            found[key] = self._value()
            self._comma("}")
        self._depth -= 1
        return found

    def _value(self) -> Any:
        if self._at(_QUOTE):
            return self._quoted()
        if self._at("{"):
            return self.object()
        if self._at("["):
            return self._list()
        return _bare(self._until(",}]").strip())

    def _list(self) -> list[Any]:
        self._enter("[")
        found: list[Any] = []
        while not self._skip("]"):
            found.append(self._value())
            self._comma("]")
        self._depth -= 1
        return found

    def _enter(self, bracket: str) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotReadableError(f"more than {MAX_DEPTH} brackets inside each other")
        if not self._skip(bracket):
            raise _NotReadableError(f"expected {bracket} at {self._rest()}")

    def _quoted(self) -> str:
        start = self.place + len(_QUOTE)
        end = self._text.find(_QUOTE, start)
        if end < 0:
            raise _NotReadableError("a text has no closing quote")
        self.place = end + len(_QUOTE)
        return self._text[start:end]

    def _until(self, stops: str) -> str:
        """Read what has no quotes, as far as the call goes at most."""
        end = re.compile(rf"[{re.escape(stops)}]|<\|?tool_call\|?>|\Z").search(self._text, self.place)
        assert end is not None, "the pattern matches at the end of the text"
        start, self.place = self.place, end.start()
        return self._text[start : self.place]

    def _comma(self, closing: str) -> None:
        if not self._skip(",") and not self._at(closing):
            raise _NotReadableError(f"expected , or {closing} at {self._rest()}")

    def _at(self, mark: str) -> bool:
        while self.place < len(self._text) and self._text[self.place].isspace():
            self.place += 1
        return self._text.startswith(mark, self.place)

    def _skip(self, mark: str) -> bool:
        if not self._at(mark):
            return False
        self.place += len(mark)
        return True

    def _rest(self) -> str:
        return repr(self._text[self.place : self.place + 20])


def _bare(text: str) -> Any:
    """Return a value without quotes: true, false, null, a number, else text."""
    named = {"true": True, "false": False, "null": None}
    if text in named:
        return named[text]
    try:
        value = read_json(text)
    except JsonTextError:
        return text
    return value if isinstance(value, int | float) else text


def _write(value: object) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ",".join(f"{key}:{_write(item)}" for key, item in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_write, cast("list[Any]", value))) + "]"
    return json.dumps(value)
