"""Functions on tensors: advantages, policy losses, KL, rollout correction, packing; and the tables of their names.

The tables and settings need no torch. What user code needs to bring its own::

    from xrl_lite.algorithms import register_adv_est, register_policy_loss
    from xrl_lite.algorithms.aggregation import agg_loss
    from xrl_lite.algorithms.kl import kl_penalty
"""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.algorithms.config import AlgorithmConfig, DistillationConfig, KLControllerConfig, PolicyLossConfig
    from xrl_lite.algorithms.correction_config import RolloutCorrectionConfig
    from xrl_lite.algorithms.estimators import get_adv_estimator_fn, register_adv_est
    from xrl_lite.algorithms.policy_losses import get_policy_loss_fn, register_policy_loss

__all__ = [
    "AlgorithmConfig",
    "DistillationConfig",
    "KLControllerConfig",
    "PolicyLossConfig",
    "RolloutCorrectionConfig",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "register_adv_est",
    "register_policy_loss",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
