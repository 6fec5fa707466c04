"""The training loop that all modes share, and the nine places where a mode (or a user's subclass) can act.

::

    on_init_end                                    weights of the start are with every replica
    [on_validate_begin, evaluation, on_validate_end]
    on_train_begin
    each step:
        on_step_begin
        prepare_step                               a batch is begun, where generation does not go on by itself
        each part of the step (parameter_sync_step of them):
            on_sample_begin  sample_batch  on_sample_end
            _prepare_train_data, advantages -> optimizer updates
        on_step_end                                weights go to the replicas, every sync_weights_interval steps
        trained.jsonl, metrics
        [on_validate_begin, evaluation, on_validate_end]
        [checkpoint]                               last: what was saved needs nothing to be made up for
    on_train_end                                   always, also after an error

===============  =========================  =========================  =========================
hook             sync                       colocate_async             separate_async
===============  =========================  =========================  =========================
on_init_end      weights                    weights                    weights
on_train_begin                                                         generation begins
prepare_step     begins a batch             begins a batch and more
on_sample_end    replicas sleep             requests are interrupted,
                                            replicas sleep
on_step_end      replicas wake, weights     replicas wake, weights     weights, between two tokens
                                                                       of whatever is generated
===============  =========================  =========================  =========================

A version of the weights has the number of the step that they came out of.

Waits for    batches, updates and syncs, each with the deadline of its part
Is woken by  the parts; a stop request is looked at between two steps
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import anyio
from anyio.abc import TaskGroup

from xrl_lite.actors import now
from xrl_lite.agent_loop.producer import NOTE
from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.data import RolloutState
from xrl_lite.errors import RunError, errors_as_themselves
from xrl_lite.judger import judger_metrics
from xrl_lite.log import get_logger
from xrl_lite.metrics import MetricLoggers, shares, with_verl_names
from xrl_lite.replay_buffer import TRAIN, PromptGroup, TrainerMode
from xrl_lite.trainer.advantages import AdvantageStep
from xrl_lite.trainer.agreement import AgreementCheck
from xrl_lite.trainer.baselines import greedy_rewards
from xrl_lite.trainer.checkpoint import CRITIC, ENGINE, HUGGINGFACE, CheckpointCallback, CheckpointStore, read_state
from xrl_lite.trainer.health import StepHealth
from xrl_lite.trainer.merging import merge_metrics
from xrl_lite.trainer.prepare import prepare_train_data
from xrl_lite.trainer.randomness import random_state, set_random_state
from xrl_lite.trainer.report import completion_table
from xrl_lite.trainer.stop import StopRequest
from xrl_lite.trainer.times import StepTimes

if TYPE_CHECKING:
    from xrl_lite.agent_loop import Producer
    from xrl_lite.agent_loop.manager import AgentLoopManager
    from xrl_lite.engine.batch import TrainBatch
    from xrl_lite.engine.controller import CriticController, TrainingController
    from xrl_lite.replay_buffer import ReplayBuffer
    from xrl_lite.trainer.config import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
    from xrl_lite.trainer.evaluation import Evaluator
    from xrl_lite.trainer.report import Reporter
    from xrl_lite.trainer.run_folder import RunFolder
    from xrl_lite.weight_sync import WeightSync

logger = get_logger(__name__)

_GAP = "logprob_gap/mean"
END_TIMEOUT_S = 60.0
"""Longest time for `on_train_end`, which is called whatever has happened."""


class JudgerStatistics(Protocol):
    """Counts what became of judgements."""

    def statistics(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return counts and times per judger since the last reset."""
        ...


class Sleeps(Protocol):
    """Can give the memory of its devices to others for a while."""

    async def sleep(self, level: int = 1) -> None:
        """Give it."""
        ...

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Take it again."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What a trainer is made of; `xrl_lite.run` puts them together."""

    engine: TrainingController
    """Trains the policy."""
    critic: CriticController | None = None
    """Gives values and is trained towards returns, where the estimator needs them."""
    weight_sync: WeightSync
    """Brings weights from the engine to the replicas."""
    rollout: Sleeps
    """Generates."""
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
    config: str | None = None
    """What the run's config.yaml holds from the moment when the run begins; None leaves it as it is."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The parts of the run's settings that the loop reads."""

    trainer: TrainerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    report: ReportConfig
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sleep_level: int = 0
    """What the replicas give up while the trainer computes, see `RolloutConfig.sleep_level`."""
    max_tokens: int | None = None
    """Longest prompt and response together that the engine takes."""


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

    A class of your own is named in `trainer.mode`, by its path or by the name that `register_trainer` gives it.

    Args:
        parts: What it is made of.
        settings: What it reads.
        stop: Looked at between steps.
    """

    layout: ClassVar[TrainerMode]
    """Which of the built-in modes it is a kind of."""

    def __init__(self, parts: TrainerParts, settings: TrainerSettings, stop: StopRequest) -> None:
        self.parts = parts
        self.settings = settings
        self.stop = stop
        self.global_step = 0
        self.background: TaskGroup
        """For what runs beside the steps. Its errors end the run, and it is cancelled at the end."""
        self.times: StepTimes
        """Of the step that is running."""
        self._advantages = AdvantageStep(settings.algorithm, in_parts=settings.trainer.parameter_sync_step > 1)
        self._health = StepHealth(settings.trainer, settings.algorithm, parts.folder.path / "rollouts")
        self._steps_not_compared = 0
        self._evaluation_due = False
        self._saved_step = 0
        self._checkpoint: Path | None = None

    async def fit(self, checkpoint: Path | None = None) -> RunSummary:
        """Train from a checkpoint or from the start, until the last step or a stop request.

        Raises:
            RunError: the run cannot go on; the message says why.
        """
        last_step = self.settings.trainer.num_steps
        await self._load(checkpoint)
        await self.on_init_end()
        if self.parts.agreement is not None:
            self.parts.reporter.note(await self.parts.agreement.run())
        with errors_as_themselves():
            async with self.parts.producer.running(), anyio.create_task_group() as self.background:
                if self._evaluation_due or (self.global_step == 0 and self.settings.evaluation.at_start):
                    await self._evaluate()
                self.stop.cancel = None
                self.parts.reporter.start(num_steps=last_step, first_step=self.global_step + 1)
                try:
                    await self.on_train_begin()
                    while self.global_step < last_step and not self.stop.requested:
                        self.global_step += 1
                        await self._run_step()
                    if self.stop.requested:
                        await self.note("stopped", step=self.global_step)
                    if self.global_step > 0 and self._saved_step != self.global_step:
                        await self._save()
                    await self.note("over")
                finally:
                    with anyio.move_on_after(END_TIMEOUT_S, shield=True):
                        await self.on_train_end()
                    self.parts.reporter.finish()
                self.background.cancel_scope.cancel()
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
        """No step will follow. Called after an error too; it has `END_TIMEOUT_S`."""

    # --- what subclasses replace or use

    async def prepare_step(self) -> None:
        """Begin what the step will be trained on, where nobody else does."""

    async def sample_batch(self, batch_size: int) -> tuple[list[PromptGroup], dict[str, Any]]:
        """Return the groups to train on, waiting for them, and metrics of buffer and producer."""
        producer = self.parts.producer
        groups, metrics = await self.parts.replay_buffer.sample(self.global_step, TRAIN, batch_size)
        producer.mask_stale_tokens(groups, self.global_step)
        return groups, metrics | producer.metrics()

    async def note(self, event: str, **fields: Any) -> None:
        """Note an event, when it may come: at once, but in a replay."""
        events = self.parts.replay_buffer.events
        await events.turn(event, **fields)
        events.record(event, **fields)

    async def sync_weights(self) -> None:
        """Give the replicas the present weights."""
        await self.parts.weight_sync.sync(self.global_step)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the replicas hold."""
        return self.parts.weight_sync.policy_version

    @property
    def weights_are_due(self) -> bool:
        """Whether the replicas get weights at the end of this step."""
        return self._is_due(self.settings.trainer.sync_weights_interval) or self._is_last

    def _prepare_train_data(self, groups: list[list[RolloutState]]) -> tuple[TrainBatch, dict[str, float]]:
        """Turn scored groups into the trajectories of one update; override to change what is trained on.

        Advantages are estimated afterwards: some need log-probs of these trajectories.
        """
        algorithm = self.settings.algorithm
        keys = algorithm.gdpo_reward_keys if algorithm.advantage == "gdpo" else None
        return prepare_train_data(
            groups,
            max_tokens=self.settings.max_tokens,
            reward_keys=keys or (),
            needs_logprobs=algorithm.needs_rollout_logprobs,
        )

    # --- one step

    async def _run_step(self) -> None:
        self.times = StepTimes(lambda: self.parts.producer.busy_s)
        await self.on_step_begin()
        await self.prepare_step()
        parts = [await self._run_part(number) for number in range(self.settings.trainer.parameter_sync_step)]
        await self.on_step_end()
        groups = [group for part in parts for group in part.groups]
        metrics = merge_metrics([(part.metrics, part.num_trajectories) for part in parts])
        metrics |= await self._compare_models(metrics)
        self.parts.folder.write_trained(self.global_step, groups)
        self._write(metrics | self._judger_metrics(), [state for group in groups for state in group.states])
        self._evaluation_due = self._is_due(self.settings.evaluation.every_steps) or self._is_last
        if self._evaluation_due and not self.stop.requested:
            await self._evaluate()
        if self._is_due(self.settings.checkpoint.every_steps):
            await self._save()
        await self._check_health(metrics)

    async def _run_part(self, number: int) -> _Part:
        trainer = self.settings.trainer
        await self.on_sample_begin()
        groups, metrics = await self.sample_batch(trainer.groups_per_step // trainer.parameter_sync_step)
        attempts = [group.states for group in groups]
        baselines = await self._greedy_baselines(attempts, number)
        await self.on_sample_end()
        batch, batch_metrics = self._prepare_train_data(attempts)
        if baselines is not None:
            batch = replace(batch, reward_baselines=[baselines[group] for group in batch.groups])
        if self.layout == "sync" and trainer.sync_weights_interval == 1:
            batch = replace(batch, policy_versions=None)  # the present one, also where an agent does not tell
        with self.times.part("train"):
            if number == 0 and trainer.parameter_sync_step > 1:
                await self.parts.engine.keep_policy()
            batch_metrics |= await self._train(replace(batch, step=self.global_step, part=number))
        return _Part(groups, batch_metrics | metrics, len(batch))

    async def _greedy_baselines(self, groups: list[list[RolloutState]], part: int) -> list[float] | None:
        if "reward_baselines" not in self.settings.algorithm.requirements():
            return None
        with self.times.part("baselines"):
            rewards = await greedy_rewards(self.parts.manager, groups)
        scores = [None if math.isnan(reward) else reward for reward in rewards]  # JSON has no NaN
        await self.note("baselines", step=self.global_step, part=part, scores=scores)
        return rewards

    async def _train(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = {}
        attempts = len(batch)
        if batch.num_trained_tokens:
            if self.parts.critic is not None:
                batch = replace(batch, values=await self.parts.critic.values(batch))
            batch, metrics = await self._advantages(batch, self.parts.engine.measure)
        if not batch.num_trained_tokens:
            metrics["skipped_step"] = 1.0
            text = f"step {self.global_step} is skipped: none of its {attempts} scored attempts has a token to train on"
            logger.warning(text)
            self.parts.reporter.note(text)
        # also without tokens: the schedule of the learning rate goes on
        if self.parts.critic is not None:
            metrics |= await self.parts.critic.train_batch(batch)
        if self.global_step > self.settings.trainer.critic_warmup:
            metrics |= await self.parts.engine.train_batch(batch)
        await self.note("trained", step=batch.step, part=batch.part)
        return metrics

    async def _compare_models(self, metrics: dict[str, float]) -> dict[str, float]:
        """Compare trainer and replicas, which hold the same weights now, if no sample of many steps could tell."""
        every, check = self.settings.trainer.check_agreement_every, self.parts.agreement
        self._steps_not_compared = 0 if _GAP in metrics else self._steps_not_compared + 1
        if check is None or not 0 < every <= self._steps_not_compared or self.policy_version != self.global_step:
            return {}
        with self.times.part("agreement"):
            gap = await check.run_again()
        if gap is None:
            return {}
        self._steps_not_compared = 0
        return {_GAP: gap}

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
        problem = self._health.check(self.global_step, metrics)
        if problem is not None:
            if problem.is_sound:
                await self._save()
            raise RunError(problem.text)

    # --- evaluation and checkpoints

    async def _evaluate(self) -> None:
        if self.parts.evaluator is None:
            return
        await self.on_validate_begin()
        started = now()
        metrics = await self.parts.evaluator.evaluate()
        await self.note("evaluated", step=self.global_step, metrics=metrics)
        record = metrics | self._judger_metrics() | {"time/evaluation": now() - started}
        await self.on_validate_end()
        self._evaluation_due = False
        self._log(record)
        self.parts.reporter.evaluation(self.global_step, metrics)

    async def _save(self) -> None:
        export = self.settings.checkpoint.export_hf

        async def write_engines(folder: Path) -> None:
            hf_folder = folder / HUGGINGFACE if export else None
            await self.parts.engine.save_checkpoint(folder / ENGINE, hf_folder=hf_folder)
            if self.parts.critic is not None:
                await self.parts.critic.save_checkpoint(folder / CRITIC)

        state = {
            "global_step": self.global_step,
            "producer": self.parts.producer.state_dict(),
            "waiting": self.parts.producer.waiting(),
            "health": self._health.state_dict(),
            "algorithm": self._advantages.state_dict(),
            "evaluation_due": self._evaluation_due,
            "random": random_state(),
        }
        await self.parts.replay_buffer.flush()
        self._checkpoint = await self.parts.store.save(self.global_step, state, write_engines)
        self._saved_step = self.global_step
        await self.note("saved", step=self.global_step)
        self.parts.replay_buffer.checkpointed(self.parts.store.oldest_step())
        self.parts.callback.on_save(
            trainer=self, global_step=self.global_step, checkpoint_dir=str(self._checkpoint), async_save=False
        )

    async def _load(self, checkpoint: Path | None) -> None:
        """Take over what a checkpoint holds. Whatever does not fit is refused before anything of the run is changed."""
        state = None if checkpoint is None else read_state(checkpoint)
        await self._check_prompts(state)
        if checkpoint is not None and state is not None:
            await self.parts.engine.load_checkpoint(checkpoint / ENGINE)
            if self.parts.critic is not None:
                await self.parts.critic.load_checkpoint(checkpoint / CRITIC)
            self.global_step = self._saved_step = state["global_step"]
            self._health.load_state_dict(state["health"])
            self._advantages.load_state_dict(state["algorithm"])
            self._evaluation_due = state["evaluation_due"]
            set_random_state(state["random"])
            self._checkpoint = checkpoint
        self._begin()
        begun_with = {name: value for name, value in (state or {}).items() if name != "random"}
        self.parts.replay_buffer.events.record("began", step=self.global_step, state=begun_with or None)
        await self._load_prompts(state)

    def _begin(self) -> None:
        """Drop what an earlier process did after the checkpoint: it is done again, with these settings."""
        folder = self.parts.folder
        if self._checkpoint is not None:
            # checkpoints first: one without its metrics must not be gone on from
            dropped = self.parts.store.forget_after(self.global_step)
            folder.forget_after(self.global_step)
            beyond = f", without the later {', '.join(path.name for path in dropped)}" if dropped else ""
            self.parts.reporter.note(f"going on after step {self.global_step} from {self._checkpoint}{beyond}")
        elif folder.has_run:
            self.parts.reporter.note(f"the run in {folder.path} never came to a checkpoint: starting it over")
            folder.start_over()
        if self.parts.config is not None:
            folder.write_config(self.parts.config)

    async def _check_prompts(self, state: dict[str, Any] | None) -> None:
        """Refuse other tasks, and other rows, than those that were drawn from so far."""
        notes = {} if self.layout == "sync" else await self.parts.replay_buffer.store.read_notes()
        if NOTE in notes or state is not None:
            self.parts.producer.load_state_dict(notes.get(NOTE) or (state or {})["producer"])

    async def _load_prompts(self, state: dict[str, Any] | None) -> None:
        """Have every prompt trained on exactly once, whatever was drawn, generated or trained on when the run ended."""
        producer, is_sync = self.parts.producer, self.layout == "sync"
        producer.advance(next_step=self.global_step + 1, policy_version=self.global_step)
        # sync: what was generated after the checkpoint is generated again, to the same bits
        notes = await self.parts.replay_buffer.restore(self.global_step, keep_newer=not is_sync)
        if NOTE in notes and not is_sync:
            producer.load_state_dict(notes[NOTE])
        elif state is not None:
            producer.load_state_dict(state["producer"])
            producer.draw_again(state["waiting"])

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.global_step % every_steps == 0

    @property
    def _is_last(self) -> bool:
        return self.global_step == self.settings.trainer.num_steps


@dataclass(frozen=True)
class _Part:
    """A part of a step that was trained."""

    groups: list[PromptGroup]
    metrics: dict[str, float]
    num_trajectories: int


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
