"""The self-test of a chat template before a run: three turns, built token by token and rendered as a whole.

Both must give the same tokens, or the difference must be one that the rules of the template foresee. What is found is
put right where it can be: a junction that does not come out right forks from then on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from xrl_lite.data.chat_template import ChatTemplate, Role
from xrl_lite.data.token_builder import OnRewrite, TokenBuilder, describe_difference, first_difference
from xrl_lite.data.tokenizer import Message
from xrl_lite.errors import TemplateError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_THOUGHT = "Let me see."


@dataclass(kw_only=True)
class TemplateReport:
    """What the self-test found."""

    forks: list[str] = field(default_factory=list[str])
    """Where a row ends and a second one begins, because the template changes earlier turns."""
    differences: list[str] = field(default_factory=list[str])
    """Where the incremental tokens were not those of the whole, though no rule said so; these fork now, too."""


@dataclass(frozen=True)
class _Step:
    """A turn of the model, and what is said then."""

    turn: Message
    then: list[Message]


def check_template(
    template: ChatTemplate, *, tools: Sequence[Message] | None = None, on_rewrite: OnRewrite = "fork"
) -> TemplateReport:
    """Compare incremental tokens with those of the whole conversation: three turns, with tools where there are some.

    Args:
        template: The model's template. Junctions that come out wrong are noted in its rules.
        tools: Schemas shown to the model.
        on_rewrite: What the run does where the template changes earlier turns.

    Raises:
        TemplateError: the template takes no such conversation, or does not know tools and there are some; or it changes
            earlier turns, or comes out with other tokens, and `on_rewrite` is "refuse": names the first that differs.
    """
    report = TemplateReport()
    for reasoning in (False, True):
        if not reasoning and template.rules.prompt_opens_reasoning:
            continue
        _walk(template, list(_conversation(template, tools, reasoning=reasoning)), tools, on_rewrite, report)
    for difference in report.differences:
        logger.warning("the chat template cannot be rendered incrementally everywhere: %s", difference)
    if report.forks:
        logger.info("conversations are trained on in several rows: %s", "; ".join(report.forks))
    return report


def _walk(
    template: ChatTemplate,
    steps: list[_Step],
    tools: Sequence[Message] | None,
    on_rewrite: OnRewrite,
    report: TemplateReport,
) -> None:
    messages: list[Message] = [{"role": "user", "content": "What is 3 + 4?"}]
    builder = TokenBuilder(template, messages, tools=tools, on_rewrite=on_rewrite)
    for number, step in enumerate(steps, start=1):
        text = _as_sampled(template, builder.messages, step, tools)
        if text is None:
            return  # the model is never asked to think here
        ids = _until_end(template, template.tokenizer.encode_following(text))
        builder.add_sampled(ids, [0.0] * len(ids), message=step.turn)
        if not step.then:
            return
        role = cast("Role", step.then[0]["role"])
        shape = template.shape_of(text, has_calls="tool_calls" in step.turn)
        where = f"a message of the role {role} after {shape}"
        if (shape, role) in template.rules.refuses:
            return
        proposed = builder.propose(step.then)
        if proposed.forks:
            report.forks += [where] if where not in report.forks else []
        else:
            ours = [*builder.context_ids, *proposed.token_ids]
            theirs = template.encode([*builder.messages, *step.then], tools=tools)
            if on_rewrite != "keep" and not _same(template, ours, theirs):
                difference = f"turn {number}, {where}. {describe_difference(template.tokenizer, ours, theirs)}"
                if on_rewrite == "refuse":
                    raise TemplateError(
                        f"The chat template cannot be rendered incrementally: {difference} Use on_rewrite='fork' to "
                        f"train on the parts as rows of their own, or 'keep' to go on from the sampled tokens."
                    )
                report.differences.append(difference)
                template.note_rewrite(shape, role)
                proposed = builder.propose(step.then)
        builder.accept(proposed)


def _conversation(template: ChatTemplate, tools: Sequence[Message] | None, *, reasoning: bool) -> Iterator[_Step]:
    """Yield a call and its result, an answer and a further question, and a last answer."""
    if tools:
        function: Any = tools[0].get("function", tools[0])
        properties: Any = function.get("parameters", {}).get("properties", {})
        call: Message = {
            "id": "call00001",
            "type": "function",
            "function": {"name": function["name"], "arguments": dict.fromkeys(list(properties)[:1], "3 + 4")},
        }
        result: Message = {"role": "tool", "name": function["name"], "tool_call_id": "call00001", "content": "7"}
        yield _Step(_turn(template, "", reasoning, [call]), [result])
    yield _Step(_turn(template, "It is 7.", reasoning), [{"role": "user", "content": "Are you sure?"}])
    yield _Step(_turn(template, "Yes.", reasoning), [])


def _turn(template: ChatTemplate, content: str, reasoning: bool, calls: Sequence[Message] = ()) -> Message:
    if reasoning:
        opening, closing = template.rules.reasoning_marks
        content = f"{opening}\n{_THOUGHT}\n{closing}\n\n{content}"
    return template.message(content, calls)


def _as_sampled(
    template: ChatTemplate, messages: Sequence[Message], step: _Step, tools: Sequence[Message] | None
) -> str | None:
    """Return what the model would have sampled for this turn: what the template shows where it is the last."""
    rules = template.rules
    before = template.render(messages, tools=tools, opening=True)
    whole = template.render([*messages, step.turn], tools=tools, opening=False)
    reasons = _THOUGHT in str(step.turn)
    if whole.startswith(before):
        sampled = whole.removeprefix(before)
        empty = re.match(
            rf"\s*{re.escape(rules.reasoning_marks[0])}\s*{re.escape(rules.reasoning_marks[1])}\s*", sampled
        )
        if reasons or empty is None:
            return sampled
        # an empty thought that only the last turn shows is the template's, not the model's
        later = template.render([*messages, step.turn, *step.then], tools=tools, opening=True)
        return sampled if later.startswith(before + empty.group()) else sampled[empty.end() :]
    if reasons and not rules.prompt_opens_reasoning:
        return None
    end = template.tokenizer.decode(sorted(rules.end_ids)[:1], skip_special_tokens=False)
    thought = f"{_THOUGHT}\n{rules.reasoning_marks[1]}\n\n" if rules.prompt_opens_reasoning else ""
    return f"{thought}{template.split_reasoning(step.turn['content'])[1]}{end}"


def _until_end(template: ChatTemplate, ids: list[int]) -> list[int]:
    """Cut at the token that ended the turn: the last one, but some templates write a second behind the last turn."""
    ends = [place for place, token in enumerate(ids) if token in template.rules.end_ids]
    if not ends:
        return ids
    while len(ends) > 1:
        between = template.tokenizer.decode(ids[ends[-2] + 1 : ends[-1]], skip_special_tokens=False)
        if between.strip():
            break
        ends.pop()
    return ids[: ends[-1] + 1]


def _same(template: ChatTemplate, ours: list[int], theirs: list[int]) -> bool:
    """Whether two token sequences are the same, or the same text in other tokens, as a model may well sample it."""
    if first_difference(ours, theirs) is None:
        return True
    texts = [template.tokenizer.decode(ids, skip_special_tokens=False) for ids in (ours, theirs)]
    return texts[0] == texts[1]
