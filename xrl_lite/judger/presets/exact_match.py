"""Scores 1.0 if the response is the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from xrl_lite.judger.config import JudgerConfig, RewardCode


def compute_reward(response: str, label: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the texts, without the white space around them."""
    is_right = response.strip() == str(label).strip()
    return {"score": 1.0 if is_right else 0.0, "acc": is_right}


class ExactMatchJudgerConfig(JudgerConfig):
    """1.0 if the response equals the label, white space around them aside; else 0.0."""

    judger_name: str = "exact_match"
    """Name in messages and metrics."""

    reward_handler: RewardCode = Field(default_factory=lambda: compute_reward, exclude=True)
    """What scores."""

    def gold_response(self, label: Any) -> str | None:
        """Return the label."""
        return str(label)
