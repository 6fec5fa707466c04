"""A causal language model under training, with transformers' own model classes; on several ranks spread by FSDP2.

T trained tokens of a packed batch, V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.engine.base import BaseEngine, LossFunction, OutputRequest, TokenOutputs, WeightShard
from xrl_lite.engine.config import OptimizerConfig
from xrl_lite.engine.ranks import gather_objects, num_ranks_here, platform_of_rank, rank_here, seed_device
from xrl_lite.engine.sharding import DTYPES, gather_on_first, layers_of, own_shard, reshard, shard_model, whole
from xrl_lite.errors import CheckpointError, ConfigError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")


class LanguageModelEngine(BaseEngine):
    """Trains a causal language model on one rank, or on several that share its weights."""

    def initialize(self) -> None:
        platform = platform_of_rank()
        self._device = torch.device(platform.device_name, platform.current_device())
        if self._device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        seed_device(platform, self._seed)
        torch.use_deterministic_algorithms(True)
        self._sharded = num_ranks_here() > 1 or self._config.always_shards
        model = _load_model(self._model_path, self._config.dtype)
        initial = copy.deepcopy(model).requires_grad_(False).eval() if self._keep_reference else None
        if self._config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = self._placed(model)
        self._policy = self._model
        self._initial = None if initial is None else self._placed(initial)
        self._teacher = self._load_teacher(self._teacher_path) if self._teacher_path else None
        if self._config.param_offload:
            for each in filter(None, (self._model, self._initial, self._teacher)):
                each.to("cpu")
        optimizer = self._config.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self._update = 0
        self._set_hyperparameters()

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.train()
        try:
            with self._on_device(optimizer=True):
                yield
        finally:
            self._model.train(was_training)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._on_device(optimizer=False):
                yield
        finally:
            self._model.train(was_training)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        assert self._initial is not None, "there is a copy of the initial policy only with keep_reference"
        with self._computing_with(self._initial):
            yield

    @contextmanager
    def use_teacher(self) -> Iterator[None]:
        assert self._teacher is not None, "there is a teacher only with teacher_path"
        with self._computing_with(self._teacher):
            yield

    def keep_policy(self) -> None:
        self._kept = [values.to("cpu", copy=True) for values in self._own_values()]

    @contextmanager
    def use_kept_policy(self) -> Iterator[None]:
        present = [values.to("cpu", copy=True) for values in self._own_values()]
        self._set_own_values(self._kept)
        try:
            yield
        finally:
            self._set_own_values(present)

    def optimizer_zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        total = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.max_grad_norm)
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
        return config.learning_rate * learning_rate_factor(self._update, self._num_updates, config)

    def forward_backward_batch(
        self,
        batch: PackedBatch,
        loss_function: LossFunction | None,
        *,
        temperature: float = 1.0,
        request: OutputRequest = OutputRequest(),  # noqa: B008 - frozen
    ) -> TokenOutputs:
        # an attribute of the model, so that FSDP gathers its weights before and spreads them after
        outputs = self._policy.token_outputs(_on(self._device, batch), temperature, request)
        if loss_function is not None:
            loss_function(TokenOutputs(**outputs), batch).backward()
        elif self._sharded:
            reshard(self._policy)
        return TokenOutputs(**{name: None if value is None else value.detach() for name, value in outputs.items()})

    def accumulate(self, *, is_last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(is_last)

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        if self._sharded:
            yield from gather_on_first(
                self._model.named_parameters(), bucket_bytes=self._config.export_bucket_bytes, device=self._device
            )
            return
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def get_per_tensor_param_shard(self) -> Iterator[WeightShard]:
        for name, parameter in self._model.named_parameters():
            yield own_shard(name, parameter)

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
        try:
            with _alone_on_purpose():
                dcp.save(self._state(), checkpoint_id=str(folder))
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"the state of the ranks could not be written to {folder}: {error}") from error

    def load_checkpoint(self, folder: Path) -> None:
        state = self._state()
        try:
            held = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
            # more ranks than wrote it: the new ones keep the random numbers of their seed
            state = {name: value for name, value in state.items() if not name.startswith("rng/") or name in held}
            with _alone_on_purpose():
                dcp.load(state, checkpoint_id=str(folder))
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{folder} does not fit the model {self._model_path}: {error}") from error
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self._update = int(state["update"])
        self._set_hyperparameters()
        self._set_random_state(state)

    def save_hf(self, folder: Path) -> None:
        model = _with_weights(self._model, dict(self.get_per_tensor_param())) if self._sharded else self._model
        if rank_here() > 0:
            return
        try:
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self._model_path).save_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"the model could not be written to {folder}: {error}") from error

    def _own_values(self) -> list[Tensor]:
        """What this rank holds of each weight."""
        return [own_shard(name, parameter).values for name, parameter in self._model.named_parameters()]

    def _set_own_values(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for own, given in zip(self._own_values(), values, strict=True):
                own.copy_(given)

    def _set_hyperparameters(self) -> None:
        """Give the optimizer what the settings and the schedule say now, whatever a checkpoint held."""
        config = self._config.optimizer
        for group in self._optimizer.param_groups:
            group.update(lr=self.learning_rate, betas=config.betas, weight_decay=config.weight_decay)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "update": torch.tensor(self._update),
            **{f"rng/{rank_here()}/{name}": value for name, value in self._random_state().items()},
        }

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
    def _on_device(self, *, optimizer: bool) -> Iterator[None]:
        """Bring what is offloaded to the device while inside."""
        moved = {"model": self._config.param_offload, "optimizer": self._config.optimizer_offload and optimizer}
        self.to(self._device.type, **moved)
        try:
            yield
        finally:
            self.to("cpu", **moved)

    @contextmanager
    def _computing_with(self, model: Any) -> Iterator[None]:
        before = self._policy
        self._policy = model
        try:
            if self._config.param_offload:
                model.to(self._device)
            yield
        finally:
            self._policy = before
            if self._config.param_offload:
                model.to("cpu")

    def _load_teacher(self, path: str) -> nn.Module:
        teacher: Any = _load_model(path, self._config.dtype).requires_grad_(False).eval()
        sizes = [model.get_output_embeddings().weight.shape[0] for model in (teacher, self._model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"algorithm.distillation.teacher={path} knows {sizes[0]} tokens, the policy {self._model_path} "
                f"{sizes[1]}: token by token they cannot be compared."
            )
        return self._placed(teacher)

    def _placed(self, model: Any) -> Any:
        """Bring a model to the device and to all ranks, and teach it `token_outputs`."""
        head_is_linear = _head_is_linear(model)
        model = platform_of_rank().apply_model_patches(model.to(self._device))
        if self._config.compile:
            for layer in layers_of(model):  # their forward only: what FSDP does around it stays outside
                layer.forward = torch.compile(layer.forward, dynamic=True)
        if self._sharded:
            shard_model(model, self._config, device_type=self._device.type)
        model.token_outputs = partial(
            _outputs_of_model, model, self._config.max_logits_tokens if head_is_linear else None
        )
        if self._sharded:
            register_fsdp_forward_method(model, "token_outputs")
        return model


def _outputs_of_model(
    model: Any, max_logits_tokens: int | None, batch: PackedBatch, temperature: float, request: OutputRequest
) -> dict[str, Tensor | None]:
    """Fields of `TokenOutputs`; a plain dict, in which FSDP finds the tensors.

    `max_logits_tokens` is None for a model whose logits are more than its head applied to the last hidden state.
    """
    inputs = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
    }
    if max_logits_tokens is None:
        logits = model(**inputs).logits.flatten(0, 1)[batch.predicted_at].float() / temperature
        return dict(vars(token_outputs(logits, batch, request)))
    # only the positions that predict a trained token go through the head: it is half the cost of a small model
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)[batch.predicted_at]

    def of(hidden: Tensor, part: PackedBatch) -> dict[str, Tensor | None]:
        logits = model.get_output_embeddings()(hidden).float() / temperature
        return dict(vars(token_outputs(logits, part, request)))

    if len(hidden) <= max_logits_tokens:
        return of(hidden, batch)
    parts: list[dict[str, Any]] = []
    for start in range(0, len(hidden), max_logits_tokens):
        stop = start + max_logits_tokens
        # the logits are forgotten, and computed again when their gradient is asked for
        parts.append(checkpoint(of, hidden[start:stop], _part(batch, start, stop), use_reentrant=False))
    return {
        name: None if value is None else torch.cat([part[name] for part in parts]) for name, value in parts[0].items()
    }


def _part(batch: PackedBatch, start: int, stop: int) -> PackedBatch:
    """Some of the trained tokens."""
    candidates = None if batch.candidates is None else batch.candidates[start:stop]
    return replace(batch, targets=batch.targets[start:stop], candidates=candidates)


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
    """A model like `model` that has these weights, and is spread over nothing."""
    with torch.device("meta"):
        like = AutoModelForCausalLM.from_config(model.config)
    like.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()}, strict=False, assign=True)
    like.tie_weights()
    return like


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def token_outputs(logits: Tensor, batch: PackedBatch, request: OutputRequest) -> TokenOutputs:
    """Read what is asked for off the logits (T, V), float32, divided by the temperature."""
    entropy = top_ids = top_logprobs = candidates = None
    if request.entropy:
        entropy = token_entropy(logits if request.entropy_gradient else logits.detach())
    if request.top_k:
        top_logprobs, top_ids = logits.log_softmax(dim=1).topk(min(request.top_k, logits.shape[1]), dim=1)
    if batch.candidates is not None:
        candidates = logits.gather(1, batch.candidates) - logits.logsumexp(dim=1, keepdim=True)
    return TokenOutputs(
        logprobs=token_logprobs(logits, batch.targets),
        entropy=entropy,
        sum_pi_squared=(2 * logits.log_softmax(dim=1)).exp().sum(dim=1) if request.sum_pi_squared else None,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        candidate_logprobs=candidates,
    )


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target: logits (T, V) float32, targets (T,) -> (T,)."""
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of each distribution in nats: logits (T, V) -> (T,)."""
    logprobs = logits.log_softmax(dim=1)
    return -(logprobs.exp() * logprobs).sum(dim=1)


def learning_rate_factor(update: int, num_updates: int, config: OptimizerConfig) -> float:
    """Share of the peak learning rate at an update, counted from 0."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min((update - config.warmup_steps) / max(num_updates - config.warmup_steps, 1), 1.0)
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * share


def _load_model(path: str, dtype: str) -> nn.Module:
    # sdpa takes the boolean masks of packed rows; dropout is off in every model this trains, so is randomness
    return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")


def _head_is_linear(model: Any) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no soft cap, no scaling)."""
    probe = torch.arange(4).unsqueeze(0)
    with torch.no_grad():
        hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
        expected = model(input_ids=probe, use_cache=False).logits
        return torch.allclose(model.get_output_embeddings()(hidden), expected, atol=1e-5)
