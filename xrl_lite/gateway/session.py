"""A session: what one agent says to the model, from its first request to its trajectories.

::

    request --> retry of an earlier one? --yes--> its answer, or the wait for it
                     | no
                  choose a chain, render what is new, reserve it      (at once)
                     |
                  generate                                            (a task of the gateway)
                     |
                  read the answer, extend the chain                   (at once)

    ACTIVE --finalize--> FINALIZING --(requests in flight: grace)--> FINALIZED
       '-----abort-----> ABORTED

Waits for    the engine; `finalize` also for requests in flight, `finalize_grace_s` long
Is woken by  the engine; the end of the session, which ends what is in flight; `retry_grace_s` after its client has gone

Nothing is changed before the answer is there: a request that fails, or is given up, leaves the session as it was.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import anyio
from anyio.abc import TaskGroup

from xrl_lite.agent_loop import RolloutCtl
from xrl_lite.agent_loop.base import StreamsTokens, TokenChunk
from xrl_lite.agent_loop.client import request_state
from xrl_lite.agent_loop.session_loop import ENDS_THE_RUN
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.rollout_state import UNKNOWN_VERSION
from xrl_lite.data.sampling_params import merge_sampling_params
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import ConfigError, RolloutError, TemplateError
from xrl_lite.gateway.chain import Chain, ChatChains, Sampled, Step, raw_step
from xrl_lite.gateway.config import GatewayConfig
from xrl_lite.gateway.prefix import PrefixHasher, tools_digest
from xrl_lite.gateway.refusal import Refusal, invalid
from xrl_lite.gateway.spoken import Spoken, split_turn
from xrl_lite.gateway.turn import FinishReason, SessionResult, TurnHead, TurnRequest, TurnResult
from xrl_lite.log import get_logger
from xrl_lite.tools import FunctionCall, ToolParser, call_message

logger = get_logger(__name__)

_MAX_ANSWERED = 64
"""Answers of a session that are kept for retries."""

_MAX_TOOL_LISTS = 8
"""Lists of tools of a session whose hashes are kept."""


class SessionState(Enum):
    """Where a session stands."""

    ACTIVE = "active"
    """It takes requests."""
    FINALIZING = "finalizing"
    """It waits for requests in flight, and takes no others."""
    FINALIZED = "finalized"
    """Its trajectories were handed out."""
    ABORTED = "aborted"
    """It was given up."""


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    """What all sessions of a gateway share."""

    rollout_ctl: RolloutCtl
    """Generates."""
    tokenizer: Tokenizer
    """Of the model."""
    template: ChatTemplate
    """Renders what is between turns."""
    parser: ToolParser
    """Finds calls in what was sampled."""
    config: GatewayConfig
    """Settings."""
    max_trajectory_tokens: int | None
    """Prompt and response of a trajectory together."""
    tasks: TaskGroup
    """Where turns are generated."""
    resume_aborted: bool
    """Ask again for what the engine aborted; otherwise that aborts the session."""

    @property
    def streams(self) -> bool:
        """Whether tokens are told while they are sampled."""
        return self.config.stream_interval_s is not None and isinstance(self.rollout_ctl, StreamsTokens)


class PendingTurn:
    """A turn that is being made, or was made; any number of requests may wait for it."""

    def __init__(self, digest: bytes, head: TurnHead) -> None:
        self.digest = digest
        """Of the request."""
        self.head = head
        """What is known before it is made."""
        self.spoken: Spoken | None = None
        """What is certain of it already; None where nothing is told before the end."""
        self.has_news = anyio.Event()
        """Set once there is more of it than when it was looked at, or an outcome."""
        self.num_waiting = 0
        """Requests that wait."""
        self.was_left = False
        """The last one that waited went away before the end."""
        self.ended = anyio.Event()
        """Set once there is an outcome."""
        self.outcome: TurnResult | Refusal | None = None
        """What came of it."""
        self.scope = anyio.CancelScope()
        """Ends it."""
        self.on_left: Callable[[PendingTurn], None] = lambda _: None
        """Told when nobody waits for it any more."""

    @contextmanager
    def attended(self) -> Generator[None]:
        """Wait for it while inside; a turn that nobody waits for is ended after a while."""
        self.num_waiting += 1
        self.was_left = False
        try:
            yield
        finally:
            self.num_waiting -= 1
            if not self.num_waiting and not self.ended.is_set():
                self.was_left = True
                self.on_left(self)

    async def wait(self) -> TurnResult:
        """Return the turn.

        Raises:
            Refusal: it could not be made.
        """
        with self.attended():
            await self.ended.wait()
        if isinstance(self.outcome, Refusal):
            raise self.outcome
        assert self.outcome is not None, "it has ended"
        return self.outcome

    def hear(self, chunk: TokenChunk) -> None:
        """Take tokens that were sampled for it."""
        if self.spoken is not None:
            self.spoken.add(chunk.token_ids, chunk.logprobs)
            self.has_news.set()
            self.has_news = anyio.Event()

    def end(self, outcome: TurnResult | Refusal) -> None:
        """Set the outcome."""
        self.outcome = outcome
        self.spoken = None
        self.ended.set()
        self.has_news.set()


class Session:
    """One agent's conversations.

    Args:
        session_id: Its name.
        parts: What it works with.
        sample_params: How turns are sampled where requests may not or do not say.
        seed_name: Source of its seeds; sessions of one name that ask the same get the same.
        task_name: Goes into the seeds, as that of the states.
    """

    def __init__(
        self,
        session_id: str,
        parts: SessionParts,
        *,
        sample_params: SampleParams,
        seed_name: str | None = None,
        task_name: str | None = None,
    ) -> None:
        self.session_id = session_id
        self.state = SessionState.ACTIVE
        self.reward_info: dict[str, Any] = {}
        """What the agent posted."""
        self.fatal: BaseException | None = None
        """An error of the engine that ends the run."""
        self.ended = anyio.Event()
        """Set once the session is over, or cannot go on."""
        self.last_request_s = time.monotonic()
        """When the last request came or was answered."""
        self._parts = parts
        self._sample_params = sample_params
        self._seed_name = seed_name or session_id
        self._task_name = task_name
        self._makes_chains = ChatChains(
            parts.template,
            on_rewrite=parts.config.on_rewrite,
            allows_rollback=parts.config.enable_last_assistant_rollback,
        )
        self._context = copy_context()
        self._chains: list[Chain] = []
        self._hasher = PrefixHasher()
        self._tools_keys: deque[tuple[Any, bytes]] = deque(maxlen=_MAX_TOOL_LISTS)
        self._pending: list[PendingTurn] = []
        self._by_digest: dict[bytes, list[PendingTurn]] = {}
        self._by_key: dict[str, PendingTurn] = {}
        self._answered: deque[PendingTurn] = deque()
        self._samples_of: Counter[str] = Counter()
        self._num_asked = self._num_turns = self._num_failed = self._num_malformed = self._num_calls = 0
        self._was_truncated = False
        self._failure: str | None = None

    @property
    def num_in_flight(self) -> int:
        """Turns that are being made."""
        return len(self._pending)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return sum(pending.num_waiting for pending in self._pending)

    @property
    def num_turns(self) -> int:
        """Turns that were answered."""
        return self._num_turns

    # --- requests

    def submit(
        self, request: TurnRequest, *, digest: bytes, is_retry: bool = False, idempotency_key: str | None = None
    ) -> PendingTurn:
        """Begin to make a turn, or find the one that this request asks for a second time.

        Args:
            request: What is asked for.
            digest: Of the request as it came; retries have that of the first try.
            is_retry: The client says that it has sent this before. Otherwise an equal request is another sample.
            idempotency_key: What the client calls the request, the same in all tries.

        Raises:
            Refusal: it cannot be answered.
        """
        self.check_active()
        self.last_request_s = time.monotonic()
        earlier = self._earlier(digest, is_retry, idempotency_key)
        if earlier is not None:
            return earlier
        step = self._step(request)
        params = self._params(request, step)
        pending = PendingTurn(digest, self._next_head(len(step.context_ids)))
        pending.on_left = self._left
        self._by_digest.setdefault(digest, []).append(pending)
        if idempotency_key is not None:
            self._by_key[idempotency_key] = pending
        if params is None:
            full = self._full(step, request, pending.head)
            self._remember(pending, full)
            pending.end(full)
            return pending
        if request.stream and self._parts.streams:
            pending.spoken = self._spoken(request, params)
        step.chain.is_reserved = True
        self._pending.append(pending)
        # in the context of whoever made the session: a loop in a process knows by it whose requests these are
        start = self._parts.tasks.start_soon
        self._context.run(start, self._make, pending, step, request, params, name=f"turn-{self.session_id}")
        return pending

    def count_tokens(self, request: TurnRequest) -> int:
        """Return how many tokens the model would see; changes nothing.

        Raises:
            Refusal: it cannot be rendered.
        """
        self.check_active()
        return len(self._step(request).context_ids)

    def add_reward_info(self, info: dict[str, Any]) -> None:
        """Take what the agent says about its reward; later values replace earlier ones.

        Raises:
            Refusal: the session is over.
        """
        self.check_active()
        self.last_request_s = time.monotonic()
        self.reward_info |= info

    def check_active(self) -> None:
        """Raise Refusal where the session takes no requests."""
        if self.state is not SessionState.ACTIVE:
            raise Refusal("conflict", f"Session {self.session_id} is {self.state.value} and takes no more requests.")

    # --- end

    async def finalize(self) -> SessionResult:
        """End the session and return what it made. Requests in flight have `finalize_grace_s` left.

        Raises:
            Refusal: it is over already.
        """
        self.check_active()
        self.state = SessionState.FINALIZING
        with anyio.move_on_after(self._parts.config.finalize_grace_s):
            for pending in list(self._pending):
                if pending.num_waiting:
                    await pending.ended.wait()
        await self._end_pending()
        self.state = SessionState.FINALIZED
        self.ended.set()
        return self._result()

    async def abort(self) -> None:
        """Give the session up, and end what is in flight. Does nothing once it is over."""
        if self.state in (SessionState.FINALIZED, SessionState.ABORTED):
            return
        self.state = SessionState.ABORTED
        self.ended.set()
        await self._end_pending()

    async def _end_pending(self) -> None:
        for pending in list(self._pending):
            pending.scope.cancel()
        with anyio.CancelScope(shield=True):  # each ends at once: its scope is cancelled
            for pending in list(self._pending):
                await pending.ended.wait()

    def _result(self) -> SessionResult:
        chains = sorted(self._chains, key=lambda chain: chain.updated)
        return SessionResult(
            session_id=self.session_id,
            trajectories=[trajectory for chain in chains for trajectory in chain.trajectories()],
            reward_info=dict(self.reward_info),
            num_turns=self._num_turns,
            num_failed_turns=self._num_failed,
            num_calls=self._num_calls,
            num_malformed_calls=self._num_malformed,
            was_truncated=self._was_truncated,
            failure=self._failure,
        )

    # --- one turn

    def _earlier(self, digest: bytes, is_retry: bool, idempotency_key: str | None) -> PendingTurn | None:
        """Return the turn that a request asks for again; turns that failed are made anew."""
        if idempotency_key is not None and (known := self._by_key.get(idempotency_key)) is not None:
            if known.digest != digest:
                raise invalid(f"The idempotency key {idempotency_key!r} belongs to a request with another body.")
            return known
        if not is_retry:
            return None
        tries = self._by_digest.get(digest, [])
        # several equal requests may be under way: the one whose client went away is the one that is retried
        return max(tries, key=lambda turn: (turn.was_left, not turn.ended.is_set()), default=None)

    def _step(self, request: TurnRequest) -> Step:
        if request.prompt is not None:
            return raw_step(self._chains, request.prompt, self._parts.tokenizer)
        try:
            return self._makes_chains.step(
                self._chains, request, self._hasher.hashes(request.messages), self._tools_key(request)
            )
        except TemplateError as error:
            raise invalid(str(error), param="messages") from error

    def _tools_key(self, request: TurnRequest) -> bytes:
        for tools, key in self._tools_keys:
            if tools == request.tools:
                return key
        key = tools_digest(request.tools)
        self._tools_keys.append((request.tools, key))
        return key

    def _params(self, request: TurnRequest, step: Step) -> SampleParams | None:
        """Return how to sample; None if a conversation that goes on has no room left.

        Raises:
            Refusal: a parameter is out of range; or a new prompt is longer than the model takes.
        """
        allowed = self._parts.config.allowed_params
        given = {name: value for name, value in request.params.items() if name in allowed}
        try:
            params = merge_sampling_params(self._sample_params, given)
        except ConfigError as error:
            raise invalid(str(error)) from error
        limit = self._parts.max_trajectory_tokens
        stops = self._parts.tokenizer.token_ids_of(self._parts.parser.stop_texts)
        params.stop_token_ids = sorted({*params.stop_token_ids, *stops})
        if limit is None:
            return params
        room = limit - len(step.context_ids)
        if room > 0:
            params.max_tokens = min(params.max_tokens, room)
            return params
        self._was_truncated = True
        if step.is_new:
            raise Refusal(
                "context_length",
                f"This model's maximum context length is {limit} tokens. However, your prompt has "
                f"{len(step.context_ids)} tokens, which leaves no room for an answer. Please reduce its length.",
                param="prompt" if request.prompt is not None else "messages",
            )
        return None

    def _next_head(self, num_prompt_tokens: int) -> TurnHead:
        self._num_asked += 1
        turn_id = f"{self.session_id}-{self._num_asked}"
        return TurnHead(turn_id=turn_id, created_s=int(time.time()), num_prompt_tokens=num_prompt_tokens)

    def _spoken(self, request: TurnRequest, params: SampleParams) -> Spoken:
        parser = self._parts.parser
        is_parsed = self._is_parsed(request)
        marks = parser.call_marks if is_parsed else ()
        return Spoken(
            self._parts.tokenizer,
            template=self._parts.template if request.prompt is None else None,
            skip_special_tokens=not (is_parsed and parser.keeps_special_tokens),
            marks=None if marks is None else (*marks, *(parser.stop_texts if is_parsed else ())),
            stops=params.stops,
            with_logprobs=request.with_logprobs,
        )

    def _full(self, step: Step, request: TurnRequest, head: TurnHead) -> TurnResult:
        """End a conversation that has no room left, with an empty turn."""
        step.chain.ended_by = "max_trajectory_length"
        self._num_turns += 1
        return TurnResult(
            head=head,
            text="",
            finish_reason="length",
            prompt_ids=step.context_ids if request.with_token_ids else None,
            response_ids=[],
            logprobs=[],
            token_texts=[] if request.with_logprobs else None,
        )

    async def _make(self, pending: PendingTurn, step: Step, request: TurnRequest, params: SampleParams) -> None:
        outcome: TurnResult | Refusal = Refusal("conflict", f"Session {self.session_id} ended before the answer came.")
        try:
            with pending.scope:
                state = await self._generate(pending, step, params)
                outcome = await self._answer(pending, step, request, state)
        except Refusal as refusal:
            outcome = refusal
            self._note_failure(refusal.message)
        except Exception as error:  # what a request runs into must not end those of the others
            logger.exception("session %s: a turn could not be made", self.session_id)
            outcome = Refusal("unavailable" if isinstance(error, ENDS_THE_RUN) else "server", "Internal server error")
            self._note_failure(f"{type(error).__name__}: {error}")
            if isinstance(error, ENDS_THE_RUN):
                self.fatal = error
                self.ended.set()
        finally:
            step.chain.is_reserved = False
            self._pending.remove(pending)
            self.last_request_s = time.monotonic()
            self._remember(pending, outcome)
            pending.end(outcome)

    async def _generate(self, pending: PendingTurn, step: Step, params: SampleParams) -> RolloutState:
        prompt = hashlib.sha256(array("q", step.context_ids)).hexdigest()[:16]
        sample = self._samples_of[prompt]
        self._samples_of[prompt] += 1
        state = request_state(
            # equal ids have equal seeds: the prompt belongs to it, and which sample of it this is
            f"{self._seed_name}/{prompt}/{sample}",
            step.context_ids,
            session_id=self.session_id,
            task_name=self._task_name,
            sample_params=params,
        )
        while True:
            try:
                state = await self._sample(pending, state)
            except RolloutError as error:
                raise Refusal("server", str(error)) from error
            if state.status is Status.FAILED:
                raise Refusal("server", state.error_msg or "The engine failed.")
            if state.status is not Status.ABORTED:
                return state
            if not self._parts.resume_aborted:
                self.state = SessionState.ABORTED
                self.ended.set()
                raise Refusal("conflict", f"Session {self.session_id} was aborted: generation is paused.")

    async def _sample(self, pending: PendingTurn, state: RolloutState) -> RolloutState:
        rollout_ctl = self._parts.rollout_ctl
        if pending.spoken is None or not isinstance(rollout_ctl, StreamsTokens):
            return await rollout_ctl.generate(state)
        async with rollout_ctl.streaming(state) as chunks:
            async for chunk in chunks:
                pending.hear(chunk)
        return state

    async def _answer(self, pending: PendingTurn, step: Step, request: TurnRequest, state: RolloutState) -> TurnResult:
        ids, logprobs = list(state.response_ids or []), list(state.logprobs or [])
        if len(ids) != len(logprobs):
            raise Refusal("server", f"The engine gave {len(logprobs)} log-probs for {len(ids)} tokens.")
        content, calls = await self._read(ids, request)
        malformed = [call.arguments for call in calls if call.error is not None]
        whole = "\n".join([content, *malformed]).lstrip("\n") if malformed else content
        good = self._named(calls)
        shown = [call_message(call) for call in good]
        if request.prompt is None:
            template_message = self._parts.template.message(whole, shown)
            reasoning, text = split_turn(self._parts.template, whole)
        else:
            template_message, reasoning, text = {"role": "assistant", "content": content}, None, content
        finish: FinishReason = "length" if state.finish_reason == "length" else "stop"
        stop_text = None
        if finish == "stop":
            text, stop_text = _cut_at_stop(text, state.sample_params.stops)
        finish = "tool_calls" if good else finish
        self._num_malformed += len(malformed)
        self._num_turns += 1
        self._failure = None
        step.commit(
            Sampled(
                token_ids=ids,
                logprobs=logprobs,
                policy_versions=_versions(state, len(ids)),
                finish_reason=finish,
                template_message=template_message,
                client_message={"role": "assistant", "content": text, "tool_calls": shown},
            ),
            updated=self._num_turns,
        )
        if step.is_new:
            self._chains.append(step.chain)
        decode = self._parts.tokenizer.decode
        return TurnResult(
            head=pending.head,
            text=text,
            reasoning=reasoning,
            calls=tuple(good),
            finish_reason=finish,
            stop_text=stop_text,
            prompt_ids=step.context_ids if request.with_token_ids else None,
            response_ids=ids,
            logprobs=logprobs,
            token_texts=[decode([token], False) for token in ids] if request.with_logprobs else None,
        )

    async def _read(self, ids: list[int], request: TurnRequest) -> tuple[str, list[FunctionCall]]:
        """Return the text of a turn and the calls in it."""
        parser, tokenizer = self._parts.parser, self._parts.tokenizer
        if not self._is_parsed(request):
            return tokenizer.decode(ids, skip_special_tokens=True), []
        content, calls = await parser.extract_tool_calls(ids, request.tools or [])
        if not request.tools:  # it was offered none
            return content, []
        return content, [call.checked() for call in calls]

    def _is_parsed(self, request: TurnRequest) -> bool:
        """Return whether calls are looked for in a turn, or its format has more marks than text can have."""
        return request.prompt is None and bool(request.tools or self._parts.parser.keeps_special_tokens)

    def _named(self, calls: list[FunctionCall]) -> list[FunctionCall]:
        """Return the well-formed calls, each with an id of its own."""
        named: list[FunctionCall] = []
        for call in calls:
            if call.error is None:
                self._num_calls += 1  # nine characters: some templates take no others
                named.append(replace(call, tool_call_id=call.tool_call_id or f"call{self._num_calls:05d}"))
        return named

    def _left(self, pending: PendingTurn) -> None:
        self._parts.tasks.start_soon(self._end_unless_retried, pending)

    async def _end_unless_retried(self, pending: PendingTurn) -> None:
        with anyio.move_on_after(self._parts.config.retry_grace_s):
            await pending.ended.wait()
        if not pending.num_waiting:
            pending.scope.cancel()

    def _remember(self, pending: PendingTurn, outcome: TurnResult | Refusal) -> None:
        """Keep an answer for retries; what failed is tried anew."""
        if isinstance(outcome, Refusal):
            self._forget(pending)
            return
        self._answered.append(pending)
        if len(self._answered) > _MAX_ANSWERED:
            self._forget(self._answered.popleft())

    def _forget(self, pending: PendingTurn) -> None:
        turns = self._by_digest[pending.digest]
        turns.remove(pending)
        if not turns:
            del self._by_digest[pending.digest]
        self._by_key = {key: turn for key, turn in self._by_key.items() if turn is not pending}

    def _note_failure(self, message: str) -> None:
        self._num_failed += 1
        self._failure = message


def _versions(state: RolloutState, length: int) -> list[int]:
    versions = state.response_model_steps or []
    return list(versions) if len(versions) == length else [UNKNOWN_VERSION] * length


def _cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the first stop, and that stop."""
    found = [(place, stop) for stop in stops if stop and (place := text.find(stop)) >= 0]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop
