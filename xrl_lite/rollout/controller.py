"""Requests to replicas: which one, in what order, with which seed, and when none may start.

::

    generate(state) --> gate open? --> least loaded replica --> outbox --one message a tick--> replica
          ^                                                                                      |
          '--- one of those that wait collects for all, and hands over to another when it has its own answer

Waits for    the gate (closed while weights are exchanged); its place in a message; its answer, `request_timeout_s` long
Is woken by  `continue_generation`; the next turn of the loop; whoever collects, or being handed the collecting
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from xrl_lite.actors import RestartPolicy
from xrl_lite.algorithms.preload import MODEL_MODULES
from xrl_lite.data import RolloutState, Status, update_status_from_finish_reason
from xrl_lite.errors import ActorTimeoutError, RolloutError
from xrl_lite.rollout.adapter import ServerAdapter
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplicaRegistry

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem

PRELOAD = {"torch": MODEL_MODULES}
"""Modules that the fork server imports once for all replicas of an engine."""

MAX_CONCURRENCY = 65_536
"""Calls a replica holds open at once; what bounds the work is `max_batch_size`."""

DecodeTokens = Callable[[list[int], bool], str]
"""Token ids, and whether to leave special tokens out -> text."""


@dataclass
class _Waiter:
    """Somebody who waits for an answer."""

    outcome: GenerateResult | Exception | None = None
    """The answer, once it is there."""
    must_collect: bool = False
    """It is this one's turn to collect for the batch."""
    woken: anyio.Event = field(default_factory=anyio.Event)
    """Set when either of the two changes."""


@dataclass
class _Batch:
    """Requests that go to one replica as one message."""

    batch_id: str
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    waiting: dict[str, _Waiter] = field(default_factory=dict[str, _Waiter])


class RolloutController:
    """Starts the replicas and generates with them.

    Args:
        system: Where the replicas run.
        config: Settings of generation.
        model_path: Hugging Face folder or hub id.
        decode: Makes text of token ids.
        seed: Seed of the run; each response gets a seed of its own from it and the state's ids.
    """

    def __init__(
        self, system: ActorSystem, *, config: RolloutConfig, model_path: str, decode: DecodeTokens, seed: int
    ) -> None:
        self._config = config
        self._decode = decode
        self._seed = seed
        self._replicas: list[Any] = [
            system.spawn(
                RolloutReplicaRegistry.get(config.engine),
                kwargs={"config": config, "model_path": model_path, "replica": number},
                name=f"rollout/{number}",
                num_cpus=config.num_cpus,
                num_threads=config.num_threads or len(os.sched_getaffinity(0)),
                max_concurrency=MAX_CONCURRENCY,
                max_pending=MAX_CONCURRENCY,
                preload=PRELOAD.get(config.engine, ()),
                start_timeout_s=config.start_timeout_s,
                # a restarted replica has the initial weights; it must not answer before it got the present ones
                restart=RestartPolicy(max_restarts=0),
            )
            for number in range(config.num_replicas)
        ]
        self.adapters = [
            ServerAdapter(replica, number, timeout_s=config.sync_timeout_s)
            for number, replica in enumerate(self._replicas)
        ]
        self._load = [0] * config.num_replicas
        self._num_batches = 0
        self._outbox = [self._new_batch() for _ in self._replicas]
        self._num_requests = 0
        self._gate = anyio.Event()
        self._gate.set()

    async def ready(self) -> None:
        """Wait until every replica has loaded the model."""
        for replica in self._replicas:
            await replica.ready()

    async def generate(self, state: RolloutState) -> RolloutState:
        """Generate the response of a state and return the state, COMPLETED, ABORTED or FAILED.

        Waits while the gate is closed. Cancelling aborts the request in the engine.

        Raises:
            ActorDiedError: the replica died; the run cannot go on without it.
        """
        await self._gate.wait()
        number = min(range(len(self._replicas)), key=self._load.__getitem__)
        request = self._request(state)
        self._load[number] += 1
        try:
            result = await self._ask(number, request)
        except (RolloutError, ActorTimeoutError) as error:
            state.status = Status.FAILED
            state.error_msg = f"sample {state.rollout_id} on rollout/{number}: {error}"
            return state
        finally:
            self._load[number] -= 1
        return self._fill(state, result)

    async def pause_generation(self) -> None:
        """Close the gate: requests that have not been sent wait."""
        if self._gate.is_set():
            self._gate = anyio.Event()

    async def continue_generation(self) -> None:
        """Open the gate."""
        self._gate.set()

    async def abort_all(self) -> int:
        """End every request in flight; return how many there were."""
        return sum([await replica.abort_all.remote() for replica in self._replicas])

    def statistics(self) -> dict[str, int]:
        """Return the requests in flight of each replica."""
        return {f"rollout/{number}": load for number, load in enumerate(self._load)}

    async def _ask(self, number: int, request: GenerateRequest) -> GenerateResult:
        batch = self._outbox[number]
        batch.requests.append(request)
        waiter = batch.waiting[request.request_id] = _Waiter()
        try:
            if len(batch.requests) == 1:
                await self._send(number, batch)
                waiter.must_collect = True
            while waiter.outcome is None:
                if waiter.must_collect:
                    await self._collect(number, batch)
                else:
                    await waiter.woken.wait()
                    waiter.woken = anyio.Event()
        finally:
            self._leave(number, batch, request.request_id, waiter)
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        return waiter.outcome

    async def _send(self, number: int, batch: _Batch) -> None:
        """Send everything that is asked for in this turn of the loop, so that the engine admits it together."""
        # shield: whoever sends for others must not take them along when it is cancelled
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()  # whoever is ready now adds to the batch meanwhile
            self._outbox[number] = self._new_batch()
            submit = self._replicas[number].submit.options(timeout_s=self._config.request_timeout_s)
            try:
                await submit.remote(batch.batch_id, batch.requests)
            except Exception as error:  # noqa: BLE001 - raised again by everyone who waits
                _deliver(batch, dict.fromkeys(list(batch.waiting), error))

    async def _collect(self, number: int, batch: _Batch) -> None:
        """Fetch what has ended and hand it to those who wait for it."""
        collect = self._replicas[number].collect.options(timeout_s=self._config.request_timeout_s)
        try:
            _deliver(batch, await collect.remote(batch.batch_id))
        except Exception as error:  # noqa: BLE001 - raised again by everyone who waits
            _deliver(batch, dict.fromkeys(list(batch.waiting), error))

    def _leave(self, number: int, batch: _Batch, request_id: str, waiter: _Waiter) -> None:
        """Take a waiter out of its batch: pass on the collecting, and free its place in the engine if it gave up."""
        if batch.waiting.pop(request_id, None) is not None:
            self._replicas[number].abort.remote([request_id])
        if waiter.must_collect and batch.waiting:
            heir = next(iter(batch.waiting.values()))
            heir.must_collect = True
            heir.woken.set()

    def _new_batch(self) -> _Batch:
        self._num_batches += 1
        return _Batch(f"batch-{self._num_batches}")

    def _request(self, state: RolloutState) -> GenerateRequest:
        assert state.prompt_ids is not None, "a state has prompt_ids before it is generated"
        self._num_requests += 1
        params = state.sample_params
        return GenerateRequest(
            request_id=f"{state.rollout_id}-{self._num_requests}",
            prompt_ids=state.tokens or state.prompt_ids,
            sample_params=params,
            seed=response_seed(self._seed, state) if params.sampling_seed is None else params.sampling_seed,
        )

    def _fill(self, state: RolloutState, result: GenerateResult) -> RolloutState:
        state.response_ids = result.token_ids
        state.response = self._decode(result.token_ids, state.sample_params.skip_special_tokens)
        state.logprobs = result.logprobs
        state.response_mask = [1] * len(result.token_ids)
        state.response_model_steps = result.policy_versions
        state.finish_reason = result.finish_reason
        state.status = update_status_from_finish_reason(result.finish_reason)
        return state


def _deliver(batch: _Batch, outcomes: Mapping[str, GenerateResult | Exception]) -> None:
    for request_id, outcome in outcomes.items():
        waiter = batch.waiting.pop(request_id, None)  # None: it gave up meanwhile
        if waiter is not None:
            waiter.outcome = outcome
            waiter.woken.set()


def response_seed(run_seed: int, state: RolloutState) -> int:
    """Seed of one response: a function of the run's seed, the task and the attempt, 63 bits."""
    text = f"{run_seed}/{state.task_name}/{state.rollout_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
