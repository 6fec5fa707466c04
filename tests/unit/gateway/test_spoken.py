"""What is told of a turn while it is sampled never becomes untrue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.rig import CALL, END, QWEN3, TEMPLATE, TOOL, open_session, user
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.tokenizer import TextStream
from xrl_lite.gateway.session import PendingTurn
from xrl_lite.gateway.spoken import Said, Spoken
from xrl_lite.gateway.turn import TurnRequest, TurnResult
from xrl_lite.rollout.replica import GenerateResult

THINKS = ChatTemplate(QWEN3)
THINKS.rules = replace(THINKS.rules, prompt_opens_reasoning=True)
FORMATS = ["hermes", "qwen3_coder", "seed", "minimax", "deepseek", "glm", "kimi", "gemma", "gpt-oss"]
PIECES = [
    *("a", "It is 7.", " ", "\n\n", "é漢字🙂", "STOP", "ST", "<", "</", "<|"),
    *("<think>", "<thi", "</think>", "<think>\nhm\n</think>\n\n", "<think></think>\n"),
    *("<tool_call>", "</tool_call>", "<tool", CALL.removesuffix(END), '<tool_call>{"name": 5}</tool_call>'),
    *(
        "<seed:tool_call>",
        "<minimax:tool_call>",
        "<|tool_calls_section_begin|>",
        "<｜DSML｜tool_calls>",
        "<|tool_call>",
    ),
    *(
        "<tool_call>\n<function=calculator>\n</function>\n</tool_call>",
        "<|observation|>",
        "<|channel|>final<|message|>",
    ),
]


class Telling(ScriptedRolloutCtl):
    """Notes what the session tells after each token."""

    pending: PendingTurn

    def __init__(self, text: str) -> None:
        super().__init__(lambda _: QWEN3.encode_text(text))
        self.told: list[Said] = []

    @asynccontextmanager
    async def streaming(self, state: RolloutState) -> AsyncGenerator[AsyncIterator[GenerateResult]]:
        async with super().streaming(state) as chunks:

            async def noted() -> AsyncIterator[GenerateResult]:
                async for chunk in chunks:
                    yield chunk
                    assert self.pending.spoken is not None
                    self.told.append(self.pending.spoken.said())

            yield noted()


async def told(
    text: str, *, tool_format: str = "hermes", template: ChatTemplate = TEMPLATE, **request: Any
) -> tuple[list[Said], TurnResult]:
    rollout = Telling(text)
    async with open_session(rollout, tool_format=tool_format, template=template) as session:
        asked = TurnRequest(stream=True, **({"messages": [user("hi")]} | request))
        rollout.pending = session.submit(asked, digest=b"")
        return rollout.told, await rollout.pending.wait()


@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.sampled_from(FORMATS),
    st.sampled_from([TEMPLATE, THINKS]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
async def test_what_was_told_stays_true(
    text: str,
    tool_format: str,
    template: ChatTemplate,
    ends: bool,
    has_tools: bool,
    has_stops: bool,
    with_logprobs: bool,
) -> None:
    if tool_format in ("deepseek", "glm"):  # beside calls they leave out what is before the end of reasoning
        text = text.replace("</think>", "")
    said, result = await told(
        f"{text}{END if ends else ''}",
        tool_format=tool_format,
        template=template,
        tools=[TOOL] if has_tools else None,
        params={"stop": ["STOP"]} if has_stops else {},
        with_logprobs=with_logprobs,
    )
    assert len(result.said.tokens) == (len(result.response_ids) if with_logprobs else 0)
    for earlier, later in pairwise([*said, result.said]):
        assert later.continues(earlier)
        assert (later.reasoning or "").startswith(earlier.reasoning or "")


@pytest.mark.parametrize(
    ("text", "kwargs", "first_words"),
    [
        ("It is seven.", {}, ["It", "It is", "It is seven."]),
        ("<think>\nhm\n</think>\n\nIt is", {}, ["It", "It is"]),
        (f"I add. {CALL}", {"tools": [TOOL]}, ["I", "I add."]),
        ("a < b and c", {"tools": [TOOL]}, ["a", "a < b", "a < b and", "a < b and c"]),
        ("one STOP two", {"params": {"stop": ["STOP"]}}, ["one"]),
        ("It is", {"messages": [], "prompt": "What?"}, ["It", "It is"]),
    ],
)
async def test_words_are_told_as_they_come(text: str, kwargs: dict[str, Any], first_words: list[str]) -> None:
    said, _ = await told(text, **kwargs)
    whole_words = [each.text for each in said if each.text and each.text in first_words]
    assert list(dict.fromkeys(whole_words)) == first_words


async def test_tokens_are_told_with_the_text_that_they_are() -> None:
    said, result = await told(f"I add it. {CALL}", tools=[TOOL], with_logprobs=True)
    for each in said:
        assert "".join(token.text for token in each.tokens).rstrip().startswith(each.text)
        assert not any("<tool_call>" in token.text for token in each.tokens)
    assert [token.logprob for token in result.said.tokens] == [-float(n + 1) for n in range(len(result.response_ids))]


def test_what_was_said_stays_with_its_tokens_while_more_are_sampled() -> None:
    spoken = Spoken(QWEN3, template=None, skip_special_tokens=True, marks=[], stops=[], with_logprobs=True)
    ids = QWEN3.encode_text("It is seven, I think.")
    told: list[Said] = []
    for token in ids:
        spoken.add([token], [-1.0])
        told.append(spoken.said())
    assert [len(each.tokens) for each in told] == [each.num_tokens for each in told]
    new = [
        token.text for earlier, later in pairwise([Said(), *told]) for token in later.tokens_from(earlier.num_tokens)
    ]
    assert "".join(new) == "It is seven, I think."
    assert all(each.sampled is told[0].sampled for each in told)  # a copy for each token would be quadratic


async def test_reasoning_is_told_as_it_comes_and_before_the_text() -> None:
    said, result = await told("<think>\nhm, well\n</think>\n\nYes")
    thoughts = list(dict.fromkeys(each.reasoning or "" for each in said))
    assert (thoughts[0], thoughts[-1], "hm," in thoughts) == ("", "hm, well", True)
    assert all(each.reasoning == "hm, well" for each in said if each.text)
    assert said[-1] == result.said


async def test_a_turn_that_was_cut_off_while_it_thought_is_reasoning() -> None:
    said, result = await told("<think>\nhm, well")
    assert (result.reasoning, result.text) == ("hm, well", "")
    assert said[-1] == result.said


async def test_a_format_whose_content_only_the_whole_tells_is_not_told_before() -> None:
    said, result = await told("<|channel|>final<|message|>It is 7.", tool_format="gpt-oss", tools=[TOOL])
    assert set(said) == {Said()}
    assert result.text == "It is 7."


@given(st.text(max_size=60), st.integers(1, 5))
def test_a_stream_of_text_is_the_text(text: str, size: int) -> None:
    ids = QWEN3.encode_text(text)
    stream = TextStream(QWEN3, skip_special_tokens=False)
    for place in range(0, len(ids), size):
        stream.add(ids[place : place + size])
        assert QWEN3.decode(ids, False).startswith(stream.text)
    assert QWEN3.decode(ids, False).removeprefix(stream.text).strip("\N{REPLACEMENT CHARACTER}") == ""
