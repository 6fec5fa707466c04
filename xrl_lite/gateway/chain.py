"""Conversations of a session as tokens, and the choice of the one that a request goes on with.

::

    chain     U1  A1  T1  A2            history: every message up to the last turn
                      |   '-- tip       `turn_start`: where the last turn begins
                      '-- mark          from here the last turn can be sampled anew

    request   U1 A1 T1 A2 U3            goes on       (exact: the whole history is there)
              U1 A1 T1 U2'              rolls back    (the last turn was replaced)
              U1 A1 T1                  a new chain   (another sample of the same prompt)
              U1' ...                   a new chain

A chain that a request is extending is reserved: another request that would fit begins a chain of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from xrl_lite.data.chat_template import ROLES, ChatTemplate
from xrl_lite.data.token_builder import BuilderMark, Continuation, OnRewrite, TokenBuilder, TokenRow
from xrl_lite.data.tokenizer import Message, Tokenizer
from xrl_lite.gateway.prefix import extend
from xrl_lite.gateway.turn import FinishReason, Trajectory, TurnRequest
from xrl_lite.tools import ToolSchema

EndedBy = Literal["session", "rewrite", "max_trajectory_length"]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One turn as it came from the engine, with the messages that stand for it."""

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    template_message: Message
    """As the template renders it."""
    client_message: Message
    """As the client got it, and will send it back."""


class Chain(Protocol):
    """A conversation that may go on."""

    is_reserved: bool
    """A request is extending it."""
    ended_by: EndedBy
    """Other than "session": it does not go on."""
    updated: int
    """Number of the session's turn that extended it last."""

    def trajectories(self) -> list[Trajectory]:
        """Return its trainable rows."""
        ...


class Step(Protocol):
    """A turn that is about to be sampled. The chain is as it was until `commit`."""

    @property
    def chain(self) -> Chain:
        """What it extends; a chain of no turns where a new one begins."""
        ...

    context_ids: list[int]
    """What the model sees."""
    is_new: bool
    """Whether the chain is new."""

    def commit(self, sampled: Sampled, *, updated: int) -> None:
        """Add the turn."""
        ...


@dataclass(eq=False)
class ChatChain:
    """A conversation of messages."""

    builder: TokenBuilder
    tools: list[ToolSchema] | None
    tools_key: bytes
    num_messages: int = 0
    """Length of the history, the last turn included; 0 before the first turn."""
    tip: bytes = b""
    """Hash of the history."""
    turn_start: int = 0
    """Messages before the last turn."""
    turn_start_hash: bytes = b""
    """Hash of these."""
    mark: BuilderMark | None = None
    """The builder behind the turn before the last one; None where there is only one."""
    num_marked: int = 0
    """Messages up to there."""
    is_reserved: bool = False
    ended_by: EndedBy = "session"
    updated: int = 0
    finishes: list[FinishReason] = field(default_factory=list[FinishReason])
    """How the last turn of each row ended."""

    def trajectories(self) -> list[Trajectory]:
        rows = self.builder.all_rows()
        return [
            _trajectory(
                row,
                messages=self.builder.messages,
                tools=self.tools,
                finish_reason=self.finishes[number],
                ended_by="rewrite" if number < len(rows) - 1 else self.ended_by,
            )
            for number, row in enumerate(rows)
            if row.num_sampled
        ]


@dataclass(kw_only=True)
class ChatStep:
    """The next turn of a `ChatChain`."""

    chain: ChatChain
    builder: TokenBuilder
    """What is extended: the chain's own, or a copy that stands before the turn that is replaced."""
    continuation: Continuation | None
    """What is said first; None for a new chain, whose builder holds it already."""
    hashes: list[bytes]
    """Of the prefixes of the request."""
    context_ids: list[int]
    is_new: bool

    def commit(self, sampled: Sampled, *, updated: int) -> None:
        chain, builder = self.chain, self.builder
        if self.is_new:
            chain.mark = None
        else:
            chain.mark, chain.num_marked = builder.mark(), len(self.hashes) - 1 - len(self._said)
            builder.accept(self._continuation)
        builder.add_sampled(
            sampled.token_ids,
            sampled.logprobs,
            message=sampled.template_message,
            policy_versions=sampled.policy_versions,
        )
        chain.builder = builder
        chain.turn_start, chain.turn_start_hash = len(self.hashes) - 1, self.hashes[-1]
        chain.num_messages, chain.tip = len(self.hashes), extend(self.hashes[-1], sampled.client_message)
        chain.updated = updated
        del chain.finishes[builder.num_rows - 1 :]
        chain.finishes.append(sampled.finish_reason)

    @property
    def _continuation(self) -> Continuation:
        assert self.continuation is not None, "only new chains have none"
        return self.continuation

    @property
    def _said(self) -> list[Message]:
        return self._continuation.messages


class ChatChains:
    """Begins and continues conversations.

    Args:
        template: Of the model.
        on_rewrite: What to do where the template changes earlier turns.
        allows_rollback: Whether a last turn may be replaced.
    """

    def __init__(self, template: ChatTemplate, *, on_rewrite: OnRewrite, allows_rollback: bool) -> None:
        self._template = template
        self._on_rewrite: OnRewrite = on_rewrite
        self._allows_rollback = allows_rollback

    def step(self, chains: Iterable[Chain], request: TurnRequest, hashes: list[bytes], tools_key: bytes) -> ChatStep:
        """Choose what a request goes on with, and render what is new in it.

        Raises:
            TemplateError: the template refuses the messages.
        """
        found = select(chains, hashes, tools_key, allows_rollback=self._allows_rollback)
        if found is not None:
            chain, is_exact = found
            begin = chain.num_messages if is_exact else chain.num_marked
            said = request.messages[begin:]
            if all(message["role"] in ROLES for message in said):  # turns that were not sampled are part of a prompt
                return self._going_on(chain, said, hashes, is_exact=is_exact)
        messages = [with_reasoning(self._template, message) for message in request.messages]
        builder = TokenBuilder(self._template, messages, tools=request.tools, on_rewrite=self._on_rewrite)
        return ChatStep(
            chain=ChatChain(builder, request.tools, tools_key),
            builder=builder,
            continuation=None,
            hashes=hashes,
            context_ids=builder.context_ids,
            is_new=True,
        )

    def _going_on(self, chain: ChatChain, said: list[Message], hashes: list[bytes], *, is_exact: bool) -> ChatStep:
        builder = chain.builder
        if not is_exact:
            assert chain.mark is not None, "selected for it"
            builder = builder.copy_at(chain.mark)
        continuation = builder.propose(said)
        context = continuation.token_ids if continuation.forks else [*builder.context_ids, *continuation.token_ids]
        return ChatStep(
            chain=chain,
            builder=builder,
            continuation=continuation,
            hashes=hashes,
            context_ids=context,
            is_new=False,
        )


def with_reasoning(template: ChatTemplate, message: Message) -> Message:
    """Return a message with its reasoning where the template looks for it: under its key, or marked in the content."""
    if "reasoning_content" not in message:
        return message
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    reasoning, key = message["reasoning_content"], template.rules.reasoning_key
    if key is not None:
        return {**changed, key: reasoning}
    opening, closing = template.rules.reasoning_marks
    return {**changed, "content": f"{opening}\n{reasoning}\n{closing}\n\n{message['content']}"}


def select(
    chains: Iterable[Chain], hashes: Sequence[bytes], tools_key: bytes, *, allows_rollback: bool
) -> tuple[ChatChain, bool] | None:
    """Return the chain that a request goes on with, and whether its whole history is in the request.

    The deepest match wins; of equally deep ones an exact match, then the one that was extended last. A roll-back counts
    only where there is no other equally deep one: it would be a guess which of them is meant. None: a new chain.

    Args:
        chains: All of the session.
        hashes: Of the prefixes of the request.
        tools_key: Stands for the tools of the request.
        allows_rollback: Whether a last turn may be replaced.
    """
    length = len(hashes) - 1
    exact: list[tuple[int, int, ChatChain]] = []
    rollbacks: list[tuple[int, ChatChain]] = []
    for chain in chains:
        if not isinstance(chain, ChatChain) or chain.is_reserved or chain.ended_by != "session":
            continue
        start = chain.turn_start
        if chain.tools_key != tools_key or start >= length or hashes[start] != chain.turn_start_hash:
            continue
        if chain.num_messages <= length and hashes[chain.num_messages] == chain.tip:
            exact.append((chain.num_messages, chain.updated, chain))
        elif allows_rollback and chain.mark is not None:
            rollbacks.append((start, chain))
    best = max(exact, key=lambda found: found[:2], default=None)
    deepest = max((depth for depth, _ in rollbacks), default=0)
    if best is not None and best[0] >= deepest:
        return best[2], True
    at_depth = [chain for depth, chain in rollbacks if depth == deepest]
    return (at_depth[0], False) if len(at_depth) == 1 else None


@dataclass(eq=False)
class RawChain:
    """A prompt of text or tokens, and what was sampled behind it, for requests without messages."""

    row: TokenRow
    text: str | None
    """Prompt and completion as text; None where the prompt came as tokens."""
    is_reserved: bool = False
    ended_by: EndedBy = "session"
    updated: int = 0
    finish_reason: FinishReason = "stop"

    def trajectories(self) -> list[Trajectory]:
        return [
            _trajectory(self.row, messages=[], tools=None, finish_reason=self.finish_reason, ended_by=self.ended_by)
        ]


@dataclass(kw_only=True)
class RawStep:
    """The next completion of a `RawChain`."""

    chain: RawChain
    said: list[int]
    """Tokens behind those of the chain."""
    text: str | None
    """The whole prompt as text."""
    context_ids: list[int]
    is_new: bool

    def commit(self, sampled: Sampled, *, updated: int) -> None:
        chain, row = self.chain, self.chain.row
        row.add(self.said, None, (row.policy_versions[-1:] or [0]) * len(self.said))
        row.add(sampled.token_ids, sampled.logprobs, sampled.policy_versions)
        if self.text is not None:
            chain.text = self.text + sampled.client_message["content"]
        chain.updated, chain.finish_reason = updated, sampled.finish_reason


def raw_step(chains: Iterable[Chain], prompt: str | list[int], tokenizer: Tokenizer) -> RawStep:
    """Choose what a raw prompt goes on with: the longest conversation that it begins with."""
    fitting = [
        chain
        for chain in chains
        if isinstance(chain, RawChain)
        and not chain.is_reserved
        and chain.ended_by == "session"
        and _begins_with(prompt, chain)
    ]
    if not fitting:
        ids = tokenizer.encode_text(prompt) if isinstance(prompt, str) else list(prompt)
        chain = RawChain(TokenRow(prompt_ids=ids), None)
        text = prompt if isinstance(prompt, str) else None
        return RawStep(chain=chain, said=[], text=text, context_ids=ids, is_new=True)
    chain = max(fitting, key=lambda each: (_num_tokens(each), each.updated))
    if isinstance(prompt, str):
        said = tokenizer.encode_text(prompt[len(chain.text or "") :])
    else:
        said = prompt[_num_tokens(chain) :]
    context = [*chain.row.prompt_ids, *chain.row.response_ids, *said]
    text = prompt if isinstance(prompt, str) else None
    return RawStep(chain=chain, said=said, text=text, context_ids=context, is_new=False)


def _begins_with(prompt: str | list[int], chain: RawChain) -> bool:
    """Whether a prompt is longer than a chain and goes on from it."""
    if isinstance(prompt, str):
        return chain.text is not None and len(prompt) > len(chain.text) and prompt.startswith(chain.text)
    context = [*chain.row.prompt_ids, *chain.row.response_ids]
    return chain.text is None and len(prompt) > len(context) and prompt[: len(context)] == context


def _num_tokens(chain: RawChain) -> int:
    return len(chain.row.prompt_ids) + len(chain.row.response_ids)


def _trajectory(
    row: TokenRow,
    *,
    messages: list[Message],
    tools: list[ToolSchema] | None,
    finish_reason: FinishReason,
    ended_by: EndedBy,
) -> Trajectory:
    mask = row.response_mask
    return Trajectory(
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=mask,
        response_logprobs=row.response_logprobs,
        policy_versions=row.policy_versions,
        messages=messages,
        tools=tools,
        num_turns=sum(own and not before for own, before in zip(mask, [0, *mask], strict=False)),
        finish_reason=finish_reason,
        ended_by=ended_by,
    )
