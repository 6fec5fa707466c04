"""The training loop, evaluation, checkpoints and reports."""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.trainer.base import RLTrainer
    from xrl_lite.trainer.checkpoint import CheckpointCallback
    from xrl_lite.trainer.config import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
    from xrl_lite.trainer.modes import TRAINERS, register_trainer

__all__ = [
    "TRAINERS",
    "CheckpointCallback",
    "CheckpointConfig",
    "EvaluationConfig",
    "RLTrainer",
    "ReportConfig",
    "TrainerConfig",
    "register_trainer",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
