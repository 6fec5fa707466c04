"""The seam of training engines: what one rank can do, and the table of engines.

An engine holds the model and its optimizer on one rank. It knows tensors and losses, and neither groups nor rewards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from xrl_lite.errors import ConfigError, UnknownNameError, did_you_mean
from xrl_lite.registry import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.packing import PackedBatch
    from xrl_lite.engine.config import EngineConfig

T = TypeVar("T")


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


LossFunction = Callable[["TokenOutputs", "PackedBatch"], "Tensor"]
"""Outputs of a micro-batch -> its share of the loss, scalar. The shares of all micro-batches and ranks, divided by the
number of ranks, add up to the loss of the update."""


class BaseEngine(ABC):
    """One rank of a training engine. All methods are called on every rank, in the same order.

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
    ) -> TokenOutputs:
        """Return the outputs at the trained tokens, without a gradient; with a loss function, add its gradient."""

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole of each weight under its Hugging Face name."""

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
        """Write weights and tokenizer as a Hugging Face folder."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute with the initial policy while inside: without the adapter, or with the frozen copy."""

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
            for batch in batches:
                self.forward_backward_batch(batch, loss_function, temperature=temperature, request=request)
            return {"grad_norm": self.optimizer_step()}

    def infer_batch(
        self,
        batches: list[PackedBatch],
        *,
        temperature: float = 1.0,
        request: OutputRequest = OutputRequest(),
    ) -> list[TokenOutputs]:
        """Return the outputs at the trained tokens of each batch."""
        with self.eval_mode():
            return [
                self.forward_backward_batch(batch, None, temperature=temperature, request=request) for batch in batches
            ]


class EngineRegistry:
    """Engines by model type, backend, and device or (device, vendor)."""

    _table: dict[tuple[str, str, str, str | None], str | type[BaseEngine]] = {  # noqa: RUF012 - the registry itself
        ("language_model", "fsdp2", "cpu", None): "xrl_lite.engine.language_model:LanguageModelEngine",
        ("language_model", "fsdp2", "cuda", None): "xrl_lite.engine.language_model:LanguageModelEngine",
    }

    @classmethod
    def register(
        cls, model_type: str, backend: str, device: str = "cuda", vendor: str | None = None
    ) -> Callable[[type[BaseEngine]], type[BaseEngine]]:
        """Return a decorator that registers an engine of user code.

        Raises:
            AssertionError: the class is not a BaseEngine, or the place is taken.
        """

        def decorate(engine: type[BaseEngine]) -> type[BaseEngine]:
            assert issubclass(engine, BaseEngine), f"{engine!r} must inherit BaseEngine"
            key = (model_type, backend, device, vendor)
            assert cls._table.get(key, engine) is engine, f"{key} is taken by {cls._table[key]!r}"
            cls._table[key] = engine
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
    def get(cls, model_type: str, backend: str, device: str, vendor: str | None = None) -> type[BaseEngine]:
        """Return the engine for (device, vendor), else for the device.

        Raises:
            ConfigError: there is none; lists what there is.
        """
        for key in ((model_type, backend, device, vendor), (model_type, backend, device, None)):
            found = cls._table.get(key)
            if found is not None:
                return load_object(found) if isinstance(found, str) else found
        known = ", ".join(sorted({f"{m}/{b} on {d}" for m, b, d, _ in cls._table}))
        raise ConfigError(
            f"No training engine for model type {model_type!r}, backend {backend!r}, device {device!r}, "
            f"vendor {vendor!r}. There are: {known}."
        )
