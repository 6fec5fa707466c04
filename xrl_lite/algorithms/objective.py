"""The whole loss of a micro-batch: policy loss - entropy + KL to the initial policy + distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.aggregation import agg_loss
from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.kl import kl_penalty
from xrl_lite.algorithms.losses.tokens import LossConfig
from xrl_lite.algorithms.masked import masked_mean, select
from xrl_lite.algorithms.policy_losses import PolicyLossFunction


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """Some rows of an update, (N, T) each; values where the mask is 0 do not matter."""

    log_prob: Tensor
    """Under the policy being trained, with a gradient."""
    old_log_prob: Tensor
    """Under the policy the ratio is taken to."""
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    """Of the policy; with a gradient where it is in the loss."""
    rollout_is_weights: Tensor | None = None
    ref_log_prob: Tensor | None = None
    """Under the initial policy."""
    distillation: Tensor | None = None
    """Loss of each token against the teacher, with a gradient."""
    selected: Tensor | None = None
    """Tokens that the loss treats apart, chosen over the whole update."""


def objective(
    rows: LossRows, *, algorithm: AlgorithmConfig, policy_loss: PolicyLossFunction, config: LossConfig
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of the rows and metrics, each a mean over their trained tokens.

    ``pg - entropy_coeff * entropy + kl_loss_coef * KL + coef * distillation``, all aggregated by one mode with the
    counts of the whole update, so the losses of all micro-batches of an update add up to its loss.
    """

    def aggregate(losses: Tensor) -> Tensor:
        return agg_loss(losses, rows.mask, algorithm.aggregation, **config.global_batch_info)

    loss, metrics = rows.log_prob.new_zeros(()), dict[str, Any]()
    distillation = algorithm.distillation
    if distillation is None or distillation.use_task_rewards or distillation.use_policy_gradient:
        chosen = {} if rows.selected is None else {"selected": rows.selected}
        loss, metrics = policy_loss(
            rows.old_log_prob,
            rows.log_prob,
            rows.advantages,
            rows.mask.long(),  # as in verl: functions compute with it
            algorithm.aggregation,
            config,
            rows.rollout_is_weights,
            **chosen,
        )
    if rows.entropy is not None:
        metrics["entropy"] = masked_mean(rows.entropy.detach(), rows.mask)
        if algorithm.entropy_coeff:
            loss = loss - algorithm.entropy_coeff * aggregate(rows.entropy)
    if algorithm.use_kl_loss:
        assert rows.ref_log_prob is not None, "the engine computes it where it is in the loss"
        kl = kl_penalty(select(rows.log_prob, rows.mask), select(rows.ref_log_prob, rows.mask), algorithm.kl_loss_type)
        metrics["kl_to_initial"] = masked_mean(kl.detach(), rows.mask)
        loss = loss + algorithm.kl_loss_coef * aggregate(kl)
    if rows.distillation is not None and distillation is not None:
        metrics["distillation"] = masked_mean(rows.distillation.detach(), rows.mask)
        loss = loss + distillation.coef * aggregate(rows.distillation)
    return loss, metrics


def rows_from_flat(flat: Tensor, mask: Tensor) -> Tensor:
    """Values of the trained tokens row by row, (T,) -> (N, T') of the mask's shape, 0 elsewhere."""
    return torch.masked_scatter(flat.new_zeros(mask.shape), mask, flat)
