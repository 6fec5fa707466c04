"""The seam of tool-call formats: sampled text in, calls out. Nothing a model writes raises.

To add a format, subclass `ToolParser` and register it::

    @ToolParser.register("mine")
    class MyParser(ToolParser):
        def parse(self, text, tools): ...
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, cast

from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.registry import Registry
from xrl_lite.tools.schema import ToolSchema

P = TypeVar("P", bound="type[ToolParser]")


@dataclass(frozen=True)
class FunctionCall:
    """One call that the model wrote."""

    name: str
    """The tool; empty where none could be read."""
    arguments: str = "{}"
    """Arguments as a JSON object; the raw text where `error` is set."""
    tool_call_id: str | None = None
    """Id, in formats that have one."""
    error: str | None = None
    """Why it cannot be carried out, in words for the model; None for a well-formed call."""
    is_checked: bool = field(default=False, compare=False, repr=False)
    """Whether it is known that `arguments` is a JSON object, or `error` is set."""

    def checked(self) -> FunctionCall:
        """Return the call, malformed if its arguments are no JSON object: parsers of others may not have looked."""
        if self.is_checked or self.error is not None:
            return self
        return call_of(self.name, self.arguments, call_id=self.tool_call_id)

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments as a dict; empty for a malformed call."""
        return {} if self.error is not None else cast("dict[str, Any]", json.loads(self.arguments))


@dataclass(frozen=True)
class ParsedResponse:
    """A response taken apart."""

    content: str
    """The text around the calls."""
    calls: tuple[FunctionCall, ...] = ()
    """The calls in order, malformed ones included."""


class Marks:
    """Where marks stand in a text. Each is looked for once, however often it is asked about: that keeps parsers linear.

    Args:
        text: The text.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._places: dict[str, list[int]] = {}

    def first(self, mark: str, start: int) -> int:
        """Return the first place from `start` on, -1 where there is none."""
        places = self._places_of(mark)
        index = bisect_left(places, start)
        return places[index] if index < len(places) else -1

    def last(self, mark: str, start: int, end: int) -> int:
        """Return the last place at which it stands whole between `start` and `end`, -1 where there is none."""
        places = self._places_of(mark)
        index = bisect_right(places, end - len(mark)) - 1
        return places[index] if index >= 0 and places[index] >= start else -1

    def _places_of(self, mark: str) -> list[int]:
        if mark not in self._places:
            self._places[mark] = [match.start() for match in re.finditer(re.escape(mark), self._text)]
        return self._places[mark]


class DecodesTokens(Protocol):
    """What a parser needs of a tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        ...


class ToolParser(ABC):
    """One format of tool calls.

    Args:
        tokenizer: Decodes responses; needed for `extract_tool_calls` alone.
    """

    stop_texts: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a response in this format, next to the tokenizer's end of sequence."""
    keeps_special_tokens: ClassVar[bool] = False
    """Whether the format is written with special tokens, so that a response must be decoded with them."""
    call_marks: ClassVar[tuple[str, ...] | None] = None
    """What calls begin with. The text before the first is the content as it stands, white space and reasoning at its
    ends aside, and may be streamed; None where only the whole response tells what is content."""

    def __init__(self, tokenizer: DecodesTokens | None = None) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedResponse:
        """Take a response apart. What cannot be read as a call becomes a call with an error; nothing is raised.

        Args:
            text: The response.
            tools: Schemas of the tools there are; tell the types of values that have no quotes.
        """

    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return calls as a model writes them, for scripted engines and tests."""
        raise NotImplementedError(f"{type(self).__name__} does not write calls.")

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[ToolSchema]
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text around the calls, and the calls, of a response given as tokens."""
        assert self.tokenizer is not None, "a parser that decodes needs a tokenizer"
        text = self.tokenizer.decode(responses_ids, not self.keeps_special_tokens)
        for stop in self.stop_texts:
            text = text.removesuffix(stop)
        parsed = self.parse(text, tools)
        return parsed.content, list(parsed.calls)

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Return a decorator that registers a format under a name.

        Raises:
            PluginError: another format has the name.
        """
        return cast("Callable[[P], P]", PARSERS.register(name))

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: DecodesTokens | None = None) -> ToolParser:
        """Return the parser of a format.

        Raises:
            UnknownNameError: there is none of this name; lists what there is.
        """
        return PARSERS.resolve(name)(tokenizer)


PARSERS: Registry[type[ToolParser]] = Registry(
    "tool parser",
    {
        "hermes": "xrl_lite.tools.parsers.json_formats:HermesParser",
        "gpt-oss": "xrl_lite.tools.parsers.json_formats:HarmonyParser",
        "kimi": "xrl_lite.tools.parsers.json_formats:KimiParser",
        "qwen3_coder": "xrl_lite.tools.parsers.tag_formats:Qwen3CoderParser",
        "seed": "xrl_lite.tools.parsers.tag_formats:SeedParser",
        "minimax": "xrl_lite.tools.parsers.tag_formats:MinimaxParser",
        "glm": "xrl_lite.tools.parsers.tag_formats:GlmParser",
        "deepseek": "xrl_lite.tools.parsers.tag_formats:DeepseekParser",
        "deepseek_v4": "xrl_lite.tools.parsers.tag_formats:DeepseekParser",
        "gemma": "xrl_lite.tools.parsers.gemma:GemmaParser",
        "gemma4": "xrl_lite.tools.parsers.gemma:GemmaParser",
    },
)
"""Formats of tool calls by name."""


def call_of(name: object, arguments: object, *, call_id: str | None = None) -> FunctionCall:
    """Make a call of what was read; arguments that are JSON in a text are decoded once.

    A name that is none, or arguments that are no object, give a malformed call.
    """
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not name.strip():
        return FunctionCall("", raw, call_id, error="the call has no name")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except JsonTextError as error:
            return FunctionCall(name.strip(), raw, call_id, error=f"the arguments are not valid JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return FunctionCall(name.strip(), raw, call_id, error=f"the arguments must be a JSON object, got {raw[:100]}")
    return FunctionCall(name.strip(), json.dumps(arguments, ensure_ascii=False), call_id, is_checked=True)


def properties_of(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Mapping[str, Any]]:
    """Return the schemas of a tool's arguments; none for a tool that does not exist."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool["function"].get("parameters", {}).get("properties", {})
    return {}
