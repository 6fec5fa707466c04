"""A whole trainer over the scripted engine, with only what matters given: no model, no process of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from xrl_lite.actors import ActorSystem
from xrl_lite.agent_loop import (
    AgentLoopManager,
    AgentLoopManagerConfig,
    AsyncProduceStrategyConfig,
    ProduceLimits,
    Producer,
    ProducerTask,
    SingleTurnAgentLoopConfig,
    SyncProduceStrategyConfig,
)
from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.data import RolloutState, Row, SampleParams, Sampler, Status
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.replay_buffer import ReplayBufferConfig, build_replay_buffer
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.trainer import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
from xrl_lite.trainer.base import RunSummary, TrainerParts, TrainerSettings
from xrl_lite.trainer.checkpoint import CheckpointCallback, CheckpointStore
from xrl_lite.trainer.evaluation import Evaluator
from xrl_lite.trainer.modes import trainer_class
from xrl_lite.trainer.report import ConsoleReporter
from xrl_lite.trainer.run_folder import RunFolder
from xrl_lite.trainer.stop import StopRequest
from xrl_lite.weight_sync import LocalWeights, WeightSync, make_transport


class Engine(LocalWeights):
    """Trains nothing, and writes down what it was asked."""

    def __init__(self, **metrics: float) -> None:
        super().__init__(lambda: {"w": torch.full((2,), float(len(self.batches)))}, in_thread=False)
        self.metrics = metrics
        self.batches: list[TrainBatch] = []
        self.measured: list[list[str]] = []
        self.measured_kept: list[bool] = []
        self.loaded: Path | None = None
        self.kept: list[int] = []

    async def keep_policy(self) -> None:
        self.kept.append(len(self.batches))

    async def measure(
        self, batch: TrainBatch, names: list[str], *, kept_policy: bool = False
    ) -> dict[str, list[list[float]]]:
        self.measured.append(names)
        self.measured_kept.append(kept_policy)
        return dict.fromkeys(names, batch.rollout_logprobs)

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(batch)
        return {"loss": 0.0, "grad_norm": 1.0, "logprob_gap/mean": 0.0} | self.metrics

    async def release_memory(self) -> None:
        """There is no device."""

    async def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        folder.mkdir()
        (folder / "weights").write_text("w")

    async def load_checkpoint(self, folder: Path) -> None:
        self.loaded = folder


class Critic(Engine):
    """Values every state at 0.25."""

    broken = False

    async def values(self, batch: TrainBatch) -> list[list[float]]:
        return [[0.25] * len(response) for response in batch.responses]

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(batch)
        return {"critic/vf_loss": 0.0, "critic/grad_norm": math.nan if self.broken else 1.0}


class Judger:
    """Scores 1.0 for "A"."""

    def __init__(self, *, blind: bool = False, broken_after: int | None = None) -> None:
        self.blind = blind
        self.left = broken_after

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                rollout_state.status = Status.FAILED
                return rollout_state
        rollout_state.reward = {"score": 0.5 if self.blind else float(rollout_state.response == "A")}
        return rollout_state

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        return [await self.judge(state) for state in rollout_states]

    def statistics(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        return {"a": {"ok": 1.0, "latency_p50": 0.5}}


class Callback(CheckpointCallback):
    """Writes down which steps were saved."""

    def __init__(self) -> None:
        super().__init__(None)
        self.saved: list[int] = []

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        assert Path(checkpoint_dir).is_dir()
        self.saved.append(global_step)


def rows(number: int) -> list[Row]:
    return [Row(index=n, prompt=[{"role": "user", "content": str(n + 1)}], ground_truth="A") for n in range(number)]


def make_trainer(system: ActorSystem, folder: RunFolder, **options: Any) -> Any:
    """A trainer whose `fit_all` also starts and ends the replicas.

    Args:
        system: Where the replica runs.
        folder: Of the run.
        **options: `engine`, `judger`, `callback`, `store`, `rows`, `strategy`, `group_size`, `events`,
            `max_failed_groups` in place of the usual ones; `config` of the folder; `cls` of the trainer; `mode`;
            settings by section:
            `trainer`, `evaluation`, `checkpoint`, `algorithm`, `rollout`, `replay_buffer`.
    """
    engine = options.pop("engine", None) or Engine()
    judger = options.pop("judger", None) or Judger()
    mode = options.pop("mode", "sync")
    cls = options.pop("cls", None) or trainer_class(mode)
    data = options.pop("rows", None) or rows(4)
    group_size = options.pop("group_size", 8)
    trainer = TrainerConfig(**{"mode": mode, "num_steps": 4, "groups_per_step": 2, **options.pop("trainer", {})})
    strategy = options.pop("strategy", None) or (
        SyncProduceStrategyConfig() if mode == "sync" else AsyncProduceStrategyConfig(max_staleness=1)
    )
    settings = {"engine": "fake", "engine_options": {"responses": [[65], [66]]}, "num_threads": 1}
    config = RolloutConfig(**{**settings, **options.pop("rollout", {})})
    rollout = RolloutController(
        system, config=config, model_path="none", decode=lambda ids, _: "".join(map(chr, ids)), seed=0
    )

    def encode(row: Row) -> list[int]:
        return [int(row.prompt[0]["content"])]

    max_failed_groups = options.pop("max_failed_groups", 0)
    buffer = build_replay_buffer(
        ReplayBufferConfig(**options.pop("replay_buffer", {})),
        trainer_mode=trainer.layout,
        store=options.pop("store", None),
        max_failed_groups=max_failed_groups,
        events=options.pop("events", None),
    )
    loops = {"task": SingleTurnAgentLoopConfig().build_local(rollout, judger)}
    partial = frozenset({"task"} if strategy.enable_partial_rollout else ())
    quick = AgentLoopManagerConfig(abort_interval_s=0.05)
    manager = AgentLoopManager(loops, replay_buffer=buffer, config=quick, requests=rollout, partial_rollout=partial)
    task = ProducerTask(
        name="task",
        sampler=Sampler(data, encode=encode, group_size=group_size, seed=0, task_name="task"),
        strategy=strategy,
    )
    parts = TrainerParts(
        engine=engine,
        critic=options.pop("critic", None),
        weight_sync=WeightSync(
            source=engine,
            targets=rollout.adapters,
            gate=rollout,
            transport=make_transport("shared_memory", folder=None, bucket_bytes=1 << 20, timeout_s=10.0),
            on_synced=lambda version: buffer.events.record("synced", version=version),
        ),
        rollout=rollout,
        manager=manager,
        producer=Producer(
            [task],
            manager=manager,
            replay_buffer=buffer,
            limits=ProduceLimits(max_failed_groups=max_failed_groups),
            sync_weights_interval=trainer.sync_weights_interval,
            num_warmup_batches=trainer.num_warmup_batches,
        ),
        replay_buffer=buffer,
        evaluator=Evaluator(
            manager, rows=rows(4), encode=encode, sample_params={"greedy": SampleParams()}, success_score=0.5
        ),
        judger=judger,
        folder=folder,
        store=CheckpointStore(folder.checkpoints, keep=2),
        callback=options.pop("callback", None) or Callback(),
        reporter=ConsoleReporter(),
        config=options.pop("config", None),
    )
    settings = TrainerSettings(
        trainer=trainer,
        evaluation=EvaluationConfig(**{"every_steps": 2, **options.pop("evaluation", {})}),
        checkpoint=CheckpointConfig(**{"every_steps": 2, **options.pop("checkpoint", {})}),
        report=ReportConfig(completions_every=2),
        algorithm=AlgorithmConfig(**options.pop("algorithm", {})),
        sleep_level=config.sleep_level or 0,
    )
    assert not options
    made = cls(parts, settings, StopRequest())
    made.rollout = rollout
    return made


async def fit(trainer: Any, checkpoint: Path | None = None) -> RunSummary:
    """Train with replicas that live as long as the training, and with a buffer that is closed afterwards."""
    try:
        async with trainer.rollout:
            return await trainer.fit(checkpoint)
    finally:
        await trainer.parts.replay_buffer.close()
