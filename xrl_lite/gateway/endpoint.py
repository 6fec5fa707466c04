"""What the endpoints of all vendors have in common: a body becomes a request for a turn, a turn becomes an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from xrl_lite.gateway.refusal import Refusal
from xrl_lite.gateway.turn import TurnRequest, TurnResult


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was read."""

    model: str
    """The name it uses for the model, and gets back."""
    turn: TurnRequest
    """What it asks for."""
    stream: bool
    """It wants the answer as a stream of events."""
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

    def events(self, asked: Asked, result: TurnResult) -> Iterator[bytes]:
        """Yield the answer as a stream."""
        ...


def encode(value: Any) -> bytes:
    """Return a value as JSON; half of a character pair, which a model may sample, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"
