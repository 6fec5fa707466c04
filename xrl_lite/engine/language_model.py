"""A causal language model under training on one rank, with transformers' own model classes.

T trained tokens of a packed batch, V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.engine.base import BaseEngine, LossFunction, OutputRequest, TokenOutputs
from xrl_lite.engine.config import OptimizerConfig
from xrl_lite.errors import CheckpointError, ConfigError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LanguageModelEngine(BaseEngine):
    """Trains a causal language model on one rank."""

    def initialize(self) -> None:
        torch.manual_seed(self._seed)
        torch.use_deterministic_algorithms(True)
        self._model = _load_model(self._model_path, self._config.dtype)
        self._policy = self._model
        self._initial: nn.Module | None = None
        if self._keep_reference:
            self._initial = copy.deepcopy(self._model).requires_grad_(False).eval()
        self._teacher = self._load_teacher(self._teacher_path) if self._teacher_path else None
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
        self._head_is_linear = _head_is_linear(self._model)

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.train()
        try:
            yield
        finally:
            self._model.train(was_training)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
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

    def optimizer_zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.max_grad_norm).item()
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
        logits = self._logits(batch).float() / temperature
        outputs = token_outputs(logits, batch, request)
        if loss_function is not None:
            loss_function(outputs, batch).backward()
        return _detached(outputs)

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def save_checkpoint(self, folder: Path) -> None:
        try:
            with _alone_on_purpose():
                dcp.save(self._state(), checkpoint_id=str(folder))
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"the state of the ranks could not be written to {folder}: {error}") from error

    def load_checkpoint(self, folder: Path) -> None:
        state = self._state()
        try:
            with _alone_on_purpose():
                dcp.load(state, checkpoint_id=str(folder))
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{folder} does not fit the model {self._model_path}: {error}") from error
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self._update = int(state["update"])
        self._set_hyperparameters()
        torch.set_rng_state(state["rng"])

    def save_hf(self, folder: Path) -> None:
        try:
            self._model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self._model_path).save_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"the model could not be written to {folder}: {error}") from error

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
            "rng": torch.get_rng_state(),
        }

    @contextmanager
    def _computing_with(self, model: Any) -> Iterator[None]:
        before = self._policy, self._head_is_linear
        self._policy, self._head_is_linear = model, _head_is_linear(model) if model is self._teacher else before[1]
        try:
            yield
        finally:
            self._policy, self._head_is_linear = before

    def _load_teacher(self, path: str) -> nn.Module:
        teacher: Any = _load_model(path, self._config.dtype).requires_grad_(False).eval()
        sizes = [model.get_output_embeddings().weight.shape[0] for model in (teacher, self._model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"algorithm.distillation.teacher={path} knows {sizes[0]} tokens, the policy {self._model_path} "
                f"{sizes[1]}: token by token they cannot be compared."
            )
        return teacher

    def _logits(self, batch: PackedBatch) -> Tensor:
        inputs = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": batch.attention_mask,
            "use_cache": False,
        }
        if not self._head_is_linear:
            return self._policy(**inputs).logits.flatten(0, 1)[batch.predicted_at]
        # only the positions that predict a trained token go through the head: it is half the cost of a small model
        hidden = self._policy.base_model(**inputs).last_hidden_state
        return self._policy.get_output_embeddings()(hidden.flatten(0, 1)[batch.predicted_at])


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


def _detached(outputs: TokenOutputs) -> TokenOutputs:
    return TokenOutputs(**{name: None if value is None else value.detach() for name, value in vars(outputs).items()})


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
