"""Rows of tokens: what was sampled stays as it was sampled, and is trained on once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_templates import FAMILIES, make_template
from tests.unit.data.test_chat_template import CALCULATOR, PLAIN
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.token_builder import OnRewrite, TokenBuilder
from xrl_lite.errors import TemplateError

PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]
TEMPLATES = {family: make_template(family) for family in FAMILIES}


def say(builder: TokenBuilder, template: ChatTemplate, text: str, *, end: str | None) -> list[int]:
    """Let the model say a text; log-probs count down so that each is known again."""
    tokens = template.tokenizer.encode_text(text) + (template.tokenizer.encode_text(end) if end else [])
    start = sum(row.num_sampled for row in builder.rows())
    builder.add_sampled(tokens, [-float(start + i + 1) for i in range(len(tokens))])
    return tokens


def tool_call(content: str = "") -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "3"}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def test_reasoning_that_the_template_drops_makes_two_rows() -> None:
    template = TEMPLATES["qwen3"]
    builder = TokenBuilder(template, PROMPT)
    first = say(builder, template, "<think>\nEasy.\n</think>\n\nIt is 7.", end="<|im_end|>")
    builder.add_messages([{"role": "user", "content": "Sure?"}])
    second = say(builder, template, "<think>\nYes.\n</think>\n\nYes.", end="<|im_end|>")
    rows = builder.rows()
    assert [row.response_ids for row in rows] == [first, second]
    assert [row.response_mask for row in rows] == [[1] * len(first), [1] * len(second)]
    assert template.tokenizer.decode(rows[1].prompt_ids, False) == (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_stays_while_tools_answer() -> None:
    template = TEMPLATES["qwen3"]
    builder = TokenBuilder(template, PROMPT, tools=[CALCULATOR])
    say(builder, template, "<think>\nI compute.\n</think>\n\n<tool_call>...</tool_call>", end="<|im_end|>")
    assert not builder.propose([{"role": "tool", "content": "7"}]).forks


def test_an_earlier_turn_with_reasoning_forks_too() -> None:
    template = TEMPLATES["qwen3"]
    builder = TokenBuilder(template, PROMPT, tools=[CALCULATOR])
    say(builder, template, "<think>\nI compute.\n</think>\n\n<tool_call>...</tool_call>", end="<|im_end|>")
    builder.add_messages([{"role": "tool", "content": "7"}])
    say(builder, template, "It is 7.", end="<|im_end|>")
    assert builder.propose([{"role": "user", "content": "Sure?"}]).forks


@pytest.mark.parametrize(("on_rewrite", "num_rows"), [("fork", 2), ("keep", 1)])
def test_a_rewritten_turn_forks_or_is_kept(on_rewrite: OnRewrite, num_rows: int) -> None:
    template = TEMPLATES["qwen3"]
    builder = TokenBuilder(template, PROMPT, on_rewrite=on_rewrite)
    for _ in range(2):
        say(builder, template, "<think>\nEasy.\n</think>\n\n7", end="<|im_end|>")
        builder.add_messages([{"role": "user", "content": "Sure?"}])
    assert len(builder.rows()) == num_rows


def test_a_rewritten_turn_is_refused_with_the_first_differing_token() -> None:
    template = TEMPLATES["qwen3"]
    builder = TokenBuilder(template, PROMPT, on_rewrite="refuse")
    say(builder, template, "<think>\nEasy.\n</think>\n\n7", end="<|im_end|>")
    with pytest.raises(TemplateError, match=r"a turn with reasoning once a message of the role user.*'<think>' .*'7'"):
        builder.propose([{"role": "user", "content": "Sure?"}])


def test_an_end_that_the_template_does_not_show_makes_two_rows() -> None:
    template = TEMPLATES["harmony"]
    builder = TokenBuilder(template, PROMPT)
    say(builder, template, "<|channel|>final<|message|>7", end="<|return|>")
    assert builder.add_messages([{"role": "user", "content": "Sure?"}]).forks
    assert "<|return|>" not in template.tokenizer.decode(builder.context_ids, False)


def test_a_response_that_goes_on_after_an_abort_is_one_turn() -> None:
    template = TEMPLATES["qwen2.5"]
    builder = TokenBuilder(template, PROMPT)
    tokens = say(builder, template, "It is", end=None) + say(builder, template, " 7.", end="<|im_end|>")
    assert [row.response_ids for row in builder.rows()] == [tokens]
    assert builder.messages[1:] == [{"role": "assistant", "content": "It is 7."}]


def test_what_was_said_by_others_has_no_logprob_and_the_version_before() -> None:
    template = TEMPLATES["llama3"]
    builder = TokenBuilder(template, PROMPT, tools=[CALCULATOR])
    end = template.tokenizer.encode_text("<|eot_id|>")
    builder.add_sampled([5, *end], [-1.0, -2.0], message=tool_call(), policy_versions=[3, 4])
    added = builder.add_messages([{"role": "tool", "content": "7"}])
    (row,) = builder.rows()
    assert row.response_logprobs == [-1.0, -2.0] + [0.0] * added.num_tokens
    assert row.policy_versions == [3, 4] + [4] * added.num_tokens


def test_unequal_lengths_are_refused() -> None:
    builder = TokenBuilder(TEMPLATES["llama3"], PROMPT)
    with pytest.raises(ValueError, match=r"2 tokens were sampled, but there are 1 log-probs"):
        builder.add_sampled([5, 6], [-1.0])


def test_messages_need_a_turn_before_them() -> None:
    with pytest.raises(ValueError, match="none was sampled"):
        TokenBuilder(TEMPLATES["llama3"], PROMPT).propose([{"role": "user", "content": "Well?"}])


@pytest.mark.parametrize(("family", "end", "longest"), [("qwen2.5", "<|im_end|>", 0), ("llama3", "<|eot_id|>", 3)])
def test_the_cost_of_a_turn_does_not_grow_with_the_conversation(family: str, end: str, longest: int) -> None:
    template = TEMPLATES[family]
    rendered: list[int] = []

    class Counting:
        def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
            rendered.append(len(messages))
            return template.tokenizer.render(messages, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(template.tokenizer, name)

    counting: Any = Counting()
    counted = ChatTemplate(counting)
    counted.continuation(None, PLAIN, [{"role": "user", "content": "Sure?"}])  # the first finds out about tools
    builder = TokenBuilder(counted, PROMPT)
    rendered.clear()
    for _ in range(16):
        say(builder, template, "It is 7.", end=end)
        builder.add_messages([{"role": "user", "content": "Sure?"}])
    assert max(rendered, default=0) == longest
    assert len(rendered) <= 2 * 16


WORDS = st.text(st.sampled_from("abz 37.,\n\t<>{}\"'é汉"), max_size=12)
TURN = st.fixed_dictionaries(
    {
        "thought": st.none() | WORDS,
        "text": WORDS,
        "ended": st.booleans(),
        "calls": st.booleans(),
        "replies": st.lists(WORDS, min_size=1, max_size=3),
    }
)


@settings(max_examples=25, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=5))
@pytest.mark.parametrize("family", FAMILIES)
def test_on_random_conversations_each_sampled_token_is_trained_once_as_sampled(
    family: str, turns: list[dict[str, Any]]
) -> None:
    template, marks = TEMPLATES[family], FAMILIES[family]
    tools = [CALCULATOR] if marks.has_tools else None
    builder = TokenBuilder(template, PROMPT, tools=tools)
    sampled: list[int] = []
    for turn in turns:
        text = turn["text"]
        if turn["thought"] is not None:
            opening, closing = template.rules.reasoning_marks
            text = f"{'' if template.rules.prompt_opens_reasoning else opening}{turn['thought']}{closing}{text}"
        calls = turn["calls"] and marks.has_tools
        end = "<|call|>" if calls and family == "harmony" else marks.end[-1] if calls and marks.end else marks.eos
        ids = template.tokenizer.encode_text(text) + (template.tokenizer.encode_text(end) if turn["ended"] else [])
        message = tool_call(turn["text"]) if calls else template.message(text)
        before = len(sampled)
        sampled += ids
        builder.add_sampled(ids, [-float(before + i + 1) for i in range(len(ids))], message=message)
        assert builder.context_ids[len(builder.context_ids) - len(ids) :] == ids
        replies = turn["replies"][:1] if family in ("llama3", "gemma") or not calls else turn["replies"]
        role = "tool" if calls else "user"
        builder.add_messages([{"role": role, "content": reply, "tool_call_id": "call00001"} for reply in replies])
    rows = builder.rows()
    for row in rows:
        assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs) == len(row.policy_versions)
    trained = [
        (token, logprob)
        for row in rows
        for token, mask, logprob in zip(row.response_ids, row.response_mask, row.response_logprobs, strict=True)
        if mask
    ]
    assert trained == [(token, -float(number + 1)) for number, token in enumerate(sampled)]
    others = [
        logprob
        for row in rows
        for mask, logprob in zip(row.response_mask, row.response_logprobs, strict=True)
        if not mask
    ]
    assert set(others) <= {0.0}


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("abz 37.,é汉"), min_size=1, max_size=12).map(lambda t: f"x{t}x"), max_size=4)
)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_conversations_come_out_as_the_template_renders_them(family: str, texts: list[str]) -> None:
    template = TEMPLATES[family]
    builder = TokenBuilder(template, PROMPT)
    for text in texts:
        lead = " " if family == "mistral" else "\n<think></think>\n" if family == "glm" else ""
        if family == "harmony":
            lead = "<|channel|>final<|message|>"
        if template.rules.prompt_opens_reasoning:
            lead = "</think>"
        message = template.message(text)
        ids = template.tokenizer.encode_following(lead + text + ("" if family == "glm" else FAMILIES[family].eos))
        builder.add_sampled(ids, [0.0] * len(ids), message=message)
        builder.add_messages([{"role": "user", "content": text}])
        expected = template.render(builder.messages, opening=True)
        assert template.tokenizer.decode(builder.context_ids, False) == template.tokenizer.decode(
            template.tokenizer.encode_text(expected), False
        )
