"""The seam of rollout engines: what a replica can do, its records, and the table of engines.

A replica is an actor: one copy of the model behind a queue of requests. Token ids in, token ids out. To add an engine,
subclass `RolloutReplica` and register a loader of it (`examples/echo_engine.py` is one)::

    RolloutReplicaRegistry.register("mine", lambda: MyReplica)

New weights come in phases, each on all replicas before the next begins::

    prepare (names and shapes fit; computing stops) --> load, bucket by bucket --> finish (caches dropped, version set)
                                                             '--> abandon, if anything failed anywhere
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from xrl_lite.algorithms.weights import adapted_layer, adapter_scaling
from xrl_lite.data import SampleParams
from xrl_lite.errors import PluginError, RolloutError, UnknownNameError, WeightSyncError, did_you_mean
from xrl_lite.registry import load_object, load_plugins

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.weights import TensorSpec, WeightBucket, WeightManifest
    from xrl_lite.rollout.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One response to generate."""

    request_id: str
    """Unique among requests in flight."""
    prompt_ids: list[int]
    """Everything the model sees before the tokens that are wanted."""
    sample_params: SampleParams
    """How to sample; `max_tokens` counts the tokens that are still wanted."""
    seed: int
    """Seed of this response: the same request and weights give the same tokens, whatever else is generated."""
    num_sampled: int = 0
    """How many of the last tokens of `prompt_ids` are of this very response, from an earlier call that was cut off."""
    stream: bool = False
    """Report tokens as they come."""


@dataclass(kw_only=True)
class GenerateResult:
    """One generated response, or as much of it as there is."""

    token_ids: list[int] = field(default_factory=list[int])
    """Sampled tokens, the one that ended the response included."""
    logprobs: list[float] = field(default_factory=list[float])
    """Log-probability of each, temperature applied."""
    policy_versions: list[int] = field(default_factory=list[int])
    """Version of the weights that sampled each token."""
    finish_reason: str | None = None
    """stop, length or abort; None while it goes on."""

    def extend(self, more: GenerateResult) -> None:
        """Add what came after."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.policy_versions += more.policy_versions
        self.finish_reason = more.finish_reason

    def cut(self, number: int) -> None:
        """Forget what came after the first `number` tokens."""
        for values in (self.token_ids, self.logprobs, self.policy_versions):
            del values[number:]

    def since(self, number: int) -> GenerateResult:
        """Return what came after the first `number` tokens."""
        return GenerateResult(
            token_ids=self.token_ids[number:],
            logprobs=self.logprobs[number:],
            policy_versions=self.policy_versions[number:],
            finish_reason=self.finish_reason,
        )


Outcome = GenerateResult | RolloutError
"""What becomes of a request."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What happened on a replica since it was last asked."""

    ended: dict[str, Outcome]
    """Whole outcomes of requests, by id."""
    progress: dict[str, GenerateResult]
    """New tokens of requests that go on."""


@dataclass(frozen=True, kw_only=True)
class ReplicaHealth:
    """How a replica is doing."""

    policy_version: int
    num_running: int
    """Requests that have not ended."""
    num_ended: int
    """Requests that have ended since it started."""
    seconds_without_token: float
    """Since the last token or the last moment without requests."""


class RolloutReplica(ABC):
    """One copy of the model. Methods run on the loop of the replica's process; compute does not.

    A subclass implements `admit`, `drop`, `partial` and `load_tensors`, and calls `deliver` once for every request.

    Args:
        config: Settings of generation.
        model_path: Hugging Face folder or hub id.
        replica: Number of this replica.
    """

    takes_adapters: ClassVar[bool] = False
    """Whether a LoRA adapter may be sent by itself."""

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        load_plugins()
        self.config = config
        self.model_path = model_path
        self.replica = replica
        self.policy_version = 0
        self._running: dict[str, GenerateRequest] = {}
        self._reported: dict[str, int] = {}
        self._ended: dict[str, Outcome] = {}
        self._streaming: set[str] = set()
        self._told_all_at = time.monotonic()
        self._changed = anyio.Event()
        self._num_ended = 0
        self._last_token = time.monotonic()
        self._manifest: WeightManifest | None = None
        self._is_loading = False
        self._loaded: set[str] = set()
        self._adapter: dict[str, Tensor] = {}

    # --- called by the controller

    async def submit(self, requests: list[GenerateRequest]) -> None:
        """Take requests: they are admitted together and in this order."""
        if not self._running:
            self._last_token = time.monotonic()
        self._running |= {request.request_id: request for request in requests}
        self._reported |= {request.request_id: 0 for request in requests}
        self.admit(requests)

    async def collect(self, within_s: float) -> Collected:
        """Return what happened since the last call; waits until a request has ended or a streamed token has come.

        Once `within_s` seconds have passed since it was last so, it returns the new tokens of all requests. Cancelling
        loses nothing.
        """
        with anyio.move_on_after(within_s):
            await self._changed.wait()
        asked = list(self._streaming)
        now = time.monotonic()
        if not self._changed.is_set() or now - self._told_all_at >= within_s:
            asked, self._told_all_at = list(self._running), now
        progress = {request_id: new for request_id in asked if (new := self._new_tokens(request_id)).token_ids}
        ended, self._ended, self._changed = self._ended, {}, anyio.Event()
        self._streaming.clear()
        return Collected(ended=ended, progress=progress)

    async def abort(self, request_ids: list[str]) -> int:
        """End requests with finish reason abort, if they still run; return how many did."""
        running = [request_id for request_id in request_ids if request_id in self._running]
        self.drop(running)
        return len(running)

    async def abort_all(self) -> int:
        """End every request in flight with finish reason abort; return how many there were."""
        return await self.abort(list(self._running))

    async def health(self) -> ReplicaHealth:
        """Say how it is doing."""
        return ReplicaHealth(
            policy_version=self.policy_version,
            num_running=len(self._running),
            num_ended=self._num_ended,
            seconds_without_token=time.monotonic() - self._last_token if self._running else 0.0,
        )

    async def devices(self) -> list[str]:
        """Return where the weights are: "cpu", or the unique ids of GPUs."""
        return ["cpu"]

    async def pause(self) -> None:
        """Stop computing between two tokens; requests stay as they are until `resume`."""

    async def resume(self) -> None:
        """Compute again."""

    async def sleep(self, level: int) -> None:
        """Give memory of the device back: level 1 keeps the weights elsewhere, level 2 forgets them. No-op on a CPU."""

    async def wake_up(self, tags: list[str]) -> None:
        """Take memory again: "weights", "kv_cache", or both."""

    # --- called by weight sync

    async def prepare_weights(self, manifest: WeightManifest) -> int:
        """Make ready for weights: check that they fit, and stop computing; return how many processes will take them.

        Raises:
            WeightSyncError: a name or shape does not fit; names it. Nothing has changed.
        """
        self._check_fit(manifest)
        await self.pause()
        self._manifest, self._is_loading, self._loaded, self._adapter = manifest, False, set(), {}
        return self.num_receivers if manifest.adapter is None else 1

    async def load_weights(self, bucket: WeightBucket) -> dict[str, str]:
        """Take the tensors of a bucket; return the checksum of each as it is held now."""
        manifest = self._manifest
        assert manifest is not None, "prepare_weights comes first"
        self._is_loading = True
        checksums = await self.load_tensors(bucket) if manifest.adapter is None else self._keep_adapter(bucket)
        self._loaded |= checksums.keys()
        return checksums

    async def finish_weights(self) -> int:
        """Use the new weights: drop what was computed with the old ones, compute again, return the version.

        Raises:
            WeightSyncError: a tensor of the manifest never came; names it.
        """
        manifest = self._manifest
        assert manifest is not None, "prepare_weights comes first"
        for spec in manifest.tensors:
            if spec.name not in self._loaded:
                raise WeightSyncError(f"rollout/{self.replica}: tensor {spec.name!r} was announced and never came.")
        if manifest.adapter is not None:
            await self.apply_adapter(self._adapter, manifest.adapter)
            self._adapter = {}
        await self.drop_caches()
        self.policy_version = manifest.version
        self._manifest = None
        await self.resume()
        return self.policy_version

    async def abandon_weights(self) -> bool:
        """Give up a transfer; return whether the weights are whole: those from before, no loading having begun."""
        # an adapter is kept beside the weights until all of it is there
        whole = self._manifest is None or not self._is_loading or self._manifest.adapter is not None
        if self._manifest is not None and whole:
            await self.resume()
        self._manifest = None
        return whole

    # --- for subclasses

    @abstractmethod
    def admit(self, requests: list[GenerateRequest]) -> None:
        """Queue requests. One that cannot be served is delivered as a RolloutError at once."""

    @abstractmethod
    def drop(self, request_ids: list[str]) -> None:
        """End these requests soon; each is delivered with what it has, finish reason abort."""

    @abstractmethod
    def partial(self, request_id: str) -> GenerateResult:
        """Return what a running request has so far."""

    @property
    def num_receivers(self) -> int:
        """Processes of this replica that take the model's weights; the n-th of them iterates `bucket.tensors(n)`."""
        return 1

    @abstractmethod
    async def load_tensors(self, bucket: WeightBucket) -> dict[str, str]:
        """Replace weights by those of a bucket; return their checksums, read from where they are held if it can be."""

    async def apply_adapter(self, adapter: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Compute with an adapter from now on, instead of the one from before.

        Only engines with `takes_adapters` are asked; to the others the trainer sends weights with the adapter merged.

        Args:
            adapter: Its weights, by the names of peft's files.
            settings: As in peft's adapter_config.json.
        """
        raise NotImplementedError

    async def drop_caches(self) -> None:
        """Forget everything that was computed with the weights from before."""

    def expected_tensors(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of all weights that a full transfer must bring, by name; None if the engine cannot tell."""
        return None

    def deliver(self, request_id: str, outcome: Outcome) -> None:
        """Hand over what became of a request. Call it on the loop."""
        if self._running.pop(request_id, None) is None:
            return
        del self._reported[request_id]
        self._streaming.discard(request_id)
        self._ended[request_id] = outcome
        self._num_ended += 1
        self._last_token = time.monotonic()
        self._changed.set()

    def advanced(self, request_ids: list[str]) -> None:
        """Note that requests got tokens: wakes up whoever streams one of them. Call it on the loop."""
        self._last_token = time.monotonic()
        streamed = [r for r in request_ids if (request := self._running.get(r)) is not None and request.stream]
        if streamed:
            self._streaming.update(streamed)
            self._changed.set()

    def _new_tokens(self, request_id: str) -> GenerateResult:
        new = self.partial(request_id).since(self._reported[request_id])
        self._reported[request_id] += len(new.token_ids)
        return new

    def _keep_adapter(self, bucket: WeightBucket) -> dict[str, str]:
        from xrl_lite.algorithms.weights import tensor_checksum

        checksums: dict[str, str] = {}
        for name, tensor in bucket.tensors():
            self._adapter[name] = tensor.clone()
            checksums[name] = tensor_checksum(self._adapter[name])
        return checksums

    def _check_fit(self, manifest: WeightManifest) -> None:
        expected = self.expected_tensors()
        if expected is None:
            return
        if manifest.adapter is not None:
            self._check_adapter_fit(manifest.tensors, manifest.adapter, expected)
            return
        sent = {spec.name: spec.shape for spec in manifest.tensors}
        for name in sorted(sent.keys() - expected.keys()):
            raise WeightSyncError(
                f"rollout/{self.replica}: tensor {name!r} is not in the model.{did_you_mean(name, expected)} "
                f"Trainer and rollout engine must load the same model."
            )
        for name in sorted(expected.keys() - sent.keys()):
            raise WeightSyncError(f"rollout/{self.replica}: tensor {name!r} of the model was not sent.")
        for name, shape in sent.items():
            if shape != expected[name]:
                raise WeightSyncError(
                    f"rollout/{self.replica}: tensor {name!r} has shape {shape}, the model's has {expected[name]}."
                )

    def _check_adapter_fit(
        self, tensors: Sequence[TensorSpec], settings: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        adapter_scaling(settings)  # raises where it has to be refused
        for spec in tensors:
            layer, side = adapted_layer(spec.name)
            if (shape := expected.get(f"{layer}.weight")) is None:
                raise WeightSyncError(
                    f"rollout/{self.replica}: tensor {spec.name!r} changes a layer that is not in the model."
                    f"{did_you_mean(f'{layer}.weight', expected)} Trainer and rollout engine must load the same model."
                )
            num_out, num_in = shape[::-1] if settings.get("fan_in_fan_out") else shape
            wanted = (settings["r"], num_in) if side == "A" else (num_out, settings["r"])
            if spec.shape != wanted:
                raise WeightSyncError(
                    f"rollout/{self.replica}: tensor {spec.name!r} has shape {spec.shape}, the model's layer wants "
                    f"{wanted}."
                )


class RolloutReplicaRegistry:
    """Engines by name. Values are loaders or import paths, so that no engine is imported before it is used."""

    _table: dict[str, Callable[[], type[RolloutReplica]] | str] = {  # noqa: RUF012 - the registry itself
        "torch": "xrl_lite.rollout.torch_engine:TorchReplica",
        "vllm": "xrl_lite.rollout.vllm_engine:VLLMReplica",
        "openai": "xrl_lite.rollout.openai_engine:OpenAIReplica",
        "fake": "xrl_lite.rollout.fake:FakeReplica",
    }

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        """Register an engine; a built-in name may be replaced."""
        cls._table[name] = loader

    @classmethod
    def names(cls) -> Iterator[str]:
        """Yield the names there are."""
        yield from sorted(cls._table)

    @classmethod
    def check(cls, name: str) -> None:
        """Raise UnknownNameError where there is no such engine, without importing one."""
        if name not in cls._table:
            raise UnknownNameError(
                f"Unknown rollout engine {name!r}.{did_you_mean(name, cls._table)} "
                f"Known: {', '.join(map(repr, cls.names()))}. Add one with RolloutReplicaRegistry.register, in a "
                f"module that XRL_LITE_USE_EXTERNAL_MODULES names."
            )

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        """Import and return an engine.

        Raises:
            UnknownNameError: there is none of this name; lists what there is.
            PluginError: it cannot be loaded, or is no replica.
        """
        cls.check(name)
        entry = cls._table[name]
        loaded: Any = load_object(entry) if isinstance(entry, str) else entry()
        if not (isinstance(loaded, type) and issubclass(loaded, RolloutReplica)):
            raise PluginError(f"The rollout engine {name!r} is {loaded!r}, which is no subclass of RolloutReplica.")
        return loaded


def copy_tensors(bucket: WeightBucket, own: dict[str, Tensor]) -> dict[str, str]:
    """Copy a bucket into tensors of the same names; return the checksums of what they hold then."""
    import torch

    from xrl_lite.algorithms.weights import tensor_checksum

    checksums: dict[str, str] = {}
    with torch.no_grad():
        for name, tensor in bucket.tensors():
            own[name].copy_(tensor)
            # a wider one holds the same number
            checksums[name] = tensor_checksum(own[name].to(tensor.dtype))
    return checksums
