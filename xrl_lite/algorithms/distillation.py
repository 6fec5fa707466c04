"""On-policy distillation: losses per token of a student on its own responses, given a teacher's log-probs.

Agarwal et al. 2024, GKD (arXiv 2306.13649); Lu 2025, On-Policy Distillation (Thinking Machines). Loads no torch until a
loss is computed, so a config can be checked against the names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from xrl_lite.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

DistillationLoss = Callable[["Tensor", "Tensor"], "Tensor"]
"""Student's and teacher's log-probs -> loss of each token, (...)."""

TOP_K = "forward_kl_topk"
"""The loss that compares the teacher's top k tokens; all others get the log-probs of the sampled tokens."""

F = TypeVar("F", bound=DistillationLoss)


def forward_kl_topk(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(teacher || student) over the teacher's k likeliest tokens, (..., k) -> (...).

    ``sum p_t (log p_t - log p_s)``, neither side renormalised: what the teacher spreads over other tokens is left out.
    """
    return (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(dim=-1)


def _estimator(name: str, student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    from xrl_lite.algorithms.kl import kl_penalty  # loads torch

    return kl_penalty(student_log_probs, teacher_log_probs, name)


_ESTIMATORS = ("k1", "k2", "k3", "kl", "mse", "low_var_kl", "abs")

DISTILLATION_LOSSES: Registry[DistillationLoss] = Registry(
    "distillation loss",
    {TOP_K: forward_kl_topk}
    | {f"{name}{plus}": partial(_estimator, f"{name}{plus}") for name in _ESTIMATORS for plus in ("", "+")},
)
"""Losses by name: the estimators of `xrl_lite.algorithms.kl` among them."""


def register_distillation_loss(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a function of (student, teacher) log-probs of the sampled tokens, (T,).

    Raises:
        PluginError: another function has the name already.
    """

    def decorate(function: F) -> F:
        DISTILLATION_LOSSES.register(name)(function)
        return function

    return decorate


def distillation_loss(name: str) -> DistillationLoss:
    """Return a loss by name or path.

    Raises:
        UnknownNameError: there is none.
    """
    return DISTILLATION_LOSSES.resolve(name)
