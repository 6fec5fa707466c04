r"""Mathematics with a short final answer: a number, a fraction, a list, a bit of LaTeX.

Needs no library: it works in any thread or process and has no alarm of its own, since the judger holds the time limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from xrl_lite.judger.config import CallableOrPath, JudgerConfig
from xrl_lite.judger.math_answers import final_answer, same_answer


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the final answer of the response, or else all of it, with the label."""
    answer = final_answer(response)
    is_right = same_answer(response if answer is None else answer, str(label))
    return {"score": 1.0 if is_right else 0.0, "acc": is_right}


class MathJudgerConfig(JudgerConfig):
    r"""1.0 if the answer in ``\boxed{}``, behind ``####`` or behind "answer is" equals the label; else 0.0."""

    judger_name: str = "math"
    """Name in messages and metrics."""

    reward_handler: CallableOrPath | None = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    def gold_response(self, label: Any) -> str | None:
        """Return the label in a box."""
        return f"\\boxed{{{label}}}"
