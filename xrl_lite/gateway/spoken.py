"""What of a turn is certain while it is still being sampled, so that it can be streamed.

::

    tokens --> text --> before the first call --> reasoning, and behind it text --> before a stop

Whatever may become something else is held back: half of a character; white space at the end; what may be the beginning
of a call, of a mark of reasoning or of a stop. A turn that was sampled to its end begins with all that was certain
before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.tokenizer import TextStream, Tokenizer


class TokenLogprob(NamedTuple):
    """A sampled token, as clients are told of it."""

    text: str
    """Its text by itself."""
    logprob: float
    """Log-probability with which it was sampled."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a turn has said so far."""

    reasoning: str | None = None
    """What it thought first; None where it did not."""
    text: str = ""
    """What it said, without reasoning and calls."""
    sampled: Sequence[TokenLogprob] = field(default=(), compare=False)
    """The tokens of the turn, to which more may be added; none where nobody asked for log-probs."""
    num_tokens: int = 0
    """How many of them all of this, marks included, was said with."""

    @property
    def tokens(self) -> tuple[TokenLogprob, ...]:
        """The tokens that all of this was said with."""
        return self.tokens_from(0)

    def tokens_from(self, start: int) -> tuple[TokenLogprob, ...]:
        """Return those of `tokens` from a place on; costs no more than they are many."""
        return tuple(self.sampled[start : self.num_tokens])

    def continues(self, earlier: Said) -> bool:
        """Return whether nothing that was said earlier has become untrue; some formats leave reasoning out at last."""
        thought = self.reasoning is None or self.reasoning.startswith(earlier.reasoning or "")
        sampled = self.tokens[: earlier.num_tokens] == earlier.tokens
        return thought and sampled and self.text.startswith(earlier.text)


class Spoken:
    """A turn that is being sampled.

    Args:
        tokenizer: Of the model.
        template: Says what reasoning looks like; None for completions, which have none.
        skip_special_tokens: Leave marks of the format out of the text.
        marks: What calls begin with; None where only the whole turn tells.
        stops: Texts that end the turn.
        with_logprobs: Tell of tokens, too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None,
        skip_special_tokens: bool,
        marks: Sequence[str] | None,
        stops: Sequence[str],
        with_logprobs: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._template = template
        self._marks = marks
        self._stops = stops
        self._with_logprobs = with_logprobs
        self._new: list[int] = []
        self._tokens: list[TokenLogprob] = []
        self._ends: list[int] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take tokens that were sampled."""
        if not self._with_logprobs:
            self._new += token_ids
            return
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self._stream.add([token])
            self._tokens.append(TokenLogprob(self._tokenizer.decode([token], False), logprob))
            self._ends.append(len(self._stream.text))

    def said(self) -> Said:
        """Return what is certain by now."""
        if self._marks is None:
            return Said()
        if self._new:
            self._stream.add(self._new)
            self._new = []
        certain = _before(self._stream.text, self._marks)
        reasoning, text = None, certain
        if self._template is not None:
            opening, closing = self._template.rules.reasoning_marks
            if closing not in certain:
                certain = _before(certain, [closing])
            if opening.startswith(certain.lstrip()):
                return Said()  # nobody knows yet whether it thinks
            reasoning, text = split_turn(self._template, certain)
        if self._marks and reasoning is None and text[:1].isspace():
            return Said()  # it is left out if there are calls
        shown = _before(text, self._stops).rstrip()
        num_tokens = bisect_right(self._ends, len(certain) - (len(text) - len(shown)))
        return Said(reasoning=reasoning, text=shown, sampled=self._tokens, num_tokens=num_tokens)


def split_turn(template: ChatTemplate, text: str) -> tuple[str | None, str]:
    """Return the reasoning that a turn begins with, cut off or whole, None if it has none; and the rest."""
    opening, closing = template.rules.reasoning_marks
    begun = text.lstrip()
    if not template.rules.prompt_opens_reasoning and not begun.startswith(opening):
        return None, text
    reasoning, _, rest = begun.removeprefix(opening).partition(closing)
    return reasoning.strip(), rest.lstrip()


def _before(text: str, marks: Iterable[str]) -> str:
    """Return a text before the first of the marks, and before what may become one of them."""
    end = len(text)
    for mark in marks:
        found = text.find(mark)
        if found < 0:
            found = next((len(text) - n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), end)
        end = min(end, found)
    return text[:end]
