"""OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar, cast

from xrl_lite.data.tokenizer import Message
from xrl_lite.gateway.endpoint import AnswerStream, Asked, Dialect, Tokens, event
from xrl_lite.gateway.refusal import Refusal, RefusalKind, invalid
from xrl_lite.gateway.turn import TurnHead, TurnRequest, TurnResult
from xrl_lite.gateway.wire import CHAT_COMPLETION, COMPLETION, ChatMessage, ChatTool, read_body, refuse_given, text_of
from xrl_lite.tools import FunctionCall, ToolSchema

_TYPES: dict[RefusalKind, str] = {"server": "server_error", "unavailable": "server_error", "conflict": "conflict_error"}
_CODES: dict[RefusalKind, str] = {
    "authentication": "invalid_api_key",
    "context_length": "context_length_exceeded",
    "too_large": "request_too_large",
    "conflict": "session_closed",
}
_PARAMS = ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty")
_CHUNK, _TEXT = "chat.completion.chunk", "text_completion"
_NO_LOGIT_BIAS = {"logit_bias": "it changes the distribution that is trained on."}


class OpenAIDialect:
    """OpenAI's errors."""

    keep_alive = b": keep-alive\n\n"

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        return {
            "error": {
                "message": refusal.message,
                "type": _TYPES.get(refusal.kind, "invalid_request_error"),
                "param": refusal.param,
                "code": refusal.code or _CODES.get(refusal.kind),
            }
        }

    def error_event(self, refusal: Refusal) -> bytes:
        return event(self.error_body(refusal))


OPENAI = OpenAIDialect()


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    dialect: Dialect = OPENAI
    refused: ClassVar[dict[str, str]] = {
        **_NO_LOGIT_BIAS,
        "functions": "use tools.",
        "audio": "the model answers with text.",
        "web_search_options": "there is no search here; give the model a tool.",
        "top_logprobs": "only the log-probability of the sampled token is known.",
    }

    def read(self, body: bytes) -> Asked:
        given = read_body(CHAT_COMPLETION, body)
        refuse_given(given, self.refused)
        _check_one(given, "n")
        form = given.get("response_format")
        if form and not (isinstance(form, Mapping) and cast("Mapping[str, Any]", form).get("type") == "text"):
            raise invalid(
                "response_format: only text is supported: sampling is not constrained.", param="response_format"
            )
        choice = given.get("tool_choice") or "auto"
        if choice not in ("auto", "none"):
            raise invalid(
                f"tool_choice: only auto and none are supported, got {choice!r}: calls cannot be forced on the model.",
                param="tool_choice",
            )
        params = _params(given)
        if given.get("max_completion_tokens") is not None:
            params["max_tokens"] = given["max_completion_tokens"]
        turn = TurnRequest(
            messages=lower_messages(given["messages"]),
            tools=lower_tools(given.get("tools") or []) if choice == "auto" else None,
            stream=bool(given.get("stream")),
            params=params,
            with_logprobs=bool(given.get("logprobs")),
            with_token_ids=bool(given.get("return_token_ids")),
        )
        return _asked(given, turn)

    def answer(self, asked: Asked, result: TurnResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        if result.calls:
            message["content"] = result.text or None
            message["tool_calls"] = [_call(call) for call in result.calls]
        if result.reasoning is not None:
            message["reasoning_content"] = result.reasoning
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None if result.tokens is None else _chat_logprobs(result.tokens),
            "finish_reason": result.finish_reason,
        }
        return _with_token_ids(
            {**_head(asked, result.head, "chat.completion"), "choices": [choice], "usage": _usage(result)}, result
        )

    def stream(self, asked: Asked, head: TurnHead) -> AnswerStream:
        return _ChatStream(asked, head)


class _ChatStream(AnswerStream):
    def _open(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def _say(self, reasoning: str, text: str, tokens: Tokens) -> Iterator[bytes]:
        told: dict[str, Any] = {"logprobs": _chat_logprobs(tokens)} if tokens else {}
        if reasoning:
            yield self._chunk({"reasoning_content": reasoning}, **({} if text else told))
        if text:
            yield self._chunk({"content": text}, **told)

    def _end(self, result: TurnResult, tokens: Tokens) -> Iterator[bytes]:
        for number, call in enumerate(result.calls):
            yield self._chunk({"tool_calls": [{"index": number, **_call(call)}]})
        if tokens:
            yield self._chunk({"content": ""}, logprobs=_chat_logprobs(tokens))
        yield self._chunk({}, result.finish_reason, **_token_ids(result))
        if self._asked.include_usage:
            yield event({**_head(self._asked, self._head, _CHUNK), "choices": [], "usage": _usage(result)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
        return event({**_head(self._asked, self._head, _CHUNK), "choices": [choice]})


class Completions:
    """``POST /v1/completions``: a prompt without a chat template."""

    dialect: Dialect = OPENAI
    refused: ClassVar[dict[str, str]] = {
        **_NO_LOGIT_BIAS,
        "echo": "the prompt is not repeated.",
        "suffix": "there is nothing behind the answer.",
    }

    def read(self, body: bytes) -> Asked:
        given = read_body(COMPLETION, body)
        refuse_given(given, self.refused)
        _check_one(given, "n")
        _check_one(given, "best_of")
        if (given.get("logprobs") or 0) > 1:
            raise invalid("logprobs: only 0 and 1 are supported: of the sampled token alone.", param="logprobs")
        turn = TurnRequest(
            prompt=_one_prompt(given["prompt"]),
            stream=bool(given.get("stream")),
            params=_params(given),
            with_logprobs=given.get("logprobs") is not None,
            with_token_ids=bool(given.get("return_token_ids")),
        )
        return _asked(given, turn)

    def answer(self, asked: Asked, result: TurnResult) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": result.text,
            "logprobs": None if result.tokens is None else _completion_logprobs(result.tokens),
            "finish_reason": result.finish_reason,
        }
        return _with_token_ids(
            {**_head(asked, result.head, _TEXT), "choices": [choice], "usage": _usage(result)}, result
        )

    def stream(self, asked: Asked, head: TurnHead) -> AnswerStream:
        return _CompletionStream(asked, head)


class _CompletionStream(AnswerStream):
    def __init__(self, asked: Asked, head: TurnHead) -> None:
        super().__init__(asked, head)
        self._num_chars = 0

    def _open(self) -> Iterator[bytes]:
        yield from ()

    def _say(self, reasoning: str, text: str, tokens: Tokens) -> Iterator[bytes]:
        yield self._chunk(text, logprobs=self._logprobs(tokens))

    def _end(self, result: TurnResult, tokens: Tokens) -> Iterator[bytes]:
        yield self._chunk(
            "",
            logprobs=self._logprobs(tokens),
            finish_reason=result.finish_reason,
            **_token_ids(result),
        )
        if self._asked.include_usage:
            yield event({**_head(self._asked, self._head, _TEXT), "choices": [], "usage": _usage(result)})
        yield b"data: [DONE]\n\n"

    def _logprobs(self, tokens: Tokens) -> dict[str, Any] | None:
        if not tokens:
            return None
        start = self._num_chars
        self._num_chars += sum(len(token.text) for token in tokens)
        return _completion_logprobs(tokens, start)

    def _chunk(self, text: str, **more: Any) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **more}
        return event({**_head(self._asked, self._head, _TEXT), "choices": [choice]})


def _one_prompt(given: Any) -> str | list[int]:
    """Return the prompt of a request that may have several."""
    prompt = given
    if isinstance(given, list) and given and not isinstance(given[0], int):
        several = cast("list[str | list[int]]", given)
        if len(several) > 1:
            raise invalid(f"prompt: one prompt per request, got {len(several)}.", param="prompt")
        prompt = several[0]
    if not prompt:
        raise invalid("prompt: it is empty.", param="prompt")
    return cast("str | list[int]", prompt)


def lower_messages(messages: list[ChatMessage]) -> list[Message]:
    """Return messages as chat templates take them.

    Raises:
        Refusal: the model does not take them.
    """
    names: dict[str, str] = {}
    lowered = [_lower(message, number, names) for number, message in enumerate(messages)]
    if lowered[-1]["role"] == "assistant":
        raise invalid(
            "messages: the last one is of the role assistant, and turns that the client has begun are not continued.",
            param="messages",
        )
    return lowered


def _lower(message: ChatMessage, number: int, names: dict[str, str]) -> Message:
    where = f"messages.{number}"
    role = "system" if message["role"] == "developer" else message["role"]
    lowered: Message = {"role": role, "content": text_of(message.get("content"), where)}
    if role == "assistant":
        calls = message.get("tool_calls") or []
        if calls:
            lowered["tool_calls"] = [
                {"id": call.get("id"), "type": "function", "function": {"arguments": "{}", **call["function"]}}
                for call in calls
            ]
            names.update((call.get("id") or "", call["function"]["name"]) for call in calls)
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            lowered["reasoning_content"] = reasoning
    elif role == "tool":
        call_id = message.get("tool_call_id")
        if call_id is None:
            raise invalid(f"{where}.tool_call_id: a message of the role tool needs the id of its call.", param=where)
        lowered["tool_call_id"] = call_id
        if name := names.get(call_id) or message.get("name"):
            lowered["name"] = name
    return lowered


def lower_tools(tools: list[ChatTool]) -> list[ToolSchema] | None:
    """Return tools as chat templates take them; None where there are none."""
    return [tool_schema(tool["function"]) for tool in tools] or None


def tool_schema(function: Mapping[str, Any]) -> ToolSchema:
    """Return the schema of a function with its optional parts filled in."""
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or empty,
        },
    }


def _params(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _PARAMS if given.get(name) is not None}


def _asked(given: Mapping[str, Any], turn: TurnRequest) -> Asked:
    options: Mapping[str, Any] = given.get("stream_options") or {}
    return Asked(
        model=given["model"],
        turn=turn,
        include_usage=bool(options.get("include_usage")),
    )


def _check_one(given: Mapping[str, Any], name: str) -> None:
    if given.get(name) not in (None, 1):
        raise invalid(f"{name} must be 1, got {given[name]}: one request has one answer. Send several.", param=name)


def _head(asked: Asked, head: TurnHead, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == _TEXT else "chatcmpl"
    return {
        "id": f"{prefix}-{head.turn_id}",
        "object": kind,
        "created": head.created_s,
        "model": asked.model,
        "system_fingerprint": None,
    }


def _usage(result: TurnResult) -> dict[str, int]:
    sampled = len(result.response_ids)
    return {
        "prompt_tokens": result.head.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": result.head.num_prompt_tokens + sampled,
    }


def _call(call: FunctionCall) -> dict[str, Any]:
    return {
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _chat_logprobs(tokens: Tokens) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, logprob in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Tokens, start: int = 0) -> dict[str, Any]:
    """Return log-probs of tokens of which the first begins at a place of the text."""
    *offsets, _ = accumulate((len(token.text) for token in tokens), initial=start)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _token_ids(result: TurnResult) -> dict[str, Any]:
    return {} if result.prompt_ids is None else {"token_ids": result.response_ids}


def _with_token_ids(body: dict[str, Any], result: TurnResult) -> dict[str, Any]:
    if result.prompt_ids is not None:
        body["prompt_token_ids"] = result.prompt_ids
        body["choices"][0] |= _token_ids(result)
    return body
