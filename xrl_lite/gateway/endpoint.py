"""What the endpoints of all vendors have in common: a body becomes a request for a turn, a turn becomes an answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xrl_lite.gateway.refusal import Refusal
from xrl_lite.gateway.spoken import Said, TokenLogprob
from xrl_lite.gateway.turn import TurnHead, TurnRequest, TurnResult

Tokens = Sequence[TokenLogprob]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was read."""

    model: str
    """The name it uses for the model, and gets back."""
    turn: TurnRequest
    """What it asks for."""
    include_usage: bool = False
    """The stream is to end with the number of tokens."""


class Dialect(Protocol):
    """How a vendor's clients want to be told about errors."""

    keep_alive: bytes
    """What a stream says while there is nothing to say."""

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def error_event(self, refusal: Refusal) -> bytes:
        """Return an error as the last event of a stream."""
        ...


class Endpoint(Protocol):
    """One path of a vendor's API that makes turns."""

    dialect: Dialect
    """The vendor."""

    def read(self, body: bytes) -> Asked:
        """Read a request.

        Raises:
            Refusal: it cannot be answered; says which field is wrong.
        """
        ...

    def answer(self, asked: Asked, result: TurnResult) -> dict[str, Any]:
        """Return the body of the answer."""
        ...

    def stream(self, asked: Asked, head: TurnHead) -> AnswerStream:
        """Return what writes the answer as a stream."""
        ...


class AnswerStream(ABC):
    """An answer as events, in the shape of one endpoint.

    Args:
        asked: The request.
        head: What is known of the turn before it is made.
    """

    def __init__(self, asked: Asked, head: TurnHead) -> None:
        self.sent = Said()
        """What the client was told."""
        self._asked = asked
        self._head = head
        self._has_begun = False

    def more(self, said: Said) -> bytes:
        """Return what is new; nothing where no reasoning and no text is."""
        reasoning = (said.reasoning or "")[len(self.sent.reasoning or "") :]
        text = said.text[len(self.sent.text) :]
        if not (reasoning or text):
            return b""
        tokens = said.tokens_from(self.sent.num_tokens)
        self.sent = said
        return b"".join([*self._begin(), *self._say(reasoning, text, tokens)])

    def finish(self, result: TurnResult) -> bytes:
        """Return the rest of the answer."""
        more = self.more(result.said)
        rest = result.said.tokens_from(self.sent.num_tokens)
        return b"".join([more, *self._begin(), *self._end(result, rest)])

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._open()

    @abstractmethod
    def _open(self) -> Iterator[bytes]:
        """Yield what comes first."""

    @abstractmethod
    def _say(self, reasoning: str, text: str, tokens: Tokens) -> Iterator[bytes]:
        """Yield more of what the model thinks, and then more of what it says, and with which tokens."""

    @abstractmethod
    def _end(self, result: TurnResult, tokens: Tokens) -> Iterator[bytes]:
        """Yield what comes behind the text: calls, the tokens not told of yet, and why the turn ended."""


def encode(value: Any) -> bytes:
    """Return a value as JSON; half of a character pair, which a model may sample, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"
