"""DAPO's mathematics: the last ``Answer:`` line, +1 or -1, less a penalty for responses near the length limit.

Reference: DAPO, https://arxiv.org/abs/2503.14476, section 3.4 (soft overlong punishment).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from xrl_lite.judger.adapters import XtunerReward
from xrl_lite.judger.base import Judger
from xrl_lite.judger.config import JudgerConfig, RewardCode
from xrl_lite.judger.math_answers import last_boxed, same_answer
from xrl_lite.judger.outcome import RewardValueError

_ANSWER = re.compile(r"answer[\s*]*+:[\s*]*+([^\n]+)", re.IGNORECASE)
_MATH = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$")
_UNITS = re.compile(
    r"\ban?\s+(?=[a-z]{2})|\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|"
    r"pounds|meters|meals|edges|students|multiples)\b"
)


def normalize_answer(answer: str) -> str:
    r"""Return an answer as it is compared: the first ``$..$``, in it a ``\boxed{}``, and of that what follows ``=``.

    Articles, units and quotation marks are left out.
    """
    math = _MATH.search(answer)
    text = math[1] if math is not None else answer
    text = last_boxed(text) or text
    return _UNITS.sub("", text.split("=")[-1].replace('"', "")).strip()


def overlong_penalty(num_tokens: int, *, max_response_len: int, buffer_len: int, factor: float) -> float:
    """Return 0 up to the buffer, then falling to ``-factor`` where the buffer ends, and further below beyond it."""
    exceeded = num_tokens - (max_response_len - buffer_len)
    return min(-exceeded / buffer_len * factor, 0.0)


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Score the last ``Answer:`` line of a response, wherever it stands, and take the overlong penalty off."""
    answers = _ANSWER.findall(_without_eos(response, extra_info.get("eos_token", ())))
    is_right = bool(answers) and same_answer(normalize_answer(answers[-1]), normalize_answer(str(label)))
    score = float(extra_info.get("score", 1)) if is_right else -1.0
    if extra_info.get("enable_overlong_buffer"):
        score += overlong_penalty(
            _count_tokens(response, extra_info),
            max_response_len=extra_info["max_response_len"],
            buffer_len=extra_info["overlong_buffer_len"],
            factor=extra_info["overlong_penalty_factor"],
        )
    return {"score": score, "acc": is_right}


class DapoReward(XtunerReward):
    """The reward function, with the sampled tokens of the response, so that none has to be encoded again."""

    needs = frozenset({"response_ids"})


class DapoMathJudgerConfig(JudgerConfig):
    """+1 or -1 by the last ``Answer:`` line, with DAPO's penalty for long responses."""

    judger_name: str = "dapo_math"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    eos_token: list[str] | str
    """Texts that end a response; one of them is cut off before the answer is read."""

    enable_overlong_buffer: bool
    """Whether long responses are punished."""

    score: int = 1
    """Score of a right answer; a wrong one scores -1."""

    format_score: int = 0
    """Has no effect; kept so that XTuner configs load."""

    max_response_len: int | None = Field(default=None, gt=0)
    """Longest response, in tokens."""

    overlong_buffer_len: int | None = None
    """Length of the stretch before `max_response_len` in which the penalty grows, in tokens."""

    overlong_penalty_factor: float | None = None
    """Penalty at the end of that stretch."""

    tokenizer: Any = Field(default=None, exclude=True)
    """Counts the tokens of a response that comes without `response_ids`; otherwise not needed."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        eos = [self.eos_token] if isinstance(self.eos_token, str) else self.eos_token
        assert eos, "eos_token list must not be empty"
        assert all(token.strip() for token in eos), "eos_token must not be an empty string"
        if self.enable_overlong_buffer:
            assert self.max_response_len is not None, "max_response_len is required."
            assert self.overlong_buffer_len is not None, "overlong_buffer_len is required."
            assert self.overlong_penalty_factor is not None, "overlong_penalty_factor is required."
            assert 0 < self.overlong_buffer_len <= self.max_response_len, (
                f"overlong_buffer_len must be between 1 and max_response_len={self.max_response_len}, "
                f"got {self.overlong_buffer_len}. Without a buffer set enable_overlong_buffer to false."
            )
        return self

    def build_local(self) -> Judger:
        """Return the judger, with the settings above in its `extra_info`."""
        names = ("eos_token", "score", "enable_overlong_buffer", "max_response_len", "overlong_buffer_len")
        own = {name: getattr(self, name) for name in (*names, "overlong_penalty_factor", "tokenizer")}
        handler = DapoReward(self.reward_handler) if callable(self.reward_handler) else self.reward_handler
        return self.native(handler, {**self.extra_info, **own})

    def gold_response(self, label: Any) -> str | None:
        """Return the label behind ``Answer:``, unless it has several lines."""
        return None if "\n" in str(label) else f"Answer: {label}"


def _without_eos(response: str, eos_token: str | Sequence[str]) -> str:
    for token in [eos_token] if isinstance(eos_token, str) else eos_token:
        if response.endswith(token):
            return response.removesuffix(token)
    return response


def _count_tokens(response: str, extra_info: Mapping[str, Any]) -> int:
    token_ids = extra_info.get("response_ids")
    if token_ids is not None:
        return len(token_ids)
    tokenizer = extra_info.get("tokenizer")
    if tokenizer is None:
        raise RewardValueError("the overlong penalty needs response_ids of the sample, or a tokenizer")
    return len(tokenizer(response)["input_ids"])
