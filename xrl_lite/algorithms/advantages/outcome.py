"""Estimators that compare one reward per trajectory with the rewards of its siblings.

Two forms each: a function of rewards and groups, (N,) -> (N,); and, in the table of estimators, a function of verl's
signature that sums the rewards of each row first and gives every trained token the advantage of its row. Groups of
equal rewards get exactly 0 from all of them, trajectories without a reward (NaN) too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.advantages.groups import group_numbers, per_group, rows_with_signal
from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.masked import select, whiten
from xrl_lite.errors import ConfigError


def grpo_advantages(rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: ``(r - mean) / (std + eps)`` over the attempts at one prompt.

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3 with outcome rewards; std is the unbiased one.
    """
    if not norm_by_std:
        return dr_grpo_advantages(rewards, groups)
    return per_group(rewards, groups, lambda r, _: (r - r.mean()) / (r.std() + eps))


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Group-relative advantages without division: ``r - mean``.

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783): dividing by the standard deviation weighs
    questions by their difficulty. That paper's length normalisation is the aggregation ``seq-mean-token-sum-norm``.
    (XTuner's estimator of this name keeps the division, and multiplies by the length.)
    """
    return per_group(rewards, groups, lambda r, _: r - r.mean())


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Leave-one-out advantages: ``r_i - mean of the other rewards of the group``.

    Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740).
    """
    return per_group(rewards, groups, lambda r, _: (r - r.mean()) * len(r) / (len(r) - 1))


def opo_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Advantages over the length-weighted mean: ``r - sum(length * r) / sum(length)``.

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585).

    Args:
        rewards: (N,).
        groups: (N,).
        lengths: (N,) trained tokens of each trajectory.
    """

    def estimate(r: Tensor, members: Tensor) -> Tensor:
        weights = lengths[members].double()
        return r - (weights * r).sum() / weights.sum().clamp(min=1)

    return per_group(rewards, groups, estimate)


def passk_advantages(rewards: Tensor, groups: Tensor, *, k: int = 4, eps: float = 1e-6) -> Tensor:
    """Advantages of the reward "one of k attempts is right"; right means a reward above 0.

    Chen et al. 2025, Pass@k Training (arXiv 2508.10751), the analytic form. Of n attempts c are right;
    ``rho = 1 - C(n-c, k) / C(n, k)``, ``sigma = sqrt(rho (1 - rho)) + eps``; right: ``(1 - rho) / sigma``; wrong:
    ``(1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma``. With fewer than k scored attempts, k is their number. (XTuner's
    gives -1e6 where no attempt is right, and wrong attempts the advantage of right ones where n < k.)
    """

    def estimate(r: Tensor, _: Tensor) -> Tensor:
        num, right = len(r), int((r > 0).sum())
        size = min(k, num)
        rho = 1 - comb(num - right, size) / comb(num, size)
        sigma = (rho * (1 - rho)) ** 0.5 + eps
        wrong = 1 - rho - comb(max(num - right - 1, 0), size - 1) / comb(num - 1, size - 1)
        if right in (0, num):
            return torch.zeros_like(r)
        return torch.where(r > 0, r.new_tensor((1 - rho) / sigma), r.new_tensor(wrong / sigma))

    return per_group(rewards, groups, estimate)


def grpo_passk_advantages(rewards: Tensor, groups: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Only the best attempt of a group: ``best - second best``, over ``std + eps`` if asked; all others 0.

    Walder and Karkhanis 2025, Pass@K Policy Optimization (arXiv 2505.15201), the leave-one-out form with k = n.
    """

    def estimate(r: Tensor, _: Tensor) -> Tensor:
        best, second = r.topk(2).values
        scale = r.std() + eps if norm_by_std else 1.0
        advantages = torch.zeros_like(r)
        advantages[r.argmax()] = (best - second) / scale
        return advantages

    return per_group(rewards, groups, estimate)


def gpg_advantages(rewards: Tensor, groups: Tensor, *, f_norm: float = 1.0) -> Tensor:
    """``alpha (r - mean) / f_norm`` with ``alpha = trajectories / trajectories whose reward is not 0``.

    Chu et al. 2025, GPG (arXiv 2504.02546): alpha makes up for the trajectories that give no gradient.
    """
    scored = rewards[~rewards.isnan()]
    alpha = len(scored) / max(1, int((scored != 0).sum()))
    return per_group(rewards, groups, lambda r, _: alpha * (r - r.mean()) / f_norm)


# --- the same in verl's signature


@dataclass(frozen=True)
class _Rows:
    rewards: Tensor
    """(N,) sum of the row's rewards; NaN where there is none."""
    groups: Tensor
    mask: Tensor
    config: AlgorithmConfig
    inputs: Mapping[str, Any]

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(dim=1)

    def whiten(self, per_row: Tensor, signal: Tensor) -> Tensor:
        """Whiten over the trained tokens of scored rows; rows without a signal are set back to exactly 0."""
        scored = self.mask & ~self.rewards.isnan().unsqueeze(1)
        return select(whiten(self.spread(per_row), scored), signal.unsqueeze(1) & self.mask)

    def spread(self, per_row: Tensor) -> Tensor:
        """(N,) -> (N, T), 0 where the mask is 0."""
        return select(per_row.unsqueeze(1).expand(self.mask.shape), self.mask)


def _estimator(estimate: Callable[[_Rows], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Give a function of rows verl's signature."""

    def estimator(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Tensor | Sequence[Hashable],
        config: AlgorithmConfig | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        rows = _Rows(
            # the whole row, not only under the mask: a trajectory that is not trained on still counts for its siblings
            token_level_rewards.double().sum(dim=1),
            group_numbers(index),
            response_mask.bool(),
            config or AlgorithmConfig(),
            inputs,
        )
        advantages = estimate(rows)
        return advantages, advantages

    return estimator


def _gdpo(rows: _Rows) -> Tensor:
    keys = rows.config.gdpo_reward_keys
    parts: Mapping[str, Tensor] = rows.inputs.get("reward_parts") or {}
    missing = [key for key in keys or () if key not in parts]
    if missing:
        raise ConfigError(f"gdpo_reward_keys names {missing}, which are no parts of the rewards: {sorted(parts)}.")
    components = [parts[key].double() for key in keys] if keys else [rows.rewards]
    weights = rows.config.gdpo_reward_weights or [1.0] * len(components)
    norm = rows.config.norm_adv_by_std_in_grpo
    total = torch.zeros_like(rows.rewards)
    signal = torch.zeros_like(rows.rewards, dtype=torch.bool)
    for weight, component in zip(weights, components, strict=True):
        total += weight * grpo_advantages(component, rows.groups, norm_by_std=norm)
        signal |= rows_with_signal(component, rows.groups)
    return rows.whiten(total, signal)


def _reinforce_plus_plus_baseline(rows: _Rows) -> Tensor:
    return rows.whiten(dr_grpo_advantages(rows.rewards, rows.groups), rows_with_signal(rows.rewards, rows.groups))


grpo = _estimator(
    lambda rows: rows.spread(
        grpo_advantages(rows.rewards, rows.groups, norm_by_std=rows.config.norm_adv_by_std_in_grpo)
    )
)
"""`grpo_advantages`; `norm_adv_by_std_in_grpo` chooses whether to divide."""

dr_grpo = _estimator(lambda rows: rows.spread(dr_grpo_advantages(rows.rewards, rows.groups)))
"""`dr_grpo_advantages`."""

rloo = _estimator(lambda rows: rows.spread(rloo_advantages(rows.rewards, rows.groups)))
"""`rloo_advantages`."""

opo = _estimator(lambda rows: rows.spread(opo_advantages(rows.rewards, rows.groups, rows.lengths)))
"""`opo_advantages`."""

passk = _estimator(lambda rows: rows.spread(passk_advantages(rows.rewards, rows.groups, k=rows.config.passk_k)))
"""`passk_advantages` with `passk_k`."""

grpo_passk = _estimator(
    lambda rows: rows.spread(
        grpo_passk_advantages(rows.rewards, rows.groups, norm_by_std=rows.config.norm_adv_by_std_in_grpo)
    )
)
"""`grpo_passk_advantages`."""

gpg = _estimator(lambda rows: rows.spread(gpg_advantages(rows.rewards, rows.groups)))
"""`gpg_advantages`."""

gdpo = _estimator(_gdpo)
"""Each part of the reward normalised in its group, weighted, summed, then whitened over all trained tokens.

GDPO, Liu et al. 2026 (arXiv 2601.05242): parts of different scale would drown each other in one normalisation. Takes
``reward_parts``, name -> (N,), for `gdpo_reward_keys`; without keys it is grpo, whitened. The whitening shifts every
row; rows of groups in which no part varies are set back to exactly 0.
"""

reinforce_plus_plus_baseline = _estimator(_reinforce_plus_plus_baseline)
"""``r - mean`` of the group, whitened over all trained tokens of the batch.

Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), the variant with a group baseline. The whitening shifts every row; rows
of groups of equal rewards are set back to exactly 0.
"""
