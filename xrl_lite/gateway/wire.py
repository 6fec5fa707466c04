"""Request bodies as they come over the wire. Fields that are not named here are ignored, as agents send many."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from xrl_lite.gateway.refusal import Refusal, invalid

Text = Annotated[str, Field(strict=True)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Probability = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Part(TypedDict, total=False):
    """One part of a content: text, an image, a result of a tool, ..."""

    type: Required[Text]
    text: Text


class WireFunction(TypedDict, total=False):
    """The function half of a call."""

    name: Required[Text]
    arguments: Text


class WireCall(TypedDict, total=False):
    """A call that the model made."""

    id: Text | None
    type: Text
    function: Required[WireFunction]


class ChatMessage(TypedDict, total=False):
    """A message of OpenAI's chat completions."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: Text | list[Part] | None
    name: Text | None
    tool_calls: list[WireCall] | None
    tool_call_id: Text | None
    reasoning_content: Text | None
    reasoning: Text | None


class FunctionSchema(TypedDict, total=False):
    """What a tool is called and what it takes."""

    name: Required[Annotated[str, Field(min_length=1, strict=True)]]
    description: Text | None
    parameters: dict[str, Any] | None


class ChatTool(TypedDict, total=False):
    """A tool in OpenAI's form."""

    type: Required[Literal["function"]]
    function: Required[FunctionSchema]


class StreamOptions(TypedDict, total=False):
    """What a stream holds besides the text."""

    include_usage: bool | None


class _Sampling(TypedDict, total=False):
    model: Required[Text]
    stream: bool | None
    stream_options: StreamOptions | None
    temperature: Temperature | None
    top_p: Probability | None
    top_k: TopK | None
    max_tokens: Positive | None
    seed: Seed | None
    presence_penalty: Penalty | None
    frequency_penalty: Penalty | None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None
    n: int | None
    logit_bias: dict[str, float] | None
    return_token_ids: bool | None


class ChatCompletionBody(_Sampling, total=False):
    """Body of ``POST /v1/chat/completions``."""

    messages: Required[Annotated[list[ChatMessage], Field(min_length=1)]]
    max_completion_tokens: Positive | None
    tools: list[ChatTool] | None
    tool_choice: Any
    response_format: Any
    logprobs: bool | None
    top_logprobs: int | None
    functions: Any
    audio: Any
    web_search_options: Any


class CompletionBody(_Sampling, total=False):
    """Body of ``POST /v1/completions``."""

    prompt: Required[Text | list[TokenId] | list[Text] | list[list[TokenId]]]
    logprobs: int | None
    echo: bool | None
    best_of: int | None
    suffix: Text | None


class AnthropicMessage(TypedDict, total=False):
    """A message of Anthropic's API."""

    role: Required[Literal["user", "assistant", "system"]]
    content: Required[Text | list[dict[str, Any]]]


class AnthropicTool(TypedDict, total=False):
    """A tool in Anthropic's form."""

    type: Text | None
    name: Required[Annotated[str, Field(min_length=1, strict=True)]]
    description: Text | None
    input_schema: dict[str, Any]


class CountTokensBody(TypedDict, total=False):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: Required[Text]
    messages: Required[Annotated[list[AnthropicMessage], Field(min_length=1)]]
    system: Text | list[Part] | None
    tools: list[AnthropicTool] | None
    tool_choice: dict[str, Any] | None


class MessagesBody(CountTokensBody, total=False):
    """Body of ``POST /v1/messages``."""

    max_tokens: Required[Positive]
    stream: bool | None
    stop_sequences: Annotated[list[Text], Field(max_length=16)] | None
    temperature: Temperature | None
    top_p: Probability | None
    top_k: TopK | None


class RewardInfoBody(TypedDict):
    """Body of ``POST /sessions/{id}/reward_info``."""

    reward_info: dict[str, Any]


class SessionBody(TypedDict, total=False):
    """Body of ``POST /sessions``."""

    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$", strict=True)] | None
    sample_params: dict[str, Any] | None


CHAT_COMPLETION = TypeAdapter[ChatCompletionBody](ChatCompletionBody)
COMPLETION = TypeAdapter[CompletionBody](CompletionBody)
MESSAGES = TypeAdapter[MessagesBody](MessagesBody)
COUNT_TOKENS = TypeAdapter[CountTokensBody](CountTokensBody)
REWARD_INFO = TypeAdapter[RewardInfoBody](RewardInfoBody)
SESSION = TypeAdapter[SessionBody](SessionBody)


def read_body(adapter: TypeAdapter[Any], body: bytes) -> Any:
    """Return a body in the form that an adapter describes.

    Raises:
        Refusal: it is no JSON, or has another form; names the field.
    """
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        first = max(details, key=lambda detail: len(detail["loc"]))
        if first["type"] == "json_invalid":
            raise invalid(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from error
        path = ".".join(str(part) for part in first["loc"] if not _is_label(part))
        message = first["msg"][0].lower() + first["msg"][1:]
        raise invalid(f"{path or 'body'}: {message}.", param=path or None) from error


def refuse_given(body: Any, reasons: dict[str, str]) -> None:
    """Raise Refusal where a body has one of these fields, with the reason that is given for it."""
    for name, reason in reasons.items():
        if body.get(name):
            raise Refusal("invalid_request", f"{name} is not supported: {reason}", param=name)


def text_of(content: str | list[Part] | None, where: str) -> str:
    """Return a content as text; parts are put on lines of their own.

    Raises:
        Refusal: there is an image or the like in it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for number, part in enumerate(content):
        if part["type"] not in ("text", "input_text", "output_text"):
            raise invalid(
                f"{where}.content.{number}: parts of the type {part['type']!r} are not supported: the model takes text "
                f"only.",
                param=where,
            )
        texts.append(part.get("text", ""))
    return "\n".join(texts)


def _is_label(part: int | str) -> bool:
    # pydantic puts the member of a union into the location: "constrained-str", "list[Part]"
    return isinstance(part, str) and ("[" in part or part in ("str", "constrained-str", "int", "bool", "float"))
