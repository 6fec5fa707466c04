"""The tokens of one conversation between a model and its surroundings, as they were sampled.

::

    prompt            sampled   continuation      sampled
    [ ............. ][ ....... ][ .............. ][ ..... ]
      prompt_ids      mask 1     mask 0            mask 1      one row
                      logprobs   0.0               logprobs

A conversation is one row as long as what the chat template makes of it goes on from the row's tokens. Where it does not
(most templates drop earlier reasoning when the user speaks again), the row ends, and a second one begins, whose prompt
is the conversation as the template renders it: what was sampled before is prompt there, so no token is trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from xrl_lite.data.chat_template import ChatTemplate, Role, Shape
from xrl_lite.data.rollout_state import UNKNOWN_VERSION
from xrl_lite.data.tokenizer import Message, Tokenizer
from xrl_lite.errors import TemplateError

OnRewrite = Literal["fork", "refuse", "keep"]
"""What to do where the template changes earlier turns: end the row and begin a second one, raise, or go on from the
sampled tokens all the same, so that the model sees what its template would not show it."""


@dataclass(kw_only=True)
class TokenRow:
    """One trainable row."""

    prompt_ids: list[int]
    """What the model saw first; not trained on."""
    response_ids: list[int] = field(default_factory=list[int])
    """Sampled tokens, and between them what others said."""
    response_mask: list[int] = field(default_factory=list[int])
    """1 on sampled tokens, 0 elsewhere; as long as `response_ids`."""
    response_logprobs: list[float] = field(default_factory=list[float])
    """Log-probability of each sampled token; 0.0 elsewhere."""
    policy_versions: list[int] = field(default_factory=list[int])
    """Version of the weights that sampled each token; elsewhere that of the sampled token before."""

    @property
    def num_sampled(self) -> int:
        """Tokens that are trained on."""
        return sum(self.response_mask)

    def cut(self, num_response_tokens: int) -> TokenRow:
        """Return the beginning of the row, as a row of its own."""
        end = num_response_tokens
        return TokenRow(
            prompt_ids=list(self.prompt_ids),
            response_ids=self.response_ids[:end],
            response_mask=self.response_mask[:end],
            response_logprobs=self.response_logprobs[:end],
            policy_versions=self.policy_versions[:end],
        )

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, versions: Sequence[int]) -> None:
        """Append tokens; without log-probs they are not the model's."""
        self.response_ids += token_ids
        self.response_mask += [0 if logprobs is None else 1] * len(token_ids)
        self.response_logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs
        self.policy_versions += versions


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What comes next if messages are added; nothing has been added yet."""

    messages: list[Message]
    """The messages."""
    token_ids: list[int]
    """Tokens behind the sampled ones; the whole new prompt where `forks`."""
    forks: bool
    """Whether a second row begins with them."""
    num_tokens: int
    """How much longer the context gets, in tokens."""


@dataclass(frozen=True, kw_only=True)
class BuilderMark:
    """A place in a conversation, to begin again from; see `TokenBuilder.copy_at`."""

    num_rows: int
    num_response_tokens: int
    """Of the last row."""
    num_messages: int
    earlier: frozenset[Shape]
    turn: Shape | None
    num_forks: int


class TokenBuilder:
    """Collects one conversation.

    Args:
        template: Renders what is between the turns.
        messages: The prompt.
        tools: Schemas shown to the model.
        on_rewrite: What to do where the template changes earlier turns.

    Raises:
        TemplateError: the template refuses the prompt, or does not know tools.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        on_rewrite: OnRewrite = "fork",
    ) -> None:
        self._template = template
        self._tools = list(tools) if tools else None
        self._on_rewrite: OnRewrite = on_rewrite
        self.messages: list[Message] = list(messages)
        """The conversation so far."""
        self._rows = [TokenRow(prompt_ids=template.encode(messages, tools=self._tools))]
        self._earlier: set[Shape] = set()
        self._turn: Shape | None = None
        self.num_forks = 0
        """How often a row was ended because the template changes earlier turns."""

    @property
    def context_ids(self) -> list[int]:
        """Everything the model sees now: what to give to the engine."""
        return [*self._row.prompt_ids, *self._row.response_ids]

    @property
    def num_tokens(self) -> int:
        """Length of the context."""
        return len(self._row.prompt_ids) + len(self._row.response_ids)

    @property
    def num_added(self) -> int:
        """Tokens of the context behind the first prompt."""
        return self.num_tokens - len(self._rows[0].prompt_ids)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self._rows)

    def rows(self) -> list[TokenRow]:
        """Return the trainable rows, in order; rows in which nothing was sampled are left out."""
        return [row for row in self._rows if row.num_sampled]

    def all_rows(self) -> list[TokenRow]:
        """Return the rows, also those in which nothing was sampled."""
        return list(self._rows)

    def add_sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        message: Message | None = None,
        policy_versions: Sequence[int] | None = None,
    ) -> None:
        """Append what the model sampled. Called again without messages in between, it goes on with the same turn.

        Args:
            token_ids: As sampled, the token that ended the turn included.
            logprobs: One per token.
            message: The turn as a message, as `ChatTemplate.message` makes it; decoded where not given.
            policy_versions: Version of the weights per token; not known (-1) where not given.

        Raises:
            ValueError: the lengths differ.
        """
        versions = [UNKNOWN_VERSION] * len(token_ids) if policy_versions is None else policy_versions
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(token_ids)} tokens were sampled, but there are {len(logprobs)} log-probs and {len(versions)} "
                f"policy versions. One of each belongs to every token."
            )
        self._row.add(token_ids, logprobs, versions)
        if self._turn is not None:
            self.messages.pop()
        self._take_turn(message)

    def propose(self, messages: Sequence[Message]) -> Continuation:
        """Return what would come next if messages are added, without adding them.

        Raises:
            TemplateError: the template refuses them, or changes earlier turns and that is to be refused.
            ValueError: a message has a role that cannot follow, or nothing was sampled since the last messages.
        """
        if self._turn is None:
            raise ValueError("Messages can only be added behind a turn of the model, and none was sampled yet.")
        tokens = self._template.continuation(self._last_token(), self._turn, messages, tools=self._tools)
        shapes = {*self._earlier, self._turn}
        changed = self._template.rewritten_by(shapes, messages, with_tools=self._tools is not None)
        if tokens is not None and (changed is None or self._on_rewrite == "keep"):
            return Continuation(messages=list(messages), token_ids=tokens, forks=False, num_tokens=len(tokens))
        whole = self._template.encode([*self.messages, *messages], tools=self._tools)
        if self._on_rewrite != "fork":
            raise self._refusal(tokens, whole, changed)
        return Continuation(
            messages=list(messages), token_ids=whole, forks=True, num_tokens=len(whole) - self.num_tokens
        )

    def accept(self, continuation: Continuation) -> None:
        """Add what `propose` returned."""
        assert self._turn is not None, "proposed before"
        if continuation.forks:
            self.num_forks += 1
            self._earlier.clear()
            self._rows.append(TokenRow(prompt_ids=continuation.token_ids))
        else:
            versions = self._row.policy_versions[-1:] or [UNKNOWN_VERSION]
            self._row.add(continuation.token_ids, None, versions * len(continuation.token_ids))
            self._earlier.add(self._turn)
        self.messages += continuation.messages
        self._turn = None

    def add_messages(self, messages: Sequence[Message]) -> Continuation:
        """Propose and accept; errors as there."""
        continuation = self.propose(messages)
        self.accept(continuation)
        return continuation

    def mark(self) -> BuilderMark:
        """Note where the conversation stands."""
        return BuilderMark(
            num_rows=len(self._rows),
            num_response_tokens=len(self._row.response_ids),
            num_messages=len(self.messages),
            earlier=frozenset(self._earlier),
            turn=self._turn,
            num_forks=self.num_forks,
        )

    def copy_at(self, mark: BuilderMark) -> TokenBuilder:
        """Return a builder of the same conversation that stands where this one stood at a mark of its own."""
        copy = TokenBuilder.__new__(TokenBuilder)
        copy._template, copy._tools, copy._on_rewrite = self._template, self._tools, self._on_rewrite
        copy.messages = self.messages[: mark.num_messages]
        *earlier, last = self._rows[: mark.num_rows]
        copy._rows = [*(row.cut(len(row.response_ids)) for row in earlier), last.cut(mark.num_response_tokens)]
        copy._earlier, copy._turn, copy.num_forks = set(mark.earlier), mark.turn, mark.num_forks
        return copy

    @property
    def _row(self) -> TokenRow:
        return self._rows[-1]

    def _last_token(self) -> int | None:
        return self._row.response_ids[-1] if self._row.response_ids and self._row.response_mask[-1] else None

    def _take_turn(self, message: Message | None) -> None:
        text = self._template.tokenizer.decode(self._turn_ids(), skip_special_tokens=False)
        if message is None:
            plain = self._template.tokenizer.decode(self._turn_ids(), skip_special_tokens=True)
            message = self._template.message(plain)
        self._turn = self._template.shape_of(text, has_calls=bool(message.get("tool_calls")))
        self.messages.append(message)

    def _turn_ids(self) -> list[int]:
        """Tokens of the last turn: the sampled ones at the end of the row."""
        mask = self._row.response_mask
        start = next((place + 1 for place in range(len(mask) - 1, -1, -1) if not mask[place]), 0)
        return self._row.response_ids[start:]

    def _refusal(self, tokens: list[int] | None, whole: list[int], changed: tuple[Shape, Role] | None) -> TemplateError:
        if changed is not None:
            reason = f"the chat template changes {changed[0]} once a message of the role {changed[1]} follows"
        else:
            reason = "the turn ended with a token that the chat template has no place for"
        ours = [*self.context_ids, *(tokens or [])]
        return TemplateError(
            f"The conversation cannot go on from the sampled tokens: {reason}. "
            f"{describe_difference(self._template.tokenizer, ours, whole)} Use on_rewrite='fork' to train on the parts "
            f"as rows of their own, or 'keep' to show the model its turns as they were sampled."
        )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first place where two token sequences differ; None if they are equal."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def describe_difference(tokenizer: Tokenizer, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Return a sentence about the first token in which the incremental tokens and the template's own differ."""
    place = first_difference(ours, theirs)
    if place is None:
        return "The tokens are the same."
    before = tokenizer.decode(list(ours[max(0, place - 12) : place]), skip_special_tokens=False)
    return (
        f"First differing token: number {place}, {_name(tokenizer, ours, place)} from the sampled tokens, "
        f"{_name(tokenizer, theirs, place)} as the template renders it; before it stands {before!r}."
    )


def _name(tokenizer: Tokenizer, tokens: Sequence[int], place: int) -> str:
    if place >= len(tokens):
        return "the end"
    return f"{tokenizer.decode([tokens[place]], skip_special_tokens=False)!r} ({tokens[place]})"
