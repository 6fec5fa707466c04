"""GSM8K: grade-school word problems whose answer stands behind ``####``.

Unlike the reward functions of verl and XTuner this looks at the whole response and compares numbers, not texts: a long
remark behind the answer, a full stop, ``42.0`` for ``42`` or a currency sign do not make a right answer wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from xrl_lite.judger.config import JudgerConfig, RewardCode
from xrl_lite.judger.math_answers import final_answer, last_number, same_answer

_MARKUP = r"(?:[$*`:(\[{=~]|\\(?:boxed|text|\$|\(|\[)|\s(?!\n))*"
_NUMBER = r"[-\N{MINUS SIGN}]?\s?[$]?\s?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.?\d+)?(?:/\d+)?"
_MARKED = re.compile(rf"####{_MARKUP}({_NUMBER})")


def extract_solution(response: str, method: str = "strict") -> str | None:
    """Return the answer of a response, or None.

    Args:
        response: The whole response.
        method: "strict" takes the number behind the last ``####``. "flexible" also takes a boxed or announced answer,
            and else the last number of the text.
    """
    marked = [match.replace("$", "").replace(" ", "") for match in _MARKED.findall(response)]
    marked = [number for number in marked if any(map(str.isdigit, number))]
    if marked or method == "strict":
        return marked[-1] if marked else None
    announced = final_answer(response)
    number = last_number(announced) if announced is not None else None
    return number or last_number(response)


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Score a response: ``extra_info["score"]`` if it is right, ``["format_score"]`` if only the form is, else 0.

    ``extra_info["method"]`` is "strict" or "flexible"; see `extract_solution`.
    """
    answer = extract_solution(response, extra_info.get("method", "strict"))
    if answer is None:
        return {"score": 0}
    is_right = same_answer(answer, str(label))
    return {"score": extra_info.get("score", 1) if is_right else extra_info.get("format_score", 0)}


def _default_extra_info() -> dict[str, Any]:
    return {"score": 1, "format_score": 0}


class GSM8KJudgerConfig(JudgerConfig):
    """Compares the number behind the last ``####`` with the label."""

    judger_name: str = "openai/gsm8k"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    extra_info: dict[str, Any] = Field(default_factory=_default_extra_info, exclude=True)
    """``score`` of a right answer, ``format_score`` of a wrong one in the right form, ``method`` strict or flexible."""

    def gold_response(self, label: Any) -> str | None:
        """Return the label behind ``####``."""
        return f"#### {label}"
