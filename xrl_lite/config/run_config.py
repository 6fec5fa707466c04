"""`RunConfig`: every setting of a run, as one tree. Imports no torch, so a config is checked in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from xrl_lite.agent_loop import AgentLoopManagerConfig, SyncProduceStrategyConfig, TaskSpecConfig
from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.algorithms.estimators import advantage_estimator
from xrl_lite.engine.base import EngineRegistry
from xrl_lite.engine.config import CriticConfig, EngineConfig
from xrl_lite.engine.tiny_model_config import TinyModelConfig
from xrl_lite.replay_buffer import ReplayBufferConfig
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.replica import RolloutReplicaRegistry
from xrl_lite.settings import Settings, UserPath
from xrl_lite.trainer import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig

_HOW_TO_PRODUCE = {
    "ref_log_prob": "Set algorithm.use_kl_in_reward or algorithm.use_kl_loss.",
    "rollout_is_weights": "Set algorithm.rollout_correction, for example to decoupled_token_is.",
}


class ModelConfig(Settings):
    """Which model is trained. Give `path` or `build`."""

    path: Annotated[str, AfterValidator(os.path.expanduser)] | None = None
    """Hugging Face folder, or hub id such as "Qwen/Qwen3-0.6B"."""

    build: TinyModelConfig | None = None
    """Make a small model from nothing instead, once; later runs take it from the cache."""

    cache_dir: UserPath = Field(default=Path("~/.cache/xrl-lite/models"), validate_default=True)
    """Where built models are kept, under a hash of their settings."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.build is None):
            raise ValueError("give exactly one of path (a folder or hub id) and build (a small model from nothing).")
        return self


class RunConfig(Settings):
    """A whole run."""

    name: str = "run"
    """Name of the run and of its folder."""

    seed: int = 0
    """Seed of everything that is random: order of the rows, sampling, initial state of the ranks."""

    output_dir: UserPath = Path("runs")
    """Runs are kept here, a folder each."""

    num_cpus: float | None = Field(default=None, gt=0)
    """CPU slots that the run may hand out; what the machine has when not given."""

    model: ModelConfig
    """The model."""

    task: TaskSpecConfig
    """What to train on."""

    agent_loop_manager: AgentLoopManagerConfig = AgentLoopManagerConfig()
    """How groups are run, and further tasks."""

    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Which groups are trained on, and what is kept of them."""

    rollout: RolloutConfig = RolloutConfig()
    """Generation."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What an advantage is, and what is minimised."""

    engine: EngineConfig = EngineConfig()
    """Training of the weights."""

    critic: CriticConfig = CriticConfig()
    """Critic of estimators that need values (gae)."""

    trainer: TrainerConfig = TrainerConfig()
    """The loop."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""

    report: ReportConfig = ReportConfig()
    """What is shown and kept."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the policy in the whole run."""
        return (self.trainer.num_steps - self.trainer.critic_warmup) * self._updates_per_step(self.engine)

    @property
    def num_critic_updates(self) -> int:
        """Optimizer updates of the critic in the whole run."""
        return self.trainer.num_steps * self._updates_per_step(self.critic)

    @property
    def max_failed_groups(self) -> int:
        """Groups that may fail while one batch is produced."""
        limit = self.trainer.max_failed_groups
        return 4 * self.trainer.groups_per_step if limit is None else limit

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return "values" in self.algorithm.requirements()

    @property
    def engines(self) -> list[tuple[str, EngineConfig]]:
        """The training engines of the run, by the names of their settings and actors."""
        return [("engine", self.engine)] + ([("critic", self.critic)] if self.has_critic else [])

    @property
    def tasks(self) -> list[TaskSpecConfig]:
        """All tasks that are trained on; the first is the one that is evaluated."""
        return [self.task, *self.agent_loop_manager.tasks]

    @property
    def resolved_algorithm(self) -> AlgorithmConfig:
        """The settings of the algorithm, with what follows from other settings filled in."""
        if self.algorithm.loss_scale_factor is not None:
            return self.algorithm
        longest = max(task.agent_loop_config.max_response_tokens for task in self.tasks)
        return self.algorithm.model_copy(update={"loss_scale_factor": float(longest)})

    @property
    def resolved_critic(self) -> CriticConfig:
        """The settings of the critic, likewise."""
        if self.critic.loss_scale_factor is not None:
            return self.critic
        return self.critic.model_copy(update={"loss_scale_factor": self.resolved_algorithm.loss_scale_factor})

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self._check_advantage()
        self._check_critic()
        for name, engine in self.engines:
            self._check_updates(name, engine)
            EngineRegistry.check(engine.backend)
        self._check_sampling()
        self._check_lengths()
        self._check_producing()
        self._check_mode()
        RolloutReplicaRegistry.check(self.rollout.engine)
        return self

    def _updates_per_step(self, engine: EngineConfig) -> int:
        return self.trainer.parameter_sync_step * engine.updates_per_batch

    def _check_updates(self, name: str, engine: EngineConfig) -> None:
        groups, parts = self.trainer.groups_per_step, engine.num_mini_batches
        name += ".num_mini_batches"
        if self.trainer.parameter_sync_step > 1:
            parts *= self.trainer.parameter_sync_step
            name += " times trainer.parameter_sync_step"
        if groups % parts:
            raise ValueError(
                f"trainer.groups_per_step ({groups}) must be a multiple of {name} ({parts}), "
                f"so that every update has equally many groups. {groups - groups % parts or parts} would do."
            )

    def _check_mode(self) -> None:
        self._check_sync_interval()
        mode, layout = self.trainer.mode, self.trainer.layout
        for place, task in self._named_tasks():
            is_sync = isinstance(task.produce_strategy_config, SyncProduceStrategyConfig)
            if layout == "sync" and not is_sync:
                raise ValueError(
                    f"{place}.produce_strategy_config.type=async carries groups over to later steps, which "
                    f"trainer.mode={mode} does not. Leave it out, or use colocate_async or separate_async."
                )
            if layout != "sync" and is_sync:
                raise ValueError(
                    f"trainer.mode={mode} carries groups over to later steps: write {place}.produce_strategy_config: "
                    f"{{type: async, max_staleness: 1}} to say how old they may be."
                )
        if layout == "separate_async":
            self._check_separate()
        elif self.trainer.parameter_sync_step > 1:
            raise ValueError(
                f"trainer.parameter_sync_step={self.trainer.parameter_sync_step} is for separate_async: in "
                f"trainer.mode={mode} nothing is generated between the parts. engine.num_mini_batches makes several "
                f"updates of one step."
            )
        if layout == "sync" and self.trainer.num_warmup_batches:
            raise ValueError(f"trainer.num_warmup_batches is for the async modes, trainer.mode is {mode}.")

    def _check_sync_interval(self) -> None:
        """Weights that are saved or evaluated are those that generate next, as in XTuner's config."""
        interval, evaluation = self.trainer.sync_weights_interval, self.evaluation
        intervals = {"checkpoint.every_steps": self.checkpoint.every_steps}
        if evaluation.data is not None:
            intervals["evaluation.every_steps"] = evaluation.every_steps
        for name, every_steps in intervals.items():
            if every_steps % interval:
                raise ValueError(
                    f"{name} ({every_steps}) must be a multiple of trainer.sync_weights_interval ({interval}): between "
                    f"two syncs the replicas hold older weights than the trainer."
                )
        if self.rollout.sleep_level == 2 and interval > 1:
            raise ValueError(
                f"rollout.sleep_level=2 forgets the weights in every step, and with trainer.sync_weights_interval="
                f"{interval} they do not come in every step. Use level 1, or an interval of 1."
            )
        threshold = self.replay_buffer.max_off_policy_threshold
        if self.trainer.layout != "sync" and threshold < interval:
            raise ValueError(
                f"replay_buffer.max_off_policy_threshold ({threshold}) must be at least trainer.sync_weights_interval "
                f"({interval}): before new weights come, samples are as old as that."
            )

    def _check_separate(self) -> None:
        trainer, rollout = self.trainer, self.rollout
        interval = trainer.sync_weights_interval
        stale = [task.produce_strategy_config.stale_threshold(interval) for task in self.tasks]
        ahead = min(self.replay_buffer.max_off_policy_threshold, *stale) - 1
        if ahead < 1:
            raise ValueError(
                f"trainer.mode={trainer.mode} generates while it trains, and no sample may be older than the weights "
                f"in training (max_staleness=0, or max_off_policy_threshold=1): it would wait for every update. Set "
                f"produce_strategy_config.max_staleness to 1 or more, or trainer.sync_weights_interval to 2 or more."
            )
        if (trainer.num_warmup_batches or 0) > ahead:
            raise ValueError(
                f"trainer.num_warmup_batches ({trainer.num_warmup_batches}) is more than the bound on the age of "
                f"samples allows, which is {ahead}. Raise produce_strategy_config.max_staleness, or leave it out."
            )
        if rollout.sleep_level is not None and rollout.sleep_level > 0:
            raise ValueError(
                f"rollout.sleep_level={rollout.sleep_level} is for replicas that share devices with the trainer; with "
                f"trainer.mode={trainer.mode} they never sleep."
            )
        for place, task in self._named_tasks():
            if task.produce_strategy_config.should_continue_fn is not None:
                raise ValueError(
                    f"{place}.produce_strategy_config.should_continue_fn says when a batch is complete, and with "
                    f"trainer.mode={trainer.mode} groups are begun one by one, as there is room. Leave it out."
                )

    def _named_tasks(self) -> Iterator[tuple[str, TaskSpecConfig]]:
        """Yield every task with its place in the settings."""
        yield "task", self.task
        for number, task in enumerate(self.agent_loop_manager.tasks):
            yield f"agent_loop_manager.tasks[{number}]", task

    def _check_lengths(self) -> None:
        name, engine = min(self.engines, key=lambda each: each[1].max_tokens_per_micro_batch)
        limit = engine.max_tokens_per_micro_batch
        for place, task in self._named_tasks():
            longest = task.agent_loop_config.max_row_tokens(task.sampler_config.max_prompt_tokens)
            if longest > limit:
                raise ValueError(
                    f"a prompt and its response may have {longest} tokens together, more than "
                    f"{name}.max_tokens_per_micro_batch ({limit}), so they could not be trained on. Raise it, or "
                    f"lower {place}.agent_loop_config.sample_params.max_tokens (of agents: response_length) or "
                    f"{place}.sampler_config.max_prompt_tokens; for black_box agents {place}.agent_loop_config."
                    f"prompt_length."
                )

    def _check_advantage(self) -> None:
        algorithm = self.algorithm
        needed = advantage_estimator(algorithm.advantage).min_group_size
        for place, task in self._named_tasks():
            group_size = task.sampler_config.prompt_repeat_k
            if group_size < needed:
                raise ValueError(
                    f"algorithm.advantage={algorithm.advantage!r} compares an attempt with its siblings, so every "
                    f"advantage would be 0 with {place}.sampler_config.prompt_repeat_k={group_size}. "
                    f"Set it to {needed} or more."
                )
            if algorithm.advantage == "passk" and algorithm.passk_k >= group_size:
                raise ValueError(
                    f"algorithm.passk_k ({algorithm.passk_k}) must be below {place}.sampler_config.prompt_repeat_k "
                    f"({group_size}): of all attempts together one is right or none, so every advantage would be 0."
                )
        missing = algorithm.requirements() - self._produced()
        if missing:
            raise ValueError(
                f"algorithm.advantage={algorithm.advantage!r} needs {', '.join(sorted(missing))}, which "
                f"nothing in these settings produces. {_HOW_TO_PRODUCE.get(min(missing), '')}".rstrip()
            )

    def _check_critic(self) -> None:
        warmup, steps = self.trainer.critic_warmup, self.trainer.num_steps
        if not self.has_critic:
            unused = "critic" if self.critic != CriticConfig() else "trainer.critic_warmup" if warmup else None
            if unused:
                raise ValueError(
                    f"{unused} is set, but algorithm.advantage={self.algorithm.advantage!r} uses no values, so there "
                    f"is no critic. Leave it out, or use gae."
                )
        if warmup >= steps:
            raise ValueError(
                f"trainer.critic_warmup ({warmup}) must be below trainer.num_steps ({steps}), or the policy is never "
                f"trained."
            )

    def _produced(self) -> frozenset[str]:
        """What an advantage estimator can get in this run."""
        algorithm = self.algorithm
        correction = algorithm.rollout_correction
        produced = self.engine.produces | {"reward_baselines", "reward_parts", "rollout_log_probs", "values"}
        if not algorithm.needs_reference:
            produced -= {"ref_log_prob"}
        if correction is not None and correction.rollout_is is not None and not correction.bypass_mode:
            produced |= {"rollout_is_weights"}
        return produced

    def _check_sampling(self) -> None:
        for place, task in self._named_tasks():
            params = task.agent_loop_config.sample_params
            if params.temperature == 0 or params.sampling_seed is not None:
                raise ValueError(
                    f"{place}.agent_loop_config.sample_params: with temperature=0 or a sampling_seed all attempts at "
                    f"a prompt are the same, so there is nothing to compare. Use a temperature above 0 and no seed."
                )
        temperatures = {place: task.agent_loop_config.sample_params.temperature for place, task in self._named_tasks()}
        if len(set(temperatures.values())) > 1:
            each = ", ".join(f"{place}: {temperature:g}" for place, temperature in temperatures.items())
            raise ValueError(
                f"agent_loop_config.sample_params.temperature must be the same for all tasks, since samples of all of "
                f"them are trained on together; got {each}."
            )

    def _check_producing(self) -> None:
        names = [task.task_name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"every task needs a task_name of its own, got {', '.join(names)}.")
        for task in self.tasks:
            smallest, group_size = self.replay_buffer.min_sessions, task.sampler_config.prompt_repeat_k
            if smallest > group_size:
                raise ValueError(
                    f"replay_buffer.min_sessions ({smallest}) is more than task {task.task_name} has attempts per "
                    f"prompt (sampler_config.prompt_repeat_k={group_size}), so every group would fail."
                )
