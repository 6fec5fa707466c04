"""Attempts that are lost, and why."""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Sequence
from numbers import Real
from pathlib import Path

from xrl_lite.data import RolloutState, Status, failed, find_uneven
from xrl_lite.errors import RunError

_HERE = Path(__file__).parent
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]

LOGPROBS_ARE_NEEDED = (
    "algorithm.rollout_correction, or an estimator that takes rollout_log_probs, needs the log-prob of each sampled "
    "token. Have the agent return response_logprobs, as generate gave them; or leave rollout_correction out, and the "
    "trainer does without."
)


def late(state: RolloutState, timeout_s: float | None) -> RolloutState:
    """Mark a state as lost that had not ended when its group had had its time."""
    return failed(state, "it was cancelled" if timeout_s is None else f"not ended within {timeout_s:g} s")


def describe_error(error: BaseException) -> str:
    """Return type, message, file, line and function of an error in user code."""
    place = _place_of(error)
    where = f" at {place.filename}:{place.lineno} in {place.name}" if place else ""
    return f"{type(error).__name__}: {error}{where}"


def _place_of(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != _HERE]
    own = [frame for frame in theirs if not any(Path(frame.filename).is_relative_to(path) for path in _LIBRARIES)]
    return (own or theirs or frames)[-1] if frames else None


class InitialFailures:
    """Stops a run whose agents never work: the first attempts all raise the same error in the same line.

    Args:
        limit: How many; 0 never stops it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_raised = 0
        self._first: tuple[object, str] | None = None

    def succeeded(self) -> None:
        """Note that an attempt did not raise: whatever comes is not initial any more."""
        self._limit = 0

    def raised(self, error: BaseException, told: str) -> None:
        """Count an attempt that raised.

        Args:
            error: What it raised.
            told: What is said about it.

        Raises:
            RunError: it was one too many; has the first traceback.
        """
        if not self._limit:
            return
        what = (type(error), _place_of(error))
        if self._first is None:
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._first = what, f"{told}\n{trace}"
        if what != self._first[0]:
            self._limit = 0
            return
        self._num_raised += 1
        if self._num_raised >= self._limit:
            raise RunError(
                f"The first {self._num_raised} attempts all raised the same, so training would learn nothing. The "
                f"first one: {self._first[1]}\n"
                f"Mend the agent, or set max_initial_failures of the agent loop (0 never stops the run)."
            ) from error


def refuse_untrainable(states: Sequence[RolloutState], *, needs_logprobs: bool) -> None:
    """Mark the trajectories of an attempt as lost if one of them cannot be trained on as its agent returned it.

    Args:
        states: Trajectories of one attempt.
        needs_logprobs: Whether the algorithm cannot do without log-probs.
    """
    for state in states:
        if state.status is Status.COMPLETED and (problem := _problem_of(state, needs_logprobs=needs_logprobs)):
            name = state.extra_fields.get("agent_name")
            agent = f"agent {name!r}" if name else f"the agent of task {state.task_name!r}"
            for each in states:
                failed(each, f"{agent} returned a trajectory {problem}").reward = None
            return


def _problem_of(state: RolloutState, *, needs_logprobs: bool) -> str | None:
    if needs_logprobs and not state.logprobs:
        return f"without log-probs. {LOGPROBS_ARE_NEEDED}"
    if (uneven := find_uneven(state)) is not None:
        return f"whose lists do not fit: {uneven[0]}: {uneven[1]}."
    return None


def refuse_endless_score(states: Sequence[RolloutState]) -> None:
    """Mark the trajectories of an attempt as lost if its score is no finite number: nothing can be compared with it."""
    *_, last = states
    score = (last.reward or {}).get("score")
    if last.status is Status.COMPLETED and isinstance(score, Real) and not math.isfinite(score):
        for state in states:
            failed(state, f"its score is {score}, and must be a finite number").reward = None
