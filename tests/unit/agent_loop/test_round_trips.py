"""Render, sample, parse, render: calls survive the way from the template to the model's tokens and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_templates import make_template
from tests.unit.agent_loop.test_sessions import Judger, make_state
from xrl_lite.agent_loop import AgentsConfig
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import Status
from xrl_lite.tools import FunctionCall, Toolbox, ToolParser, ToolsConfig, call_message, function_tool

WORDS = st.text(st.sampled_from("abz 37.,\n\t<>{}\"'\\é漢"), max_size=12)
VALUES = st.recursive(
    WORDS | st.integers(-999, 999) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("klm"), inner, max_size=2),
)
PAIRS = {
    "qwen2.5": ("hermes", "<|im_end|>"),
    "qwen3": ("hermes", "<|im_end|>"),
    "glm": ("glm", "<|observation|>"),
    "harmony": ("gpt-oss", ""),
}


@function_tool
def echo(text: str, extra: list | None = None) -> str:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    """Return what it is given.

    Args:
        text: A text.
        extra: Anything.
    """
    return f"{text}|{json.dumps(extra, ensure_ascii=False)}"


@settings(max_examples=15)
@given(text=WORDS, extra=st.lists(VALUES, max_size=2))
@pytest.mark.parametrize("family", PAIRS)
async def test_a_call_reaches_the_tool_as_the_model_meant_it(family: str, text: str, extra: list[Any]) -> None:
    call_format, end = PAIRS[family]
    template = make_template(family)
    tokenizer = template.tokenizer
    parser = ToolParser.get_tool_parser(call_format, tokenizer)
    meant = FunctionCall("echo", json.dumps({"text": text, "extra": extra}, ensure_ascii=False))
    sampled = tokenizer.encode_text(parser.render([meant]) + end)

    content, (found,) = await parser.extract_tool_calls(sampled, [echo.schema])
    assert (found.name, found.parameters, content) == ("echo", meant.parameters, "")
    async with Toolbox([echo]).session() as tools:
        (result,) = await tools.run([found])
    assert result.response.text == f"{text}|{json.dumps(extra, ensure_ascii=False)}"

    # the turn as a message, rendered by the template, holds the same call again
    turn = template.message(content, [call_message(found)])
    rendered = template.render([{"role": "user", "content": "Go."}, turn], tools=[echo.schema], opening=False)
    again = parser.parse(_last_turn(family, rendered), [echo.schema]).calls
    assert [(call.name, call.parameters) for call in again] == [("echo", meant.parameters)]


def _last_turn(family: str, rendered: str) -> str:
    opening = {"glm": "<|assistant|>", "harmony": "<|start|>assistant"}.get(family, "<|im_start|>assistant\n")
    return rendered[rendered.rindex(opening) + len(opening) :]


@settings(max_examples=15)
@given(answers=st.lists(WORDS, min_size=1, max_size=3), last=WORDS, cut=st.integers(0, 40))
@pytest.mark.parametrize("family", PAIRS)
async def test_masks_align_on_random_conversations_with_a_tool(
    family: str, answers: list[str], last: str, cut: int
) -> None:
    call_format, end = PAIRS[family]
    tokenizer = make_template(family).tokenizer
    parser = ToolParser.get_tool_parser(call_format)
    texts = [parser.render([FunctionCall("calculator", json.dumps({"expression": a}))]) + end for a in answers]
    turns = [*map(tokenizer.encode_text, texts), [*tokenizer.encode_text(last), *sorted(tokenizer.eos_token_ids)]]
    script = iter(turns)
    rollout = ScriptedRolloutCtl(lambda _: next(script))
    length = sum(map(len, turns)) + 2000 - cut * 50  # sometimes there is no room for the whole
    config = AgentsConfig(tools=ToolsConfig(builtin=["calculator"], format=call_format), response_length=length)
    states = await config.build(rollout, Judger(), tokenizer=tokenizer).generate_group([make_state()])
    assert {state.status for state in states} == {Status.COMPLETED}, states[-1].error_msg
    said = [token for turn in turns[: len(rollout.requests)] for token in turn]
    trained: list[int] = []
    for state in states:
        ids, mask, logprobs = state.response_ids or [], state.response_mask or [], state.logprobs or []
        assert len(ids) == len(mask) == len(logprobs) == len(state.response_model_steps or [])
        assert all((logprob < 0) == bool(bit) for logprob, bit in zip(logprobs, mask, strict=True))
        trained += [token for token, bit in zip(ids, mask, strict=True) if bit]
    assert trained == said[: len(trained)]
    assert len(trained) == len(said) or states[-1].finish_reason == "length"
