"""On-policy distillation: losses per token of a student on its own responses, given a teacher's log-probs.

Agarwal et al. 2024, GKD (arXiv 2306.13649); Lu 2025, On-Policy Distillation (Thinking Machines).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from xrl_lite.algorithms.kl import kl_penalty
from xrl_lite.errors import UnknownNameError, did_you_mean
from xrl_lite.registry import load_object

DistillationLoss = Callable[[Tensor, Tensor], Tensor]
"""Student's and teacher's log-probs -> loss of each token, (...)."""

TOP_K = "forward_kl_topk"
"""The loss that compares the teacher's top k tokens; all others get the log-probs of the sampled tokens."""

F = TypeVar("F", bound=DistillationLoss)


def forward_kl_topk(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(teacher || student) over the teacher's k likeliest tokens, (..., k) -> (...).

    ``sum p_t (log p_t - log p_s)``, neither side renormalised: what the teacher spreads over other tokens is left out.
    """
    return (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(dim=-1)


_LOSSES: dict[str, DistillationLoss] = {TOP_K: forward_kl_topk}


def register_distillation_loss(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a function of (student, teacher) log-probs of the sampled tokens, (T,)."""

    def decorate(function: F) -> F:
        _LOSSES[name] = function
        return function

    return decorate


def distillation_loss(name: str) -> DistillationLoss:
    """Return a loss by name: `forward_kl_topk`, a registered one, a path, or an estimator of `kl_penalty`.

    Raises:
        UnknownNameError: there is none.
    """
    if name in _LOSSES:
        return _LOSSES[name]
    if ":" in name:
        return load_object(name)
    if name.removesuffix("+") in _ESTIMATORS:
        return lambda student, teacher: kl_penalty(student, teacher, name)
    known = [*_LOSSES, *_ESTIMATORS]
    raise UnknownNameError(f"Unknown distillation loss {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")


_ESTIMATORS = ("k1", "k2", "k3", "kl", "mse", "low_var_kl", "abs")
