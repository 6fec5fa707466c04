r"""What a model's chat template does to a conversation that goes on, found out by rendering.

In training, tokens that were sampled are never encoded again. So the text between two turns of the model must be had by
itself: what closes the turn, the messages that follow, and the opening of the next turn::

    <|im_start|>assistant\n  It is 7.<|im_end|>  \n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n
    '----- was there ------''---- sampled -----''-------------- `continuation` ---------------------------'

It is rendered behind a short stand-in of the turn, so its cost does not depend on how long the conversation is.

That is right only if the template leaves earlier turns alone. Many do not: they drop earlier reasoning when a user
speaks, or move the tools to the last user message. `ChatTemplate` renders probes of each kind of turn, followed by each
role, and notes which of them change the turn (`TemplateRules.rewrites`). Nothing is known about families by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.data.tokenizer import Message, Tokenizer
from xrl_lite.errors import TemplateError

Role = Literal["tool", "user", "system"]
"""Roles that may speak between two turns of the model."""

ROLES: tuple[Role, ...] = get_args(Role)

_USER, _ANSWER, _REASON, _NEWS = "uqzuser", "aqzanswer", "rqzreason", "nqznews"
_TOOL = "tqztool"
_CALL_ID = "callqz001"
_DIFFICULT = (
    " \n\t q'\"\\&<b>{x}[y]|é\u2028%</think>\n\n ",
    "<tool_response>\n{}\n</tool_response>",
    '{"q": [1, "x"]}',
    "0",
)
"""Contents that come out changed where a template trims them, escapes them or takes them for something else."""
_FRAMED_KEYS = {"role", "content", "name", "tool_call_id"}
_MAX_CACHED = 1024
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"(<[^<>]+>|\[[^\[\]]+\])")
_LAST_TAG = re.compile(rf"{_TAG.pattern}\s*$")

_PROBE_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "Any."}}},
    },
}


class Shape(NamedTuple):
    """What kind of turn the model made."""

    reasoning: bool
    """It thought before it spoke."""
    tools: bool
    """It called tools."""

    def __str__(self) -> str:
        parts = [name for name, has in (("reasoning", self.reasoning), ("tool calls", self.tools)) if has]
        return f"a turn with {' and '.join(parts)}" if parts else "a plain turn"


SHAPES = tuple(Shape(reasoning, tools) for reasoning in (False, True) for tools in (False, True))


@dataclass(frozen=True, kw_only=True)
class TemplateRules:
    """What was found out about a template."""

    end_ids: frozenset[int]
    """Tokens that end a turn of the model."""
    has_tools: bool
    """It shows tool schemas and takes messages of the role tool."""
    reasoning_key: str | None
    """Key of a message that holds its reasoning; None where the template knows of none."""
    reasoning_marks: tuple[str, str]
    """Texts around reasoning."""
    prompt_opens_reasoning: bool
    """The opening of a turn has the first of these marks already, so every turn has reasoning."""
    text_arguments: bool
    """Arguments of tool calls must be given as JSON text, not as an object."""
    content_parts: bool
    """Contents must be given as lists of parts, not as text."""
    rewrites: frozenset[tuple[Shape, Role]]
    """Turns that are rendered in another way once somebody of that role has spoken."""
    rewrites_with_tools: frozenset[tuple[Shape, Role]]
    """The same where tool schemas are shown, which some templates move along."""
    refuses: Mapping[tuple[Shape, Role], str] = field(default_factory=dict[tuple[Shape, Role], str])
    """Sequences that the template does not take, and what it says."""


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """What is behind the mark in a turn where it is the last."""

    text: str
    """The text."""
    ids: list[int]
    """Its tokens."""
    end: int | None
    """Place of the token that ends the turn; None if there is none."""
    head: int
    """Where in the text encoding may begin: at the token that ends the turn if it stands for itself, else at 0."""

    @property
    def num_skipped(self) -> int:
        """Tokens before `head`."""
        return self.end if self.head and self.end is not None else 0


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """What a template writes around the contents of messages that follow a turn."""

    rest_of_turn: _Rest
    """What is behind the mark in the turn where it is the last."""
    pieces: tuple[str, ...]
    """Texts before, between and behind the contents."""

    def filled(self, messages: Sequence[Message]) -> str:
        """Return the text with contents in it."""
        first, *others = self.pieces
        return first + "".join(message["content"] + piece for message, piece in zip(messages, others, strict=True))


class ChatTemplate:
    """Renders the text between turns of one model.

    Args:
        tokenizer: The model's tokenizer.
        end_ids: Further tokens that end a turn, such as those of the model's generation config or of a tool format.

    Raises:
        TemplateError: the template cannot even render a user message.
    """

    def __init__(self, tokenizer: Tokenizer, *, end_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.rules = _Probe(tokenizer, frozenset(end_ids)).rules()
        self._rests: dict[str | None, _Rest | None] = {}
        self._frames: dict[tuple[Shape, tuple[tuple[str, str | None], ...]], _Frame | None] = {}

    def encode(self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None) -> list[int]:
        """Return the token ids of a whole prompt, the opening of the model's turn included.

        Raises:
            TemplateError: the template refuses the messages, or there are tools and it has no place for them.
        """
        if tools and not self.rules.has_tools:
            raise TemplateError(
                "The model's chat template does not know tools: it shows no schemas, or takes no messages of the role "
                "tool. Use a model that was trained for tool calls, or an agent loop without tools."
            )
        return self.tokenizer.encode_text(self.render(messages, tools=tools, opening=True))

    def render(self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None, opening: bool) -> str:
        """Return the text of a conversation, with the opening of the next turn of the model or without."""
        prepared = [self._prepare(message) for message in messages]
        return self.tokenizer.render(prepared, tools=tools, add_generation_prompt=opening)

    def shape_of(self, text: str, *, has_calls: bool) -> Shape:
        """Return what kind of turn a sampled text is. Marks of reasoning with nothing between them do not count.

        Args:
            text: The sampled tokens as text, special tokens included.
            has_calls: Whether it called tools.
        """
        opening, closing = self.rules.reasoning_marks
        reasoning = self.rules.prompt_opens_reasoning
        if closing in text:
            reasoning = reasoning or bool(self.split_reasoning(text)[0])
        else:
            reasoning = reasoning or opening in text  # it was cut off while it thought
        return Shape(reasoning, has_calls)

    def split_reasoning(self, content: str) -> tuple[str | None, str]:
        """Return the reasoning in a sampled text, None if there is none, and the rest."""
        opening, closing = self.rules.reasoning_marks
        before, mark, after = content.partition(closing)
        if not mark:
            return None, content
        return before.partition(opening)[2].strip() if opening in before else before.strip(), after.lstrip()

    def message(self, content: str, tool_calls: Sequence[Message] = ()) -> Message:
        """Return the model's turn as a message that this template can render again."""
        reasoning, rest = self.split_reasoning(content) if self.rules.reasoning_key else (None, content)
        message: Message = {"role": "assistant", "content": rest}
        if reasoning is not None and self.rules.reasoning_key is not None:
            message[self.rules.reasoning_key] = reasoning
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        return message

    def rewritten_by(
        self, shapes: Iterable[Shape], messages: Sequence[Message], *, with_tools: bool
    ) -> tuple[Shape, Role] | None:
        """Return the first kind of turn that the template would change because of these messages, and the role."""
        rewrites = self.rules.rewrites_with_tools if with_tools else self.rules.rewrites
        roles = {message["role"] for message in messages}
        pairs: list[tuple[Shape, Role]] = [(shape, role) for shape in sorted(shapes) for role in ROLES if role in roles]
        return next((pair for pair in pairs if pair in rewrites), None)

    def continuation(
        self,
        last_token: int | None,
        shape: Shape,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
    ) -> list[int] | None:
        """Return the tokens that come behind a sampled turn: its end where that is missing, messages, next opening.

        Args:
            last_token: The last sampled token; None where none was sampled.
            shape: What kind of turn it was.
            messages: What is said next: messages of the roles tool, user, system.
            tools: Schemas, as at the start of the conversation.

        Returns:
            Token ids; None if the turn ended with a token that the template has no place for, so that the conversation
            cannot go on from it.

        Raises:
            TemplateError: the template refuses the messages.
            ValueError: a message has another role.
        """
        for message in messages:
            role = message.get("role")
            if role not in ROLES:
                raise ValueError(
                    f"Only messages of the roles {', '.join(ROLES)} can follow sampled tokens, got {role!r}."
                )
        closing, following = self._after_turn(shape, messages, tools)
        if last_token is None or not self._ends_turns(last_token):
            return closing + following  # it was cut off
        if last_token in closing:
            return closing[closing.index(last_token) + 1 :] + following
        if not closing and following[:1] == [last_token]:
            return following[1:]  # in some formats the opening of the next message is what ends a turn
        return None if last_token in self.rules.end_ids else closing + following

    def _ends_turns(self, token: int) -> bool:
        return token in self.rules.end_ids or self.tokenizer.is_special(token)

    def note_rewrite(self, shape: Shape, role: Role) -> None:
        """Note that the template changes such turns, as was seen when a conversation was checked."""
        pair = {(shape, role)}
        self.rules = replace(
            self.rules,
            rewrites=self.rules.rewrites | pair,
            rewrites_with_tools=self.rules.rewrites_with_tools | pair,
        )

    def _after_turn(
        self, shape: Shape, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[list[int], list[int]]:
        """Return what closes the turn, from the token that ends it, and what follows."""
        shown = tools if self._needs_tools else None
        frame = None if shown else self._frame(shape, messages)
        if frame is not None:
            return self._split(frame.rest_of_turn, frame.filled(messages))
        return self._split(*self._rendered(shape, messages, shown))

    def _rendered(
        self, shape: Shape, messages: Sequence[Message], shown: Sequence[Message] | None
    ) -> tuple[_Rest, str]:
        """Return what is behind the mark where the turn is the last, and where messages follow."""
        refusal: TemplateError | None = None
        for stand_in in self._stand_ins(shape, messages):
            before = [{"role": "user", "content": _USER}, stand_in]
            try:
                rest_of_turn = self._rest_of_turn(before, shown)
                full = self.render([*before, *messages], tools=shown, opening=True)
            except TemplateError as error:
                refusal = refusal or error
                continue
            if rest_of_turn is not None and _ANSWER in full:
                return rest_of_turn, full[full.index(_ANSWER) + len(_ANSWER) :]
        raise refusal or TemplateError("The chat template does not show the model's turn once messages follow it.")

    def _rest_of_turn(self, turn: list[Message], tools: Sequence[Message] | None) -> _Rest | None:
        """Return what is behind the mark where the turn is the last; None if it is not shown."""
        key = None if tools else json.dumps(turn[-1])
        if key in self._rests:
            return self._rests[key]
        text = self.render(turn, tools=tools, opening=False)
        found = None
        if _ANSWER in text:  # some formats show only one call
            found = self._rest(text[text.index(_ANSWER) + len(_ANSWER) :])
        if key is not None and len(self._rests) < _MAX_CACHED:
            self._rests[key] = found
        return found

    def _rest(self, text: str) -> _Rest:
        tokenizer = self.tokenizer
        ids = tokenizer.encode_following(text)
        end = _last_end(ids, tokenizer, self.rules.end_ids)
        head = max(0, text.find(tokenizer.decode([ids[end]], skip_special_tokens=False))) if end is not None else 0
        stands_alone = end is not None and tokenizer.encode_text(text[head:]) == ids[end:]
        return _Rest(text=text, ids=ids, end=end, head=head if stands_alone else 0)

    def _frame(self, shape: Shape, messages: Sequence[Message]) -> _Frame | None:
        """Return the text around the contents of such messages; None where they must be rendered.

        Most templates put contents into the text as they are. It is found out once for each sequence of roles and
        names, with contents that a template which trims, escapes or looks at them would show in another way.
        """
        kinds: list[tuple[str, str | None]] = []
        for message in messages:
            content, role = message.get("content"), message["role"]
            if not isinstance(content, str) or not content or message.keys() - _FRAMED_KEYS:
                return None
            if role == "tool" and self._shows_ids:
                return None
            kinds.append((role, message.get("name")))
        key = (shape, tuple(kinds))
        if key not in self._frames and len(self._frames) < _MAX_CACHED:
            self._frames[key] = self._find_frame(shape, messages)
        return self._frames.get(key)

    def _find_frame(self, shape: Shape, messages: Sequence[Message]) -> _Frame | None:
        def rendered(contents: Sequence[str]) -> tuple[_Rest, str]:
            filled = [{**message, "content": text} for message, text in zip(messages, contents, strict=True)]
            return self._rendered(shape, filled, None)

        marks = [f"{_NEWS}{place}q" for place in range(len(messages))]
        rest, text = rendered(marks)
        pieces: list[str] = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found or any(other in before + text for other in (*marks[: len(pieces)], mark)):
                return None
            pieces.append(before)
        frame = _Frame(rest_of_turn=rest, pieces=(*pieces, text))
        for probe in _DIFFICULT:
            contents = [probe] * len(messages)
            try:
                if rendered(contents)[1] != frame.filled([{"content": content} for content in contents]):
                    return None
            except TemplateError:
                return None
        return frame

    def _split(self, rest_of_turn: _Rest, text: str) -> tuple[list[int], list[int]]:
        """Split what is behind the mark, messages included, at the end of the turn."""
        rest, tokenizer = rest_of_turn, self.tokenizer
        if text.startswith(rest.text):
            if rest.end is None:
                return [], tokenizer.encode_following(text[len(rest.text) :])
            # encoded as one, so that a line break at the end of the turn meets what follows it
            ids = tokenizer.encode_text(text[rest.head :]) if rest.num_skipped else tokenizer.encode_following(text)
            start, stop = rest.end - rest.num_skipped, len(rest.ids) - rest.num_skipped
            return ids[start:stop], ids[stop:]
        # the last turn of a conversation ends in a way of its own
        ids = tokenizer.encode_following(text)
        start = next((place for place, token in enumerate(ids) if token in self.rules.end_ids), None)
        if start is None:
            raise TemplateError(
                f"The chat template cannot be rendered incrementally: behind the model's turn, "
                f"{text[:60]!r} has no token that ends it. Give its id in end_token_ids."
            )
        return ids[start : start + 1], ids[start + 1 :]

    def _stand_ins(self, shape: Shape, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield short turns that the messages can follow: results of tools may need calls that they belong to."""
        results = [message for message in messages if message["role"] == "tool"]
        if not shape.tools and not results:
            yield {"role": "assistant", "content": _ANSWER}
            return
        named = [
            (message.get("name") or _TOOL, (message.get("tool_call_id") if self._shows_ids else None) or _CALL_ID)
            for message in results
        ]
        *before, last = named or [(_TOOL, _CALL_ID)]
        text = self.rules.text_arguments
        marked = _call(*last, text=text)  # only the last, since what comes behind the mark is looked at
        plain = [_call(*each, text=text, value="") for each in before]
        yield {"role": "assistant", "content": "", "tool_calls": [*plain, marked]}
        yield {"role": "assistant", "content": "", "tool_calls": [marked]}  # for formats with one call a turn
        yield {"role": "assistant", "content": _ANSWER}

    @cached_property
    def _shows_ids(self) -> bool:
        """Whether ids of calls are part of what is rendered."""
        texts: list[str] = []
        for call_id in (_CALL_ID, "otherqz01"):
            call = _call(_TOOL, call_id, text=self.rules.text_arguments)
            turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {**_results()[0], "tool_call_id": call_id}
            try:
                texts.append(self.render([{"role": "user", "content": _USER}, turn, result], opening=True))
            except TemplateError:
                return True
        return texts[0] != texts[1]

    @cached_property
    def _needs_tools(self) -> bool:
        """Whether what follows a turn depends on the tools there are."""
        if not self.rules.has_tools:
            return False
        for role in ("user", "tool"):
            news = _news(role)
            turn = _turn(Shape(False, role == "tool"), self.rules)
            before = [{"role": "user", "content": _USER}, turn]
            try:
                texts = [self.render([*before, *news], tools=tools, opening=True) for tools in (None, [_PROBE_TOOL])]
            except TemplateError:
                continue
            ends = [text[text.index(_ANSWER) :] for text in texts]
            if ends[0] != ends[1]:
                return True
        return False

    def _prepare(self, message: Message) -> Message:
        """Give contents and the arguments of tool calls the form that the template takes."""
        if self.rules.content_parts:
            message = _in_parts(message)
        calls = cast("list[Message] | None", message.get("tool_calls"))
        if not calls:
            return {key: value for key, value in message.items() if key != "tool_calls"}
        return {**message, "tool_calls": [_with_arguments(call, text=self.rules.text_arguments) for call in calls]}


class _Probe:
    """Renders conversations of made-up words and looks at what becomes of them."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids | tokenizer.eos_token_ids
        self._user = {"role": "user", "content": _USER}
        self._content_parts = False
        self._content_parts = not self._shows([self._user, {"role": "assistant", "content": _ANSWER}], _ANSWER)
        self._opening = self._render([self._user], opening=True)
        if not self._shows([self._user, {"role": "assistant", "content": _ANSWER}], _ANSWER):
            raise TemplateError(
                "The chat template cannot be rendered incrementally: it does not show what the assistant said."
            )

    def rules(self) -> TemplateRules:
        text_arguments = self._wants_text_arguments()
        key, marks = self._reasoning()
        found = TemplateRules(
            end_ids=self._end_ids,
            has_tools=self._has_tools(text_arguments),
            reasoning_key=key,
            reasoning_marks=marks,
            prompt_opens_reasoning=_squash(self._opening).endswith(_squash(marks[0])),
            text_arguments=text_arguments,
            content_parts=self._content_parts,
            rewrites=frozenset(),
            rewrites_with_tools=frozenset(),
        )
        found = replace(found, end_ids=self._end_ids | self._ends_seen(found))
        rewrites: dict[bool, set[tuple[Shape, Role]]] = {False: set(), True: set()}
        refuses: dict[tuple[Shape, Role], str] = {}
        for shape in SHAPES:
            for role in ROLES:
                for with_tools in (False, True) if found.has_tools else (False,):
                    if (shape.tools or role == "tool") and not found.has_tools:
                        continue
                    try:
                        if not self._survives(shape, role, found, with_tools=with_tools):
                            rewrites[with_tools].add((shape, role))
                    except TemplateError as error:
                        refuses[shape, role] = str(error)
        return replace(
            found,
            rewrites=frozenset(rewrites[False]),
            rewrites_with_tools=frozenset(rewrites[True]),
            refuses=refuses,
        )

    def _survives(self, shape: Shape, role: Role, rules: TemplateRules, *, with_tools: bool) -> bool:
        """Whether a turn stands as it was sampled once somebody of that role has spoken."""
        tools = [_PROBE_TOOL] if with_tools else None
        opening = self._render([self._user], tools, opening=True)
        turn = _turn(shape, rules)
        alone = self._render([self._user, turn], tools, opening=False)
        answered = [*_results(), {"role": "assistant", "content": "cqzclosing"}]
        between = answered if shape.tools and role != "tool" else []
        after = self._render([self._user, turn, *between, *_news(role)], tools, opening=True)
        return any(
            _squash(after).startswith(_squash(opening) + sampled)
            for sampled in self._as_sampled(shape, opening, alone, rules)
        )

    def _as_sampled(self, shape: Shape, opening: str, alone: str, rules: TemplateRules) -> Iterator[str]:
        """Yield the texts, without white space, that the model may have sampled for a turn that renders like this."""
        start, turn = _squash(opening), _squash(alone[: alone.index(_ANSWER) + len(_ANSWER)])
        if not turn.startswith(start):
            return  # not even the opening stays as it was
        sampled = turn.removeprefix(start)
        if not shape.reasoning:
            empty = "".join(map(_squash, rules.reasoning_marks))
            yield sampled.replace(empty, "")
            if not shape.tools:
                yield _squash(_ANSWER)
            yield sampled
        elif _REASON in sampled:
            yield sampled

    def _reasoning(self) -> tuple[str | None, tuple[str, str]]:
        """Return the key for reasoning in a message, and the texts around it in a turn."""
        for key in _REASONING_KEYS:
            for with_call in (False, True):  # some templates show it only where a tool is called
                turn: Message = {"role": "assistant", key: _REASON, "content": "" if with_call else _ANSWER}
                if with_call:
                    turn["tool_calls"] = [_call(_TOOL, _CALL_ID, text=False)]
                marks = self._marks_around_reasoning(turn)
                if marks is not None:
                    return key, marks
        return None, ("<think>", "</think>")

    def _marks_around_reasoning(self, turn: Message) -> tuple[str, str] | None:
        try:
            text = self._render([self._user, turn], opening=False)
        except TemplateError:
            return None
        before, found, after = text.partition(_REASON)
        if not found or _ANSWER not in after:
            return None
        opening = before.removeprefix(_common_prefix(before, self._opening)).strip()
        if not opening and (tag := _LAST_TAG.search(before)) is not None:
            opening = tag.group(1)
        closing = after[: after.index(_ANSWER)].strip()
        if "tool_calls" in turn and (tag := _TAG.search(closing)) is not None:
            closing = tag.group(1)
        return (opening, closing) if opening and closing else None

    def _has_tools(self, text_arguments: bool) -> bool:
        try:
            shown = _TOOL in self._render([self._user], [_PROBE_TOOL], opening=True)
            call = {"role": "assistant", "content": "", "tool_calls": [_call(_TOOL, _CALL_ID, text=text_arguments)]}
            text = self._render([self._user, call, *_results()], [_PROBE_TOOL], opening=True)
        except TemplateError:
            return False
        # a template may leave the schemas to the system prompt, but what tools say must be there
        return _NEWS in text and _ANSWER in text and (shown or text.count(_TOOL) > 0)

    def _wants_text_arguments(self) -> bool:
        call = {"role": "assistant", "content": "", "tool_calls": [_call(_TOOL, _CALL_ID, text=False)]}
        try:
            self._render([self._user, call, *_results()], [_PROBE_TOOL], opening=True)
        except TemplateError:
            return True
        return False

    def _ends_seen(self, rules: TemplateRules) -> frozenset[int]:
        """Special tokens that the template closes turns with, whatever the tokenizer says."""
        found: set[int] = set()
        for shape in (Shape(False, False), Shape(False, True)):
            if shape.tools and not rules.has_tools:
                continue
            try:
                text = self._render([self._user, _turn(shape, rules), *_news("tool" if shape.tools else "user")])
                alone = self._render([self._user, _turn(shape, rules)])
            except TemplateError:
                continue
            rest = alone[alone.index(_ANSWER) + len(_ANSWER) :]
            ids = self._tokenizer.encode_following(rest)
            place = _last_end(ids, self._tokenizer, frozenset())
            if place is not None:
                found.add(ids[place])
            if not shape.tools and rest not in text:  # the last turn is closed in another way than those before it
                following = self._tokenizer.encode_following(text[text.index(_ANSWER) + len(_ANSWER) :])
                found.update(following[:1] if self._tokenizer.is_special(following[0]) else ())
        return frozenset(found)

    def _shows(self, messages: Sequence[Message], text: str) -> bool:
        try:
            return text in self._render(messages, opening=True)
        except TemplateError:
            return False

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, opening: bool = False
    ) -> str:
        shown = [_in_parts(message) for message in messages] if self._content_parts else messages
        return self._tokenizer.render(shown, tools=tools, add_generation_prompt=opening)


def _turn(shape: Shape, rules: TemplateRules) -> Message:
    """Return a turn whose last variable text is the answer mark."""
    turn: Message = {"role": "assistant", "content": "" if shape.tools else _ANSWER}
    if shape.reasoning and rules.reasoning_key:
        turn[rules.reasoning_key] = _REASON
    elif shape.reasoning:
        opening, closing = rules.reasoning_marks
        turn["content"] = f"{opening}\n{_REASON}\n{closing}\n\n{turn['content']}"
    if shape.tools:
        turn["tool_calls"] = [_call(_TOOL, _CALL_ID, text=rules.text_arguments)]
    return turn


def _news(role: Role | str) -> list[Message]:
    return _results() if role == "tool" else [{"role": role, "content": _NEWS}]


def _results() -> list[Message]:
    return [{"role": "tool", "name": _TOOL, "tool_call_id": _CALL_ID, "content": _NEWS}]


def _call(name: str, call_id: str, *, text: bool, value: str = _ANSWER) -> Message:
    arguments = {"q": value}
    function = {"name": name, "arguments": json.dumps(arguments) if text else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_arguments(call: Message, *, text: bool) -> Message:
    """Return a call whose arguments are JSON text or an object, whichever is asked for; what is no JSON stays text."""
    function = cast("Message", call["function"])
    arguments = function.get("arguments")
    if text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not text and isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except JsonTextError:
            arguments = {"arguments": arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _last_end(ids: Sequence[int], tokenizer: Tokenizer, end_ids: frozenset[int]) -> int | None:
    """Place of the token that ends a turn: the first known one, else the last mark with only white space behind it."""
    known = next((place for place, token in enumerate(ids) if token in end_ids), None)
    if known is not None:
        return known
    special = [place for place, token in enumerate(ids) if tokenizer.is_special(token)]
    if special and not tokenizer.decode(list(ids[special[-1] + 1 :]), skip_special_tokens=False).strip():
        return special[-1]
    return None


def _squash(text: str) -> str:
    return "".join(text.split())


def _common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
