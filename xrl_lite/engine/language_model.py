# pyright: basic
"""A causal language model under training: log-probs of tokens, a reference policy, a teacher.

T trained tokens of a packed batch, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.engine.base import OutputRequest, TokenOutputs
from xrl_lite.engine.packed_forward import model_inputs
from xrl_lite.engine.sharding import DTYPES
from xrl_lite.engine.transformers_engine import OutputsOf, TransformersEngine
from xrl_lite.errors import ConfigError

_INITIAL, _TEACHER = "initial", "teacher"


class LanguageModelEngine(TransformersEngine):
    """Trains a causal language model."""

    output_type = TokenOutputs

    def initialize(self) -> None:
        super().initialize()
        if _TEACHER not in self._frozen:
            return
        teacher, policy = (
            model.get_output_embeddings().weight.shape[0] for model in (self._frozen[_TEACHER], self._model)
        )
        if teacher != policy:
            raise ConfigError(
                f"algorithm.distillation.teacher={self._teacher_path} knows {teacher} tokens, the policy "
                f"{self._model_path} {policy}: token by token they cannot be compared."
            )

    @contextmanager
    def disable_adapter(self) -> Generator[None]:
        assert self._keep_reference, "what this needs is there only with keep_reference"
        with self._adapter.disabled() if self._adapter is not None else self._computing_with(self._frozen[_INITIAL]):
            yield

    @contextmanager
    def use_teacher(self) -> Generator[None]:
        assert _TEACHER in self._frozen, "there is a teacher only with teacher_path"
        with self._computing_with(self._frozen[_TEACHER]):
            yield

    def _load(self, path: str) -> nn.Module:
        # sdpa takes the boolean masks of packed rows
        dtype = DTYPES[self._config.dtype]
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")

    def _frozen_paths(self) -> dict[str, str]:
        paths: dict[str, str] = {}
        if self._keep_reference and self._adapter is None:
            paths[_INITIAL] = self._model_path
        if self._teacher_path:
            paths[_TEACHER] = self._teacher_path
        return paths

    def _outputs_of(self, model: Any) -> OutputsOf:
        return partial(_outputs_of_model, self._config.max_logits_tokens if _head_is_linear(model) else None)

    def _without_weights(self, model: Any) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(model.config)

    @contextmanager
    def _computing_with(self, model: Any) -> Generator[None]:
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


def _outputs_of_model(
    max_logits_tokens: int | None, model: Any, batch: PackedBatch, temperature: float, request: OutputRequest
) -> dict[str, Tensor | None]:
    """Fields of `TokenOutputs`.

    `max_logits_tokens` is None for a model whose logits are more than its head applied to the last hidden state.
    """
    inputs = model_inputs(model, batch)
    if max_logits_tokens is None:
        logits = _at_temperature(model(**inputs).logits.flatten(0, 1)[batch.predicted_at], temperature)
        return dict(vars(token_outputs(logits, batch, request)))
    # only the positions that predict a trained token go through the head: it is half the cost of a small model
    hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)[batch.predicted_at]

    def of(hidden: Tensor, part: PackedBatch) -> dict[str, Tensor | None]:
        logits = _at_temperature(model.get_output_embeddings()(hidden), temperature)
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


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _part(batch: PackedBatch, start: int, stop: int) -> PackedBatch:
    """Some of the trained tokens."""
    candidates = None if batch.candidates is None else batch.candidates[start:stop]
    return replace(batch, targets=batch.targets[start:stop], candidates=candidates)


def token_outputs(logits: Tensor, batch: PackedBatch, request: OutputRequest) -> TokenOutputs:
    """Read what is asked for off the logits (T, V), float32, divided by the temperature."""
    total = logits.logsumexp(dim=1, keepdim=True)
    entropy = top_ids = top_logprobs = candidates = squared = None
    if request.entropy:
        with_gradient = request.entropy_gradient
        entropy = token_entropy(logits, total) if with_gradient else token_entropy(logits.detach(), total.detach())
    if request.top_k:
        top_logits, top_ids = logits.topk(min(request.top_k, logits.shape[1]), dim=1)
        top_logprobs = top_logits - total
    if batch.candidates is not None:
        candidates = logits.gather(1, batch.candidates) - total
    if request.sum_pi_squared:
        squared = (2 * (logits - total)).exp_().sum(dim=1)
    return TokenOutputs(
        logprobs=(logits.gather(1, batch.targets.unsqueeze(1)) - total).squeeze(1),
        entropy=entropy,
        sum_pi_squared=squared,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        candidate_logprobs=candidates,
    )


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target: logits (T, V) float32, targets (T,) -> (T,)."""
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)


def token_entropy(logits: Tensor, total: Tensor) -> Tensor:
    """Entropy of each distribution in nats: logits (T, V), their logsumexp (T, 1) -> (T,)."""
    logprobs = logits - total
    probs = logprobs.exp()
    # in place where no gradient needs them: each of these is as large as all the logits
    weighted = probs * logprobs if probs.requires_grad else probs.mul_(logprobs)
    return -weighted.sum(dim=1)


def _head_is_linear(model: Any) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no soft cap, no scaling)."""
    probe = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    with torch.no_grad():
        hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
        expected = model(input_ids=probe, use_cache=False).logits
        return torch.allclose(model.get_output_embeddings()(hidden), expected, atol=1e-5)
