"""`RemoteJudger`: the caller's side of a judger in a worker process, and `JudgerActor`, the side in that process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from time import perf_counter
from types import CoroutineType
from typing import Any, Protocol, cast

from xrl_lite.actors import ActorMethod
from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.errors import ActorDiedError
from xrl_lite.judger.base import Judger, JudgerOutput, JudgerOutputBatch, JudgerPayload, JudgerPayloadBatch, within
from xrl_lite.judger.dispatch import Dispatcher
from xrl_lite.judger.ledger import Statistics
from xrl_lite.judger.native import NativeJudger, run_to_end
from xrl_lite.judger.outcome import JudgementPolicy
from xrl_lite.judger.quarantine import MAX_ENDED, with_quarantine
from xrl_lite.judger.stopwatch import Item
from xrl_lite.judger.whereabouts import full_traceback
from xrl_lite.log import get_logger

logger = get_logger(__name__)


class RayJudgerProxy(Protocol):
    """What `RemoteJudger` needs of an actor handle: ``handle.judge_payload.remote(payload)`` gives an awaitable.

    With a handle of ours the time limit is a hard one; with any other, waiting ends, but not the work.
    """

    @property
    def judge_payload(self) -> Any:
        """The remote method."""
        ...


class BuildsJudger(Protocol):
    """A config, as seen from the worker."""

    def build_local(self) -> Judger:
        """Return the judger that does the work."""
        ...


class RemoteJudger(Judger):
    """Sends payloads to a judger in a worker process. `preprocess` and `postprocess` run in the caller's process.

    Args:
        actor: Handle of a `JudgerActor`.
        judger_name: Name in messages and metrics.
        preprocess_judger: Whose `preprocess` and `postprocess` to use; the template's when not given.
        policy: What happens to a sample without a score, and how long one judgement may run.
        max_concurrency: Judgements with the worker at the same time; others wait here, so that one that hangs holds up
            nothing but itself. No limit when not given.
        can_take_many: Whether the actor has `judge_each`.
    """

    limits_itself = True

    def __init__(
        self,
        actor: RayJudgerProxy,
        judger_name: str,
        preprocess_judger: Judger | None = None,
        *,
        policy: JudgementPolicy | None = None,
        max_concurrency: int | None = None,
        can_take_many: bool = False,
    ) -> None:
        super().__init__(judger_name)
        self.actor = actor
        self.preprocess_judger = preprocess_judger
        self.policy = policy or JudgementPolicy()
        self.max_concurrency = max_concurrency
        self.can_take_many = can_take_many
        self.runs_many = max_concurrency != 1
        self._dispatcher = Dispatcher(judger_name, [self])
        if self._judges_as(RemoteJudger):
            self._company = self._dispatcher

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Make the payload here, so that only it travels."""
        if self.preprocess_judger is not None:
            return self.preprocess_judger.preprocess(rollout_state)
        return super().preprocess(rollout_state)

    def postprocess(self, rollout_state: RolloutState, output: JudgerOutput) -> RolloutState:
        """Write the output into the state here."""
        if self.preprocess_judger is not None:
            return self.preprocess_judger.postprocess(rollout_state, output)
        return super().postprocess(rollout_state, output)

    @property
    def code_file(self) -> str | None:
        """The file of the reward function, where it is known."""
        return None if self.preprocess_judger is None else self.preprocess_judger.code_file

    def gold_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return what the judger behind it says."""
        return None if self.preprocess_judger is None else self.preprocess_judger.gold_response(rollout_state, label)

    def wrong_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return what the judger behind it says."""
        return None if self.preprocess_judger is None else self.preprocess_judger.wrong_response(rollout_state, label)

    def gold_guess(self, label: Any) -> str | None:
        """Return what the judger behind it says."""
        return None if self.preprocess_judger is None else self.preprocess_judger.gold_guess(label)

    def judge_payload(self, payload: JudgerPayloadBatch) -> CoroutineType[Any, Any, JudgerOutputBatch]:
        """Score in the worker. Waits for a place at it; cancelling frees the place, and the worker.

        Raises:
            ActorTimeoutError: the judgement ran longer than the limit; the worker was replaced.
            ActorDiedError: the worker died, and so did the next one on the same payload.
            ActorUnavailableError: no worker is left.
            Exception: what the reward code raised.
        """
        return self._dispatcher.run(payload)

    async def send(self, payload: JudgerPayloadBatch, *, num_deaths: int = 0) -> JudgerOutputBatch:
        """Send a payload now, and once more if the worker dies of something else than this payload."""
        while True:
            try:
                return await self._send_once(payload)
            except ActorDiedError as error:
                num_deaths += 1
                if num_deaths >= MAX_ENDED:  # a second death is its own doing
                    raise
                logger.warning("judger %r: sending a payload again, its worker died: %s", self.get_judger_name(), error)

    async def send_many(self, payloads: Sequence[JudgerPayload], *, limit_s: float) -> list[Item]:
        """Send several payloads by one call."""
        limit_s = min(limit_s, self.policy.request_timeout)
        return await cast("Any", self.actor).judge_each.options(timeout_s=limit_s).remote(payloads)

    async def aclose(self) -> None:
        """End the worker, and wait until it is gone."""
        if self.preprocess_judger is not None:
            await self.preprocess_judger.aclose()
        stop = getattr(self.actor, "stop", None)
        if stop is not None:
            await stop()
        await super().aclose()

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Return counts and times, and how many payloads are in quarantine."""
        return with_quarantine(super().statistics(reset=reset), self._dispatcher.quarantine)

    def close(self) -> None:
        """End the worker at once."""
        kill = getattr(self.actor, "kill", None)
        if kill is not None:
            kill()
        super().close()

    async def _send_once(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        limit_s = self.policy.request_timeout
        method = self.actor.judge_payload
        if isinstance(method, ActorMethod):
            return await method.options(timeout_s=limit_s).remote(payload)
        return await within(limit_s, method.remote, payload)


class JudgerActor:
    """Holds the judger in the worker process. One judgement at a time, in the main thread, where it can be killed.

    Args:
        judger_config: Whatever has `build_local`.
    """

    def __init__(self, judger_config: BuildsJudger) -> None:
        self.judger = judger_config.build_local()
        self.judger.prepare()
        self._runner: asyncio.Runner | None = None
        self._score: Callable[[JudgerPayloadBatch], Any] = self._judge
        if isinstance(judger := self.judger, NativeJudger):
            judger.run_in_place()
            if judger.runs_here:
                self._score = partial(judger.judge_payload_here, run=self._run)

    def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Score one payload, or several if the judger can."""
        return self._score(payload)

    def judge_each(self, payloads: Sequence[JudgerPayload]) -> list[Item]:
        """Score payloads one after the other; one that raises does not keep the others from being scored."""
        return [self._judge_one(payload) for payload in payloads]

    def _judge_one(self, payload: JudgerPayload) -> Item:
        began = perf_counter()
        try:
            return self._score(payload), True, perf_counter() - began
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller raises it again
            return _ready_to_travel(error), False, perf_counter() - began

    def _judge(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        return self._run(self.judger.judge_payload(payload))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if _a_loop_runs_here():  # a backend without processes
            return run_to_end(coroutine)
        if self._runner is None:
            self._runner = asyncio.Runner()  # kept: clients and limiters belong to a loop
        return self._runner.run(coroutine)


class ConcurrentJudgerActor(JudgerActor):
    """For reward code that waits rather than computes: many judgements at a time, in the event loop of the worker."""

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Score one payload, or several if the judger can."""
        return await self.judger.judge_payload(payload)


RayJudger = JudgerActor
"""Name under which XTuner exports the actor class."""


def _ready_to_travel(error: Exception) -> Exception:
    """Put the traceback into a note, as it does not travel, and replace an exception that cannot travel itself."""
    trace = full_traceback(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - any way of failing means that it does not travel
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(trace)
    return error


def _a_loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
