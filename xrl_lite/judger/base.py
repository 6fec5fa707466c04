"""The interface of judgers, and the template that all judgers with a payload follow.

::

    judge(state) = preprocess(state) -> judge_payload(payload) -> postprocess(state, output)
                   caller's process     anywhere                  caller's process

Only the payload and the output travel; a state is never copied. `judge` returns the state it was given, and calls
`judge_payload` once.

Where payloads run in workers or in a thread, the two steps in the caller's process are taken for many states in a row,
in the task of one of them or in none, so they must not go by what belongs to a task.

What `judge_payload` raises does not leave `judge`: it becomes the outcome of this one judgement, and the policy of the
judger says what happens to the sample. Misuse is raised: no response, no label, bad routing, a method that is not
there, a list where one output belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from string import digits
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, cast

import anyio

from xrl_lite.data.rollout_state import RolloutState, Status
from xrl_lite.errors import ActorUnavailableError, JudgerError, is_being_cancelled
from xrl_lite.judger.ledger import Ledger, Statistics
from xrl_lite.judger.outcome import (
    Judgement,
    JudgementPolicy,
    JudgementTimeoutError,
    JudgerMisuseError,
    Outcome,
    UnsupportedCallError,
    classify,
    ended_by,
    no_worker_left,
)
from xrl_lite.judger.rate_limit import RateLimiter
from xrl_lite.judger.reward_check import check_reward
from xrl_lite.judger.stopwatch import Item, Stopwatch, running_stopwatch
from xrl_lite.judger.whereabouts import name_dynamic_code

if TYPE_CHECKING:
    from xrl_lite.judger.company import Company
    from xrl_lite.judger.gate import Gate

JudgerPayload: TypeAlias = dict[str, Any]
JudgerPayloadBatch: TypeAlias = JudgerPayload | list[JudgerPayload]
JudgerOutput: TypeAlias = dict[str, Any]
JudgerOutputBatch: TypeAlias = JudgerOutput | list[JudgerOutput]


_LAST_DIGITS = 100
"""Digits of a label that are read as a number; Python reads no number of thousands of them."""


class BaseJudger:
    """Scores rollout states. Whoever inherits only this owns the whole flow, and cannot be a branch or run remotely."""

    _judger_name: str | None = None

    def __init__(self, judger_name: str | None = None) -> None:
        self._judger_name = judger_name or type(self).__name__

    def get_judger_name(self) -> str:
        """Return the name used in messages and metrics."""
        return self._judger_name or type(self).__name__

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        """Score one state and return it."""
        raise UnsupportedCallError(f"{type(self).__name__}.judge() is not implemented.")

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Score several states and return them in the order given."""
        raise UnsupportedCallError(f"{type(self).__name__}.batch_judge() is not implemented.")

    async def trial(self, rollout_state: RolloutState) -> RolloutState:
        """Score one state without counting it, and raise whatever the reward code raises. For self-tests."""
        return await self.judge(rollout_state)

    def gold_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return a response that must get a higher score than others when `label` is right; None if unknown."""
        return None

    def wrong_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return a response that must get a lower score when `label` is right; None if unknown."""
        return self.gold_response(rollout_state, other_label(label))

    def gold_guess(self, label: Any) -> str | None:
        """Return what may be a right response where `gold_response` knows none; None if there is no guess."""
        return None

    def parts(self, rollout_state: RolloutState) -> list[BaseJudger]:
        """Return the judgers that a state goes to: this one, or the branches that it selects."""
        return [self]

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Return counts of outcomes and times for each judger inside this one, by name."""
        return {}

    on_close: Callable[[], None] | None = None
    """Called when the judger is closed; gives back the CPU slots of its workers."""

    async def aclose(self) -> None:
        """End worker processes and connections and give the resources back. May be called twice."""
        self.close()

    def close(self) -> None:
        """Do the same at once, without waiting for anything; judgements under way end with an error."""
        if self.on_close is not None:
            self.on_close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # shield: a worker left behind would keep its CPU slots
            await self.aclose()


class Judger(BaseJudger):
    """Template for judgers: override `judge_payload`, and the two steps around it where the defaults do not fit."""

    policy: JudgementPolicy = JudgementPolicy()
    """What is done about judgements that do not end well; set by the config that builds the judger."""

    limits_itself: ClassVar[bool] = False
    """Whether `judge_payload` keeps to `request_timeout` on its own, from when it starts to run."""

    rate_limiter: RateLimiter | None = None
    """Holds judgements back before they run; set by the config that builds the judger."""

    gate: Gate | None = None
    """Bounds the judgements that are under way or in line; set by the config that builds the judger."""

    _company: Company[Any] | None = None
    """Does what `attempt` and `settle` do, for many states together."""

    _ledger: Ledger | None = None

    def prepare(self) -> None:
        """Load what is costly. Called in a worker before its first judgement, and there no limit runs yet."""

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Return what `judge_payload` needs, and no more: it may travel to another process."""
        return {
            "response": rollout_state.response,
            "label": label_of(rollout_state),
            "message": rollout_state.message,
            "status": rollout_state.status,
            "data_source": rollout_state.data_source,
            "task_name": rollout_state.task_name,
        }

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Score one payload, or a list of them if the judger supports batches."""
        raise UnsupportedCallError(f"{type(self).__name__}.judge_payload() is not implemented.")

    def postprocess(self, rollout_state: RolloutState, output: JudgerOutput) -> RolloutState:
        """Write the output into the state."""
        rollout_state.reward = output
        return rollout_state

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        """Score one state and return it, with ``reward`` set or, if that failed, as the policy says.

        How it ended is in ``extra_fields["judgement"]``. Cancelling frees the worker, and leaves a state as it was that
        has not been judged by then.

        Raises:
            JudgerMisuseError: the state lacks what every judgement needs.
            TypeError: `judge_payload` returned a list.
            JudgerError: the first judgements all failed.
        """
        company, gate = self._company, self.gate
        if company is None or self.rate_limiter is not None or not (gate is None or gate.enter_now()):
            judgement = await self.attempt(rollout_state)
            if isinstance(judgement.output, list):
                raise _is_list()
            return self.settle(rollout_state, judgement)[0]
        try:
            return await company.join(self, rollout_state)
        finally:
            if gate is not None:
                gate.leave()

    def settle_item(self, rollout_state: RolloutState, asked: float, item: Item) -> RolloutState:
        """Settle a state by what came of its payload, and return it.

        Args:
            rollout_state: The state.
            asked: When the judgement was asked for, on the clock of `time.perf_counter`.
            item: What came of it.

        Raises:
            Exception: as `judge`.
        """
        value, is_output, run_s = item
        queue_s = perf_counter() - asked - run_s
        if not is_output:
            judgement = self._failed(value, queue_s, run_s)
        elif isinstance(value, list):
            raise _is_list()
        else:
            judgement = Judgement(self.get_judger_name(), queue_s, run_s, value)
        return self.settle(rollout_state, judgement)[0]

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Score several states by one call of `judge_payload` and return them in the order given.

        Raises:
            JudgerMisuseError: as in `judge`.
            TypeError: `judge_payload` returned a single output.
            ValueError: it returned more or fewer outputs than there are states.
            JudgerError: the first judgements all failed.
        """
        judgement = await self.attempt(rollout_states)
        if judgement.error is not None:
            return [self.settle(state, judgement)[0] for state in rollout_states]
        outputs = cast("list[Any] | JudgerOutput", judgement.output)
        if not isinstance(outputs, list):
            raise TypeError(f"Judger returned a single output for {len(rollout_states)} rollout states.")
        if len(outputs) != len(rollout_states):
            raise ValueError(f"Judger returned {len(outputs)} outputs for {len(rollout_states)} rollout states.")
        pairs = zip(rollout_states, outputs, strict=True)
        return [self.settle(state, judgement.with_output(output))[0] for state, output in pairs]

    async def trial(self, rollout_state: RolloutState) -> RolloutState:
        """Score one state without counting it, and raise whatever the reward code raises. For self-tests."""
        try:
            output = await self._start(self.preprocess(rollout_state))
        except BaseException as error:
            if isinstance(error, Exception) or not _is_of_reward_code(error):
                raise
            raise ended_by(error) from error
        judged = self.postprocess(rollout_state, cast("JudgerOutput", output))
        judged.reward = check_reward(judged.reward, judger=self.get_judger_name(), sample=rollout_state.rollout_id)
        return judged

    def _judges_as(self, kind: type[Judger]) -> bool:
        """Return whether a judgement runs as that class has it, and not by a method of a subclass."""
        mine = type(self)
        return mine.judge_payload is kind.judge_payload and mine.attempt is kind.attempt

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Return counts of outcomes and times, by name of judger."""
        return {self.get_judger_name(): self.ledger.statistics(reset=reset)}

    @property
    def code_file(self) -> str | None:
        """The file of the reward function, where it is known."""
        return None

    @property
    def ledger(self) -> Ledger:
        """Where the judgements of this judger are counted."""
        if self._ledger is None:  # made here, as subclasses need not call __init__
            self._ledger = Ledger(self.get_judger_name())
        return self._ledger

    async def attempt(self, rollout_states: RolloutState | list[RolloutState]) -> Judgement:
        """Run `judge_payload` once and say how that ended. The payload is made once the judger has room for it.

        Args:
            rollout_states: One, or a list that is one batch.

        Raises:
            JudgerMisuseError: no sample could be judged that way.
            JudgerError: no judgement can be made any more.
        """
        asked, gate = perf_counter(), self.gate
        if gate is not None and not gate.enter_now():
            await gate.enter()
        try:
            if isinstance(rollout_states, list):
                payload = [self.preprocess(state) for state in rollout_states]
            else:
                payload = self.preprocess(rollout_states)
            value, is_output, run_s = await self._run_payload(payload)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; here it turns into data
            return self._failed(error, perf_counter() - asked, 0.0)
        finally:
            if gate is not None:
                gate.leave()
        queue_s = perf_counter() - asked - run_s
        if not is_output:
            return self._failed(value, queue_s, run_s)
        return Judgement(self.get_judger_name(), queue_s, run_s, value)

    async def _run_payload(self, payload: JudgerPayloadBatch) -> Item:
        watch = Stopwatch()
        try:
            output = await self._start(payload)
        except Exception as error:  # noqa: BLE001 - as above
            return error, False, watch.read_run_s()
        except BaseException as error:
            if not _is_of_reward_code(error):
                raise
            return ended_by(error), False, watch.read_run_s()
        return output, True, watch.read_run_s()

    def settle(self, rollout_state: RolloutState, judgement: Judgement) -> tuple[RolloutState, Judgement]:
        """Write a judgement into the state it is about, count it, and apply the policy if it did not end well.

        Returns:
            The state, and the judgement: an output that is no reward turns it into `raised`.

        Raises:
            JudgerError: the first judgements all failed.
        """
        if judgement.error is None:
            try:
                judged = self.postprocess(rollout_state, judgement.output)
                reward = check_reward(judged.reward, judger=judgement.judger, sample=rollout_state.rollout_id)
                if reward is not judged.reward:  # which costs more than the check
                    judged.reward = reward
            except Exception as error:  # noqa: BLE001 - as above: user code
                judgement = replace(judgement, outcome=Outcome.RAISED, output=None, error=error)
            else:
                self.note(judged, judgement)
                return judged, judgement
        return self.settle_failure(rollout_state, judgement), judgement

    def settle_failure(self, rollout_state: RolloutState, judgement: Judgement) -> RolloutState:
        """Apply the policy to a sample that got no score. Skipping is a choice, so it is never an error or a zero."""
        rollout_state.reward = None
        self.note(rollout_state, judgement)
        on_error = "fail_sample" if judgement.outcome is Outcome.SKIPPED else self.policy.on_error
        if on_error == "raise" and judgement.error is not None:
            raise judgement.error
        if on_error == "zero":
            rollout_state.reward = {"score": 0.0}
            return rollout_state
        rollout_state.status = Status.FAILED
        rollout_state.error_msg = judgement.explain(rollout_state.rollout_id)
        return rollout_state

    def note(self, rollout_state: RolloutState, judgement: Judgement) -> None:
        """Keep the judgement with the sample and in the ledger."""
        sample = rollout_state.rollout_id
        # a new dict: the payload may still hold the old one
        rollout_state.extra_fields = {**rollout_state.extra_fields, "judgement": judgement.record(sample)}
        (self._ledger or self.ledger).enter(judgement, sample, self.policy)

    def _failed(self, error: BaseException, queue_s: float, run_s: float) -> Judgement:
        """Return the judgement that an error of reward code comes to; raise one that is about more than this sample."""
        if isinstance(error, JudgerMisuseError | JudgerError):
            raise error
        if not isinstance(error, Exception):
            if not _is_of_reward_code(error):
                raise error
            error = ended_by(error)
        if isinstance(error, ActorUnavailableError):
            raise no_worker_left(self.get_judger_name(), error) from error
        name_dynamic_code(error, self.code_file)
        return Judgement(self.get_judger_name(), queue_s, run_s, error=error, outcome=classify(error))

    def _start(self, payload: JudgerPayloadBatch) -> Coroutine[Any, Any, JudgerOutputBatch]:
        """Return `judge_payload` under way, with what holds it back and ends it; no frame more than that takes."""
        if self.rate_limiter is not None:
            return self._wait_and_judge(self.rate_limiter, payload)
        if self.limits_itself:
            return self.judge_payload(payload)
        return within(self.policy.request_timeout, self.judge_payload, payload)

    async def _wait_and_judge(self, limiter: RateLimiter, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        await limiter.wait()
        running_stopwatch().start()
        if self.limits_itself:
            return await self.judge_payload(payload)
        return await within(self.policy.request_timeout, self.judge_payload, payload)


async def within(limit_s: float, judge: Callable[[Any], Any], payload: Any) -> Any:
    """Await ``judge(payload)`` for at most `limit_s` seconds.

    Raises:
        JudgementTimeoutError: it took longer, and was cancelled.
    """
    with anyio.move_on_after(limit_s):
        return await judge(payload)
    raise JudgementTimeoutError(f"no reward within {limit_s:g} s (request_timeout)")


def _is_list() -> TypeError:
    return TypeError("Judger returned a list output for a single rollout state.")


def _is_of_reward_code(error: BaseException) -> bool:
    """Return whether it is meant for the judgement alone, and not to stop the task, the coroutine or the program."""
    import asyncio  # where configs are read nothing else needs it

    if isinstance(error, asyncio.CancelledError):
        return not is_being_cancelled()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def other_label(label: Any) -> str:
    """Return a label that is certainly not this one: another number if it holds one, else another text."""
    text = str(label)
    end = max(map(text.rfind, digits)) + 1
    if not end:
        return f"not {text}"
    start = max(len(text[:end].rstrip(digits)), end - _LAST_DIGITS)
    return f"{text[:start]}{int(text[start:end]) + 1:0{end - start}}{text[end:]}"


def label_of(rollout_state: RolloutState) -> Any:
    """Return the ground truth of a state, or None."""
    return rollout_state.reward_model.get("ground_truth") if rollout_state.reward_model else None
