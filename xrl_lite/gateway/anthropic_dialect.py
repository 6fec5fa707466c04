"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from xrl_lite.data.tokenizer import Message
from xrl_lite.gateway.endpoint import AnswerStream, Asked, Dialect, Tokens, event
from xrl_lite.gateway.openai_dialect import tool_schema
from xrl_lite.gateway.refusal import Refusal, RefusalKind, invalid
from xrl_lite.gateway.turn import TurnHead, TurnRequest, TurnResult
from xrl_lite.gateway.wire import COUNT_TOKENS, MESSAGES, AnthropicMessage, AnthropicTool, Part, read_body, text_of
from xrl_lite.tools import FunctionCall, ToolSchema

Block = dict[str, Any]

_TYPES: dict[RefusalKind, str] = {
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "server": "api_error",
    "unavailable": "api_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_PARAMS = {
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
}
_BILLING = "x-anthropic-billing-header"


class AnthropicDialect:
    """Anthropic's errors."""

    keep_alive = event({"type": "ping"}, "ping")

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        message = refusal.message
        if refusal.kind == "context_length":
            message = f"prompt is too long: {message}"
        return {
            "type": "error",
            "error": {"type": _TYPES.get(refusal.kind, "invalid_request_error"), "message": message},
            "request_id": None,
        }

    def error_event(self, refusal: Refusal) -> bytes:
        return event(self.error_body(refusal), "error")


ANTHROPIC = AnthropicDialect()


class Messages:
    """``POST /v1/messages``."""

    dialect: Dialect = ANTHROPIC

    def read(self, body: bytes) -> Asked:
        given = read_body(MESSAGES, body)
        params = {own: given[name] for name, own in _PARAMS.items() if given.get(name) is not None}
        return Asked(model=given["model"], turn=_turn(given, params))

    def answer(self, asked: Asked, result: TurnResult) -> dict[str, Any]:
        return {
            **_head(asked, result.head),
            "content": [*_text_blocks(result), *(_tool_use(call, call.parameters) for call in result.calls)],
            **_ending(result),
            "usage": _usage(result.head, len(result.response_ids)),
        }

    def stream(self, asked: Asked, head: TurnHead) -> AnswerStream:
        return _MessageStream(asked, head)


class _MessageStream(AnswerStream):
    """A message block by block; the last block is open while text may be added to it."""

    def __init__(self, asked: Asked, head: TurnHead) -> None:
        super().__init__(asked, head)
        self._num_blocks = 0
        self._open_block: str | None = None

    def _open(self) -> Iterator[bytes]:
        start: dict[str, Any] = {
            **_head(self._asked, self._head),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._head, 0),
        }
        yield _event("message_start", message=start)

    def _say(self, reasoning: str, text: str, tokens: Tokens) -> Iterator[bytes]:
        if reasoning:
            if self._open_block != "thinking":
                yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._add({"type": "thinking_delta", "thinking": reasoning})
        if text:
            if self._open_block != "text":
                yield from self._start({"type": "text", "text": ""})
            yield self._add({"type": "text_delta", "text": text})

    def _end(self, result: TurnResult, tokens: Tokens) -> Iterator[bytes]:
        for call in result.calls:
            yield from self._start(_tool_use(call, {}))
            yield self._add({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._stop()
        usage = {"output_tokens": len(result.response_ids)}
        yield _event("message_delta", delta=_ending(result), usage=usage)
        yield _event("message_stop")

    def _start(self, block: Block) -> Iterator[bytes]:
        yield from self._stop()
        self._num_blocks += 1
        self._open_block = block["type"]
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _add(self, delta: Block) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stop(self) -> Iterator[bytes]:
        if self._open_block is not None:
            self._open_block = None
            yield _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def read_count_tokens(body: bytes) -> Asked:
    """Read a request of ``POST /v1/messages/count_tokens``.

    Raises:
        Refusal: it cannot be answered.
    """
    given = read_body(COUNT_TOKENS, body)
    return Asked(model=given["model"], turn=_turn(given, {}))


def lower_messages(system: str | list[Part] | None, messages: list[AnthropicMessage]) -> list[Message]:
    """Return system prompt and messages as chat templates take them.

    Results of tools become messages of the role tool, before the text beside them; a system message that is not the
    first becomes part of what the user says; messages of one role that follow each other become one.

    Raises:
        Refusal: the model does not take them.
    """
    lowering = _Lowering()
    if prompt := _system_text(system):
        lowering.out.append({"role": "system", "content": prompt})
    for number, message in enumerate(messages):
        lowering.add(message["role"], message["content"], f"messages.{number}")
    if not lowering.out or lowering.out[-1]["role"] == "assistant":
        raise invalid(
            "messages: the last one is of the role assistant, and turns that the client has begun are not continued.",
            param="messages",
        )
    if lowering.out[-1]["role"] == "system":
        raise invalid("messages: there is none of the role user.", param="messages")
    return lowering.out


class _Lowering:
    """Messages so far, and the names of the tools that were called."""

    def __init__(self) -> None:
        self.out: list[Message] = []
        self._names: dict[str, str] = {}

    def add(self, role: str, content: str | list[Block], where: str) -> None:
        blocks: list[Block] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        match role:
            case "system":
                self._add_system(_texts(blocks, where))
            case "user":
                self._add_user(blocks, where)
            case _:
                self._add_assistant(blocks, where)

    def _add_system(self, text: str) -> None:
        if all(message["role"] == "system" for message in self.out):
            self._say("system", text)
        else:
            self._say("user", f"<system-reminder>\n{text}\n</system-reminder>")

    def _add_user(self, blocks: list[Block], where: str) -> None:
        results = [block for block in blocks if block.get("type") == "tool_result"]
        for block in results:
            call_id = str(block.get("tool_use_id") or "")
            message: Message = {"role": "tool", "content": _result_text(block, where), "tool_call_id": call_id}
            if call_id in self._names:
                message["name"] = self._names[call_id]
            self.out.append(message)
        rest = [block for block in blocks if block.get("type") != "tool_result"]
        if rest or not results:
            self._say("user", _texts(rest, where))

    def _add_assistant(self, blocks: list[Block], where: str) -> None:
        message: Message = {"role": "assistant", "content": ""}
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Message] = []
        for number, block in enumerate(blocks):
            match block.get("type"):
                case "text":
                    texts.append(str(block.get("text") or ""))
                case "thinking":
                    thoughts.append(str(block.get("thinking") or ""))
                case "tool_use":
                    calls.append(self._call(block, f"{where}.content.{number}"))
                case kind:
                    raise _unsupported(kind, f"{where}.content.{number}")
        message["content"] = "".join(texts)
        if reasoning := "\n".join(thoughts):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        if self.out and self.out[-1]["role"] == "assistant":
            message = _merged(self.out.pop(), message)
        self.out.append(message)

    def _call(self, block: Block, where: str) -> Message:
        name: Any = block.get("name")
        arguments: Any = block.get("input") or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise invalid(f"{where}: a tool_use needs a name and an object as input.", param=where)
        call_id = str(block.get("id") or "")
        self._names[call_id] = name
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }

    def _say(self, role: str, text: str) -> None:
        if self.out and self.out[-1]["role"] == role:
            self.out[-1] = {"role": role, "content": f"{self.out[-1]['content']}\n{text}"}
        else:
            self.out.append({"role": role, "content": text})


def _merged(one: Message, other: Message) -> Message:
    """Return two turns of the model as one."""
    merged: Message = {"role": "assistant", "content": one["content"] + other["content"]}
    for key in ("reasoning_content", "tool_calls"):
        parts = [message[key] for message in (one, other) if message.get(key)]
        if parts:
            merged[key] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return merged


def _turn(given: Mapping[str, Any], params: dict[str, Any]) -> TurnRequest:
    choice: Mapping[str, Any] = given.get("tool_choice") or {"type": "auto"}
    if choice.get("type") not in ("auto", "none"):
        raise invalid(
            f"tool_choice: only auto and none are supported, got {choice.get('type')!r}: calls cannot be forced on the "
            f"model.",
            param="tool_choice",
        )
    tools = lower_tools(given.get("tools") or []) if choice.get("type") == "auto" else None
    messages = lower_messages(given.get("system"), given["messages"])
    return TurnRequest(messages=messages, tools=tools, stream=bool(given.get("stream")), params=params)


def lower_tools(tools: list[AnthropicTool]) -> list[ToolSchema] | None:
    """Return tools as chat templates take them; None where there are none.

    Raises:
        Refusal: one of them runs at Anthropic.
    """
    for number, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise invalid(
                f"tools.{number}: tools of the type {tool.get('type')!r} run on Anthropic's side, which is not here.",
                param=f"tools.{number}",
            )
    return [tool_schema({**tool, "parameters": tool.get("input_schema")}) for tool in tools] or None


def _system_text(system: str | list[Part] | None) -> str:
    if isinstance(system, list):  # this block is another one in every request, and no words for the model
        system = [part for part in system if not part.get("text", "").startswith(_BILLING)]
    return text_of(system, "system")


def _texts(blocks: Sequence[Block], where: str) -> str:
    for number, block in enumerate(blocks):
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), f"{where}.content.{number}")
    return "\n".join(str(block.get("text") or "") for block in blocks)


def _result_text(block: Block, where: str) -> str:
    content = block.get("content")
    if isinstance(content, list):
        parts: list[Any] = [part if isinstance(part, dict) else {} for part in cast("list[Any]", content)]
        return _texts(parts, f"{where}.content.tool_result")
    return "" if content is None else str(content)


def _unsupported(kind: object, where: str) -> Refusal:
    reason = "the model takes text only" if kind in ("image", "document") else "it has no meaning to this model"
    return invalid(f"{where}: blocks of the type {kind!r} are not supported: {reason}.", param=where)


def _head(asked: Asked, head: TurnHead) -> dict[str, Any]:
    return {"id": f"msg_{head.turn_id}", "type": "message", "role": "assistant", "model": asked.model}


def _usage(head: TurnHead, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": head.num_prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _ending(result: TurnResult) -> dict[str, Any]:
    if result.stop_text is not None and result.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_text}
    return {"stop_reason": _STOP_REASONS[result.finish_reason], "stop_sequence": None}


def _text_blocks(result: TurnResult) -> Iterator[Block]:
    if result.reasoning is not None:
        yield {"type": "thinking", "thinking": result.reasoning, "signature": ""}
    if result.text:
        yield {"type": "text", "text": result.text}


def _tool_use(call: FunctionCall, arguments: dict[str, Any]) -> Block:
    return {"type": "tool_use", "id": call.tool_call_id, "name": call.name, "input": arguments}
