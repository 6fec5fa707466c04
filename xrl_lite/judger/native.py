"""`NativeJudger`: one reward function, or one scoring service, run where the judger is."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, cast

import anyio

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.judger.adapters import RewardAdapter, XtunerReward, adapt, select_needed
from xrl_lite.judger.base import (
    Judger,
    JudgerOutput,
    JudgerOutputBatch,
    JudgerPayload,
    JudgerPayloadBatch,
    label_of,
    within,
)
from xrl_lite.judger.company import Case
from xrl_lite.judger.handler import (
    DEFAULT_CONCURRENCY,
    RewardHandler,
    SyncIn,
    code_file,
    is_async,
    is_url,
    load_handlers,
)
from xrl_lite.judger.http import HttpScorer
from xrl_lite.judger.loop_local import LoopLocal
from xrl_lite.judger.outcome import (
    JudgementPolicy,
    JudgerInputError,
    OnError,
    RewardValueError,
    UnsupportedCallError,
)
from xrl_lite.judger.serial_thread import SerialThread
from xrl_lite.judger.stopwatch import Item, running_stopwatch


class NativeJudger(Judger):
    """Scores one sample at a time by a callable or a URL.

    Where the judger is local, a sync function runs in a thread of its own, one call at a time, so the event loop goes
    on. That is the weak mode: a function that hangs ends as `timeout`, but its thread is only left behind, and one that
    kills the process kills the run. Worker processes (`JudgerConfig.cpu_resources`) have neither weakness.

    Args:
        judger_name: Name in messages and metrics.
        reward_handler: A callable, sync or async; its path; the URL of a service; or, for TRL, several functions.
        extra_info: Handed to the reward code, as a fresh shallow copy for every call.
        request_timeout: Longest run of one judgement, in seconds.
        signature: How the reward code is called; see `xrl_lite.judger.adapters`.
        reward_kwargs: Further arguments for the reward code.
        reward_weights: One factor for each of several functions.
        sync_in: "loop" runs a sync function right in the event loop, without a thread and without a limit.
        max_concurrency: Async judgements at the same time.
        on_error: What happens to a sample without a score.
        max_initial_failures: So many failures before the first success stop the run; 0 never does.
        http_retries: Further tries after a connection error, 408, 429 or 5xx.
        http_backoff_s: Wait before the second try.
        gold_response: Makes a right response from a label, for the self-test.
    """

    limits_itself = True

    def __init__(
        self,
        judger_name: str = "native_judger",
        reward_handler: RewardHandler | str | Sequence[RewardHandler | str] | None = None,
        extra_info: Mapping[str, Any] | None = None,
        request_timeout: float = 30.0,
        *,
        signature: str = "xtuner",
        reward_kwargs: Mapping[str, Any] | None = None,
        reward_weights: Sequence[float] | None = None,
        sync_in: SyncIn = "thread",
        max_concurrency: int = DEFAULT_CONCURRENCY,
        on_error: OnError = "fail_sample",
        max_initial_failures: int = 32,
        http_retries: int = 3,
        http_backoff_s: float = 0.2,
        gold_response: Callable[[Any], str | None] | None = None,
    ) -> None:
        super().__init__(judger_name)
        self.policy = JudgementPolicy(
            on_error=on_error, request_timeout=request_timeout, max_initial_failures=max_initial_failures
        )
        self.reward_handler = reward_handler
        self.extra_info = dict(extra_info or {})
        self._http: HttpScorer | None = None
        self._reward: RewardAdapter | None = None
        if is_url(reward_handler):
            self._http = HttpScorer(
                str(reward_handler), timeout_s=request_timeout, max_retries=http_retries, backoff_s=http_backoff_s
            )
            self._reward = XtunerReward(self._http)
        elif reward_handler is not None:
            self._reward = adapt(
                load_handlers(reward_handler, judger=judger_name),
                judger=judger_name,
                signature=signature,
                reward_kwargs=reward_kwargs,
                weights=reward_weights,
            )
        self.is_async = self._reward is not None and is_async(self._reward)
        """Whether the reward code is a coroutine function or a service."""
        self.wraps_async = self._reward is not None and self._reward.wraps_async
        """Whether it is a sync function around a coroutine function: it may return a coroutine, or run it itself."""
        self._needs = frozenset[str]() if self._reward is None else self._reward.needs
        self._has_own_payload = type(self).judge_payload is not NativeJudger.judge_payload
        self._sync_in: SyncIn = sync_in
        self._thread = SerialThread(f"judger {judger_name}")
        if not self.is_async and sync_in == "thread" and self._judges_as(NativeJudger):
            self._company = _InThread(self._thread)
        self._limiter: LoopLocal[anyio.Semaphore] = LoopLocal(partial(anyio.Semaphore, max_concurrency))
        self._gold_response = gold_response

    @property
    def request_timeout(self) -> float:
        """Longest run of one judgement, in seconds."""
        return self.policy.request_timeout

    async def complete(self, output: Any) -> JudgerOutput:
        """Return what sync code returned; or, where that is something to await for the reward, what it comes to."""
        if isinstance(output, dict):
            return cast("JudgerOutput", output)
        return _accept(await within(self.request_timeout, _wait, output))

    @property
    def code_file(self) -> str | None:
        """The file of the reward function, where it is known."""
        return code_file(self._reward.function) if self._reward is not None else None

    def run_in_place(self) -> None:
        """Run sync code in the event loop from now on. For worker processes, where a call that hangs can be ended."""
        if not self.wraps_async:  # it may run a loop of its own, which no loop allows
            self._sync_in = "loop"
            self._company = None

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Return response and label, and what else the signature needs; all of it if `judge_payload` is overridden."""
        if self._has_own_payload:
            return super().preprocess(rollout_state)
        payload = {"response": rollout_state.response, "label": label_of(rollout_state)}
        return {**payload, **select_needed(rollout_state, self._needs)} if self._needs else payload

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Run the reward code on one payload.

        Raises:
            JudgerInputError: a list, no response or no label.
            JudgementTimeoutError: it ran longer than `request_timeout`.
            RewardValueError: it returned nothing, or not a dict.
            Exception: what the reward code raised.
        """
        if self.is_async:
            single = _check(payload)
            async with self._limiter.get():
                running_stopwatch().start()
                return _accept(await within(self.request_timeout, self._call_async, single))
        if self._sync_in == "loop":
            result = self.score(payload)
        else:
            result = await self._thread.run(self.score, payload, limit_s=self.request_timeout)
        return cast("JudgerOutput", result if type(result) is dict else await self.complete(result))

    @property
    def runs_here(self) -> bool:
        """Whether `judge_payload_here` does what `judge_payload` does."""
        return not self.is_async and not self._has_own_payload

    def judge_payload_here(
        self, payload: JudgerPayloadBatch, *, run: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    ) -> JudgerOutput:
        """Run sync reward code on one payload in this very thread, without a limit. For worker processes.

        Args:
            payload: One, as for `judge_payload`.
            run: Runs a coroutine to its end, where the code returns something awaitable; by default in a thread.
        """
        result = self.score(payload)
        if type(result) is not dict and inspect.isawaitable(result):
            result = _accept((run or run_to_end)(_wait(result)))
        return cast("JudgerOutput", result)

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Not supported: one function call scores one sample."""
        raise UnsupportedCallError("NativeJudger does not support batch_judge.")

    def gold_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return what the config says a right response looks like."""
        return self._gold_response(label) if self._gold_response is not None else None

    def gold_guess(self, label: Any) -> str | None:
        """Return the label itself for a function; a service is asked nothing that may be wrong of it."""
        is_function = self._reward is not None and self._http is None
        return str(label) if is_function and isinstance(label, str | int | float) else None

    async def aclose(self) -> None:
        """Close connections to the service."""
        await super().aclose()
        if self._http is not None:
            await self._http.aclose()

    def score(self, payload: JudgerPayloadBatch) -> Any:
        """Run sync reward code; return the reward, or something to await for it."""
        single = _check(payload)
        result = None if self._reward is None else self._reward(single, self.extra_info)
        if type(result) is dict:  # nearly always, and the next look costs more than the rest
            return cast("JudgerOutput", result)
        return result if inspect.isawaitable(result) else _accept(result)

    async def _call_async(self, payload: JudgerPayload) -> Any:
        assert self._reward is not None
        return await self._reward(payload, self.extra_info)


class _InThread:
    """Runs sync reward code in a thread; see `Company`. Does not hold the judger, which may be gone before."""

    def __init__(self, thread: SerialThread) -> None:
        self._thread = thread

    async def join(self, judger: NativeJudger, state: RolloutState) -> RolloutState:
        case = _ThreadCase(judger, state, perf_counter())
        try:
            payload = case.make()
            job = self._thread.put(judger.score, payload, limit_s=judger.request_timeout, case=case)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; here it turns into data
            return case.read((error, False, 0.0))
        try:
            found = await job.future
        except BaseException:
            self._thread.drop(job)
            raise
        if type(found) is not tuple:
            return found
        output, _, run_s = cast("Item", found)
        began = perf_counter()
        try:
            output = await judger.complete(output)
        except BaseException as error:  # noqa: BLE001 - as above
            return case.read((error, False, run_s + perf_counter() - began))
        return super(_ThreadCase, case).read((output, True, run_s + perf_counter() - began))


class _ThreadCase(Case):
    __slots__ = ()

    def read(self, item: Item) -> Any:
        """Settle it; or return the item as it is, where there is something to await in it."""
        value, is_output, _ = item
        if is_output and type(value) is not dict:
            return item
        return self.judger.settle_item(self.state, self.asked, item)


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns, out of sync code: in a thread, as a loop may run in this one."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def _wait(result: Any) -> Any:
    return await result


def _check(payload: JudgerPayloadBatch) -> JudgerPayload:
    if isinstance(payload, list):
        raise JudgerInputError("NativeJudger does not support batch payloads.")
    if payload["response"] is None:
        raise JudgerInputError(
            "RolloutState must have a response for judging. Decode the response_ids in the agent loop first."
        )
    if payload["label"] is None:
        raise JudgerInputError(
            "RolloutState must have reward_model with 'ground_truth' for judging. The data set has to give it."
        )
    return payload


def _accept(result: Any) -> JudgerOutput:
    if result is None:
        raise RewardValueError("Reward handler did not return a response.")
    if not isinstance(result, dict):
        raise RewardValueError(
            f"Reward handler must return a dict, but got {type(result)}. It returned {result!r:.200}. Return the score "
            f"as a number, or a dict with 'score'."
        )
    return cast("JudgerOutput", result)
