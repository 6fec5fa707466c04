# pyright: basic, reportPrivateImportUsage=false
"""A model of transformers under training, with transformers' own classes; on several ranks spread by FSDP2.

What is computed with it, and what becomes of its output, is said by subclasses: `language_model`, `value_model`.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import AutoTokenizer

from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.engine.base import BaseEngine, LossFunction, OutputRequest, TokenOutputs, ValueOutputs, WeightShard
from xrl_lite.engine.lora import Adapter, file_name, hf_name
from xrl_lite.engine.optimizers import hyperparameters_of, learning_rate_factors, make_optimizer
from xrl_lite.engine.packed_forward import check_packing, turn_off_dropout
from xrl_lite.engine.ranks import (
    copy_from_first,
    gather_objects,
    num_ranks_here,
    platform_of_rank,
    rank_here,
    seed_device,
)
from xrl_lite.engine.sharding import gather_on_first, layers_of, own_shard, reshard, shard_model, whole
from xrl_lite.errors import CheckpointError, ConfigError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

OutputsOf = Callable[[Any, PackedBatch, float, OutputRequest], "dict[str, Tensor | None]"]
"""(model, batch, temperature, request) -> fields of the outputs; a plain dict, in which FSDP finds the tensors."""

ADAPTER = "adapter"
"""Folder inside an exported model that holds the adapter by itself, where there is one."""

_HALF_STEP = 2.0**-9
"""Half the distance of neighbouring bfloat16 numbers, as a share of them, is this at least."""

_OPTIONAL = ("rng/", "updates_per_batch")
"""Entries that a checkpoint may lack: ranks that are new keep the random numbers of their seed."""


class TransformersEngine(BaseEngine):
    """Trains a model on one rank, or on several that share its weights."""

    output_type: ClassVar[type[TokenOutputs] | type[ValueOutputs]]
    """What a forward pass gives."""

    @abstractmethod
    def _load(self, path: str) -> nn.Module:
        """Return a model on the CPU, all of it."""

    @abstractmethod
    def _outputs_of(self, model: Any) -> OutputsOf:
        """Return what computes the outputs of a model like the one given, which is not spread over ranks yet."""

    @abstractmethod
    def _without_weights(self, model: Any) -> Any:
        """Return a model of the same class and settings as `model` on the meta device."""

    def initialize(self) -> None:
        platform = platform_of_rank()
        self._device = torch.device(platform.device_name, platform.current_device())
        if self._device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        seed_device(platform, self._seed)
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # costs a tenth, and nothing here reads such memory
        self._sharded = num_ranks_here() > 1 or self._config.always_shards
        model = self._loaded(self._model_path)
        self._adapter = self._add_adapter(model)
        if self._config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = self._placed(model)
        self._policy = self._model
        self._frozen = {
            name: self._placed(self._loaded(path).requires_grad_(False).eval())
            for name, path in self._frozen_paths().items()
        }
        if self._config.param_offload:
            for each in (self._model, *self._frozen.values()):
                each.to("cpu")
        self._optimizer = make_optimizer(
            self._config.optimizer, (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        )
        self._hyperparameters = hyperparameters_of(self._optimizer, self._config.optimizer)
        self._factor_at = learning_rate_factors(self._config.optimizer, self._num_updates)
        self._update = 0
        self._set_hyperparameters()
        self._warn_of_lost_updates()

    def _loaded(self, path: str) -> Any:
        model = self._load(path)
        turn_off_dropout(model)
        check_packing(model, path)
        return model

    def _frozen_paths(self) -> dict[str, str]:
        """Models that are computed with and not trained, by name."""
        return {}

    @contextmanager
    def train_mode(self) -> Generator[None]:
        was_training = self._model.training
        self._model.train()
        try:
            with self._on_device(optimizer=True):
                yield
        finally:
            self._model.train(was_training)

    @contextmanager
    def eval_mode(self) -> Generator[None]:
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._on_device(optimizer=False):
                yield
        finally:
            self._model.train(was_training)

    def keep_policy(self) -> None:
        self._kept = [values.to("cpu", copy=True) for values in self._own_values()]

    @contextmanager
    def use_kept_policy(self) -> Generator[None]:
        present = [values.to("cpu", copy=True) for values in self._own_values()]
        self._set_own_values(self._kept)
        try:
            yield
        finally:
            self._set_own_values(present)

    def optimizer_zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        trained = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        total = nn.utils.clip_grad_norm_(trained, self._config.optimizer.max_grad_norm)
        norm = whole(total).item()  # the same on all ranks, which skip an update together
        if math.isfinite(norm):
            self._optimizer.step()
        else:
            logger.warning("gradient norm is %s: this update is skipped", norm)
        return norm

    def lr_scheduler_step(self) -> float:
        self._update += 1
        self._set_hyperparameters()
        return self.learning_rate

    @property
    def learning_rate(self) -> float:
        config = self._config.optimizer
        return config.learning_rate * self._factor_at(self._update)

    def forward_backward_batch(
        self,
        batch: PackedBatch,
        loss_function: LossFunction | None,
        *,
        temperature: float = 1.0,
        request: OutputRequest = OutputRequest(),  # noqa: B008 - frozen
    ) -> Any:
        # an attribute of the model, so that FSDP gathers its weights before and spreads them after
        outputs = self._policy.outputs(_on(self._device, batch), temperature, request)
        if loss_function is not None:
            loss_function(self.output_type(**outputs), batch).backward()
        elif self._sharded:
            reshard(self._policy)
        values: dict[str, Any] = {name: value if value is None else value.detach() for name, value in outputs.items()}
        return self.output_type(**values)

    def accumulate(self, *, is_last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(is_last)

    def get_per_tensor_param(self, *, adapters_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        parameters = self._model.named_parameters
        if self._adapter is None:
            if adapters_only:
                raise ConfigError("There is no adapter: set engine.lora, or hand over all weights.")
            yield from self._whole(parameters())
            return
        own = dict(self._whole(self._adapter.own(parameters())))
        if adapters_only:
            yield from ((file_name(name), weight) for name, weight in own.items())
            return
        for name, weight in self._whole(self._adapter.base(parameters())):
            yield hf_name(name), self._adapter.merged(name, weight, own)

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        for name, parameter in self._model.named_parameters():
            if self._adapter is None:
                yield own_shard(name, parameter)
            elif parameter.requires_grad:
                yield own_shard(file_name(name), parameter)

    @property
    def peft_config(self) -> dict[str, Any] | None:
        return None if self._adapter is None else self._adapter.peft_config

    def get_data_parallel_rank(self) -> int:
        return rank_here()

    def get_data_parallel_size(self) -> int:
        return num_ranks_here()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def is_param_offload_enabled(self) -> bool:
        return self._config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self._config.optimizer_offload

    def all_gather(self, value: T) -> list[T]:
        return gather_objects(value)

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        if model:
            self._model.to(device)
        if optimizer:
            for state in self._optimizer.state.values():
                state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})

    def save_checkpoint(self, folder: Path) -> None:
        what = f"the state of the ranks could not be written to {folder}"
        with _told_as_checkpoint_error(what), _alone_on_purpose():
            # of an optimizer that has no state yet, torch makes some by a step
            dcp.save(self._state(optimizer=bool(self._optimizer.state)), checkpoint_id=str(folder))

    def load_checkpoint(self, folder: Path) -> None:
        self.optimizer_zero_grad()  # with gradients, torch makes no state to be loaded into
        state = self._state(optimizer=True)
        with _told_as_checkpoint_error(f"{folder} cannot be read"):
            metadata = dcp.FileSystemReader(str(folder)).read_metadata()
        if (misfit := _misfit(state["model"], metadata.state_dict_metadata)) is not None:
            raise ConfigError(
                f"{folder} is not a checkpoint of the model {self._model_path}: {misfit}. Go on with the model and the "
                f"adapter that the run began with, or start a new run under another name."
            )
        state = _held(state, metadata)
        with _told_as_checkpoint_error(f"{folder} cannot be read"), _alone_on_purpose():
            dcp.load(state, checkpoint_id=str(folder))
        set_model_state_dict(self._model, state["model"], options=StateDictOptions(strict=self._adapter is None))
        if "optimizer" in state:
            partial_state = StateDictOptions(strict=False)  # what got no gradient so far has none
            set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"], options=partial_state)
        else:
            self._optimizer.state.clear()
        per_batch = self._config.updates_per_batch
        self._update = int(state["update"]) * per_batch // int(state.get("updates_per_batch", per_batch))
        self._set_hyperparameters()
        self._set_random_state(state)

    def save_hf(self, folder: Path) -> None:
        plain = not self._sharded and self._adapter is None
        weights = {} if plain else dict(self.get_per_tensor_param())
        adapter = {} if self._adapter is None else dict(self._whole(self._adapter.own(self._model.named_parameters())))
        if rank_here() > 0:
            return
        try:
            model = self._model if plain else _with_weights(self._without_weights(self._model), weights)
            if hasattr(self._model, "generation_config"):
                model.generation_config = self._model.generation_config
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self._model_path).save_pretrained(folder)
            if self._adapter is not None:
                self._adapter.save(folder / ADAPTER, adapter)
        except Exception as error:
            raise CheckpointError(f"the model could not be written to {folder}: {error}") from error

    def _whole(self, parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights; on several ranks all go through it, and the first is given them."""
        if self._sharded:
            yield from gather_on_first(parameters, bucket_bytes=self._config.export_bucket_bytes, device=self._device)
            return
        for name, parameter in parameters:
            yield name, parameter.detach()

    def _own_values(self) -> list[Tensor]:
        """What this rank holds of each weight that is trained."""
        named = self._model.named_parameters()
        return [own_shard(name, parameter).values for name, parameter in named if parameter.requires_grad]

    def _set_own_values(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for own, given in zip(self._own_values(), values, strict=True):
                own.copy_(given)

    def _warn_of_lost_updates(self) -> None:
        rate = self._config.optimizer.learning_rate
        narrow = [values for values in self._own_values() if values.dtype == torch.bfloat16]
        num_weights = sum(values.numel() for values in narrow)
        num_stuck = sum(int((values.abs() > rate / _HALF_STEP).sum()) for values in narrow)
        if rank_here() == 0 and num_stuck > num_weights / 2:
            logger.warning(
                "%d %% of the weights will not move: an update of the size of learning_rate %g is less than half a "
                "step of bfloat16 for them, and is rounded away. Set dtype to float32 and compute_dtype to bfloat16 "
                "(rollout.dtype may be bfloat16 still), or train an adapter (lora).",
                100 * num_stuck / num_weights,
                rate,
            )

    def _set_hyperparameters(self) -> None:
        """Give the optimizer what the settings and the schedule say now, whatever a checkpoint held."""
        factor = self._factor_at(self._update)
        for group, said in zip(self._optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(said, lr=said["lr"] * factor)

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        # what is frozen is in the model's own folder
        options = StateDictOptions(ignore_frozen_params=self._adapter is not None)
        state = {
            "model": get_model_state_dict(self._model, options=options),
            "update": torch.tensor(self._update),
            "updates_per_batch": torch.tensor(self._config.updates_per_batch),
            **{f"rng/{rank_here()}/{name}": value for name, value in self._random_state().items()},
        }
        if optimizer:
            state["optimizer"] = get_optimizer_state_dict(self._model, self._optimizer, options=options)
        return state

    def _random_state(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            state["device"] = getattr(torch, self._device.type).get_rng_state()
        return state

    def _set_random_state(self, state: dict[str, Any]) -> None:
        own = {name: state.get(f"rng/{rank_here()}/{name}") for name in self._random_state()}
        if own["cpu"] is not None:
            torch.set_rng_state(own["cpu"])
        if own.get("device") is not None:
            getattr(torch, self._device.type).set_rng_state(own["device"])

    @contextmanager
    def _on_device(self, *, optimizer: bool) -> Generator[None]:
        """Bring what is offloaded to the device while inside."""
        moved = {"model": self._config.param_offload, "optimizer": self._config.optimizer_offload and optimizer}
        self.to(self._device.type, **moved)
        try:
            yield
        finally:
            self.to("cpu", **moved)

    def _add_adapter(self, model: Any) -> Adapter | None:
        if self._config.lora is None:
            return None
        adapter = Adapter(model, self._config.lora, model_path=self._model_path)
        copy_from_first(weight for _, weight in adapter.own(model.to(self._device).named_parameters()))
        return adapter

    def _placed(self, model: Any) -> Any:
        """Bring a model to the device and to all ranks, and teach it `outputs`."""
        outputs_of = self._outputs_of(model)
        model = platform_of_rank().apply_model_patches(model.to(self._device))
        if self._config.compile:
            for layer in layers_of(model):  # their forward only: what FSDP does around it stays outside
                layer.forward = torch.compile(layer.forward, dynamic=True)
        if self._sharded:
            shard_model(model, self._config, device_type=self._device.type)
        model.outputs = partial(outputs_of, model)
        if self._sharded:
            register_fsdp_forward_method(model, "outputs")
        return model


def _on(device: torch.device, batch: PackedBatch) -> PackedBatch:
    if device.type == "cpu":
        return batch
    tensors = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return replace(batch, **tensors)


def _with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    """Give a model on the meta device its weights."""
    model.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()}, strict=False, assign=True)
    model.tie_weights()
    return model


def _held(state: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Leave out what a checkpoint may lack: `_OPTIONAL`, and the optimizer's state of what had none yet."""
    paths = [path for path in (metadata.planner_data or {}).values() if path[0] == "optimizer"]
    with_state = {path[2] for path in paths if path[1] == "state"}
    held = {
        name: value
        for name, value in state.items()
        if not name.startswith(_OPTIONAL) or name in metadata.state_dict_metadata
    }
    optimizer = held.pop("optimizer")
    if paths:
        optimizer["state"] = {name: value for name, value in optimizer["state"].items() if name in with_state}
        held["optimizer"] = optimizer
    return held


def _misfit(model: Mapping[str, Tensor], held: Mapping[str, Any]) -> str | None:
    """Say where the weights of a model differ from those that a checkpoint holds; None if they do not."""
    saved = {name.removeprefix("model."): kept for name, kept in held.items() if name.startswith("model.")}
    for name in sorted(model.keys() ^ saved.keys()):
        return f"only the {'model' if name in model else 'checkpoint'} has weights {name}"
    for name, weights in model.items():
        if saved[name].size != weights.shape:
            return f"{name} is {tuple(saved[name].size)} in the checkpoint, {tuple(weights.shape)} in the model"
    return None


@contextmanager
def _told_as_checkpoint_error(what: str) -> Generator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{what}: {error}") from error


@contextmanager
def _alone_on_purpose() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
