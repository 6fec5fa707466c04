"""Bodies of both vendors: what they mean, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xrl_lite.gateway import Refusal
from xrl_lite.gateway.anthropic_dialect import ANTHROPIC, Messages
from xrl_lite.gateway.endpoint import Endpoint
from xrl_lite.gateway.openai_dialect import OPENAI, ChatCompletions, Completions
from xrl_lite.gateway.turn import TurnRequest

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TOOL_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}


def chat(**fields: Any) -> TurnRequest:
    return read(ChatCompletions(), {"model": "policy", "messages": [USER], **fields})


def messages(**fields: Any) -> TurnRequest:
    return read(Messages(), {"model": "policy", "max_tokens": 5, "messages": [USER], **fields})


def read(endpoint: Endpoint, body: dict[str, Any]) -> TurnRequest:
    return endpoint.read(json.dumps(body).encode()).turn


def test_w3_everything_that_anthropics_clients_send_at_once() -> None:
    request = messages(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc=1"},
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        messages=[
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, TOOL_USE]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "So?"},
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7"}]},
                    {"type": "tool_result", "tool_use_id": "b", "content": "8", "is_error": True},
                ],
            },
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": "Well?"},
        ],
    )
    arguments = {"name": "f", "arguments": '{"x": 1}'}
    assert request.messages == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": arguments}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "a", "name": "f"},
        {"role": "tool", "content": "8", "tool_call_id": "b"},
        {"role": "user", "content": "So?\n<system-reminder>\nHurry.\n</system-reminder>\nWell?"},
    ]


def test_turns_of_the_model_that_follow_each_other_become_one() -> None:
    request = messages(
        messages=[
            USER,
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, TOOL_USE]},
            {"role": "user", "content": "c"},
        ]
    )
    assert [message["content"] for message in request.messages] == ["hi", "ab", "c"]
    assert len(request.messages[1]["tool_calls"]) == 1


def test_w4_everything_that_openais_clients_send_at_once() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "x", "content": "7"},
            {"role": "assistant", "content": "", "tool_calls": []},
            USER,
        ],
        max_completion_tokens=9,
        stop="STOP",
        temperature=0,
        user="me",
        parallel_tool_calls=True,
        tools=[{"type": "function", "function": {"name": "f", "strict": True}}],
    )
    assert [message["role"] for message in request.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user"),
    ]
    assert request.messages[1]["content"] == "a\nb"
    assert request.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"q": 1}'}
    assert request.messages[3]["name"] == "f"
    assert "tool_calls" not in request.messages[4]
    assert request.params == {"temperature": 0, "max_tokens": 9, "stop": "STOP"}
    empty = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "", "parameters": empty}
    assert request.tools == [{"type": "function", "function": function}]


def test_a_tool_choice_of_none_hides_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools, tool_choice="none").tools is None
    assert messages(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "none"}).tools is None


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"n": 2}, "n must be 1, got 2", "n"),
        ({"n": 0}, "n must be 1, got 0", "n"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than 0", "max_tokens"),
        ({"max_completion_tokens": -1}, "greater than 0", "max_completion_tokens"),
        ({"temperature": -1}, "temperature: input should be greater", "temperature"),
        ({"top_p": 0}, "top_p: input should be greater than 0", "top_p"),
        ({"response_format": {"type": "json_object"}}, "only text is supported", "response_format"),
        ({"tool_choice": "required"}, "only auto and none are supported, got 'required'", "tool_choice"),
        ({"logit_bias": {"5": 1}}, "changes the distribution", "logit_bias"),
        ({"functions": [{"name": "f"}]}, "use tools", "functions"),
        ({"messages": []}, "messages: list should have at least 1 item", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: input should be 'system'", None),
        ({"messages": [{"content": "x"}]}, "messages.0.role: field required", None),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image_url' are not supported: the model takes", None),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "the last one is of the role assistant", None),
        ({"messages": [USER, {"role": "tool", "content": "7"}]}, "needs the id of its call", None),
        ({"tools": [{"type": "web_search"}]}, "tools.0", None),
        ({"messages": "hi"}, "messages: input should be a valid", "messages"),
    ],
)
def test_chat_completions_that_cannot_be_answered(fields: dict[str, Any], message: str, param: str | None) -> None:
    with pytest.raises(Refusal) as caught:
        chat(**fields)
    assert message in caught.value.message
    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: input should be greater than 0"),
        ({"tool_choice": {"type": "any"}}, "only auto and none are supported, got 'any'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run on Anthropic's side"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "the model takes text only"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "no meaning"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "the last one is of the role assistant"),
        ({"messages": [{"role": "system", "content": "x"}]}, "none of the role user"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: input should be 'user'"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}, USER]}, "needs a"),
    ],
)
def test_messages_that_cannot_be_answered(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        messages(**fields)
    assert message in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(["a", "b"], "one prompt per request, got 2"), ("", "it is empty"), ([], "it is empty"), (5, "prompt")],
)
def test_completions_that_cannot_be_answered(prompt: Any, message: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(Completions(), {"model": "policy", "prompt": prompt})
    assert message in caught.value.message


@pytest.mark.parametrize(("prompt", "want"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_a_prompt_is_text_or_tokens(prompt: Any, want: Any) -> None:
    assert read(Completions(), {"model": "policy", "prompt": prompt}).prompt == want


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "policy"}', b"null"])
def test_bodies_that_are_none(body: bytes) -> None:
    for endpoint in (ChatCompletions(), Completions(), Messages()):
        with pytest.raises(Refusal):
            endpoint.read(body)


def test_errors_have_the_shape_of_each_vendor() -> None:
    refusal = Refusal("context_length", "This model's maximum context length is 5 tokens.", param="messages")
    assert OPENAI.error_body(refusal)["error"] == {
        "message": "This model's maximum context length is 5 tokens.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    body = ANTHROPIC.error_body(refusal)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith("prompt is too long: ")
