"""A judger proves itself before the run: a right answer must score higher than a wrong one."""

from __future__ import annotations

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

    judger: str
    """Name of the judger."""
    right_response: str
    """The response that has to score higher."""
    right_score: float
    """Its score."""
    wrong_response: str
    """The response that has to score lower."""
    wrong_score: float
    """Its score."""


async def self_test(judger: BaseJudger, state: RolloutState) -> list[SelfTestResult]:
    """Score a right and a wrong response to the prompt of `state`, which is left as it is; counts in no statistics.

    Each judger that the state goes to is tested by itself. The responses are made from the label (the wrong one from
    another label). A judger is left out where that is not possible: there is no label, or nobody says how a right
    response looks (`JudgerConfig.gold_template`, `gold_response`).

    Raises:
        JudgerError: the right one does not score higher, or one of them gets no score; both are shown.
    """
    label = label_of(state)
    if label is None:
        return []
    tested = [await _test(part, state, label) for part in judger.parts(state)]
    return [result for result in tested if result is not None]


async def _test(judger: BaseJudger, state: RolloutState, label: Any) -> SelfTestResult | None:
    name = judger.get_judger_name()
    right, wrong = judger.gold_response(state, label), judger.wrong_response(state, label)
    if right is None or wrong is None or right == wrong:
        return None
    right_score = await _score(judger, state, right, "right", label)
    wrong_score = await _score(judger, state, wrong, "wrong", label)
    if not right_score > wrong_score:
        raise JudgerError(
            f"The self-test of judger {name!r} failed: a right answer must score higher than a "
            f"wrong one.\n  label          {_short(label)}\n  right response {_short(right)} -> score {right_score}\n"
            f"  wrong response {_short(wrong)} -> score {wrong_score}\n"
            f"Check the reward code and the ground truth; if a right response looks different, set gold_template."
        )
    return SelfTestResult(
        judger=name, right_response=right, right_score=right_score, wrong_response=wrong, wrong_score=wrong_score
    )


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
