"""The training loop that all modes share, and the nine places where a mode (or a user's subclass) can act.

::

    on_init_end                                    weights of the start are with every replica
    [on_validate_begin, evaluation, on_validate_end]
    on_train_begin
    each step:
        on_step_begin
        on_sample_begin  produce, sample a batch  on_sample_end
        _prepare_train_data, advantages -> optimizer updates
        on_step_end                                weights go to the replicas
        metrics
        [on_validate_begin, evaluation, on_validate_end]
        [checkpoint]                               last: what was saved needs nothing to be made up for
    on_train_end                                   always, also after an error

Waits for    batches, updates and syncs, each with the deadline of its part
Is woken by  the parts; a stop request is looked at between two steps
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.data import RolloutState
from xrl_lite.errors import RunError
from xrl_lite.judger import judger_metrics
from xrl_lite.log import get_logger
from xrl_lite.metrics import MetricLoggers, shares, with_verl_names
from xrl_lite.replay_buffer import PromptGroup
from xrl_lite.trainer.advantages import AdvantageStep
from xrl_lite.trainer.agreement import AgreementCheck
from xrl_lite.trainer.baselines import greedy_rewards
from xrl_lite.trainer.checkpoint import ENGINE, CheckpointCallback, CheckpointStore, read_state
from xrl_lite.trainer.prepare import prepare_train_data
from xrl_lite.trainer.randomness import random_state, set_random_state
from xrl_lite.trainer.report import completion_table
from xrl_lite.trainer.stop import StopRequest

if TYPE_CHECKING:
    from xrl_lite.agent_loop import Producer
    from xrl_lite.agent_loop.manager import AgentLoopManager
    from xrl_lite.engine.batch import TrainBatch
    from xrl_lite.engine.controller import TrainingController
    from xrl_lite.replay_buffer import ReplayBuffer
    from xrl_lite.trainer.config import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
    from xrl_lite.trainer.evaluation import Evaluator
    from xrl_lite.trainer.report import Reporter
    from xrl_lite.trainer.run_folder import RunFolder
    from xrl_lite.weight_sync import WeightSync

logger = get_logger(__name__)

MAX_SKIPPED_UPDATES = 5
"""Steps in a row with a gradient that is not finite before the run stops."""


class JudgerStatistics(Protocol):
    """Counts what became of judgements."""

    def statistics(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return counts and times per judger since the last reset."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What a trainer is made of; `xrl_lite.run` puts them together."""

    engine: TrainingController
    """Trains."""
    weight_sync: WeightSync
    """Brings weights from the engine to the replicas."""
    manager: AgentLoopManager
    """Runs groups past the buffer, as an evaluation does."""
    producer: Producer
    """Decides which groups are run for training."""
    replay_buffer: ReplayBuffer
    """Holds groups."""
    evaluator: Evaluator | None
    """Measures held-out accuracy."""
    judger: JudgerStatistics
    """Its counters go into the metrics."""
    folder: RunFolder
    """Where everything is written."""
    store: CheckpointStore
    """Where checkpoints are kept."""
    callback: CheckpointCallback
    """Runs after each checkpoint."""
    reporter: Reporter
    """Shows what happens."""
    agreement: AgreementCheck | None = None
    """Compares trainer and rollout engine after the first weight sync."""
    loggers: MetricLoggers = field(default_factory=lambda: MetricLoggers({}))
    """Take the metrics too."""
    health: Callable[[], dict[str, float]] = dict
    """Returns what the processes are doing: memory, restarts, lag of the event loop."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The parts of the run's settings that the loop reads."""

    trainer: TrainerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    report: ReportConfig
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    max_tokens: int | None = None
    """Longest prompt and response together that the engine takes."""


@dataclass
class StepTimes:
    """Seconds of the parts of one step."""

    started: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def metrics(self, num_tokens: float) -> dict[str, float]:
        """Return all parts, the rest as other, and the tokens generated per second of the step."""
        step = time.perf_counter() - self.started
        other = step - sum(self.parts.values())
        return {
            "time/step": step,
            **{f"time/{name}": value for name, value in self.parts.items()},
            "time/other": other,
            "time/tokens_per_s": num_tokens / step,
        }


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    folder: Path
    """Folder of the run."""
    last_step: int
    """Last step that was trained."""
    stopped: bool
    """Whether it was asked to stop before its end."""
    checkpoint: Path | None
    """Newest checkpoint."""


class RLTrainer(ABC):
    """Runs the loop; subclasses say how batches are produced and when weights move.

    Args:
        parts: What it is made of.
        settings: What it reads.
        stop: Looked at between steps.
    """

    def __init__(self, parts: TrainerParts, settings: TrainerSettings, stop: StopRequest) -> None:
        self.parts = parts
        self.settings = settings
        self.stop = stop
        self.global_step = 0
        self.times = StepTimes()
        self._advantages = AdvantageStep(settings.algorithm)
        self._steps_without_signal = 0
        self._empty_steps = 0
        self._skipped_updates = 0
        self._gap_is_wide = False
        self._evaluation_due = False
        self._saved_step = 0
        self._checkpoint: Path | None = None

    async def fit(self, checkpoint: Path | None = None) -> RunSummary:
        """Train from a checkpoint or from the start, until the last step or a stop request.

        Raises:
            RunError: the run cannot go on; the message says why.
        """
        last_step = self.settings.trainer.num_steps
        if checkpoint is not None:
            await self._load(checkpoint)
        # what was generated after the checkpoint is generated again, to the same bits
        await self.parts.replay_buffer.restore(self.global_step, keep_newer=False)
        await self.on_init_end()
        if self.parts.agreement is not None:
            self.parts.reporter.note(await self.parts.agreement.run())
        if self._evaluation_due or (self.global_step == 0 and self.settings.evaluation.at_start):
            await self._evaluate()
        self.stop.cancel = None
        self.parts.reporter.start(num_steps=last_step, first_step=self.global_step + 1)
        await self.on_train_begin()
        try:
            while self.global_step < last_step and not self.stop.requested:
                self.global_step += 1
                await self._run_step()
            if self.global_step > 0 and self._saved_step != self.global_step:
                await self._save()
        finally:
            await self.on_train_end()
            self.parts.reporter.finish()
        return RunSummary(self.parts.folder.path, self.global_step, self.global_step < last_step, self._checkpoint)

    # --- the nine hooks, in the order in which they are called

    async def on_init_end(self) -> None:
        """Everything is built and, on resume, loaded."""

    async def on_train_begin(self) -> None:
        """The first step comes next."""

    async def on_validate_begin(self) -> None:
        """An evaluation comes next."""

    async def on_validate_end(self) -> None:
        """An evaluation ended."""

    async def on_step_begin(self) -> None:
        """A step begins; `global_step` is its number, counted from 1."""

    async def on_sample_begin(self) -> None:
        """A batch is needed."""

    @abstractmethod
    async def on_sample_end(self) -> None:
        """A batch was taken."""

    @abstractmethod
    async def on_step_end(self) -> None:
        """The weights were updated."""

    async def on_train_end(self) -> None:
        """No step will follow. Called after an error too."""

    @abstractmethod
    async def sample_batch(self, batch_size: int) -> tuple[list[PromptGroup], dict[str, Any]]:
        """Return the groups to train on, and metrics of the buffer."""

    def _prepare_train_data(self, groups: list[list[RolloutState]]) -> tuple[TrainBatch, dict[str, float]]:
        """Turn scored groups into the trajectories of one step; override to change what is trained on.

        Advantages are estimated afterwards: some need log-probs of these trajectories.
        """
        algorithm = self.settings.algorithm
        keys = algorithm.gdpo_reward_keys if algorithm.advantage == "gdpo" else None
        return prepare_train_data(groups, max_tokens=self.settings.max_tokens, reward_keys=keys or ())

    # --- one step

    async def _run_step(self) -> None:
        self.times = StepTimes()
        await self.on_step_begin()
        await self.on_sample_begin()
        groups, buffer_metrics = await self.sample_batch(self.settings.trainer.groups_per_step)
        attempts = [group.states for group in groups]
        baselines = await self._greedy_baselines(attempts)
        await self.on_sample_end()
        batch, metrics = self._prepare_train_data(attempts)
        if baselines is not None:
            batch = replace(batch, reward_baselines=[baselines[group] for group in batch.groups])
        with self.times.part("train"):
            metrics |= await self._train(replace(batch, step=self.global_step))
        await self.on_step_end()
        self._write(metrics | buffer_metrics | self._judger_metrics(), [state for group in attempts for state in group])
        self._evaluation_due = self._is_due(self.settings.evaluation.every_steps) or self._is_last
        if self._evaluation_due and not self.stop.requested:
            await self._evaluate()
        if self._is_due(self.settings.checkpoint.every_steps):
            await self._save()
        await self._check_health(metrics)

    async def _greedy_baselines(self, groups: list[list[RolloutState]]) -> list[float] | None:
        if "reward_baselines" not in self.settings.algorithm.requirements():
            return None
        with self.times.part("baselines"):
            return await greedy_rewards(self.parts.manager, groups)

    async def _train(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = {}
        attempts = len(batch)
        if batch.num_trained_tokens:
            batch, metrics = await self._advantages(batch, self.parts.engine.measure)
        if not batch.num_trained_tokens:
            metrics["skipped_step"] = 1.0
            text = f"step {self.global_step} is skipped: none of its {attempts} scored attempts has a token to train on"
            logger.warning(text)
            self.parts.reporter.note(text)
        # also without tokens: the schedule of the learning rate goes on
        return metrics | await self.parts.engine.train_batch(batch)

    def _write(self, metrics: dict[str, float], states: list[RolloutState]) -> None:
        if self.settings.report.save_rollouts:
            self.parts.folder.write_rollouts(self.global_step, [rollout_record(state) for state in states])
        record = {
            **metrics,
            **shares((state.finish_reason for state in states), "completions/finish_reason"),
            **self.times.metrics(metrics["num_tokens"]),
            **self.parts.health(),
        }
        self._log(record)
        self.parts.reporter.step(self.global_step, record)
        if self._is_due(self.settings.report.completions_every):
            shown = states[: self.settings.report.num_completions]
            self.parts.reporter.completions(self.global_step, shown)
            self.parts.loggers.log_table(self.global_step, "completions", *completion_table(shown))

    def _log(self, record: dict[str, Any]) -> None:
        self.parts.folder.write_metrics({"step": self.global_step, **record})
        renamed = with_verl_names(record) if self.settings.report.verl_names else record
        self.parts.loggers.log(self.global_step, renamed)

    def _judger_metrics(self) -> dict[str, float]:
        metrics = judger_metrics(self.parts.judger.statistics(reset=True))
        times = [name for name in metrics if "/latency_" in name or "/queue_" in name]
        return metrics | {f"time/{name}": metrics.pop(name) for name in times}

    async def _check_health(self, metrics: dict[str, float]) -> None:
        await self._check_there_is_something(metrics)
        config = self.settings.trainer
        gap = metrics.get("logprob_gap/mean", 0.0)
        if not gap <= config.max_logprob_gap:  # NaN is no agreement either
            raise RunError(
                f"Trainer and rollout engine disagree about the same tokens by {gap:.3f} nats on average, more than "
                f"max_logprob_gap={config.max_logprob_gap}. They hold different weights, or use different types "
                f"(engine.dtype, rollout.dtype), temperatures or chat templates."
            )
        if gap > config.warn_logprob_gap and not self._gap_is_wide:
            logger.warning(
                "step %d: trainer and rollout engine disagree about the same tokens by %.4f nats on average, more than "
                "warn_logprob_gap=%g; algorithm.rollout_correction can make up for it",
                self.global_step,
                gap,
                config.warn_logprob_gap,
            )
        self._gap_is_wide = gap > config.warn_logprob_gap
        self._skipped_updates = 0 if math.isfinite(metrics.get("grad_norm", 0.0)) else self._skipped_updates + 1
        if self._skipped_updates >= MAX_SKIPPED_UPDATES:
            raise RunError(
                f"The gradient was not finite for {self._skipped_updates} steps in a row, so nothing was learned. "
                f"Lower engine.optimizer.learning_rate; go on from an earlier checkpoint."
            )

    async def _check_there_is_something(self, metrics: dict[str, float]) -> None:
        config, folder = self.settings.trainer, self.parts.folder.path / "rollouts"
        self._empty_steps = self._empty_steps + 1 if "skipped_step" in metrics else 0
        if self._empty_steps >= config.max_empty_steps:
            await self._save()
            raise RunError(
                f"There was no token to train on for {self._empty_steps} steps in a row: all attempts failed, were "
                f"masked or were rejected. See {folder} and the logs beside it."
            )
        if "skipped_step" in metrics:
            return
        distillation = self.settings.algorithm.distillation
        by_teacher = distillation is not None and not distillation.use_task_rewards
        without = not by_teacher and metrics["advantages/min"] == metrics["advantages/max"] == 0.0
        self._steps_without_signal = self._steps_without_signal + 1 if without else 0
        if self._steps_without_signal >= config.max_steps_without_signal:
            await self._save()
            raise RunError(
                f"No group had two different rewards for {self._steps_without_signal} steps in a row "
                f"(reward {metrics['reward']:.3f}), so there is nothing to learn from. Is the task too hard or too "
                f"easy for the model, or is the judger wrong? See {folder}."
            )

    # --- evaluation and checkpoints

    async def _evaluate(self) -> None:
        if self.parts.evaluator is None:
            return
        await self.on_validate_begin()
        started = time.perf_counter()
        metrics = await self.parts.evaluator.evaluate()
        record = metrics | self._judger_metrics() | {"time/evaluation": time.perf_counter() - started}
        await self.on_validate_end()
        self._evaluation_due = False
        self._log(record)
        self.parts.reporter.evaluation(self.global_step, metrics)

    async def _save(self) -> None:
        export = self.settings.checkpoint.export_hf

        async def write_engine(folder: Path, hf_folder: Path) -> None:
            await self.parts.engine.save_checkpoint(folder, hf_folder=hf_folder if export else None)

        state = {
            "global_step": self.global_step,
            "producer": self.parts.producer.state_dict(),
            "steps_without_signal": self._steps_without_signal,
            "empty_steps": self._empty_steps,
            "algorithm": self._advantages.state_dict(),
            "evaluation_due": self._evaluation_due,
            "random": random_state(),
        }
        await self.parts.replay_buffer.flush()
        self._checkpoint = await self.parts.store.save(self.global_step, state, write_engine)
        self._saved_step = self.global_step
        self.parts.replay_buffer.checkpointed(self.parts.store.oldest_step())
        self.parts.callback.on_save(
            trainer=self, global_step=self.global_step, checkpoint_dir=str(self._checkpoint), async_save=False
        )

    async def _load(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        await self.parts.engine.load_checkpoint(checkpoint / ENGINE)
        self.parts.producer.load_state_dict(state["producer"])
        self.global_step = state["global_step"]
        self._saved_step = self.global_step
        self._steps_without_signal = state["steps_without_signal"]
        self._empty_steps = state["empty_steps"]
        self._advantages.load_state_dict(state["algorithm"])
        self._evaluation_due = state["evaluation_due"]
        set_random_state(state["random"])
        self._checkpoint = checkpoint
        self.parts.folder.forget_after(self.global_step)
        self.parts.store.forget_after(self.global_step)
        self.parts.reporter.note(f"going on after step {self.global_step} from {checkpoint}")

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.global_step % every_steps == 0

    @property
    def _is_last(self) -> bool:
        return self.global_step == self.settings.trainer.num_steps


def rollout_record(state: RolloutState) -> dict[str, Any]:
    """Return what rollouts/step_*.jsonl keeps of an attempt."""
    return {
        "group_id": state.group_id,
        "rollout_id": state.rollout_id,
        "task": state.task_name,
        "row": state.extra_fields.get("row"),
        "data_source": state.data_source,
        "status": state.status.value,
        "finish_reason": state.finish_reason,
        "error": state.error_msg,
        "prompt": state.message,
        "response": state.response,
        "response_ids": state.response_ids,
        "ground_truth": (state.reward_model or {}).get("ground_truth"),
        "reward": state.reward,
        "policy_versions": sorted(set(state.response_model_steps or [])),
    }
