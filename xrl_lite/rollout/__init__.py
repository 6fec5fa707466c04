"""Generation: token ids in, token ids out."""

from xrl_lite.rollout.config import RolloutConfig

__all__ = ["RolloutConfig"]
