"""What every policy loss gets, and the way from a formula to verl's signature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.aggregation import BatchInfo, agg_loss
from xrl_lite.algorithms.config import PolicyLossConfig
from xrl_lite.algorithms.masked import masked_mean, select

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says nothing and float32 nears its end."""

Metrics = dict[str, Any]


class LossConfig:
    """Settings of a loss, with the counts of the whole update beside them; read like verl's actor config.

    Args:
        settings: The settings; reached as attributes, by ``[...]`` and by ``get``, also under ``config.policy_loss``.
        batch: Counts of the whole update; None: the rows that are given are all there is.
        session_num_tokens: (N,) trained tokens of the session of each row that is given.
    """

    def __init__(
        self,
        settings: PolicyLossConfig | None = None,
        *,
        batch: BatchInfo | None = None,
        session_num_tokens: Tensor | None = None,
    ) -> None:
        self.policy_loss = settings or PolicyLossConfig()
        self.batch = batch
        self.session_num_tokens = session_num_tokens

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """Keywords for `agg_loss`."""
        if self.batch is None:
            return {}
        return {
            "dp_size": self.batch.dp_size,
            "batch_num_tokens": self.batch.batch_num_tokens,
            "global_batch_size": self.batch.global_batch_size,
            "loss_scale_factor": self.batch.loss_scale_factor,
            "num_sessions": self.batch.num_sessions,
            "session_num_tokens": self.session_num_tokens,
        }

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting or an option of user code, or the default."""
        return self.policy_loss.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.policy_loss[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy_loss, name)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The arguments of a loss, (N, T) each, with 0 where the mask is 0."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None
    config: LossConfig
    options: dict[str, Any]

    @cached_property
    def log_ratio(self) -> Tensor:
        """d, clamped."""
        return (self.log_prob - self.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def ratio(self) -> Tensor:
        """R."""
        return self.log_ratio.exp()

    def clip(self, ratio: Tensor) -> Tensor:
        """Ratio between 1 - clip_ratio_low and 1 + clip_ratio_high."""
        return ratio.clamp(1 - self.config.clip_ratio_low, 1 + self.config.clip_ratio_high)

    def share(self, chosen: Tensor) -> Tensor:
        """Share of the trained tokens for which something holds."""
        return masked_mean(chosen.double(), self.mask)


Formula = Callable[[Tokens], tuple[Tensor, Metrics]]


def policy_loss(*, mode: str | None = None, weighs_itself: bool = False) -> Callable[[Formula], Callable[..., Any]]:
    """Return a decorator that turns a formula (Tokens -> losses (N, T) and metrics) into verl's signature.

    Args:
        mode: The only aggregation the loss is defined with.
        weighs_itself: The formula takes care of the importance weights.
    """

    def decorate(formula: Formula) -> Callable[..., Any]:
        @functools.wraps(formula)
        def loss_function(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = "token-mean",
            config: LossConfig | PolicyLossConfig | None = None,
            rollout_is_weights: Tensor | None = None,
            **options: Any,
        ) -> tuple[Tensor, Metrics]:
            mask = response_mask.bool()
            if not isinstance(config, LossConfig):
                config = LossConfig(config)
            dtype = log_prob.dtype
            tokens = Tokens(
                log_prob=select(log_prob, mask),
                old_log_prob=select(old_log_prob.to(dtype), mask),
                advantages=select(advantages.to(dtype), mask),
                mask=mask,
                weights=None if rollout_is_weights is None else select(rollout_is_weights.to(dtype), mask).detach(),
                config=config,
                options=options,
            )
            losses, metrics = formula(tokens)
            if tokens.weights is not None and not weighs_itself:
                losses = losses * tokens.weights
            loss = agg_loss(losses, mask, mode or loss_agg_mode, **config.global_batch_info)
            with torch.no_grad():
                metrics["kl"] = masked_mean(tokens.ratio - 1 - tokens.log_ratio, mask)
            return loss, metrics

        return loss_function

    return decorate
