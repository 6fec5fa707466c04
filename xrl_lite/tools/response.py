"""What a tool answers, and how much of it the model gets to see."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from xrl_lite.errors import ToolError

TruncateSide = Literal["left", "right", "middle"]
"""Which part of a long text is cut out."""

LengthUnit = Literal["characters", "tokens"]

_MARK = "(truncated)"


@dataclass(frozen=True)
class ToolResponse:
    """What a tool answers.

    Raises:
        ValueError: images or videos are not in a list.
    """

    text: str | None = None
    """Text for the model."""
    image: list[Any] | None = None
    """Images for the model."""
    video: list[Any] | None = None
    """Videos for the model."""

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ValueError(
                    f"ToolResponse.{name} must be a list, got {type(value).__name__}. For a single one write [{name}]."
                )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.text or self.image or self.video)

    def followed_by(self, other: ToolResponse) -> ToolResponse:
        """Return both as one, this one first."""
        texts = [text for text in (self.text, other.text) if text]
        image, video = [*(self.image or []), *(other.image or [])], [*(self.video or []), *(other.video or [])]
        return ToolResponse(text="\n".join(texts) or None, image=image or None, video=video or None)


def truncate(text: str, max_length: int, side: TruncateSide) -> str:
    """Return a text of at most `max_length` characters of the original, with a mark where some are missing."""
    if len(text) <= max_length:
        return text
    match side:
        case "left":
            return f"{_MARK}...{_tail(text, max_length)}"
        case "right":
            return f"{text[:max_length]}...{_MARK}"
        case "middle":
            half = max_length // 2
            return f"{text[:half]}...{_MARK}...{_tail(text, half)}"


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """How long texts of tools are cut."""

    max_length: int | None = None
    """Longest text; None does not cut."""
    side: TruncateSide = "middle"
    """Which part is cut out."""
    unit: LengthUnit = "characters"
    """What `max_length` counts."""

    def __call__(
        self,
        text: str,
        *,
        encode: Callable[[str], list[int]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> str:
        """Return the text, cut if it is too long.

        Args:
            text: The text.
            encode: Makes tokens of a text; needed to count tokens.
            decode: Makes a text of tokens; needed to count tokens.
        """
        if self.max_length is None:
            return text
        if self.unit == "characters":
            return truncate(text, self.max_length, self.side)
        if encode is None or decode is None:
            raise ToolError("Texts of tools can be cut by tokens only where there is a tokenizer. Use characters.")
        return self._by_tokens(text, self.max_length, encode, decode)

    def _by_tokens(
        self, text: str, limit: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
    ) -> str:
        tokens = encode(text)
        if len(tokens) <= limit:
            return text
        match self.side:
            case "left":
                return f"{_MARK}...{decode(_tail(tokens, limit))}"
            case "right":
                return f"{decode(tokens[:limit])}...{_MARK}"
            case "middle":
                half = limit // 2
                return f"{decode(tokens[:half])}...{_MARK}...{decode(_tail(tokens, half))}"


def read_return(value: object) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Return response, reward and metrics that the return value of a tool stands for.

    Understood are a `ToolResponse`, a text, a dict (as JSON), anything else by its ``str``, and tuples of one of these
    alone, with a reward, or with a reward and a dict of metrics. A reward of None counts as 0.0.

    Raises:
        TypeError: a tuple of another length, a reward that is no number, or metrics that are no dict.
    """
    if not isinstance(value, tuple):
        return _read_response(value), 0.0, {}
    parts = list(cast("tuple[object, ...]", value))
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            f"A tool returned a tuple of {len(parts)} values. Return a response, (response, reward), or "
            f"(response, reward, metrics)."
        )
    reward = parts[1] if len(parts) > 1 else None
    metrics: object = parts[2] if len(parts) > 2 else {}
    if reward is not None and not isinstance(reward, int | float):
        raise TypeError(f"The reward of a tool must be a number or None, got {reward!r}.")
    if not isinstance(metrics, dict):
        raise TypeError(f"The metrics of a tool must be a dict, got {metrics!r}.")
    return _read_response(parts[0]), float(reward or 0.0), cast("dict[str, Any]", metrics)


def _read_response(value: object) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, dict):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False, default=str))
    return ToolResponse(text=value if isinstance(value, str) else str(value))


def _tail(sequence: Any, length: int) -> Any:
    kept: Sequence[Any] = sequence[len(sequence) - length :]  # [-0:] would be everything
    return kept
