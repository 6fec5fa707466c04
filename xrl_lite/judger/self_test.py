"""A judger proves itself before the run: a right answer must score higher than a wrong one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from xrl_lite.data.rollout_state import RolloutState, Status
from xrl_lite.errors import JudgerError
from xrl_lite.judger.base import BaseJudger, label_of
from xrl_lite.judger.whereabouts import full_traceback

_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class SelfTestResult:
    """What a self-test saw."""

    right_response: str
    """The response that has to score higher."""
    right_score: float
    """Its score."""
    wrong_response: str
    """The response that has to score lower."""
    wrong_score: float
    """Its score."""


async def self_test(judger: BaseJudger, state: RolloutState) -> SelfTestResult | None:
    """Score a right and a wrong response to the prompt of `state`, which is left as it is; counts in no statistics.

    Both are made from the label, the wrong one from a changed label. Returns None where that is not possible: there is
    no label, or the judger does not say how a right response looks (`JudgerConfig.gold_template`, `gold_response`).

    Raises:
        JudgerError: the right one does not score higher, or one of them gets no score; both are shown.
    """
    label = label_of(state)
    if label is None:
        return None
    right = judger.gold_response(state, label)
    wrong = judger.gold_response(state, wrong_label(label))
    if right is None or wrong is None or right == wrong:
        return None
    right_score = await _score(judger, state, right, "right", label)
    wrong_score = await _score(judger, state, wrong, "wrong", label)
    if not right_score > wrong_score:
        raise JudgerError(
            f"The self-test of judger {judger.get_judger_name()!r} failed: a right answer must score higher than a "
            f"wrong one.\n  label          {_short(label)}\n  right response {_short(right)} -> score {right_score}\n"
            f"  wrong response {_short(wrong)} -> score {wrong_score}\n"
            f"Check the reward code and the ground truth; if a right response looks different, set gold_template."
        )
    return SelfTestResult(right_response=right, right_score=right_score, wrong_response=wrong, wrong_score=wrong_score)


def wrong_label(label: Any) -> str:
    """Return a label that is certainly not this one: another number if it holds one, else another text."""
    text = str(label)
    number = re.search(r"\d+(?!.*\d)", text, re.DOTALL)
    if number is None:
        return f"not {text}"
    return f"{text[: number.start()]}{int(number[0]) + 1}{text[number.end() :]}"


async def _score(judger: BaseJudger, state: RolloutState, response: str, kind: str, label: Any) -> float:
    trial = state.model_copy(update={"response": response, "status": Status.COMPLETED, "response_ids": []})
    failure: Exception | None = None
    try:
        judged = await judger.trial(trial)
    except JudgerError:
        raise
    except Exception as error:  # noqa: BLE001 - reward code may raise anything; the report names it
        failure = error
    else:
        if judged.reward is not None and judged.status is not Status.FAILED:
            return float(judged.reward["score"])
    reason = full_traceback(failure) if failure is not None else trial.error_msg
    raise JudgerError(
        f"The self-test of judger {judger.get_judger_name()!r} failed: the {kind} answer got no score.\n"
        f"  label    {_short(label)}\n  response {_short(response)}\n{reason}"
    ) from failure


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
