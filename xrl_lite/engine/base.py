"""The seam of training engines: what one rank can do, and the table of engines.

An engine holds the model and its optimizer on one rank. It knows tensors and losses, and neither groups nor rewards.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xrl_lite.errors import ConfigError, UnknownNameError, did_you_mean
from xrl_lite.registry import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.packing import PackedBatch
    from xrl_lite.engine.config import EngineConfig

T = TypeVar("T")

DEVICE_VARIABLE = "XRL_LITE_ENGINE_DEVICE"
VENDOR_VARIABLE = "XRL_LITE_ENGINE_VENDOR"


@dataclass(frozen=True, kw_only=True)
class OutputRequest:
    """What a forward pass shall give beyond log-probs."""

    entropy: bool = False
    """Entropy of each distribution."""
    entropy_gradient: bool = False
    """With its gradient."""
    sum_pi_squared: bool = False
    """Sum of the squared probabilities of all tokens."""
    top_k: int = 0
    """The k likeliest tokens and their log-probs."""


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """What the model says at each trained token, T in the order of `PackedBatch.targets`, temperature applied."""

    logprobs: Tensor
    """(T,) of the trained tokens."""
    entropy: Tensor | None = None
    """(T,) in nats."""
    sum_pi_squared: Tensor | None = None
    """(T,)."""
    top_ids: Tensor | None = None
    """(T, k) the likeliest tokens."""
    top_logprobs: Tensor | None = None
    """(T, k)."""
    candidate_logprobs: Tensor | None = None
    """(T, k) of `PackedBatch.candidates`, where there are any."""


@dataclass(frozen=True, kw_only=True)
class ValueOutputs:
    """What a value model says at each trained token, T in the order of `PackedBatch.targets`."""

    values: Tensor
    """(T,) of the state in which each token was chosen."""


@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """The part of a weight that one rank holds: whole rows, the last of a rank's weights perhaps none."""

    name: str
    """Hugging Face name of the weight."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    first_row: int
    """Row of the whole weight that `values` begins with."""
    values: Tensor
    """(R, *shape[1:]) this rank's rows; of shape () where the weight has that shape."""


@dataclass(frozen=True, kw_only=True)
class WeightDelta:
    """What became of this rank's part of a weight since `BaseEngine.prime_delta_snapshots`."""

    name: str
    """Hugging Face name of the weight."""
    shape: tuple[int, ...]
    """Of the whole weight."""
    indices: Tensor
    """(N,) int64 into the flattened whole weight, ascending: the values that changed."""
    values: Tensor
    """(N,) what they are now."""


LossFunction = Callable[[Any, "PackedBatch"], "Tensor"]
"""Outputs of a micro-batch (`TokenOutputs`, of a value model `ValueOutputs`) -> its share of the loss, scalar. The
shares of all micro-batches and ranks, divided by the number of ranks, add up to the loss of the update."""


class BaseEngine(ABC):
    """One rank of a training engine. All methods are called on every rank, in the same order.

    One for language models gives `TokenOutputs`, one for value models `ValueOutputs`.

    Args:
        model_path: Hugging Face folder or hub id.
        config: Settings of the engine.
        num_updates: Updates of the whole run, for the schedule of the learning rate.
        seed: Seed of this rank's random numbers.
        keep_reference: Keep what `disable_adapter` needs.
        teacher_path: Hugging Face folder or hub id of what `use_teacher` computes with.
    """

    def __init__(
        self,
        *,
        model_path: str,
        config: EngineConfig,
        num_updates: int,
        seed: int,
        keep_reference: bool = False,
        teacher_path: str | None = None,
    ) -> None:
        self._model_path = model_path
        self._config = config
        self._num_updates = num_updates
        self._seed = seed
        self._keep_reference = keep_reference
        self._teacher_path = teacher_path
        self._snapshots: dict[str, Tensor] = {}

    @abstractmethod
    def initialize(self) -> None:
        """Load the model, build optimizer and schedule."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Enter training: weights, gradients and optimizer state are on the device."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Enter inference: only the weights are needed."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip the gradients, update the weights and return the norm before clipping; not finite: skip the update."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule and return the learning rate of the next update."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Learning rate of the next update."""

    @abstractmethod
    def forward_backward_batch(
        self,
        batch: PackedBatch,
        loss_function: LossFunction | None,
        *,
        temperature: float = 1.0,
        request: OutputRequest = OutputRequest(),
    ) -> Any:
        """Return the outputs at the trained tokens, without a gradient; with a loss function, add its gradient."""

    @abstractmethod
    def get_per_tensor_param(self, *, adapters_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole of each weight under its Hugging Face name.

        Every rank has to go through all of it; ranks other than 0 may be given nothing.

        Args:
            adapters_only: With LoRA, yield the adapter's weights under the names of peft's files, to be used with
                `peft_config`. Otherwise the adapter is merged into the weights.

        Raises:
            ConfigError: there is no adapter.
        """

    @abstractmethod
    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        """Yield the part of each weight that this rank holds. No collective: ranks may be read one by one.

        With LoRA these are the adapter's weights, under the names of peft's files: the others do not change.
        """

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Return which shard of a batch this rank gets."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Return how many shards a batch is split into."""

    @abstractmethod
    def save_checkpoint(self, folder: Path) -> None:
        """Write everything that is needed to go on exactly. The folder exists and is empty."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None:
        """Go on from what `save_checkpoint` wrote."""

    @abstractmethod
    def save_hf(self, folder: Path) -> None:
        """Write weights and tokenizer as a Hugging Face folder; an adapter merged, and by itself in ``adapter/``."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute with the initial policy while inside: without the adapter, or with the frozen copy."""

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move what is named to a device, with gradients where the model goes.

        Args:
            device: ``cpu``, or the device the engine computes on.
            model: The weights.
            optimizer: The state of the optimizer.
        """

    @property
    def peft_config(self) -> dict[str, Any] | None:
        """Settings of the adapter, as in peft's adapter_config.json; None where there is none."""
        return None

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the data-parallel ranks; None where the rank is alone."""
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank has the outputs: false for all but one of the ranks that share a model and a batch."""
        return True

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether the weights lie in CPU memory while nothing is computed."""
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the state of the optimizer lies in CPU memory except for updates."""
        return False

    def prime_delta_snapshots(self) -> None:
        """Keep a copy of this rank's weights, in CPU memory, that `get_per_tensor_param_delta_shard` compares with."""
        self._snapshots = {
            shard.name: shard.values.detach().to("cpu", copy=True) for shard in self.get_per_tensor_param_shard()
        }

    def get_per_tensor_param_delta_shard(self) -> Iterator[WeightDelta]:
        """Yield what changed in this rank's weights since the last call, or since `prime_delta_snapshots`.

        Weights in which no bit changed are left out.

        Raises:
            RuntimeError: there is no snapshot.
        """
        if not self._snapshots:
            raise RuntimeError("There is nothing to compare with: call prime_delta_snapshots() first.")
        for shard in self.get_per_tensor_param_shard():
            now, before = shard.values.detach().cpu(), self._snapshots[shard.name]
            # a NaN is unlike itself, and would be sent for ever rather than once too few
            changed = (now != before).flatten().nonzero().squeeze(1)
            if not len(changed):
                continue
            values = now.flatten()[changed]
            before.view(-1)[changed] = values
            row_size = now[0].numel() if now.dim() else 1
            yield WeightDelta(
                name=shard.name, shape=shard.shape, indices=changed + shard.first_row * row_size, values=values
            )

    def accumulate(self, *, is_last: bool) -> None:
        """Called before each micro-batch of an update: only after the last do the ranks need the summed gradients."""

    def keep_policy(self) -> None:
        """Keep a copy of the present weights, in CPU memory, that `use_kept_policy` computes with."""
        raise ConfigError(f"{type(self).__name__} cannot train a step in parts: set trainer.parameter_sync_step to 1.")

    def use_kept_policy(self) -> AbstractContextManager[None]:
        """Compute with the weights of the last `keep_policy` while inside; the present ones come back afterwards."""
        raise ConfigError(f"{type(self).__name__} cannot train a step in parts: set trainer.parameter_sync_step to 1.")

    def use_teacher(self) -> AbstractContextManager[None]:
        """Compute with the teacher while inside."""
        raise ConfigError(f"{type(self).__name__} cannot hold a teacher: set algorithm.distillation to null.")

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all data-parallel ranks, in their order. Any picklable value."""
        return [value]

    def train_batch(
        self,
        batches: list[PackedBatch],
        loss_function: LossFunction,
        *,
        temperature: float = 1.0,
        request: OutputRequest = OutputRequest(),
    ) -> dict[str, float]:
        """Make one update from several micro-batches; return the gradient norm as `grad_norm`."""
        with self.train_mode():
            self.optimizer_zero_grad()
            for number, batch in enumerate(batches, start=1):
                self.accumulate(is_last=number == len(batches))
                self.forward_backward_batch(batch, loss_function, temperature=temperature, request=request)
            return {"grad_norm": self.optimizer_step()}

    def infer_batch(
        self,
        batches: list[PackedBatch],
        *,
        temperature: float = 1.0,
        request: OutputRequest = OutputRequest(),
    ) -> list[Any]:
        """Return the outputs at the trained tokens of each batch."""
        with self.eval_mode():
            return [
                self.forward_backward_batch(batch, None, temperature=temperature, request=request) for batch in batches
            ]


class EngineRegistry:
    """Engines by model type, backend, and (device, vendor) or device."""

    _table: dict[tuple[str, str, str, str | None], str | type[BaseEngine]] = {  # noqa: RUF012 - the registry itself
        ("language_model", "fsdp2", "cpu", None): "xrl_lite.engine.language_model:LanguageModelEngine",
        ("language_model", "fsdp2", "cuda", None): "xrl_lite.engine.language_model:LanguageModelEngine",
        ("value_model", "fsdp2", "cpu", None): "xrl_lite.engine.value_model:ValueModelEngine",
        ("value_model", "fsdp2", "cuda", None): "xrl_lite.engine.value_model:ValueModelEngine",
    }

    @classmethod
    def register(
        cls,
        model_type: str,
        backend: str | Sequence[str],
        device: str | Sequence[str] = "cuda",
        vendor: str | Sequence[str] | None = None,
    ) -> Callable[[type[BaseEngine]], type[BaseEngine]]:
        """Return a decorator that registers an engine of user code.

        Args:
            model_type: ``language_model`` or ``value_model``.
            backend: Name or names that `EngineConfig.backend` may have for it.
            device: Device or devices it is for, as torch calls them.
            vendor: Vendor or vendors it is for, see `PlatformBase.vendor_name`; None is any vendor's device.

        Raises:
            AssertionError: the class is not a BaseEngine, or a place is taken.
        """
        vendors = [None] if vendor is None else _listed(vendor)

        def decorate(engine: type[BaseEngine]) -> type[BaseEngine]:
            assert isinstance(engine, type) and issubclass(engine, BaseEngine), f"{engine!r} must inherit BaseEngine"  # noqa: PT018
            keys = [(model_type, b, d, v) for b in _listed(backend) for d in _listed(device) for v in vendors]
            for key in keys:
                assert cls._table.get(key, engine) is engine, f"{key} is taken by {cls._table[key]!r}"
            cls._table.update(dict.fromkeys(keys, engine))
            return engine

        return decorate

    @classmethod
    def check(cls, backend: str) -> None:
        """Raise UnknownNameError where no device has such a backend, without importing one."""
        known = {key[1] for key in cls._table}
        if backend not in known:
            raise UnknownNameError(
                f"Unknown training engine {backend!r}.{did_you_mean(backend, known)} "
                f"Known: {', '.join(sorted(known))}. Add one with EngineRegistry.register."
            )

    @classmethod
    def find(
        cls,
        model_type: str,
        backend: str,
        *,
        device: str,
        vendor: str | None,
        environment: Mapping[str, str] = os.environ,
    ) -> type[BaseEngine]:
        """Return the engine for this machine: what ``XRL_LITE_ENGINE_DEVICE`` and ``_VENDOR`` say goes before it.

        Raises:
            ConfigError: there is none.
        """
        device = environment.get(DEVICE_VARIABLE, "").strip() or device
        vendor = environment.get(VENDOR_VARIABLE, "").strip() or vendor
        return cls.get(model_type, backend, device, vendor)

    @classmethod
    def get(cls, model_type: str, backend: str, device: str, vendor: str | None = None) -> type[BaseEngine]:
        """Return the engine for (device, vendor), else for the device, else on ``cuda`` that of ``nvidia``.

        Raises:
            UnknownNameError: no engine has such a model type or backend.
            ConfigError: there is none for this device; lists what there is.
        """
        for what, name, position in (("model type", model_type, 0), ("training engine", backend, 1)):
            names = sorted({str(key[position]) for key in cls._table})
            if name not in names:
                raise UnknownNameError(
                    f"Unknown {what} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}."
                )
        places: list[tuple[str, str | None]] = [(device, vendor), (device, None)]
        if device == "cuda" and vendor != "nvidia":
            places.append((device, "nvidia"))  # chips that speak CUDA mostly can do what NVIDIA's do
        for known_device, known_vendor in places:
            found = cls._table.get((model_type, backend, known_device, known_vendor))
            if found is not None:
                return load_object(found) if isinstance(found, str) else found
        known = ", ".join(sorted({f"{m}/{b} on {d}" + (f" of {v}" if v else "") for m, b, d, v in cls._table}))
        raise ConfigError(
            f"No training engine for model type {model_type!r}, backend {backend!r}, device {device!r}, "
            f"vendor {vendor!r}. There are: {known}."
        )


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
