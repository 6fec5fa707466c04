"""The seam of training engines: what one rank can do, and the table of engines.

An engine holds the model and its optimizer on one rank. It knows tensors and losses, and neither groups nor rewards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from xrl_lite.errors import ConfigError, UnknownNameError, did_you_mean
from xrl_lite.registry import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.packing import PackedBatch
    from xrl_lite.engine.config import EngineConfig

LossFunction = Callable[["Tensor", "PackedBatch"], "tuple[Tensor, dict[str, float]]"]
"""Log-probs of the response tokens (T,) and their batch -> loss (scalar) and sums of metrics."""


class BaseEngine(ABC):
    """One rank of a training engine. All methods are called on every rank, in the same order.

    Args:
        model_path: Hugging Face folder or hub id.
        config: Settings of the engine.
        num_updates: Updates of the whole run, for the schedule of the learning rate.
        seed: Seed of this rank's random numbers.
    """

    def __init__(self, *, model_path: str, config: EngineConfig, num_updates: int, seed: int) -> None:
        self._model_path = model_path
        self._config = config
        self._num_updates = num_updates
        self._seed = seed

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
        self, batch: PackedBatch, loss_function: LossFunction | None, *, temperature: float = 1.0
    ) -> tuple[Tensor, dict[str, float]]:
        """Return log-probs (T,) without a gradient, and metrics; with a loss function, add its gradient."""

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

    def train_batch(
        self, batches: list[PackedBatch], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """Make one update from several micro-batches; return the sums of their metrics and the gradient norm."""
        totals: dict[str, float] = {}
        with self.train_mode():
            self.optimizer_zero_grad()
            for batch in batches:
                _, metrics = self.forward_backward_batch(batch, loss_function, temperature=temperature)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
            totals["grad_norm"] = self.optimizer_step()
        return totals

    def infer_batch(self, batches: list[PackedBatch], *, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of the response tokens of each batch."""
        with self.eval_mode():
            return [self.forward_backward_batch(batch, None, temperature=temperature)[0] for batch in batches]


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
