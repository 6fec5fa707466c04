"""Corrects for rollouts whose probabilities are not the trainer's: other kernels, other precision, older weights.

(N, T) log-probs of the sampled tokens; ``log r = log p_old(trainer) - log p_rollout``, clamped to +-20. Weights and
masks carry no gradient. Row means are taken row by row, also where rows were packed together (XTuner's are not), and
bounds of k1 are bounds of r itself (verl compares -log r with them, which turns an asymmetric interval around).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xrl_lite.algorithms.correction_config import Rejection, RolloutCorrectionConfig
from xrl_lite.algorithms.masked import masked_mean, row_mean, select

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Correction:
    """What becomes of a batch."""

    weights: Tensor | None
    """(N, T) importance weights, 0 where the mask was 0; None without them."""
    mask: Tensor
    """(N, T) bool: tokens that are still trained on."""
    metrics: dict[str, float]
    """Named ``rollout_corr/...``."""


def correct_rollout(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Weigh and reject the tokens of a whole batch, and measure the mismatch."""
    mask = response_mask.bool()
    old, rollout = select(old_log_probs.detach().double(), mask), select(rollout_log_probs.double(), mask)
    log_ratio = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics = mismatch_metrics(old, rollout, mask)
    weights = None
    if config.rollout_is is not None:
        weights, more = importance_weights(log_ratio, mask, config)
        metrics |= more
    kept, more = rejection_mask(log_ratio, mask, config.rejections)
    return Correction(weights, kept, {f"rollout_corr/{name}": value for name, value in (metrics | more).items()})


def importance_weights(
    log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return weights (N, T), 0 where the mask is 0, and metrics.

    token: r; sequence: product of r over the row; geometric: its geometric mean. Then cut (truncated importance
    sampling), raised to the floor, or dropped outside the bounds (IcePop), and divided by the mean if asked.
    """
    of_rows = config.rollout_is != "token"
    if config.rollout_is == "sequence":
        log_ratio = select(log_ratio, mask).sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif config.rollout_is == "geometric":
        log_ratio = row_mean(log_ratio, mask).unsqueeze(1)
    ratio = select(log_ratio.exp().expand(mask.shape), mask)
    lower, upper = config.is_bounds
    outside = (ratio > upper) | (ratio < lower) if lower is not None else torch.zeros_like(mask)
    cut = ratio if lower is not None else ratio.clamp(min=config.rollout_is_floor, max=upper)
    weights = select(cut, mask & ~outside)
    metrics = _weight_metrics(ratio, weights, mask, lower if lower is not None else 1 / upper, upper)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = _share(outside, mask)
    if config.rollout_is_batch_normalize:
        rows = mask.any(dim=1)
        mean = row_mean(weights, mask)[rows].mean() if of_rows else masked_mean(weights, mask)
        metrics["rollout_is_batch_norm_factor"] = mean.item()
        weights = weights / mean if mean > 0 else weights
    return weights, metrics


def rejection_mask(log_ratio: Tensor, mask: Tensor, rejections: list[Rejection]) -> tuple[Tensor, dict[str, float]]:
    """Return the tokens that meet every condition, (N, T) bool, and metrics.

    k1 is log r, k2 ``(log r)^2 / 2``, k3 ``r - 1 - log r``; of each token, or of a row their sum, mean or maximum, in
    which case the whole row is kept or rejected.
    """
    kept = mask.clone()
    metrics: dict[str, float] = {}
    for rejection in rejections:
        high, low, values = _violations(log_ratio, mask, rejection)
        chosen = mask & ~(high | low)
        kept &= chosen
        used = values.expand(mask.shape)[mask]
        name = f"rollout_rs_{rejection.option}"
        if len(used):
            metrics |= {
                f"{name}_mean": used.mean().item(),
                f"{name}_max": used.max().item(),
                f"{name}_min": used.min().item(),
                f"{name}_std": used.std(correction=0).item(),
                f"{name}_fraction_high": _share(high.expand(mask.shape), mask),
                f"{name}_fraction_low": _share(low.expand(mask.shape), mask),
            }
        metrics |= _masked_fractions(name, mask, chosen)
    if rejections:
        metrics |= _masked_fractions("rollout_rs", mask, kept)
    return kept, metrics


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far trainer and rollout engine are apart, of tokens and of rows; empty without a trained token.

    kl and k3_kl estimate KL(rollout || trainer); perplexities are ``exp(-mean log p)`` of each row; chi2 is
    ``E[r^2] - 1`` of tokens and of rows.
    """
    rows = mask.any(dim=1)
    if not bool(rows.any()):
        return {}
    difference = select(old - rollout, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    row_ratio = difference.sum(dim=1)[rows].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    training, sampled = -row_mean(old, mask)[rows], -row_mean(rollout, mask)[rows]
    gap = training - sampled
    values = {
        "kl": masked_mean(-difference, mask),
        "k3_kl": masked_mean(difference.exp() - 1 - difference, mask),
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": sampled.exp().mean(),
        "rollout_log_ppl": sampled.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": masked_mean((2 * difference).exp(), mask) - 1,
        "chi2_seq": (2 * row_ratio).exp().mean() - 1,
    }
    return {name: value.item() for name, value in values.items()}


def _violations(log_ratio: Tensor, mask: Tensor, rejection: Rejection) -> tuple[Tensor, Tensor, Tensor]:
    """Where a value is too high, where it is too low, and the values: (N, T), or (N, 1) for rows."""
    level, _, kind = rejection.option.rpartition("_")
    values = {
        "k1": log_ratio,
        "k2": log_ratio.square() / 2,
        "k3": log_ratio.exp() - 1 - log_ratio,
    }[kind]
    lowest = values
    if level == "seq_sum":
        values = lowest = select(values, mask).sum(dim=1, keepdim=True)
    elif level == "seq_mean":
        values = lowest = row_mean(values, mask).unsqueeze(1)
    elif level == "seq_max":
        lowest = torch.where(mask, values, torch.inf).amin(dim=1, keepdim=True)
        values = torch.where(mask, values, -torch.inf).amax(dim=1, keepdim=True)
    if rejection.lower is None:
        return values > rejection.upper, torch.zeros_like(values, dtype=torch.bool), values
    bounds = log_ratio.new_tensor([rejection.lower, rejection.upper]).log()
    return values > bounds[1], lowest < bounds[0], values


def _weight_metrics(ratio: Tensor, weights: Tensor, mask: Tensor, lower: float, upper: float) -> dict[str, float]:
    """Extremes and shares are of the ratios before they are cut, the rest of the weights that are used."""
    raw, used, rows = ratio[mask], weights[mask], mask.any(dim=1)
    if not len(used):
        return {}
    of_rows = row_mean(ratio, mask)[rows]
    values = {
        "mean": used.mean(),
        "std": used.std(correction=0),
        "max": raw.max(),
        "min": raw.min(),
        "ratio_fraction_high": (raw > upper).double().mean(),
        "ratio_fraction_low": (raw < lower).double().mean(),
        "eff_sample_size": used.mean().square() / used.square().mean().clamp(min=1e-12),
        "seq_mean": of_rows.mean(),
        "seq_std": of_rows.std(correction=0),
        "seq_max": of_rows.max(),
        "seq_min": of_rows.min(),
        "seq_max_deviation": (of_rows - 1).abs().max(),
        "seq_fraction_high": (of_rows > upper).double().mean(),
        "seq_fraction_low": (of_rows < lower).double().mean(),
    }
    return {f"rollout_is_{name}": value.item() for name, value in values.items()}


def _masked_fractions(name: str, before: Tensor, after: Tensor) -> dict[str, float]:
    rows = before.any(dim=1)
    lost_rows = (rows & ~after.any(dim=1)).sum() / rows.sum().clamp(min=1)
    return {
        f"{name}_masked_fraction": 1 - _share(after, before) if bool(before.any()) else 0.0,
        f"{name}_seq_masked_fraction": lost_rows.item(),
    }


def _share(chosen: Tensor, mask: Tensor) -> float:
    return masked_mean(chosen.double(), mask).item()
