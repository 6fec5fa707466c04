"""The loop over the scripted engine: order of hooks, what is saved when, and when it stops by itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from xrl_lite.actors import ActorSystem
from xrl_lite.agent_loop import AgentLoopManager, ProduceLimits, Producer, ProducerTask, SingleTurnAgentLoopConfig
from xrl_lite.data import RolloutState, Row, SampleParams, Sampler
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import RunError
from xrl_lite.replay_buffer import PromptGroup, ReplayBufferConfig, build_replay_buffer
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.trainer import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
from xrl_lite.trainer.base import TrainerParts, TrainerSettings
from xrl_lite.trainer.checkpoint import CheckpointCallback, CheckpointStore, read_state
from xrl_lite.trainer.evaluation import Evaluator
from xrl_lite.trainer.report import ConsoleReporter
from xrl_lite.trainer.run_folder import RunFolder
from xrl_lite.trainer.stop import StopRequest
from xrl_lite.trainer.sync import SyncTrainer
from xrl_lite.weight_sync import WeightSync

ROWS = [Row(index=n, prompt=[{"role": "user", "content": str(n + 1)}], ground_truth="A") for n in range(4)]
NINE = [
    "on_init_end",
    "on_validate_begin",
    "on_validate_end",
    "on_train_begin",
    "on_step_begin",
    "on_sample_begin",
    "on_sample_end",
    "on_step_end",
    "on_train_end",
]


class Engine:
    """Trains nothing, and writes down what it was asked."""

    def __init__(self, **metrics: float) -> None:
        self.metrics = metrics
        self.batches: list[TrainBatch] = []
        self.loaded: Path | None = None

    async def export_weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((2,), float(len(self.batches)))}

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(batch)
        return {"loss": 0.0, "grad_norm": 1.0, "logprob_gap/mean": 0.0} | self.metrics

    async def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        folder.mkdir()
        (folder / "weights").write_text("w")

    async def load_checkpoint(self, folder: Path) -> None:
        self.loaded = folder


class Judger:
    """Scores 1.0 for "A"."""

    def __init__(self, *, blind: bool = False) -> None:
        self.blind = blind

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
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


class Recorded(SyncTrainer):
    """Writes down its hooks, and asks for a stop in a step if told to."""

    stop_in_step = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in NINE:
            self.called.append(name)
        return super().__getattribute__(name)

    async def sample_batch(self, batch_size: int) -> tuple[list[PromptGroup], dict[str, float]]:
        if self.global_step == self.stop_in_step:
            self.stop.requested = True
        return await super().sample_batch(batch_size)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4, backend="inline") as running:
        yield running


def make_trainer(system: ActorSystem, folder: RunFolder, **options: Any) -> Recorded:
    engine = options.pop("engine", None) or Engine()
    judger = options.pop("judger", None) or Judger()
    config = RolloutConfig(engine="fake", engine_options={"responses": [[65], [66]]}, num_threads=1)
    rollout = RolloutController(
        system, config=config, model_path="none", decode=lambda ids, _: "".join(map(chr, ids)), seed=0
    )

    def encode(messages: list[dict[str, Any]]) -> list[int]:
        return [int(messages[0]["content"])]

    buffer = build_replay_buffer(ReplayBufferConfig(), max_failed_groups=0)
    loops = {"task": SingleTurnAgentLoopConfig().build_local(rollout, judger)}
    manager = AgentLoopManager(loops, replay_buffer=buffer)
    task = ProducerTask(name="task", sampler=Sampler(ROWS, encode=encode, group_size=8, seed=0))
    limits = ProduceLimits(max_failed_groups=0)
    parts = TrainerParts(
        engine=engine,
        weight_sync=WeightSync(source=engine, targets=rollout.adapters, gate=rollout),
        manager=manager,
        producer=Producer([task], manager=manager, replay_buffer=buffer, limits=limits),
        replay_buffer=buffer,
        evaluator=Evaluator(
            manager, rows=ROWS, encode=encode, sample_params={"greedy": SampleParams()}, success_score=0.5
        ),
        judger=judger,
        folder=folder,
        store=CheckpointStore(folder.checkpoints, keep=2),
        callback=options.pop("callback", None) or Callback(),
        reporter=ConsoleReporter(),
    )
    settings = TrainerSettings(
        trainer=TrainerConfig(**{"num_steps": 4, "groups_per_step": 2, **options.pop("trainer", {})}),
        evaluation=EvaluationConfig(**{"every_steps": 2, **options.pop("evaluation", {})}),
        checkpoint=CheckpointConfig(**{"every_steps": 2, **options.pop("checkpoint", {})}),
        report=ReportConfig(completions_every=2),
    )
    assert not options
    return Recorded(parts, settings, StopRequest())


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    opened = RunFolder(tmp_path / "run")
    yield opened
    opened.close()


def steps_of(folder: RunFolder, name: str) -> list[int]:
    return [record["step"] for record in folder.metrics() if name in record]


async def test_hooks_are_called_in_the_promised_order(system: ActorSystem, folder: RunFolder) -> None:
    trainer = make_trainer(system, folder, trainer={"num_steps": 2})
    await trainer.fit()
    step = ["on_step_begin", "on_sample_begin", "on_sample_end", "on_step_end"]
    validate = ["on_validate_begin", "on_validate_end"]
    assert trainer.called == [
        *["on_init_end", *validate, "on_train_begin"],
        *[*step, *step, *validate],
        "on_train_end",
    ]


async def test_every_save_is_reported_once_with_its_folder(system: ActorSystem, folder: RunFolder) -> None:
    callback = Callback()
    summary = await make_trainer(system, folder, callback=callback).fit()
    assert callback.saved == [2, 4]
    assert (summary.last_step, summary.stopped) == (4, False)
    assert summary.checkpoint == folder.checkpoints / "step_000004"


async def test_what_is_evaluated_and_saved_at_which_step(system: ActorSystem, folder: RunFolder) -> None:
    await make_trainer(system, folder, trainer={"num_steps": 3}).fit()
    assert steps_of(folder, "loss") == [1, 2, 3]
    assert steps_of(folder, "eval/greedy/accuracy") == [0, 2, 3]
    assert [path.name for path in sorted(folder.checkpoints.iterdir())] == ["step_000002", "step_000003"]


async def test_a_stop_ends_after_the_step_and_its_evaluation_is_made_up_for(
    system: ActorSystem, folder: RunFolder
) -> None:
    trainer = make_trainer(system, folder)
    trainer.stop_in_step = 2
    summary = await trainer.fit()
    assert (summary.last_step, summary.stopped) == (2, True)
    assert steps_of(folder, "eval/greedy/accuracy") == [0]
    assert summary.checkpoint is not None
    assert read_state(summary.checkpoint)["evaluation_due"]

    engine = Engine()
    await system.get("rollout/0").stop()
    await make_trainer(system, folder, engine=engine).fit(summary.checkpoint)
    assert engine.loaded == summary.checkpoint / "engine"
    assert steps_of(folder, "loss") == [1, 2, 3, 4]
    assert steps_of(folder, "eval/greedy/accuracy") == [0, 2, 4]


async def test_going_back_to_an_earlier_checkpoint_drops_what_came_after_it(
    system: ActorSystem, folder: RunFolder
) -> None:
    await make_trainer(system, folder).fit()
    await system.get("rollout/0").stop()
    again = make_trainer(system, folder, trainer={"num_steps": 3})
    summary = await again.fit(folder.checkpoints / "step_000002")
    assert steps_of(folder, "loss") == [1, 2, 3]
    assert summary.checkpoint == folder.checkpoints / "step_000003"
    assert not (folder.checkpoints / "step_000004").exists()


async def test_no_signal_for_long_stops_with_a_checkpoint(system: ActorSystem, folder: RunFolder) -> None:
    limits = {"num_steps": 50, "max_steps_without_signal": 3}
    trainer = make_trainer(system, folder, judger=Judger(blind=True), trainer=limits, checkpoint={"every_steps": 0})
    with pytest.raises(RunError, match=r"No group had two different rewards for 3 steps.*reward 0.500"):
        await trainer.fit()
    assert (folder.checkpoints / "step_000003").is_dir()
    assert trainer.called[-1] == "on_train_end"


@pytest.mark.parametrize("gap", [2.0, float("nan")])
async def test_a_gap_between_trainer_and_engine_stops(gap: float, system: ActorSystem, folder: RunFolder) -> None:
    trainer = make_trainer(system, folder, engine=Engine(**{"logprob_gap/mean": gap}))
    with pytest.raises(RunError, match="disagree about the same tokens"):
        await trainer.fit()


async def test_gradients_that_stay_broken_stop(system: ActorSystem, folder: RunFolder) -> None:
    trainer = make_trainer(system, folder, engine=Engine(grad_norm=float("inf")), trainer={"num_steps": 9})
    with pytest.raises(RunError, match="not finite for 5 steps in a row"):
        await trainer.fit()


async def test_replicas_hold_the_weights_of_the_step_before(system: ActorSystem, folder: RunFolder) -> None:
    await make_trainer(system, folder, trainer={"num_steps": 3}).fit()
    for step in (1, 2, 3):
        lines = (folder.path / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert {tuple(json.loads(line)["policy_versions"]) for line in lines} == {(step - 1,)}


async def test_times_and_counts_of_judgers_are_metrics(system: ActorSystem, folder: RunFolder) -> None:
    await make_trainer(system, folder).fit()
    record = next(record for record in folder.metrics() if "loss" in record)
    assert record["judger/a/ok"] == 1.0
    assert record["time/judger/a/latency_p50"] == 0.5
    parts = ("generate", "judge", "train", "sync", "other")
    assert sum(record[f"time/{part}"] for part in parts) == pytest.approx(record["time/step"], abs=1e-3)


async def test_a_person_sees_steps_completions_and_the_curve(
    system: ActorSystem, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(system, folder)
    await trainer.fit()
    trainer.parts.reporter.summary(list(folder.metrics()), folder.path)
    shown = capsys.readouterr().out
    assert "step 1/4  reward 0." in shown
    assert "held-out accuracy after step 2: greedy" in shown
    assert "completions of step 2" in shown
    assert "reward and held-out accuracy" in shown
    assert "train reward: 0." in shown
    assert (folder.path / "learning_curve.png").is_file()
