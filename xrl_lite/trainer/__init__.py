"""The training loop, evaluation, checkpoints and reports."""

from xrl_lite.trainer.checkpoint import CheckpointCallback
from xrl_lite.trainer.config import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig

__all__ = ["CheckpointCallback", "CheckpointConfig", "EvaluationConfig", "ReportConfig", "TrainerConfig"]
