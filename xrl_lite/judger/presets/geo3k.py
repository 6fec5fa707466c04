"""Geometry3K: an answer in a box behind a think block; most of the score is the answer, a part is the form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from xrl_lite.judger.config import JudgerConfig, RewardCode
from xrl_lite.judger.math_answers import last_boxed
from xrl_lite.judger.presets.math import LONGEST_ANSWER, is_equivalent, require_library

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``(1 - f) * acc + f * form`` with f = ``extra_info["format_score"]``.

    ``use_boxed`` False compares the end of the response instead of what is in the box.
    """
    share = extra_info.get("format_score", 0.1)
    answer = last_boxed(response) if extra_info.get("use_boxed", True) else response[-LONGEST_ANSWER:]
    acc = 1.0 if answer is not None and is_equivalent(answer, str(label)) else 0.0
    form = 1.0 if _FORM.fullmatch(response.strip()) else 0.0
    return {"score": (1.0 - share) * acc + share * form, "acc": acc}


def _default_extra_info() -> dict[str, Any]:
    return {"format_score": 0.1, "use_boxed": True}


class GEO3KJudgerConfig(JudgerConfig):
    r"""Compares the answer in the last ``\boxed{}`` with the label, and rewards the form a little.

    Needs ``pip install 'xrl-lite[math]'``; see `MathJudgerConfig`.
    """

    judger_name: str = "hiyouga/geometry3k"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    extra_info: dict[str, Any] = Field(default_factory=_default_extra_info, exclude=True)
    """``format_score``: share of the score given for the form; ``use_boxed``: whether the answer stands in a box."""

    @model_validator(mode="after")
    def _library_is_there(self) -> Self:
        require_library("geo3k")
        return self

    def gold_response(self, label: Any) -> str | None:
        """Return the label in a box behind an empty think block."""
        return f"<think></think>\\boxed{{{label}}}" if self.extra_info.get("use_boxed", True) else str(label)
