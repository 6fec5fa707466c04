"""Questions whose answer is a short text: exact match after normalising, as for SQuAD.

Reference: Rajpurkar et al., SQuAD, https://arxiv.org/abs/1606.05250 (normalising); Jin et al., Search-R1,
https://arxiv.org/abs/2503.09516 (the last ``<answer>``).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import Field

from xrl_lite.judger.config import JudgerConfig, RewardCode

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and needless spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Score 1.0 if the last ``<answer>`` is one of the right answers: a text, a list, or ``{"target": ...}``."""
    targets = cast("Mapping[str, Any]", label).get("target") if isinstance(label, Mapping) else label
    right = [targets] if isinstance(targets, str) else list(cast("Sequence[Any]", targets))
    given = _ANSWER.findall(response)
    is_right = bool(given) and normalize_answer(given[-1]) in {normalize_answer(str(text)) for text in right}
    return {"score": 1.0 if is_right else 0.0, "acc": is_right}


class SearchQAJudgerConfig(JudgerConfig):
    """1.0 if the text in the last ``<answer>`` is a right answer, but for case, punctuation and articles."""

    judger_name: str = "search_qa"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    def gold_response(self, label: Any) -> str | None:
        """Return the first right answer in its tags."""
        targets = cast("Mapping[str, Any]", label).get("target") if isinstance(label, Mapping) else label
        first = targets if isinstance(targets, str) else next(iter(cast("Sequence[Any]", targets or ())), None)
        return None if first is None else f"<answer>{first}</answer>"
