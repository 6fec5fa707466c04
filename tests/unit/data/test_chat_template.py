"""The rules of chat templates: what is found by rendering, and what a turn is continued with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_templates import FAMILIES, Family, make_template, make_tokenizer
from xrl_lite.data.chat_template import ChatTemplate, Shape
from xrl_lite.data.template_check import check_template
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import TemplateError

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "What."}},
            "required": ["expression"],
        },
    },
}
PLAIN, CALL = Shape(False, False), Shape(False, True)
RESULTS = [{"role": "tool", "name": "calculator", "tool_call_id": "call00001", "content": "7"}]
QUESTION = [{"role": "user", "content": "Sure?"}]
TEMPLATES = {family: make_template(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_come_out_as_the_template_renders_them(family: str) -> None:
    template = make_template(family)
    report = check_template(template, tools=[CALCULATOR] if template.rules.has_tools else None)
    assert report.differences == []


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_of_each_family(family: str) -> None:
    rules = make_template(family).rules
    assert rules.has_tools is FAMILIES[family].has_tools
    drops = (Shape(True, False), "user") in rules.rewrites
    assert drops is FAMILIES[family].drops_reasoning
    ends = {make_tokenizer(family).convert_ids_to_tokens(token) for token in rules.end_ids}
    assert FAMILIES[family].eos in ends


@pytest.mark.parametrize(
    ("family", "end", "shape", "messages", "expected"),
    [
        ("qwen2.5", "<|im_end|>", PLAIN, QUESTION, "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen2.5",
            "<|im_end|>",
            CALL,
            RESULTS * 2,
            "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|eot_id|>",
            CALL,
            RESULTS,
            "<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "mistral",
            "</s>",
            CALL,
            RESULTS,
            '[TOOL_RESULTS] {"content": "7", "call_id": "call00001"}[/TOOL_RESULTS]',
        ),
        (
            "gemma",
            "<end_of_turn>",
            PLAIN,
            QUESTION,
            "\n<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("glm", "<|observation|>", CALL, RESULTS, "\n<tool_response>\n7\n</tool_response><|assistant|>"),
        (
            "harmony",
            "<|call|>",
            CALL,
            RESULTS,
            '<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant',
        ),
    ],
)
def test_what_follows_a_turn_that_ended(
    family: str, end: str, shape: Shape, messages: list[dict[str, Any]], expected: str
) -> None:
    template = make_template(family)
    (last,) = template.tokenizer.token_ids_of([end])
    tokens = template.continuation(last, shape, messages)
    assert tokens is not None
    assert template.tokenizer.decode(tokens, False) == expected


@settings(max_examples=20)
@given(contents=st.lists(st.text(st.sampled_from("ab 7\n\t\"'\\<>{}&|é</think>"), max_size=9), min_size=1, max_size=2))
@pytest.mark.parametrize("family", FAMILIES)
def test_contents_that_are_put_into_a_known_frame_come_out_as_rendered(family: str, contents: list[str]) -> None:
    template = TEMPLATES[family]
    tools = template.rules.has_tools
    role, shape = ("tool", CALL) if tools else ("user", PLAIN)
    asked = contents if tools and family not in ("llama3", "harmony") else contents[:1]
    messages = [{"role": role, "name": "calculator", "tool_call_id": "call00001", "content": text} for text in asked]
    whole = template._split(*template._rendered(shape, messages, None))
    assert template._after_turn(shape, messages, None) == whole


def test_most_templates_need_not_be_rendered_for_every_message() -> None:
    framed = {family for family, template in TEMPLATES.items() if template._frame(PLAIN, QUESTION) is not None}
    assert framed == FAMILIES.keys() - {"gemma", "llama3"}, "these two trim contents"


@pytest.mark.parametrize("cut_off", ["It is", "It is\n"])  # the template, too, has a line break behind its end token
def test_a_turn_that_was_cut_off_is_closed(cut_off: str) -> None:
    template = make_template("qwen2.5")
    tokens = template.continuation(template.tokenizer.encode_text(cut_off)[-1], PLAIN, QUESTION)
    assert tokens is not None
    assert template.tokenizer.decode(tokens, False).startswith("<|im_end|>\n<|im_start|>user")


def test_an_end_that_the_template_does_not_show_cannot_be_gone_on_from() -> None:
    template = make_template("harmony")
    (end,) = template.tokenizer.token_ids_of(["<|return|>"])
    assert template.continuation(end, PLAIN, QUESTION) is None


def test_the_end_of_turn_is_found_where_the_tokenizer_names_another_one() -> None:
    tokenizer = make_tokenizer("qwen2.5")
    base = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>", chat_template=tokenizer.chat_template
    )
    rules = ChatTemplate(Tokenizer(base)).rules
    assert {base.convert_ids_to_tokens(token) for token in rules.end_ids} == {"<|endoftext|>", "<|im_end|>"}


def test_tools_for_a_model_without_tool_support_are_refused() -> None:
    with pytest.raises(TemplateError, match="does not know tools"):
        make_template("smollm2").encode(QUESTION, tools=[CALCULATOR])


def test_a_role_that_the_template_refuses_is_named() -> None:
    template = make_template("gemma")
    with pytest.raises(TemplateError, match=r"roles system, user.*System role not supported"):
        template.encode([{"role": "system", "content": "Be brief."}, *QUESTION])


def test_only_messages_of_others_can_follow() -> None:
    with pytest.raises(ValueError, match="'assistant'"):
        make_template("qwen3").continuation(None, PLAIN, [{"role": "assistant", "content": "Yes."}])


def test_a_template_that_counts_cannot_be_rendered_incrementally() -> None:
    counting = Family(
        template="{{ messages | length }}{% for message in messages %}<|im_start|>{{ message.role + '\n' }}"
        "{{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        eos="<|im_end|>",
        special=FAMILIES["qwen2.5"].special,
    )
    tokenizer = make_tokenizer("smollm2")
    counted = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=counting.eos, chat_template=counting.template
    )
    template = ChatTemplate(Tokenizer(counted))
    with pytest.raises(TemplateError, match=r"First differing token: number 0, '1'.*'3'"):
        check_template(template, on_rewrite="refuse")
    assert check_template(template, on_rewrite="fork").forks


def test_a_template_without_the_models_words_is_refused() -> None:
    tokenizer = make_tokenizer("smollm2")
    silent = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    broken = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", chat_template=silent)
    with pytest.raises(TemplateError, match="cannot be rendered incrementally"):
        ChatTemplate(Tokenizer(broken))


def test_a_difference_that_no_rule_foresaw_is_printed_and_forks_from_then_on() -> None:
    # one particular answer is shouted later on: probes do not see that
    odd = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{{ message.content | upper if message.content == 'It is 7.' and not loop.last else message.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer("smollm2")
    wrapped = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", chat_template=odd)
    template = ChatTemplate(Tokenizer(wrapped))
    assert (PLAIN, "user") not in template.rules.rewrites
    report = check_template(template)
    assert "a message of the role user after a plain turn. First differing token" in report.differences[0]
    assert (PLAIN, "user") in template.rules.rewrites


def test_an_empty_list_of_calls_is_no_call() -> None:
    template = make_template("qwen3")
    texts = [
        template.render([*QUESTION, {"role": "assistant", "content": "Yes.", **calls}], opening=False)
        for calls in ({}, {"tool_calls": []}, {"tool_calls": None})
    ]
    assert len(set(texts)) == 1


def test_template_arguments_reach_the_template() -> None:
    template = make_template("qwen3", enable_thinking=False)
    assert template.tokenizer.decode(template.encode(QUESTION), False).endswith("<think>\n\n</think>\n\n")
    # what the opening shows is gone once the user speaks again
    assert (PLAIN, "user") in template.rules.rewrites
