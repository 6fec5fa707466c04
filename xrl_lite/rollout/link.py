"""One replica as the driver sees it: what it was given, what it answered, and its successor when it dies.

::

    send(request) --> outbox --one message a tick--> replica --collect()--> whoever waits for the request
                                                        |
    STARTING --up--> UP --died, stuck, or broken--> STARTING (a new process gets the present weights) --> UP
                                                        '--too often--> DOWN
    UP --a transfer of weights failed half-way--> TORN --a later one succeeded--> UP

Waits for    answers; a replica that is busy answers every `health_interval_s` at the latest, an idle one is asked
Is woken by  the actor layer: an answer, the death of the process, or the time limit of a call
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from xrl_lite.actors import RestartPolicy
from xrl_lite.actors.restart import RestartBudget
from xrl_lite.algorithms.preload import MODEL_MODULES
from xrl_lite.errors import RolloutError, WeightSyncError, errors_as_themselves
from xrl_lite.log import get_logger
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import (
    Collected,
    GenerateRequest,
    GenerateResult,
    Outcome,
    ReplicaHealth,
    RolloutReplicaRegistry,
)

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.actors.placement import Bundle

logger = get_logger(__name__)

PRELOAD = {"torch": MODEL_MODULES}
"""Modules that the fork server imports once for all replicas of an engine."""

MAX_CONCURRENCY = 65_536
"""Calls a replica holds open at once; what bounds the work is `max_in_flight`."""

STOP_GRACE_S = 2.0
"""An engine may take so long to end in order."""

OnTokens = Callable[[GenerateResult], None]
"""Is told the new tokens of a request as they come."""


class LinkState(Enum):
    """Whether a replica can be given requests."""

    STARTING = "starting"
    UP = "up"
    TORN = "torn"
    """Holds a mixture of old and new weights."""
    DOWN = "down"


@dataclass(frozen=True)
class Lost:
    """The replica died while it had the request."""

    error: Exception
    known: GenerateResult
    """The tokens it had told of."""


@dataclass(eq=False)
class Pending:
    """A request that a replica has, and whoever waits for it."""

    request: GenerateRequest
    on_tokens: OnTokens | None = None
    known: GenerateResult = field(default_factory=GenerateResult)
    """Tokens told of so far."""
    outcome: Outcome | Lost | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    def progress(self, new: GenerateResult) -> None:
        """Take new tokens."""
        self.known.extend(new)
        if self.on_tokens is None or not new.token_ids:
            return
        try:
            self.on_tokens(new)
        except Exception:
            # whoever wanted to know is at fault, not the replica
            self.on_tokens = None
            logger.exception(
                "request %s: whoever is told of its tokens raised, and is told no more", self.request.request_id
            )

    def end(self, outcome: Outcome | Lost) -> None:
        """Wake up whoever waits."""
        if isinstance(outcome, GenerateResult) and self.on_tokens is not None:
            self.progress(outcome.since(len(self.known.token_ids)))
        self.outcome = outcome
        self.ended.set()


class ReplicaLink:
    """Starts one replica, speaks to it, and replaces it.

    Args:
        system: Where the replica runs.
        config: Settings of generation.
        model_path: Hugging Face folder or hub id.
        number: Number of the replica.
        bundle: Where it is placed, on its own part of the accelerators; without it, it claims some that nobody else
            has.
        on_change: Is called when it may take more requests than before, or will take none any more.
    """

    def __init__(
        self,
        system: ActorSystem,
        *,
        config: RolloutConfig,
        model_path: str,
        number: int,
        bundle: Bundle | None = None,
        on_change: Callable[[], None],
    ) -> None:
        self.name = f"rollout/{number}"
        self.number = number
        self.state = LinkState.STARTING
        self.error: Exception | None = None
        """Why it is down, or was last replaced."""
        self.num_replaced = 0
        self.load = 0
        """Requests it was given or promised."""
        self.restore: Callable[[], Awaitable[None]] | None = None
        """Gives a replica that was started anew the present weights."""
        self.settled = anyio.Event()
        """Set when it is known whether the first process came up."""
        self._state_changed = anyio.Event()
        self._system = system
        self._config = config
        self._model_path = model_path
        self._bundle = bundle
        self._on_change = on_change
        self._pending: dict[str, Pending] = {}
        self._outbox: list[GenerateRequest] = []
        self._wanted = anyio.Event()
        self._fault: Exception | None = None
        self._faulty = anyio.Event()
        self._held = False
        self._last_news = time.monotonic()
        self._budget = RestartBudget(
            RestartPolicy(max_restarts=config.max_restarts, window_s=config.restart_window_s, backoff_s=1.0)
        )
        self.replica: Any = self._spawn()

    @property
    def is_live(self) -> bool:
        """Whether it has a process that works, as far as is known."""
        return self.state in (LinkState.UP, LinkState.TORN) and self._fault is None

    # --- requests

    def send(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Pending:
        """Give it a request; everything that is sent in one turn of the loop is admitted together."""
        pending = Pending(request, on_tokens)
        if self.state is LinkState.DOWN:  # since the place was given
            pending.end(Lost(self.error or RolloutError("it is down"), pending.known))
            return pending
        self._pending[request.request_id] = pending
        self._outbox.append(request)
        self._wanted.set()
        return pending

    def give_up(self, pending: Pending) -> None:
        """End a request that nobody waits for any more."""
        request_id = pending.request.request_id
        if self._pending.pop(request_id, None) is not None:
            self._abort([request_id])

    def abort_all(self) -> int:
        """End all requests with what they have; return how many there were."""
        if self._pending and self.state is not LinkState.DOWN:
            self._abort(list(self._pending))
        return len(self._pending)

    def touch(self, *, held: bool) -> None:
        """Note that no tokens are to be expected (held), or again from now on."""
        self._held = held
        self._last_news = time.monotonic()

    # --- life

    async def run(self) -> None:
        """Speak to the replica until it is down for good. Cancelling ends that; the process goes with the system."""
        came_up = False
        while True:
            try:
                await self._start(came_up)
                came_up = True
                with errors_as_themselves():
                    async with anyio.create_task_group() as tasks:
                        for part in (self._send_all, self._collect_all, self._watch):
                            tasks.start_soon(part)
            except Exception as error:  # noqa: BLE001 - whatever ended it, the answer is a new process, or none
                if not await self._survive(error, came_up):
                    return

    async def stop(self) -> None:
        """End the process, which gets a moment to do so in order; whoever waits for a response gets an error."""
        self.state = LinkState.DOWN
        self.error = self.error or RolloutError("generation was ended (its controller was left)")
        pending, self._pending, self._outbox = list(self._pending.values()), {}, []
        for each in pending:
            each.end(RolloutError("generation was ended (its controller was left) before the response was whole"))
        self._changed()
        with anyio.move_on_after(self._config.health_timeout_s):
            await self.replica.stop(grace_s=STOP_GRACE_S)

    def fail(self, error: Exception) -> None:
        """Have it replaced."""
        self._fault = self._fault or error
        self._faulty.set()

    def torn(self, error: Exception) -> None:
        """Note that its weights are a mixture; it gets no requests until a transfer succeeds."""
        if self.state is LinkState.UP:
            self.state, self.error = LinkState.TORN, error

    def whole(self) -> None:
        """Note that its weights are the present ones."""
        if self.state is LinkState.TORN:
            self.state = LinkState.UP
            self._on_change()

    async def state_changed(self) -> None:
        """Return when it has come up, gone down, or was lost."""
        await self._state_changed.wait()

    async def health(self) -> ReplicaHealth:
        """Ask how it is doing.

        Raises:
            ActorError: it does not answer.
        """
        return await self.replica.health.options(timeout_s=self._config.health_timeout_s).remote()

    def _spawn(self) -> Any:
        config = self._config
        return self._system.spawn(
            RolloutReplicaRegistry.get(config.engine),
            kwargs={"config": config, "model_path": self._model_path, "replica": self.number},
            name=self.name,
            num_cpus=config.num_cpus,
            **self._devices(),
            num_threads=config.num_threads or len(os.sched_getaffinity(0)),
            max_concurrency=MAX_CONCURRENCY,
            max_pending=MAX_CONCURRENCY,
            preload=PRELOAD.get(config.engine, ()),
            start_timeout_s=config.start_timeout_s,
            # we start the successor ourselves: it must not answer before it got the present weights
            restart=RestartPolicy(max_restarts=0),
        )

    def _devices(self) -> dict[str, Any]:
        """What is said to `spawn`: a replica sees no accelerator that it is not given."""
        wanted = self._config.accelerators_of(self._system.num_accelerators)
        if self._bundle is None:
            return {"num_accelerators": wanted}
        first = self.number * wanted
        return {"bundle": self._bundle, "accelerators": self._bundle.claim.accelerators[first : first + wanted]}

    async def _start(self, again: bool) -> None:
        if again:
            # shield: a half-stopped actor would keep its name and its CPU slots
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._config.health_timeout_s):
                await self.replica.stop(grace_s=0.1)
            self.replica = self._spawn()
        await self.replica.ready()
        self._fault, self._faulty = None, anyio.Event()
        self.touch(held=self._held)
        self.state = await self._restored() if again else LinkState.UP
        self.settled.set()
        self._changed()

    async def _restored(self) -> LinkState:
        """Give a new process the present weights; where they are gone, it waits for the next sync."""
        try:
            if self.restore is not None:
                await self.restore()
        except WeightSyncError as error:
            self.error = error
            logger.warning("%s serves nobody until the next weight sync: %s", self.name, error)
            return LinkState.TORN
        return LinkState.UP

    async def _survive(self, error: Exception, came_up: bool) -> bool:
        """Hand back what the replica had; return whether a new one is to be started."""
        self.error = error
        self.state = LinkState.STARTING
        lost, self._pending, self._outbox = list(self._pending.values()), {}, []
        pause = self._budget.spend(time.monotonic()) if came_up else None
        if pause is None:
            self.state = LinkState.DOWN
            logger.error("%s is down for good: %s", self.name, error)
        else:
            self.num_replaced += 1
            logger.warning("%s is replaced (it had %d requests): %s", self.name, len(lost), error)
        for pending in lost:
            pending.end(Lost(error, pending.known))
        self.settled.set()
        self._changed()
        await anyio.sleep(pause or 0.0)
        return pause is not None

    def _changed(self) -> None:
        self._state_changed.set()
        self._state_changed = anyio.Event()
        self._on_change()

    async def _send_all(self) -> None:
        while True:
            await self._wanted.wait()
            await anyio.lowlevel.checkpoint()  # whoever is ready now adds to the message meanwhile
            self._wanted = anyio.Event()
            requests, self._outbox = self._outbox, []
            if requests:
                submit = self.replica.submit.options(timeout_s=self._config.health_timeout_s)
                await submit.remote(requests)

    async def _collect_all(self) -> None:
        collect = self.replica.collect.options(timeout_s=self._config.health_timeout_s)
        while True:
            if not self._pending:
                await self._idle()
                continue
            self._take(await collect.remote(self._config.health_interval_s))

    async def _idle(self) -> None:
        """Wait for a request; ask meanwhile whether the replica is still there."""
        with anyio.move_on_after(self._config.health_interval_s):
            await self._wanted.wait()
            self._last_news = time.monotonic()
            return
        await self.health()

    async def _watch(self) -> None:
        await self._faulty.wait()
        assert self._fault is not None, "it is set first"
        raise self._fault

    def _take(self, collected: Collected) -> None:
        for request_id, new in collected.progress.items():
            if (pending := self._pending.get(request_id)) is not None:
                pending.progress(new)
        for request_id, outcome in collected.ended.items():
            if (pending := self._pending.pop(request_id, None)) is not None:  # None: it gave up meanwhile
                pending.end(outcome)
        if collected.progress or collected.ended or self._held:
            self._last_news = time.monotonic()
        elif time.monotonic() - self._last_news > self._config.stall_timeout_s:
            raise RolloutError(
                f"{self.name} has {len(self._pending)} requests and made no token for "
                f"{self._config.stall_timeout_s:g} s (stall_timeout_s)."
            )

    def _abort(self, request_ids: list[str]) -> None:
        unsent = {request.request_id for request in self._outbox}.intersection(request_ids)
        if unsent:
            self._outbox = [request for request in self._outbox if request.request_id not in unsent]
        for request_id in unsent:
            if (pending := self._pending.pop(request_id, None)) is not None:
                pending.end(GenerateResult(finish_reason="abort"))
        sent = [request_id for request_id in request_ids if request_id not in unsent]
        if sent and self.state is not LinkState.STARTING:
            self.replica.abort.remote(sent)
