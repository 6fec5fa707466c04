"""Settings of the training loop, evaluation, checkpoints and reports. Imports no torch."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from xrl_lite.data import DataConfig, SampleParams
from xrl_lite.metrics import check_loggers
from xrl_lite.replay_buffer import TrainerMode
from xrl_lite.settings import Settings
from xrl_lite.trainer.modes import TRAINERS, layout_of


class TrainerConfig(Settings):
    """How large a step is, how many there are, and when a run stops by itself."""

    mode: str = "sync"
    """sync: generation and training take turns, and every sample is of the policy that is trained. colocate_async: they
    take turns, but what is not done when a batch is there goes on in the next step. separate_async: both run at the
    same time, on devices of their own. Or a class of your own: a name given by `register_trainer`, or
    "package.module:Class" or "file.py:Class"."""

    num_steps: int = Field(default=100, gt=0)
    """Steps of the run."""

    groups_per_step: int = Field(default=32, gt=0)
    """Groups that one step is trained on."""

    sync_weights_interval: int = Field(default=1, gt=0)
    """Steps from one weight sync to the next; the last step is always followed by one."""

    parameter_sync_step: int = Field(default=1, gt=0)
    """Parts that a step of separate_async is sampled and trained in, each as soon as its groups are there. All parts
    are compared with the policy that the step began with."""

    num_warmup_batches: int | None = Field(default=None, ge=0)
    """Batches that generation is ahead of the step that is wanted, from before the first one on, in the async modes.
    When not given: as many as `max_staleness` allows in separate_async, none in colocate_async, where
    `over_sample_threshold` gives a share of a batch."""

    critic_warmup: int = Field(default=0, ge=0)
    """Steps at the start in which the critic is trained and the policy is left as it is (gae)."""

    max_failed_groups: int | None = Field(default=None, ge=0)
    """Groups that may fail while one batch is produced before the run stops; 4 batches' worth when not given."""

    max_steps_without_signal: int = Field(default=20, gt=0)
    """Stop after so many steps in a row in which no advantage differs from 0: no group had two different rewards."""

    max_empty_steps: int = Field(default=5, gt=0)
    """Stop after so many steps in a row without a single token to train on."""

    warn_logprob_gap: float = Field(default=0.05, gt=0)
    """Warn when trainer and rollout engine give tokens that the present weights sampled log-probs that differ by more
    than this on average, in nats."""

    max_logprob_gap: float = Field(default=1.0, gt=0)
    """Stop when they differ by more than this on average: they then hold different weights."""

    check_agreement_every: int = Field(default=25, ge=0)
    """Sample a few tokens to compare the two on, after so many steps in a row without one that the present weights
    sampled, as is usual in separate_async; 0 for never."""

    @field_validator("mode")
    @classmethod
    def _mode_exists(cls, mode: str) -> str:
        TRAINERS.check(mode)
        return mode

    @property
    def layout(self) -> TrainerMode:
        """Which of the three built-in modes it is a kind of."""
        return layout_of(self.mode)


class EvaluationConfig(Settings):
    """Accuracy on held-out rows."""

    data: DataConfig | None = None
    """Held-out rows; no evaluation when not given."""

    every_steps: int = Field(default=25, ge=0)
    """Evaluate every so many steps; 0 for only before and after."""

    at_start: bool = True
    """Evaluate before the first step."""

    sample_params: dict[str, SampleParams] = Field(
        default_factory=lambda: {
            "greedy": SampleParams(temperature=0.0, max_tokens=512),
            "sampled": SampleParams(temperature=1.0, max_tokens=512),
        }
    )
    """Ways of sampling, by name; each gives an accuracy of its own."""

    num_samples: dict[str, int] = Field(default_factory=dict[str, int])
    """Attempts per row, by the name of the way of sampling; one where nothing is said. With k of them pass@k, and maj@k
    where rewards have `pred`, are reported too."""

    success_score: float = 0.5
    """An answer counts as right when its score is above this."""

    @model_validator(mode="after")
    def _samples_are_of_a_way(self) -> Self:
        unknown = sorted(set(self.num_samples) - set(self.sample_params))
        if unknown:
            raise ValueError(
                f"evaluation.num_samples names {unknown[0]!r}, which is not in sample_params: "
                f"{', '.join(sorted(self.sample_params))}."
            )
        greedy = [
            way for way, count in self.num_samples.items() if count > 1 and not self.sample_params[way].temperature
        ]
        if greedy or min(self.num_samples.values(), default=1) < 1:
            raise ValueError(
                f"evaluation.num_samples must be at least 1, and 1 at temperature 0, where all are equal; got "
                f"{self.num_samples}."
            )
        return self


class CheckpointConfig(Settings):
    """When the run is saved, and where it starts."""

    every_steps: int = Field(default=0, ge=0)
    """Save every so many steps; 0 for only at the end and when the run is stopped."""

    keep: int = Field(default=2, gt=0)
    """Newest checkpoints to keep."""

    export_hf: bool = True
    """Also write each checkpoint's model as a Hugging Face folder."""

    resume: str = "never"
    """never: start anew, in a folder of its own. auto: go on from the newest complete checkpoint of this run's folder,
    or start if the folder has no run. Or the path of a checkpoint."""

    callback: str | None = None
    """Path of a CheckpointCallback class, "package.module:Class" or "file.py:Class". It is built with ``config``."""


class ReportConfig(Settings):
    """What is shown and kept."""

    completions_every: int = Field(default=25, ge=0)
    """Show a table of sample completions every so many steps; 0 for never."""

    num_completions: int = Field(default=4, gt=0)
    """Rows of that table."""

    loggers: list[str] = Field(default_factory=lambda: ["console", "jsonl"])
    """Where metrics go: console, jsonl (metrics.jsonl, written in any case), tensorboard, wandb, trackio, mlflow."""

    project: str = "xrl-lite"
    """Project that the loggers file the run under."""

    logger_options: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """Per logger, handed to its library, for example ``{wandb: {mode: offline}}``."""

    verl_names: bool = False
    """Also give the loggers the metrics under verl's names, so that dashboards carry over."""

    save_rollouts: bool = True
    """Write every trained attempt to rollouts/step_*.jsonl."""

    save_events: bool = True
    """Write what happens, in its order, to events.jsonl; `xrl-lite replay` repeats it."""

    @field_validator("loggers")
    @classmethod
    def _loggers_exist(cls, names: list[str]) -> list[str]:
        check_loggers(names)
        return names
