"""How a judgement ends, the errors that say so, and what is done with a sample that got no score.

========  ==========================================================================================
ok        the reward is there and usable
timeout   the reward code ran longer than `request_timeout`
crashed   the process it ran in died
raised    the reward code raised, or what it returned is not a reward
skipped   the reward code chose not to score the sample (raised `SkipSampleError`, or a TRL function gave None)
========  ==========================================================================================

A judgement is never turned into a score of 0 unless `on_error="zero"` asks for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from xrl_lite.errors import ActorDiedError, ActorTimeoutError, JudgerError, XrlLiteError
from xrl_lite.judger.whereabouts import describe

OnError = Literal["fail_sample", "zero", "raise"]


class Outcome(StrEnum):
    """How a judgement ended."""

    OK = "ok"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    RAISED = "raised"
    SKIPPED = "skipped"


_VALUES = {outcome: outcome.value for outcome in Outcome}  # `value` itself takes ten times as long


class JudgementTimeoutError(XrlLiteError, TimeoutError):
    """The reward code ran longer than its limit."""


class SkipSampleError(XrlLiteError):
    """Raised by reward code that does not want to score a sample; its siblings are scored."""


class RewardValueError(XrlLiteError, AssertionError):
    """What the reward code returned is not a reward. Names the judger, the sample and the value."""


class JudgerMisuseError(XrlLiteError):
    """A judger is called in a way that cannot work for any sample. Always raised, whatever `on_error` says."""


class JudgerInputError(JudgerMisuseError, AssertionError):
    """The sample lacks what the judger needs: a response, a label, or one sample instead of a list."""


class UnsupportedCallError(JudgerMisuseError, NotImplementedError):
    """The judger does not have this method, for example `batch_judge`."""


@dataclass(frozen=True, kw_only=True)
class JudgementPolicy:
    """What a judger does about reward code that does not answer well."""

    on_error: OnError = "fail_sample"
    """fail_sample: status FAILED and no reward; zero: a score of 0.0; raise: the error is raised."""
    request_timeout: float = 30.0
    """Longest run of one judgement, in seconds, counted from when it starts to run."""
    max_initial_failures: int = 32
    """So many failures before the first success stop the run; 0 never stops it."""


@dataclass(slots=True)
class Judgement:
    """One ended judgement of one sample, or of a batch that was judged in one call. Is not changed once made."""

    judger: str
    """Name of the judger."""
    queue_s: float
    """Seconds the judgement waited before it ran."""
    run_s: float
    """Seconds the reward code ran."""
    output: Any = None
    """What the reward code returned; None unless the outcome is ok."""
    error: Exception | None = None
    """What went wrong; None if and only if the outcome is ok."""
    outcome: Outcome = Outcome.OK
    """How it ended."""

    def with_output(self, output: Any) -> Judgement:
        """Return the same judgement for one sample of a batch."""
        return replace(self, output=output)

    def explain(self, sample: object) -> str:
        """Return a sentence for people: which judger, which sample, what happened, where in the user's code."""
        what = {
            Outcome.TIMEOUT: "ran too long",
            Outcome.CRASHED: "its process died",
            Outcome.RAISED: "raised",
            Outcome.SKIPPED: "skipped the sample",
        }[self.outcome]
        reason = f": {describe(self.error)}" if self.error is not None else ""
        return f"judger {self.judger!r}, sample {sample}: {what}{reason}"

    def record(self, sample: object) -> dict[str, Any]:
        """Return the plain values that are kept with the sample."""
        return {
            "judger": self.judger,
            "outcome": _VALUES[self.outcome],
            "run_s": self.run_s,
            "queue_s": self.queue_s,
            "error": None if self.error is None else self.explain(sample),
        }


def classify(error: Exception) -> Outcome:
    """Return the outcome that an exception out of `judge_payload` stands for."""
    match error:
        case ActorTimeoutError() | JudgementTimeoutError():
            return Outcome.TIMEOUT
        case ActorDiedError():
            return Outcome.CRASHED
        case SkipSampleError():
            return Outcome.SKIPPED
        case _:
            return Outcome.RAISED


def ended_by(error: BaseException) -> Exception:
    """Return an error for what reward code raised and no `except Exception` would catch: it fails one sample."""
    failure = RuntimeError(f"the reward code raised {error!r}, which would end more than this judgement")
    failure.__cause__ = error
    return failure


def no_worker_left(judger: str, error: Exception) -> JudgerError:
    """Return the error that ends a run whose judger has lost all its workers."""
    return JudgerError(f"judger {judger!r} has no worker process left, so nothing can be judged any more: {error}")
