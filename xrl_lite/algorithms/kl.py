"""KL to a reference policy: estimates per token, in the reward or in the loss, and the weight it has.

x = log p of the sampled token, y = log p under the reference.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xrl_lite.algorithms.config import KLControllerConfig
from xrl_lite.algorithms.masked import row_mean, select
from xrl_lite.errors import ConfigError

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0
_MAX_ERROR = 0.2


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate KL(policy || reference) of each token, of the shape given.

    kl, k1: ``x - y``. abs: ``|x - y|``. mse, k2: ``(x - y)^2 / 2``. low_var_kl, k3: ``e^u - u - 1`` with u = y - x
    within +-20, at most 10 (Schulman 2020, http://joschu.net/blog/kl-approx.html). With a + the value is that of the
    estimator and the gradient that of k2, which is the right one in expectation (straight through).

    Raises:
        ConfigError: there is no such estimator.
    """
    value = _estimate(logprob, ref_logprob, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    slope = _estimate(logprob, ref_logprob, "k2")
    return value.detach() + slope - slope.detach()


def _estimate(x: Tensor, y: Tensor, name: str) -> Tensor:
    match name:
        case "kl" | "k1":
            return x - y
        case "abs":
            return (x - y).abs()
        case "mse" | "k2":
            return (x - y).square() / 2
        case "low_var_kl" | "k3":
            difference = (y - x).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            return (difference.exp() - difference - 1).clamp(-_MAX_K3, _MAX_K3)
        case _:
            raise ConfigError(
                f"KL estimator must be kl, k1, abs, mse, k2, low_var_kl or k3, or one with a +: {name!r}."
            )


class KLController(Protocol):
    """Holds the weight of the KL in the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the KL of a batch of `n_steps` trajectories."""
        ...


class FixedKLController:
    """A weight that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""


class AdaptiveKLController:
    """A weight that follows the KL: ``value *= 1 + clip(KL / target - 1, -0.2, 0.2) * n_steps / horizon``.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        self.value = init_kl_coef
        self._target = target_kl
        self._horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the KL of a batch of `n_steps` trajectories."""
        error = min(max(current_kl / self._target - 1, -_MAX_ERROR), _MAX_ERROR)
        self.value *= 1 + error * n_steps / self._horizon


def get_kl_controller(kl_ctrl: KLControllerConfig) -> KLController:
    """Make the controller of the settings."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)


def subtract_kl(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    kl_penalty_name: str,
    coef: float,
) -> tuple[Tensor, float]:
    """Return token rewards ``score - coef * KL`` (N, T), and the KL: the mean over tokens, then over rows.

    A NaN of the KL at a masked position is dropped.
    """
    mask = response_mask.bool()
    with torch.no_grad():
        kl = select(kl_penalty(select(old_log_probs, mask), select(ref_log_prob, mask), kl_penalty_name), mask)
        rows = mask.any(dim=1)
        mean = row_mean(kl, mask)[rows].mean().item() if bool(rows.any()) else 0.0
        return token_level_scores - coef * kl, mean
