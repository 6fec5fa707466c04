"""Requests to replicas: which one, in what order, with which seed, and when none may start.

::

    generate(state) --> gate open? --> least loaded replica --> outbox --one message a tick--> replica
                                                                      result(request_id) <--'

Waits for    the gate (closed while weights are exchanged), and for the replica's answer within `request_timeout_s`
Is woken by  `continue_generation`; the replica's answer, its death, or the deadline
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from xrl_lite.actors import RestartPolicy
from xrl_lite.data import RolloutState, Status, update_status_from_finish_reason
from xrl_lite.errors import ActorTimeoutError, RolloutError
from xrl_lite.rollout.adapter import ServerAdapter
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplicaRegistry

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem

PRELOAD = {"torch": ("torch", "transformers")}
"""Modules that the fork server imports once for all replicas of an engine."""

MAX_CONCURRENCY = 65_536
"""Calls a replica holds open at once; what bounds the work is `max_batch_size`."""

DecodeTokens = Callable[[list[int], bool], str]
"""Token ids, and whether to leave special tokens out -> text."""


@dataclass
class _Outbox:
    """Requests of one tick for one replica."""

    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    sent: anyio.Event = field(default_factory=anyio.Event)


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
        self._outbox = [_Outbox() for _ in self._replicas]
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
            await self._send(number, request)
            call = self._replicas[number].result.options(timeout_s=self._config.request_timeout_s)
            result: GenerateResult = await call.remote(request.request_id)
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

    async def _send(self, number: int, request: GenerateRequest) -> None:
        """Send with all other requests of this tick as one message, so that the engine admits them together."""
        outbox = self._outbox[number]
        outbox.requests.append(request)
        # shield: who sends for others must not take them along, and a request that was sent must be asked for, since
        # cancelling that call is what frees its place in the engine
        with anyio.CancelScope(shield=True):
            if len(outbox.requests) > 1:
                await outbox.sent.wait()
                return
            await anyio.lowlevel.checkpoint()  # whoever is ready in this tick adds to the outbox meanwhile
            self._outbox[number] = _Outbox()
            submit = self._replicas[number].submit.options(timeout_s=self._config.request_timeout_s)
            try:
                await submit.remote(outbox.requests)
            finally:
                outbox.sent.set()

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


def response_seed(run_seed: int, state: RolloutState) -> int:
    """Seed of one response: a function of the run's seed, the task and the attempt, 63 bits."""
    text = f"{run_seed}/{state.task_name}/{state.rollout_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
