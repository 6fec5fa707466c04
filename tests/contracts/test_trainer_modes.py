"""The three modes over the scripted engine: what each does when, how old samples are, and what is trained on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.fake_run import Callback, Engine, Judger, fit, make_trainer, rows
from xrl_lite.actors import ActorSystem, VirtualClock
from xrl_lite.agent_loop import AsyncProduceStrategyConfig
from xrl_lite.algorithms.weights import WeightOffer
from xrl_lite.data import RolloutState
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import ConfigError, PluginError, RunError, UnknownNameError
from xrl_lite.replay_buffer import SQLiteStore
from xrl_lite.trainer import RLTrainer, register_trainer
from xrl_lite.trainer.merging import merge_metrics
from xrl_lite.trainer.modes import layout_of, trainer_class
from xrl_lite.trainer.run_folder import RunFolder
from xrl_lite.trainer.sync import SyncTrainer

MODES = ["sync", "colocate_async", "separate_async"]
ASYNC = MODES[1:]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4, backend="inline") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with closing(RunFolder(tmp_path / "run")) as opened:
        yield opened


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Callable[[str], RunFolder]]:
    """Opens run folders by name."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(RunFolder(tmp_path / name)))


class SlowEngine(Engine):
    """An update takes a while."""

    def __init__(self, train_s: float) -> None:
        super().__init__()
        self.train_s = train_s

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        await anyio.sleep(self.train_s)
        return await super().train_batch(batch)


def in_virtual_time(run: Callable[[ActorSystem], Coroutine[Any, Any, None]]) -> float:
    """Run it, and return the virtual seconds that it took."""
    clock = VirtualClock()

    async def inside() -> None:
        async with ActorSystem(num_cpus=4, backend="inline", clock=clock) as system:
            await run(system)

    clock.run(inside())
    return clock.time()


def lengths(*tokens: int) -> dict[str, Any]:
    """Replicas that answer with so many tokens, one a second."""
    responses = [[65 + number % 2] * length for number, length in enumerate(tokens)]
    return {"engine_options": {"responses": responses, "seconds_per_token": 1.0}, "health_interval_s": 1.0}


def partial(**options: Any) -> AsyncProduceStrategyConfig:
    return AsyncProduceStrategyConfig(enable_partial_rollout=True, **{"max_staleness": 1, **options})


def trained(folder: RunFolder) -> dict[int, list[str]]:
    """Step -> groups that it trained on."""
    steps: dict[int, list[str]] = {}
    for line in folder.trained():
        steps.setdefault(line["step"], []).append(line["uid"])
    return steps


# --- what is done when


@pytest.mark.parametrize("mode", ASYNC)
async def test_every_prompt_is_trained_once_and_its_versions_are_written_down(
    mode: str, system: ActorSystem, folder: RunFolder
) -> None:
    trainer = make_trainer(system, folder, mode=mode, trainer={"num_steps": 6}, rows=rows(64))
    await fit(trainer)
    assert trainer.parts.replay_buffer.num_admitted == 12, "nothing is begun that will not be trained on"
    lines = list(folder.trained())
    assert [line["uid"] for line in lines] == [f"task-{n}" for n in range(12)]
    assert len({line["row"] for line in lines}) == 12
    for line in lines:
        oldest, newest = line["policy_version"]
        assert line["step"] - 2 <= oldest <= newest <= line["step"] - 1
    assert max(record["off_policy/max"] for record in folder.metrics() if "loss" in record) <= 1


@pytest.mark.parametrize("mode", MODES)
async def test_b8_weights_go_out_every_interval_and_at_the_end(
    mode: str, system: ActorSystem, folder: RunFolder
) -> None:
    every_3 = {"evaluation": {"every_steps": 3}, "checkpoint": {"every_steps": 3}}
    synced: list[int] = []
    trainer = make_trainer(
        system, folder, mode=mode, trainer={"num_steps": 7, "sync_weights_interval": 3}, rows=rows(64), **every_3
    )
    sync = trainer.parts.weight_sync.sync

    async def note(version: int) -> Any:
        synced.append(version)
        return await sync(version)

    trainer.parts.weight_sync.sync = note
    await fit(trainer)
    assert synced == [0, 3, 6, 7]
    assert [record["step"] for record in folder.metrics() if "eval/greedy/accuracy" in record] == [0, 3, 6, 7]
    if mode == "sync":
        assert [line["policy_version"][0] for line in folder.trained()] == [0] * 6 + [3] * 6 + [6] * 2


class Sleepless:
    """Writes down what replicas are told."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    async def sleep(self, level: int = 1) -> None:
        self.told.append(level)

    async def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        self.told.append(tags)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
async def test_replicas_sleep_while_the_trainer_computes(mode: str, system: ActorSystem, folder: RunFolder) -> None:
    told: list[Any] = []

    class Telling(Engine):
        async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
            told.append("train")
            return await super().train_batch(batch)

        async def release_memory(self) -> None:
            told.append("release")

        async def open_weights(self, version: int, *, adapters_only: bool = False) -> WeightOffer:
            told.append("hand over")
            return await super().open_weights(version, adapters_only=adapters_only)

    trainer = make_trainer(
        system, folder, mode=mode, engine=Telling(), rollout={"sleep_level": 2}, trainer={"num_steps": 1}
    )
    trainer.parts = replace(trainer.parts, rollout=Sleepless(told))
    await fit(trainer)
    assert told == ["hand over", 2, "train", "release", ("weights",), "hand over", ("kv_cache",)]


@pytest.mark.parametrize("mode", MODES)
async def test_the_last_hook_is_called_whatever_happens(mode: str, system: ActorSystem, folder: RunFolder) -> None:
    class Broken(Engine):
        async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
            raise RunError("the engine is gone")

    ended: list[str] = []

    class Ending(trainer_class(mode)):  # type: ignore[misc]
        async def on_train_end(self) -> None:
            await anyio.lowlevel.checkpoint()
            ended.append(mode)

    trainer = make_trainer(system, folder, mode=mode, cls=Ending, engine=Broken())
    with pytest.raises(RunError, match="the engine is gone"):
        await fit(trainer)
    assert ended == [mode]
    assert trainer.parts.producer.manager.num_in_flight == 0


@pytest.mark.parametrize("mode", MODES)
async def test_f5_a_bug_in_a_judger_ends_the_run_with_its_error(
    mode: str, system: ActorSystem, folder: RunFolder
) -> None:
    class Buggy(Judger):
        async def judge(self, rollout_state: RolloutState) -> RolloutState:
            if rollout_state.rollout_id == 20:
                raise KeyError("a bug in sample 20")
            return await super().judge(rollout_state)

    trainer = make_trainer(
        system, folder, mode=mode, judger=Buggy(), trainer={"num_steps": 9}, evaluation={"at_start": False}
    )
    with pytest.raises(KeyError, match="a bug in sample 20"):
        await fit(trainer)


# --- time and age


def test_separate_async_generates_while_it_trains(folders: Callable[[str], RunFolder]) -> None:
    steps, took = 8, {}
    for mode in ("sync", "separate_async"):
        folder = folders(mode)

        async def run(system: ActorSystem, mode: str = mode, folder: RunFolder = folder) -> None:
            trainer = make_trainer(
                system,
                folder,
                mode=mode,
                engine=SlowEngine(4.0),
                rollout=lengths(4),
                rows=rows(64),
                trainer={"num_steps": steps},
                evaluation={"at_start": False, "every_steps": 0},
            )
            trainer.parts = replace(trainer.parts, evaluator=None)
            await fit(trainer)

        took[mode] = in_virtual_time(run)
        times = [record for record in folder.metrics() if "loss" in record]
        assert sum(record["time/overlap"] for record in times) == (0 if mode == "sync" else 4 * (steps - 2))
    assert took["sync"] >= 8 * steps
    assert took["separate_async"] <= 4 * (steps + 1) + 1


def test_a_generator_that_is_three_times_as_fast_is_held_back_and_nothing_is_thrown_away(folder: RunFolder) -> None:
    steps, admitted = 30, []

    async def run(system: ActorSystem) -> None:
        trainer = make_trainer(
            system,
            folder,
            mode="separate_async",
            engine=SlowEngine(3.0),
            rollout=lengths(1, 1),
            rows=rows(64),
            trainer={"num_steps": steps},
            evaluation={"at_start": False, "every_steps": 0},
        )
        await fit(trainer)
        admitted.append(trainer.parts.replay_buffer.num_admitted)

    in_virtual_time(run)
    records = [record for record in folder.metrics() if "loss" in record]
    assert len(records) == steps
    assert max(record["off_policy/max"] for record in records) == 1
    assert all(record["training/off_policy/evicted_samples"] == 0 for record in records)
    assert admitted == [2 * steps]


@pytest.mark.parametrize("mode", ASYNC)
def test_sequences_go_on_under_new_weights(mode: str, folder: RunFolder) -> None:
    """Short and long responses: the long ones are not begun anew, and hold tokens of several policies."""
    engine = SlowEngine(3.0)
    strategy = partial(max_staleness=3, over_sample_threshold=1.0 if mode == "colocate_async" else 0.0)

    async def run(system: ActorSystem) -> None:
        trainer = make_trainer(
            system,
            folder,
            mode=mode,
            engine=engine,
            strategy=strategy,
            rollout={**lengths(2, 3, 12, 2), "partial_rollout": True, "max_batch_size": 20},
            rows=rows(64),
            replay_buffer={"stragglers": "pass"},
            trainer={"num_steps": 10},
        )
        await fit(trainer)

    in_virtual_time(run)
    versions = [line["policy_version"] for line in folder.trained()]
    assert any(oldest < newest for oldest, newest in versions)
    records = [record for record in folder.metrics() if "loss" in record]
    assert max(record["off_policy/max"] for record in records) <= 3
    assert all(record["training/off_policy/evicted_samples"] == 0 for record in records)


def test_without_partial_rollout_every_sequence_is_of_one_version(folder: RunFolder) -> None:

    async def run(system: ActorSystem) -> None:
        trainer = make_trainer(
            system,
            folder,
            mode="separate_async",
            engine=SlowEngine(3.0),
            strategy=AsyncProduceStrategyConfig(max_staleness=2),
            rollout=lengths(2, 3, 7, 2),
            rows=rows(64),
            trainer={"num_steps": 8},
        )
        await fit(trainer)

    in_virtual_time(run)
    for file in sorted((folder.path / "rollouts").iterdir()):
        for line in file.read_text().splitlines():
            assert len(json.loads(line)["policy_versions"]) == 1
    assert [uid for uids in trained(folder).values() for uid in uids] == [f"task-{n}" for n in range(16)]


async def test_a_step_in_parts_has_one_old_policy(system: ActorSystem, folder: RunFolder) -> None:
    engine = Engine()
    trainer = make_trainer(
        system,
        folder,
        mode="separate_async",
        engine=engine,
        trainer={"num_steps": 3, "groups_per_step": 4, "parameter_sync_step": 2},
        rows=rows(64),
    )
    await fit(trainer)
    assert [(batch.step, batch.part) for batch in engine.batches] == [(s, p) for s in (1, 2, 3) for p in (0, 1)]
    assert engine.kept == [0, 2, 4], "kept before the first part of each step"
    assert engine.measured == [["old_logprobs"]] * 6
    assert engine.measured_kept == [True] * 6
    assert [len(uids) for uids in trained(folder).values()] == [4, 4, 4]
    records = [record for record in folder.metrics() if "loss" in record]
    assert [record["num_tokens"] for record in records] == [32.0] * 3


# --- how far ahead


@pytest.mark.parametrize(("ahead", "most"), [(None, 3), (1, 1), (0, 0)])
async def test_generation_is_ahead_as_far_as_it_is_told(
    ahead: int | None, most: int, system: ActorSystem, folder: RunFolder
) -> None:
    """What waits while a step is trained, in batches."""
    waiting: list[float] = []

    class Watching(Engine):
        async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
            await anyio.wait_all_tasks_blocked()
            waiting.append(trainer.parts.replay_buffer.num_waiting("train") / 2)
            return await super().train_batch(batch)

    trainer = make_trainer(
        system,
        folder,
        mode="separate_async",
        engine=Watching(),
        strategy=AsyncProduceStrategyConfig(max_staleness=3),
        trainer={"num_steps": 8, "num_warmup_batches": ahead},
        rows=rows(64),
    )
    await fit(trainer)
    assert waiting == [min(most, 8 - step) for step in range(1, 9)]


# --- resume


@pytest.mark.parametrize("mode", MODES)
async def test_a_run_goes_on_in_another_folder_without_losing_a_prompt(
    mode: str, system: ActorSystem, folder: RunFolder, folders: Callable[[str], RunFolder]
) -> None:
    """What waited when the checkpoint was made is drawn again: the buffer of the first folder is not needed."""
    summary = await fit(
        make_trainer(system, folder, mode=mode, trainer={"num_steps": 2}, rows=rows(64), callback=Callback())
    )
    elsewhere = folders("elsewhere")
    again = make_trainer(system, elsewhere, mode=mode, trainer={"num_steps": 5}, rows=rows(64))
    await fit(again, summary.checkpoint)
    groups = [uid for place in (folder, elsewhere) for uids in trained(place).values() for uid in uids]
    assert groups == [f"task-{n}" for n in range(10)]


@pytest.mark.parametrize("mode", ASYNC)
async def test_after_a_resume_no_burst_of_groups_is_begun(
    mode: str, system: ActorSystem, folder: RunFolder, tmp_path: Path
) -> None:
    """What was trained on after the checkpoint is trained on again, from the disk; only then is anything new begun."""
    path = tmp_path / "buffer.sqlite"
    options = {"mode": mode, "rows": rows(64), "checkpoint": {"every_steps": 2}, "evaluation": {"every_steps": 0}}

    class Dying(Engine):
        async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
            if batch.step == 6:
                raise RunError("killed")
            return await super().train_batch(batch)

    callback = Callback()
    first = make_trainer(
        system, folder, engine=Dying(), store=SQLiteStore(path), trainer={"num_steps": 8}, callback=callback, **options
    )
    with pytest.raises(RunError, match="killed"):
        await fit(first)
    assert callback.saved == [2, 4]
    drawn = first.parts.replay_buffer.num_admitted

    class Watching(Engine):
        async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
            if batch.step < 6:
                assert again.parts.replay_buffer.num_admitted == drawn
            return await super().train_batch(batch)

    again = make_trainer(
        system, folder, engine=Watching(), store=SQLiteStore(path), trainer={"num_steps": 8}, **options
    )
    await fit(again, folder.checkpoints / "step_000002")
    assert [uid for uids in trained(folder).values() for uid in uids] == [f"task-{n}" for n in range(16)]


@pytest.mark.parametrize("mode", ASYNC)
async def test_what_was_in_flight_is_begun_again_only_when_its_turn_is_near(
    mode: str, system: ActorSystem, folder: RunFolder, tmp_path: Path
) -> None:
    """Killed long after its checkpoint, a run must not generate the batch after next with the weights of long ago."""
    path = tmp_path / "buffer.sqlite"
    options = {"mode": mode, "rows": rows(64), "checkpoint": {"every_steps": 0}, "evaluation": {"every_steps": 0}}

    class Dying(Judger):
        async def judge(self, rollout_state: RolloutState) -> RolloutState:
            if rollout_state.extra_fields["row"] == 13 and rollout_state.task_name == "task":
                raise KeyError("killed")
            return await super().judge(rollout_state)

    first = make_trainer(
        system, folder, judger=Dying(), store=SQLiteStore(path), trainer={"num_steps": 32}, group_size=2, **options
    )
    with pytest.raises(KeyError, match="killed"):
        await fit(first)
    steps = max(trained(folder))
    assert steps >= 3
    folder.start_over()
    again = make_trainer(
        system, folder, store=SQLiteStore(path), trainer={"num_steps": steps + 3}, group_size=2, **options
    )
    await fit(again)
    records = [record for record in folder.metrics() if "loss" in record]
    assert max(record["off_policy/max"] for record in records) <= 1
    assert all(record["training/off_policy/evicted_samples"] == 0 for record in records)
    assert [uid for uids in trained(folder).values() for uid in uids] == [f"task-{n}" for n in range(2 * steps + 6)]


# --- names


def test_a_trainer_of_ones_own_is_named() -> None:
    @register_trainer("test_mine")
    class Mine(SyncTrainer):
        pass

    assert trainer_class("test_mine") is Mine
    assert layout_of("test_mine") == "sync"
    assert layout_of("xrl_lite.trainer.separate_async:SeparateAsyncTrainer") == "separate_async"
    with pytest.raises(PluginError, match="is taken by"):
        register_trainer("test_mine")(type("Other", (RLTrainer,), {}))
    with pytest.raises(TypeError, match="must be a subclass of"):
        register_trainer("test_other")(dict)  # type: ignore[type-var]
    with pytest.raises(UnknownNameError, match="Did you mean 'sync'"):
        trainer_class("synk")
    with pytest.raises(ConfigError, match="must be a subclass"):
        trainer_class("xrl_lite.trainer.config:TrainerConfig")


def test_metrics_of_parts_add_up() -> None:
    first = {
        "num_tokens": 4.0,
        "reward": 1.0,
        "entropy_max": 3.0,
        "learning_rate": 0.2,
        "x/min": 1,
        "skipped_step": 1.0,
    }
    second = {"num_tokens": 2.0, "reward": 0.0, "entropy_max": 2.0, "learning_rate": 0.1, "x/min": 2, "kl": 5.0}
    assert merge_metrics([(first, 1), (second, 3)]) == {
        "num_tokens": 6.0,
        "reward": 0.25,
        "entropy_max": 3.0,
        "learning_rate": 0.1,
        "x/min": 1,
        "kl": 5.0,
    }
    assert merge_metrics([(first, 1)]) == first


@pytest.mark.parametrize(
    ("name", "values", "merged"),
    [
        ("buffer/failed_groups", (3.0, 0.0), 3.0),
        ("buffer/stale_dropped", (2.0, 1.0), 3.0),
        ("buffer/size", (2.0, 1.0), 1.0),
        ("tools/num_calls", (10.0, 20.0), 30.0),
        ("tools/num_truncated", (1.0, 2.0), 3.0),
        ("tools/failures/timeout", (4.0, 1.0), 5.0),
        ("num_groups_zero_std", (1.0, 2.0), 3.0),
        ("produce/t/samples", (8.0, 4.0), 12.0),
        ("num_turns/mean", (1.0, 3.0), 2.0),
        ("completions/min_length", (9.0, 1.0), 1.0),
        ("completions/max_length", (9.0, 1.0), 9.0),
    ],
)
def test_counts_add_up_and_bounds_hold_for_all_parts(name: str, values: tuple[float, float], merged: float) -> None:
    first, second = values
    assert merge_metrics([({name: first}, 1), ({name: second}, 1)]) == {name: merged}
