"""The table of advantage estimators. Imports no torch, so a config can be checked against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from xrl_lite.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


class AdvantageEstimator(Protocol):
    """Rewards and group of each trajectory -> advantage of each trajectory."""

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return advantages, (N,) float64.

        Args:
            rewards: (N,) float; NaN marks a trajectory without a reward.
            groups: (N,) int; trajectories with equal numbers are attempts at one prompt.
        """
        ...


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    {
        "grpo": "xrl_lite.algorithms.advantages:grpo_advantages",
        "dr_grpo": "xrl_lite.algorithms.advantages:dr_grpo_advantages",
        "rloo": "xrl_lite.algorithms.advantages:rloo_advantages",
    },
)
