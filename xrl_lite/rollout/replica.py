"""The seam of rollout engines: what a replica can do, its records, and the table of engines.

A replica is an actor: one copy of the model behind a queue of requests. Token ids in, token ids out. To add an engine,
subclass `RolloutReplica` and register a loader of it::

    RolloutReplicaRegistry.register("mine", lambda: MyReplica)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.data import SampleParams
from xrl_lite.errors import RolloutError, UnknownNameError, did_you_mean
from xrl_lite.registry import load_object, load_plugins

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.rollout.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One response to generate."""

    request_id: str
    """Unique among requests in flight."""
    prompt_ids: list[int]
    """Everything the model sees before the response."""
    sample_params: SampleParams
    """How to sample."""
    seed: int
    """Seed of this response: the same request and weights give the same tokens, whatever else is generated."""


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """One generated response."""

    token_ids: list[int]
    """Sampled tokens, the one that ended the response included."""
    logprobs: list[float]
    """Log-probability of each, temperature applied."""
    finish_reason: str
    """stop, length or abort."""
    policy_versions: list[int]
    """Version of the weights that sampled each token."""


@dataclass
class _Batch:
    """Requests that were submitted together, and what became of them since the last `collect`."""

    running: set[str]
    ended: dict[str, GenerateResult | RolloutError] = field(default_factory=dict[str, "GenerateResult | RolloutError"])
    changed: anyio.Event = field(default_factory=anyio.Event)


class RolloutReplica(ABC):
    """One copy of the model. Methods run on the loop of the replica's process; compute does not.

    A subclass implements `admit`, `drop` and `update_weights`, and calls `deliver` once for every request.

    Args:
        config: Settings of generation.
        model_path: Hugging Face folder or hub id.
        replica: Number of this replica.
    """

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        load_plugins()
        self.config = config
        self.model_path = model_path
        self.replica = replica
        self.policy_version = 0
        self._batches: dict[str, _Batch] = {}
        self._batch_of: dict[str, str] = {}

    # --- called by the controller

    async def submit(self, batch_id: str, requests: list[GenerateRequest]) -> None:
        """Take requests: they are admitted together and in this order."""
        self._batches[batch_id] = _Batch({request.request_id for request in requests})
        self._batch_of |= {request.request_id: batch_id for request in requests}
        self.admit(requests)

    async def collect(self, batch_id: str) -> dict[str, GenerateResult | RolloutError]:
        """Return what ended since the last call, by request; waits until something has. Cancelling loses nothing."""
        batch = self._batches[batch_id]
        await batch.changed.wait()
        ended, batch.ended, batch.changed = batch.ended, {}, anyio.Event()
        if not batch.running:
            del self._batches[batch_id]
        return ended

    async def abort(self, request_ids: list[str]) -> int:
        """End requests with finish reason abort, if they still run; return how many did."""
        running = [request_id for request_id in request_ids if request_id in self._batch_of]
        self.drop(running)
        return len(running)

    async def abort_all(self) -> int:
        """End every request in flight with finish reason abort; return how many there were."""
        return await self.abort(list(self._batch_of))

    @abstractmethod
    async def update_weights(self, version: int, weights: dict[str, Tensor]) -> str:
        """Take new weights, given by Hugging Face name, and return their digest. No request is being computed.

        Raises:
            WeightSyncError: a name or shape does not fit; the message names it.
        """

    # --- for subclasses

    @abstractmethod
    def admit(self, requests: list[GenerateRequest]) -> None:
        """Queue requests. One that cannot be served is delivered as a RolloutError at once."""

    @abstractmethod
    def drop(self, request_ids: list[str]) -> None:
        """End these requests soon; each is delivered with what it has, finish reason abort."""

    def deliver(self, request_id: str, outcome: GenerateResult | RolloutError) -> None:
        """Hand over what became of a request. Call it on the loop."""
        batch = self._batches[self._batch_of.pop(request_id)]
        batch.running.remove(request_id)
        batch.ended[request_id] = outcome
        batch.changed.set()


class RolloutReplicaRegistry:
    """Engines by name. Values are loaders or import paths, so that no engine is imported before it is used."""

    _table: dict[str, Callable[[], type[RolloutReplica]] | str] = {  # noqa: RUF012 - the registry itself
        "torch": "xrl_lite.rollout.torch_engine:TorchReplica",
        "fake": "xrl_lite.rollout.fake:FakeReplica",
    }

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        """Register an engine; a built-in name may be replaced."""
        cls._table[name] = loader

    @classmethod
    def check(cls, name: str) -> None:
        """Raise UnknownNameError where there is no such engine, without importing one."""
        if name not in cls._table:
            raise UnknownNameError(
                f"Unknown rollout engine {name!r}.{did_you_mean(name, cls._table)} "
                f"Known: {', '.join(map(repr, sorted(cls._table)))}. Add one with RolloutReplicaRegistry.register."
            )

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        """Import and return an engine.

        Raises:
            UnknownNameError: there is none of this name; lists what there is.
        """
        cls.check(name)
        entry = cls._table[name]
        loaded: Any = load_object(entry) if isinstance(entry, str) else entry()
        return loaded
