"""When a run should not go on: trainer and rollout engine disagree, nothing is learned, or nothing can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from xrl_lite.trainer.config import TrainerConfig

logger = get_logger(__name__)

MAX_SKIPPED_UPDATES = 5
"""Steps in a row with a gradient that is not finite before the run stops."""


@dataclass(frozen=True)
class Problem:
    """Why a run stops."""

    text: str
    is_sound: bool
    """Whether the weights are worth a checkpoint."""


class StepHealth:
    """Looks at the metrics of every step.

    Args:
        config: Limits.
        algorithm: Settings of the algorithm.
        rollouts: Folder to point to.
    """

    def __init__(self, config: TrainerConfig, algorithm: AlgorithmConfig, rollouts: Path) -> None:
        self._config = config
        self._algorithm = algorithm
        self._rollouts = rollouts
        self._steps_without_signal = 0
        self._empty_steps = 0
        self._skipped_updates = 0
        self._gap_is_wide = False

    def check(self, step: int, metrics: Mapping[str, float]) -> Problem | None:
        """Return why the run should stop after this step, or None to go on."""
        return (
            self._check_there_is_something(metrics)
            or self._check_signal(metrics)
            or self._check_gap(step, metrics.get("logprob_gap/mean", 0.0))
            or self._check_gradient([metrics.get(name, 0.0) for name in ("grad_norm", "critic/grad_norm")])
        )

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold."""
        return {"steps_without_signal": self._steps_without_signal, "empty_steps": self._empty_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._steps_without_signal, self._empty_steps = state["steps_without_signal"], state["empty_steps"]

    def _check_there_is_something(self, metrics: Mapping[str, float]) -> Problem | None:
        self._empty_steps = self._empty_steps + 1 if "skipped_step" in metrics else 0
        if self._empty_steps < self._config.max_empty_steps:
            return None
        text = (
            f"There was no token to train on for {self._empty_steps} steps in a row: all attempts failed, were "
            f"masked or were rejected. See {self._rollouts} and the logs beside it."
        )
        return Problem(text, is_sound=True)

    def _check_signal(self, metrics: Mapping[str, float]) -> Problem | None:
        if "skipped_step" in metrics:
            return None
        distillation = self._algorithm.distillation
        by_teacher = distillation is not None and not distillation.use_task_rewards
        without = not by_teacher and metrics["advantages/min"] == metrics["advantages/max"] == 0.0
        self._steps_without_signal = self._steps_without_signal + 1 if without else 0
        if self._steps_without_signal < self._config.max_steps_without_signal:
            return None
        text = (
            f"No group had two different rewards for {self._steps_without_signal} steps in a row "
            f"(reward {metrics['reward']:.3f}), so there is nothing to learn from. Is the task too hard or too "
            f"easy for the model, or is the judger wrong? See {self._rollouts}."
        )
        return Problem(text, is_sound=True)

    def _check_gap(self, step: int, gap: float) -> Problem | None:
        config = self._config
        if not gap <= config.max_logprob_gap:  # NaN is no agreement either
            text = (
                f"Trainer and rollout engine disagree about tokens of the same weights by {gap:.3f} nats on average, "
                f"more than max_logprob_gap={config.max_logprob_gap}. They hold different weights, or use different "
                f"types (engine.dtype, rollout.dtype), temperatures or chat templates."
            )
            return Problem(text, is_sound=False)
        if gap > config.warn_logprob_gap and not self._gap_is_wide:
            logger.warning(
                "step %d: trainer and rollout engine disagree about tokens of the same weights by %.4f nats on "
                "average, more than warn_logprob_gap=%g; algorithm.rollout_correction can make up for it",
                step,
                gap,
                config.warn_logprob_gap,
            )
        self._gap_is_wide = gap > config.warn_logprob_gap
        return None

    def _check_gradient(self, grad_norms: list[float]) -> Problem | None:
        self._skipped_updates = 0 if all(map(math.isfinite, grad_norms)) else self._skipped_updates + 1
        if self._skipped_updates < MAX_SKIPPED_UPDATES:
            return None
        text = (
            f"The gradient was not finite for {self._skipped_updates} steps in a row, so nothing was learned. "
            f"Lower engine.optimizer.learning_rate; go on from an earlier checkpoint."
        )
        return Problem(text, is_sound=False)
