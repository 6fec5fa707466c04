"""The training loop, evaluation, checkpoints and reports."""

from typing import TYPE_CHECKING, Any

from xrl_lite.trainer.checkpoint import CheckpointCallback
from xrl_lite.trainer.config import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
from xrl_lite.trainer.modes import TRAINERS, register_trainer

if TYPE_CHECKING:
    from xrl_lite.trainer.base import RLTrainer

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


def __getattr__(name: str) -> Any:
    if name == "RLTrainer":  # on demand: a config is read without it
        from xrl_lite.trainer.base import RLTrainer

        return RLTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
