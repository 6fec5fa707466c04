"""Requests to replicas: which one, in what order, with which seed, and what becomes of them when a replica dies.

::

    generate(state) --> turnstile (gate open? a replica with room?) --> its link --> replica
          ^                                                               |
          '-- answer; or the replica died: sent again from the tokens that are known, to another or to its successor

Waits for    its turn; its answer; both together `request_timeout_s` long
Is woken by  the turnstile; the link: an answer, or the loss of the replica

States: COMPLETED ones are returned untouched. ABORTED ones go on from their tokens with `partial_rollout`, else start
over; so do all others. What comes back is COMPLETED, ABORTED (with what there is) or FAILED (with `error_msg`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from xrl_lite.data import RolloutState, SampleParams, Status, failed, update_status_from_finish_reason
from xrl_lite.errors import ActorError, RolloutError, errors_as_themselves
from xrl_lite.log import get_logger
from xrl_lite.rollout.adapter import ServerAdapter, make_adapter
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.link import LinkState, Lost, OnTokens, ReplicaLink
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, ReplicaHealth
from xrl_lite.rollout.turnstile import Turnstile

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.actors.placement import Bundle

logger = get_logger(__name__)

DecodeTokens = Callable[[list[int], bool], str]
"""Token ids, and whether to leave special tokens out -> text."""


class RolloutController:
    """Starts the replicas and generates with them. Use it as an async context manager.

    Args:
        system: Where the replicas run.
        config: Settings of generation.
        model_path: Hugging Face folder or hub id.
        decode: Makes text of token ids.
        seed: Seed of the run; each response gets a seed of its own from it and the state's ids.
        eos_token_ids: Tokens that end a response; an aborted sample that ends so is complete.
        bundle: Whose accelerators the replicas divide among them; without it, each claims its own.
    """

    def __init__(
        self,
        system: ActorSystem,
        *,
        config: RolloutConfig,
        model_path: str,
        decode: DecodeTokens,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        bundle: Bundle | None = None,
    ) -> None:
        self._config = config
        self._decode = decode
        self._seed = seed
        self._eos_token_ids = eos_token_ids
        self._partial_rollout = config.partial_rollout
        self._links = [
            ReplicaLink(
                system, config=config, model_path=model_path, number=number, bundle=bundle, on_change=self._serve
            )
            for number in range(config.num_replicas)
        ]
        self._turnstile = Turnstile(self._links, limit=config.in_flight_limit, max_sessions=config.max_sessions)
        self.adapters: list[ServerAdapter] = [
            make_adapter(config.engine, link, timeout_s=config.sync_timeout_s) for link in self._links
        ]
        self._num_requests = 0
        self._num_resent = 0
        self._frozen = False
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for link in self._links:
            self._tasks.start_soon(link.run, name=link.name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            with errors_as_themselves():
                await self._tasks.__aexit__(kind, error, trace)
        finally:
            # shield: what is not stopped here would be killed later; each stop is bounded
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as stopping:
                    for link in self._links:
                        stopping.start_soon(link.stop)

    async def ready(self) -> None:
        """Wait until every replica has loaded the model; raises what its constructor raised."""
        for link in self._links:
            await link.settled.wait()
            if link.state is LinkState.DOWN and link.error is not None:
                raise link.error

    async def devices(self) -> list[frozenset[str]]:
        """Return where the weights of each replica are: "cpu", or the unique ids of GPUs."""
        return [frozenset(await link.replica.devices.remote()) for link in self._links]

    def restore_with(self, restore: Callable[[ServerAdapter], Awaitable[None]]) -> None:
        """Have replicas that are started anew be given the present weights by `restore`."""
        for link, adapter in zip(self._links, self.adapters, strict=True):
            link.restore = lambda adapter=adapter: restore(adapter)

    # --- generating

    async def generate(
        self, state: RolloutState, *, on_tokens: OnTokens | None = None, resume: bool | None = None
    ) -> RolloutState:
        """Generate the response of a state and return the state, COMPLETED, ABORTED or FAILED.

        Waits while the gate is closed. Cancelling ends the request in the engine.

        Args:
            state: What to respond to: `tokens`, or `prompt_ids` where there are none.
            on_tokens: Is told tokens as they come.
            resume: Whether an aborted state goes on from its tokens, instead of what `partial_rollout` says.

        Raises:
            ActorUnavailableError: no replica is left.
        """
        if state.status is Status.COMPLETED:
            return state
        earlier = self._take_up(state, self._partial_rollout if resume is None else resume)
        if (finish_reason := self._ended_before(state, earlier)) is not None:
            return self._fill(state, earlier, finish_reason)
        problem = ""
        with anyio.move_on_after(self._config.request_timeout_s) as deadline:
            try:
                result = await self._respond(state, earlier, on_tokens)
            except RolloutError as error:
                problem = str(error)
            else:
                return self._fill(state, result, result.finish_reason)
        if deadline.cancelled_caught:
            problem = (
                f"no whole response within {self._config.request_timeout_s:g} s (rollout.request_timeout_s), "
                f"queueing included"
            )
        _empty(state)
        return failed(state, problem)

    @asynccontextmanager
    async def streaming(self, state: RolloutState) -> AsyncGenerator[MemoryObjectReceiveStream[GenerateResult]]:
        """Generate in the background while inside: yields a stream of new tokens that ends with the response.

        ::

            async with controller.streaming(state) as chunks:
                async for chunk in chunks:
                    ...
            # state is filled; leaving early cancels the request
        """
        sender, receiver = anyio.create_memory_object_stream[GenerateResult](float("inf"))

        async def run() -> None:
            with sender:
                await self.generate(state, on_tokens=sender.send_nowait)

        # the receiver is closed last: as long as the request is there, it is told of tokens
        with receiver, errors_as_themselves():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                yield receiver
                tasks.cancel_scope.cancel()

    # --- control

    async def pause_generation(self, *, freeze: bool = False) -> None:
        """Close the gate: requests that have not been sent wait.

        Args:
            freeze: Also stop computing those that have been, until `continue_generation`.
        """
        self._turnstile.close()
        for link in self._links:
            link.touch(held=True)
        if freeze:
            self._frozen = True
            await self._on_all("pause")

    async def continue_generation(self) -> None:
        """Open the gate, and compute again what was frozen."""
        if self._frozen:
            self._frozen = False
            await self._on_all("resume")
        for link in self._links:
            link.touch(held=False)
        self._turnstile.open()

    async def abort_all(self) -> int:
        """End every request, sent or not, with what it has; return how many there were."""
        return self._turnstile.abort_waiting() + sum(link.abort_all() for link in self._links)

    def set_enable_partial_rollout(self, enabled: bool) -> None:
        """Say whether aborted samples go on from their tokens."""
        self._partial_rollout = enabled

    async def sleep(self, level: int = 1) -> None:
        """Have the replicas give memory of their devices back; nothing may be in flight. Does nothing on CPUs."""
        await self._on_all("sleep", level)

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Have the replicas take memory again."""
        await self._on_all("wake_up", list(tags))

    async def check_health(self) -> dict[str, ReplicaHealth]:
        """Ask every replica that is up how it is doing; one that does not answer is replaced and left out."""
        found: dict[str, ReplicaHealth] = {}

        async def ask(link: ReplicaLink) -> None:
            try:
                found[link.name] = await link.health()
            except ActorError as error:
                link.fail(error)

        async with anyio.create_task_group() as tasks:
            for link in self._links:
                if link.state in (LinkState.UP, LinkState.TORN):
                    tasks.start_soon(ask, link)
        return found

    def statistics(self) -> dict[str, Any]:
        """Return requests in flight and state of each replica, and counts of the whole."""
        return {
            "replicas": {
                link.name: {"load": link.load, "state": link.state.value, "num_replaced": link.num_replaced}
                for link in self._links
            },
            "num_waiting": self._turnstile.num_waiting,
            "num_requests": self._num_requests,
            "num_resent": self._num_resent,
        }

    def metrics(self) -> dict[str, float]:
        """Return how many requests the replicas have, and how many wait for their turn."""
        return {
            "rollout/in_flight": float(sum(link.load for link in self._links)),
            "rollout/waiting": float(self._turnstile.num_waiting),
        }

    # --- one response

    def _take_up(self, state: RolloutState, resume: bool) -> GenerateResult:
        """Return what an aborted state goes on from; nothing, and an emptied state, where it starts over."""
        if state.status is Status.ABORTED and resume and state.response_ids:
            return GenerateResult(
                token_ids=list(state.response_ids),
                logprobs=list(state.logprobs or []),
                policy_versions=list(state.response_model_steps or []),
            )
        if state.status is not Status.INIT or state.response_ids is not None:
            state.status = Status.INIT
            _empty(state)
        return GenerateResult()

    def _ended_before(self, state: RolloutState, earlier: GenerateResult) -> str | None:
        if not earlier.token_ids:
            return None
        params = state.sample_params
        if earlier.token_ids[-1] in self._eos_token_ids.union(params.stop_token_ids):
            return "stop"
        if self._holds_stop_text(earlier.token_ids, params.stops):
            return "stop"
        return "length" if len(earlier.token_ids) >= params.max_tokens else None

    async def _respond(
        self, state: RolloutState, earlier: GenerateResult, on_tokens: OnTokens | None
    ) -> GenerateResult:
        """Return `earlier` and what comes after it, whatever happens to replicas meanwhile."""
        result = GenerateResult()
        num_lost = num_unusable = 0
        while True:
            whole = _joined(earlier, result)
            outcome = await self._ask(state, whole.token_ids, on_tokens)
            if isinstance(outcome, Lost):
                num_lost += 1
                result.extend(outcome.known)
                whole.extend(outcome.known)
                if (finish_reason := self._ended_before(state, whole)) is not None:
                    whole.finish_reason = finish_reason
                    return whole
                if num_lost > self._config.max_resends:
                    raise RolloutError(f"its replica died {num_lost} times under it, the last time so: {outcome.error}")
                self._num_resent += 1
                continue
            result.extend(outcome)
            if (problem := _problem_of(result)) is None:
                return self._cut_after_stop_text(_joined(whole, outcome), state) if whole.token_ids else outcome
            num_unusable += 1
            if num_unusable > self._config.max_retries:
                raise RolloutError(f"the response cannot be used after {num_unusable} attempts: {problem}")
            logger.warning("sample %s: %s; it is asked for again", state.rollout_id, problem)
            result = GenerateResult()

    def _cut_after_stop_text(self, result: GenerateResult, state: RolloutState) -> GenerateResult:
        """End a response with the token that completes a stop text: an engine may see the last part of it alone."""
        tokens, stops = result.token_ids, state.sample_params.stops
        if self._holds_stop_text(tokens, stops):
            end = bisect_left(range(len(tokens)), True, key=lambda end: self._holds_stop_text(tokens[:end], stops))
            result.cut(end)
            result.finish_reason = "stop"
        return result

    def _holds_stop_text(self, token_ids: list[int], stops: list[str]) -> bool:
        if not stops:
            return False
        text = self._decode(token_ids, False)
        return any(stop in text for stop in stops)

    async def _ask(self, state: RolloutState, known: list[int], on_tokens: OnTokens | None) -> GenerateResult | Lost:
        link = await self._turnstile.enter(state.session_id)
        if link is None:
            return GenerateResult(finish_reason="abort")
        try:
            pending = link.send(self._request(state, known, stream=on_tokens is not None), on_tokens)
            try:
                await pending.ended.wait()
            finally:
                link.give_up(pending)
        finally:
            self._turnstile.leave(link)
        if isinstance(pending.outcome, RolloutError):
            raise RolloutError(f"{link.name}: {pending.outcome}")
        assert pending.outcome is not None, "it has ended"
        return pending.outcome

    def _request(self, state: RolloutState, known: list[int], *, stream: bool) -> GenerateRequest:
        prompt_ids = state.tokens or state.prompt_ids
        assert prompt_ids is not None, "a state has prompt_ids before it is generated"
        self._num_requests += 1
        params = state.sample_params
        seed = params.sampling_seed
        return GenerateRequest(
            request_id=f"{state.rollout_id}-{self._num_requests}",
            prompt_ids=[*prompt_ids, *known],
            sample_params=_less_tokens(params, len(known)),
            seed=response_seed(self._seed, state, len(prompt_ids)) if seed is None else seed,
            num_sampled=len(known),
            stream=stream,
        )

    def _fill(self, state: RolloutState, result: GenerateResult, finish_reason: str | None) -> RolloutState:
        params = state.sample_params
        state.response_ids = result.token_ids
        state.response = self._decode(result.token_ids, params.skip_special_tokens)
        if params.stops and not params.include_stop_str_in_output:
            state.response = _before_stop(state.response, params.stops)
        state.logprobs = result.logprobs
        state.response_mask = [1] * len(result.token_ids)
        state.response_model_steps = result.policy_versions
        state.finish_reason = finish_reason
        state.status = update_status_from_finish_reason(finish_reason)
        state.error_msg = None
        if state.status is Status.FAILED:
            state.error_msg = f"sample {state.rollout_id}: the engine ended the response with {finish_reason!r}"
        return state

    def _serve(self) -> None:
        self._turnstile.serve()

    async def _on_all(self, method: str, *arguments: Any) -> None:
        """Call a method of every replica that is up; one that fails is replaced."""

        async def call(link: ReplicaLink) -> None:
            try:
                named = link.replica.method_named(method).options(timeout_s=self._config.health_timeout_s)
                await named.remote(*arguments)
            except ActorError as error:
                link.fail(error)

        async with anyio.create_task_group() as tasks:
            for link in self._links:
                if link.state is LinkState.UP:
                    tasks.start_soon(call, link)


def response_seed(run_seed: int, state: RolloutState, num_prompt_tokens: int) -> int:
    """Seed of one response: a function of the run's seed, the task, the attempt and its turn, 63 bits.

    Turns of one attempt differ in the tokens before them, and must not draw the same numbers again.
    """
    text = f"{run_seed}/{state.task_name}/{state.rollout_id}/{num_prompt_tokens}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _less_tokens(params: SampleParams, num_known: int) -> SampleParams:
    return params.model_copy(update={"max_tokens": params.max_tokens - num_known}) if num_known else params


def _joined(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    joined = GenerateResult()
    joined.extend(first)
    joined.extend(second)
    return joined


def _problem_of(result: GenerateResult) -> str | None:
    num_tokens = len(result.token_ids)
    if result.finish_reason is None:
        return "it has no finish reason"
    if num_tokens == 0 and result.finish_reason != "abort":
        return f"it has no tokens, and ended with {result.finish_reason!r}"
    if len(result.logprobs) != num_tokens:
        return f"it has {len(result.logprobs)} log-probs for {num_tokens} tokens"
    return None


def _before_stop(text: str, stops: list[str]) -> str:
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _empty(state: RolloutState) -> None:
    state.response = state.response_ids = state.logprobs = state.response_mask = state.response_model_steps = None
    state.finish_reason = state.routed_experts = state.reward = state.error_msg = None
