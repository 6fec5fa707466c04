"""A judger proves itself before the run: a right answer must score higher than a wrong one.

Where nobody says how a right answer looks, the bare label is tried. That may be wrong of what the judger looks at, its
length for example, so that it proves something but refutes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from xrl_lite.data.rollout_state import RolloutState, Status
from xrl_lite.errors import JudgerError
from xrl_lite.judger.base import BaseJudger, label_of, other_label
from xrl_lite.judger.whereabouts import full_traceback

_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A right and a wrong response, and what they got."""

    right_response: str
    """The response that has to score higher."""
    right_score: float
    """Its score."""
    wrong_response: str
    """The response that has to score lower."""
    wrong_score: float
    """Its score."""

    @property
    def is_passed(self) -> bool:
        """Whether the right one scored higher."""
        return self.right_score > self.wrong_score


@dataclass(frozen=True, kw_only=True)
class SelfTestResult:
    """What a self-test saw."""

    judger: str
    """Name of the judger."""
    trial: Trial | None = None
    """The two responses; None where there was no test."""
    reason: str = ""
    """Why there was none."""

    @property
    def is_passed(self) -> bool:
        """Whether a right response scored higher than a wrong one."""
        return self.trial is not None and self.trial.is_passed

    def explain(self) -> str:
        """Return a line for a person."""
        if self.trial is None:
            return f"judger {self.judger!r} was not tested: {self.reason}"
        if self.is_passed:
            return f"judger {self.judger!r} passed its self-test"
        trial = self.trial
        return (
            f"warning: judger {self.judger!r} scores {trial.right_score:g} for the label "
            f"{_short(trial.right_response)} and {trial.wrong_score:g} for {_short(trial.wrong_response)}. "
            f"If it should tell right from wrong, check it, or say by gold_template how a right response looks"
        )


def summarize(results: Iterable[SelfTestResult]) -> list[str]:
    """Return a line about each judger: what it passed with one row or another counts, then what it did not."""
    by_judger: dict[str, SelfTestResult] = {}
    for result in results:
        known = by_judger.setdefault(result.judger, result)
        if _rank(result) > _rank(known):
            by_judger[result.judger] = result
    return [result.explain() for result in by_judger.values()]


def _rank(result: SelfTestResult) -> tuple[bool, bool]:
    return result.is_passed, result.trial is not None


async def self_test(judger: BaseJudger, state: RolloutState) -> list[SelfTestResult]:
    """Score a right and a wrong response to the prompt of `state`, which is left as it is; counts in no statistics.

    Each judger that the state goes to is tested by itself. The responses are made from the label (the wrong one from
    another label). Where nobody says how a right response looks (`JudgerConfig.gold_template`, `gold_response`), a
    function is tried with the label itself, and whatever comes of it is no error.

    Raises:
        JudgerError: the right one does not score higher, or one of them gets no score; both are shown.
    """
    label = label_of(state)
    return [await _test(part, state, label) for part in judger.parts(state)]


async def _test(judger: BaseJudger, state: RolloutState, label: Any) -> SelfTestResult:
    name = judger.get_judger_name()
    if label is None:
        return SelfTestResult(judger=name, reason="there is no ground truth")
    right, wrong = judger.gold_response(state, label), judger.wrong_response(state, label)
    if right is None:
        return await _try_label(judger, state, label)
    if wrong is None or right == wrong:
        return SelfTestResult(judger=name, reason="no response is known to be wrong")
    trial = await _try(judger, state, right, wrong, label)
    if not trial.is_passed:
        raise JudgerError(
            f"The self-test of judger {name!r} failed: a right answer must score higher than a wrong one.\n"
            f"  label          {_short(label)}\n"
            f"  right response {_short(right)} -> score {trial.right_score}\n"
            f"  wrong response {_short(wrong)} -> score {trial.wrong_score}\n"
            f"Check the reward code and the ground truth; if a right response looks different, set gold_template."
        )
    return SelfTestResult(judger=name, trial=trial)


async def _try_label(judger: BaseJudger, state: RolloutState, label: Any) -> SelfTestResult:
    name, guess = judger.get_judger_name(), judger.gold_guess(label)
    if guess is None:
        return SelfTestResult(judger=name, reason="nobody says how a right response looks; gold_template would")
    try:
        trial = await _try(judger, state, guess, other_label(label), label)
    except JudgerError as error:
        cause = f": {error.__cause__!r}" if error.__cause__ else ""
        return SelfTestResult(
            judger=name, reason=f"the label alone gets no score{cause}. Say by gold_template how a right response looks"
        )
    return SelfTestResult(judger=name, trial=trial)


async def _try(judger: BaseJudger, state: RolloutState, right: str, wrong: str, label: Any) -> Trial:
    return Trial(
        right_response=right,
        right_score=await _score(judger, state, right, "right", label),
        wrong_response=wrong,
        wrong_score=await _score(judger, state, wrong, "wrong", label),
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
