"""The loop over the scripted engine: order of hooks, what is saved when, and when it stops by itself."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import fake_run
from tests.fake_run import Callback, Critic, Engine, Judger, fit
from xrl_lite.actors import ActorSystem
from xrl_lite.data import RolloutState
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import ConfigError, RunError
from xrl_lite.replay_buffer import PromptGroup, SQLiteStore
from xrl_lite.replay_buffer.events import EventLog
from xrl_lite.trainer.agreement import AgreementCheck
from xrl_lite.trainer.base import RLTrainer
from xrl_lite.trainer.checkpoint import read_state
from xrl_lite.trainer.modes import trainer_class
from xrl_lite.trainer.run_folder import BUFFER, EVENTS, RunFolder
from xrl_lite.trainer.sync import SyncTrainer

MODES = ["sync", "colocate_async", "separate_async"]
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


class Recording(RLTrainer):
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


def make_trainer(system: ActorSystem, folder: RunFolder, *, mode: str = "sync", **options: Any) -> Any:
    cls = options.pop("cls", None) or type("Recorded", (Recording, trainer_class(mode)), {})
    return fake_run.make_trainer(system, folder, mode=mode, cls=cls, **options)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4, backend="inline") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    opened = RunFolder(tmp_path / "run")
    yield opened
    opened.close()


def steps_of(folder: RunFolder, name: str) -> list[int]:
    return [record["step"] for record in folder.metrics() if name in record]


class Noting(Callback):
    """Writes down among the hooks when a checkpoint is made."""

    def on_save(self, trainer: Any, global_step: int, *rest: Any, **kwargs: Any) -> None:
        trainer.called.append("save")


STEP = ["on_step_begin", "on_sample_begin", "on_sample_end", "on_step_end"]
VALIDATE = ["on_validate_begin", "on_validate_end"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("every", "steps"),
    [
        pytest.param((2, 2), [*STEP, *STEP, *VALIDATE, "save"], id="both on the last step"),
        pytest.param((1, 1), [*STEP, *VALIDATE, "save", *STEP, *VALIDATE, "save"], id="both on each step"),
        pytest.param((0, 1), [*STEP, "save", *STEP, *VALIDATE, "save"], id="validation at the end"),
        pytest.param((1, 0), [*STEP, *VALIDATE, *STEP, *VALIDATE, "save"], id="save at the end"),
    ],
)
async def test_hooks_are_called_in_the_promised_order(
    mode: str, every: tuple[int, int], steps: list[str], system: ActorSystem, folder: RunFolder
) -> None:
    trainer = make_trainer(
        system,
        folder,
        mode=mode,
        trainer={"num_steps": 2},
        evaluation={"every_steps": every[0]},
        checkpoint={"every_steps": every[1]},
        callback=Noting(),
    )
    await fit(trainer)
    assert trainer.called == ["on_init_end", *VALIDATE, "on_train_begin", *steps, "on_train_end"]


async def test_every_save_is_reported_once_with_its_folder(system: ActorSystem, folder: RunFolder) -> None:
    callback = Callback()
    summary = await fit(make_trainer(system, folder, callback=callback))
    assert callback.saved == [2, 4]
    assert (summary.last_step, summary.stopped) == (4, False)
    assert summary.checkpoint == folder.checkpoints / "step_000004"


async def test_what_is_evaluated_and_saved_at_which_step(system: ActorSystem, folder: RunFolder) -> None:
    await fit(make_trainer(system, folder, trainer={"num_steps": 3}))
    assert steps_of(folder, "loss") == [1, 2, 3]
    assert steps_of(folder, "eval/greedy/accuracy") == [0, 2, 3]
    assert [path.name for path in sorted(folder.checkpoints.iterdir())] == ["step_000002", "step_000003"]


async def test_a_stop_ends_after_the_step_and_its_evaluation_is_made_up_for(
    system: ActorSystem, folder: RunFolder
) -> None:
    trainer = make_trainer(system, folder)
    trainer.stop_in_step = 2
    summary = await fit(trainer)
    assert (summary.last_step, summary.stopped) == (2, True)
    assert steps_of(folder, "eval/greedy/accuracy") == [0]
    assert summary.checkpoint is not None
    assert read_state(summary.checkpoint)["evaluation_due"]

    engine = Engine()
    await fit(make_trainer(system, folder, engine=engine), summary.checkpoint)
    assert engine.loaded == summary.checkpoint / "engine"
    assert steps_of(folder, "loss") == [1, 2, 3, 4]
    assert steps_of(folder, "eval/greedy/accuracy") == [0, 2, 4]


async def test_going_back_to_an_earlier_checkpoint_drops_what_came_after_it(
    system: ActorSystem, folder: RunFolder
) -> None:
    await fit(make_trainer(system, folder))
    again = make_trainer(system, folder, trainer={"num_steps": 3})
    summary = await fit(again, folder.checkpoints / "step_000002")
    assert steps_of(folder, "loss") == [1, 2, 3]
    assert summary.checkpoint == folder.checkpoints / "step_000003"
    assert not (folder.checkpoints / "step_000004").exists()


class Dying(Judger):
    """Ends the run at the sixth row."""

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        if rollout_state.extra_fields["row"] == 5 and rollout_state.task_name == "task":
            raise KeyError("killed")
        return await super().judge(rollout_state)


class Unloadable(Engine):
    """Is of another model than the checkpoint."""

    async def load_checkpoint(self, folder: Path) -> None:
        raise ConfigError("of another model")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", [{"rows": fake_run.rows(5)}, {"engine": Unloadable()}], ids=["rows", "engine"])
async def test_a_refused_resume_changes_nothing(
    mode: str, other: dict[str, Any], system: ActorSystem, folder: RunFolder
) -> None:
    def options() -> dict[str, Any]:
        store, events = SQLiteStore(folder.path / BUFFER), EventLog(folder.path / EVENTS)
        return {"mode": mode, "store": store, "events": events}

    def everything() -> dict[str, bytes]:
        files = [path for path in folder.path.rglob("*") if path.is_file() and BUFFER not in path.name]
        held = {str(path): path.read_bytes() for path in files}
        with closing(sqlite3.connect(folder.path / BUFFER)) as connection:
            return held | {BUFFER: repr(list(connection.iterdump())).encode()}

    await fit(make_trainer(system, folder, config="name: first\n", **options()))
    before = everything()
    with pytest.raises(ConfigError, match=r"of another model|cannot go on with other data: num_rows was 4 and is 5"):
        await fit(
            make_trainer(system, folder, config="name: second\n", **options(), **other),
            folder.checkpoints / "step_000002",
        )
    assert everything() == before


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
async def test_what_came_before_the_first_checkpoint_is_kept_if_going_on_is_refused(
    mode: str, system: ActorSystem, folder: RunFolder
) -> None:
    async def go_on(number: int, judger: Judger) -> None:
        store = SQLiteStore(folder.path / BUFFER)
        checkpoint = {"every_steps": 0}
        data = fake_run.rows(number)
        await fit(
            make_trainer(
                system, folder, mode=mode, store=store, checkpoint=checkpoint, rows=data, judger=judger, config=""
            )
        )

    with pytest.raises(KeyError, match="killed"):
        await go_on(8, Dying())
    before = list(folder.metrics())
    assert before
    with pytest.raises(ConfigError, match="num_rows was 8 and is 5"):
        await go_on(5, Judger())
    assert list(folder.metrics()) == before


async def test_a_resume_says_which_checkpoints_it_drops_and_keeps_its_settings(
    system: ActorSystem, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    await fit(make_trainer(system, folder, config="name: first\n"))
    again = make_trainer(system, folder, trainer={"num_steps": 3}, config="name: second\n")
    await fit(again, folder.checkpoints / "step_000002")
    assert "step_000002, without the later step_000004" in " ".join(capsys.readouterr().out.split())
    assert (folder.path / "config.yaml").read_text() == "name: second\n"


async def test_no_signal_for_long_stops_with_a_checkpoint(system: ActorSystem, folder: RunFolder) -> None:
    limits = {"num_steps": 50, "max_steps_without_signal": 3}
    trainer = make_trainer(system, folder, judger=Judger(blind=True), trainer=limits, checkpoint={"every_steps": 0})
    with pytest.raises(RunError, match=r"No group had two different rewards for 3 steps.*reward 0.500"):
        await fit(trainer)
    assert (folder.checkpoints / "step_000003").is_dir()
    assert trainer.called[-1] == "on_train_end"


class Masking(Recording, SyncTrainer):
    """Leaves nothing to train on in some steps."""

    masked_steps: tuple[int, ...] = ()

    def _prepare_train_data(self, groups: list[list[RolloutState]]) -> tuple[TrainBatch, dict[str, float]]:
        batch, metrics = super()._prepare_train_data(groups)
        if self.global_step in self.masked_steps:
            batch = replace(batch, response_masks=[[0] * len(row) for row in batch.responses])
        return batch, metrics


async def test_a_step_with_nothing_to_train_on_is_skipped_and_said(
    system: ActorSystem, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine()
    trainer = make_trainer(system, folder, engine=engine, cls=Masking)
    trainer.masked_steps = (2,)
    await fit(trainer)
    assert "step 2 is skipped: none of its 16 scored attempts has a token to train on" in capsys.readouterr().out
    assert steps_of(folder, "skipped_step") == [2]
    assert [batch.num_trained_tokens > 0 for batch in engine.batches] == [True, False, True, True]


async def test_steps_in_a_row_with_nothing_to_train_on_stop_with_a_checkpoint(
    system: ActorSystem, folder: RunFolder
) -> None:
    limits = {"num_steps": 50, "max_empty_steps": 2}
    trainer = make_trainer(system, folder, trainer=limits, checkpoint={"every_steps": 0}, cls=Masking)
    trainer.masked_steps = (2, 4, 5)
    with pytest.raises(RunError, match="no token to train on for 2 steps in a row"):
        await fit(trainer)
    assert (folder.checkpoints / "step_000005").is_dir()


async def test_greedy_responses_are_the_baselines_of_remax(system: ActorSystem, folder: RunFolder) -> None:
    engine = Engine()
    # evaluation at the start takes 4 judgements, the 16 attempts of a step come before its 2 greedy ones
    judger = Judger(broken_after=4 + 16 + 1)
    trainer = make_trainer(
        system, folder, engine=engine, judger=judger, trainer={"num_steps": 1}, algorithm={"advantage": "remax"}
    )
    await fit(trainer)
    (batch,) = engine.batches
    assert batch.reward_baselines is not None
    assert batch.rewards is not None
    assert batch.reward_baselines[:8] == [batch.reward_baselines[0]] * 8
    known = [not math.isnan(value) for value in batch.reward_baselines]
    assert known.count(True) == 8
    for row, reward, baseline in zip(batch.advantages, batch.rewards, batch.reward_baselines, strict=True):
        assert row == ([0.0] if math.isnan(baseline) else [reward - baseline])


async def test_what_an_algorithm_needs_is_measured_once_and_its_state_is_saved(
    system: ActorSystem, folder: RunFolder
) -> None:
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 100}}
    engine = Engine()
    summary = await fit(make_trainer(system, folder, engine=engine, algorithm=algorithm))
    assert engine.measured == [["old_logprobs", "ref_logprobs"]] * 4
    assert summary.checkpoint is not None
    coefficient = read_state(summary.checkpoint)["algorithm"]["kl_coef"]
    assert coefficient == pytest.approx(0.1 * (1 - 0.2 * 16 / 100) ** 4)
    again = make_trainer(system, folder, algorithm=algorithm, trainer={"num_steps": 5})
    await fit(again, summary.checkpoint)
    assert [r["reward_kl_penalty_coeff"] for r in folder.metrics() if r["step"] == 5 and "loss" in r] == [coefficient]


async def test_a_critic_values_is_trained_and_saved_and_learns_before_the_policy(
    system: ActorSystem, folder: RunFolder
) -> None:
    engine, critic = Engine(), Critic()
    settings = {"algorithm": {"advantage": "gae", "lam": 0.5}, "trainer": {"critic_warmup": 2}}
    trainer = make_trainer(system, folder, engine=engine, critic=critic, **settings)
    summary = await fit(trainer)
    assert [batch.step for batch in critic.batches] == [1, 2, 3, 4]
    assert [batch.step for batch in engine.batches] == [3, 4]
    assert steps_of(folder, "loss") == [3, 4]
    for batch in critic.batches:
        # one token, then the end: its return is the reward
        assert [row[0] for row in batch.returns or []] == batch.rewards
    first = next(record for record in folder.metrics() if "reward" in record)
    assert first["critic/returns/mean"] == pytest.approx(first["reward"])
    assert steps_of(folder, "critic/vf_loss") == [1, 2, 3, 4]

    fresh = Critic()
    await fit(make_trainer(system, folder, engine=Engine(), critic=fresh, **settings), summary.checkpoint)
    assert fresh.loaded == summary.checkpoint / "critic"


async def test_gradients_of_a_critic_that_stay_broken_stop(system: ActorSystem, folder: RunFolder) -> None:
    critic = Critic()
    critic.broken = True
    trainer = make_trainer(system, folder, critic=critic, algorithm={"advantage": "gae"}, trainer={"num_steps": 9})
    with pytest.raises(RunError, match="not finite for 5 steps in a row"):
        await fit(trainer)


async def test_a_gap_that_is_wide_is_warned_of_once(
    system: ActorSystem, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    await fit(make_trainer(system, folder, engine=Engine(**{"logprob_gap/mean": 0.2})))
    warnings = [record.getMessage() for record in caplog.records if "warn_logprob_gap" in record.getMessage()]
    assert len(warnings) == 1
    assert "by 0.2000 nats on average, more than warn_logprob_gap=0.05" in warnings[0]


@pytest.mark.parametrize("gap", [2.0, float("nan")])
async def test_a_gap_between_trainer_and_engine_stops(gap: float, system: ActorSystem, folder: RunFolder) -> None:
    trainer = make_trainer(system, folder, engine=Engine(**{"logprob_gap/mean": gap}))
    with pytest.raises(RunError, match="disagree about tokens of the same weights"):
        await fit(trainer)


@pytest.mark.parametrize(("off", "dtype"), [(0.01, "float32"), (math.nan, "bfloat16")])
async def test_other_logprobs_after_the_first_sync_stop_with_the_usual_causes(
    off: float, dtype: str, system: ActorSystem, folder: RunFolder
) -> None:
    class Off(Engine):
        async def measure(self, batch: TrainBatch, names: list[str], **policy: bool) -> dict[str, list[list[float]]]:
            (values,) = (await super().measure(batch, names, **policy)).values()
            return {names[0]: [[value + off for value in row] for row in values]}

    def checked(engine: Any) -> Any:
        trainer = make_trainer(system, folder, engine=engine)
        check = AgreementCheck(
            trainer.rollout, engine, prompts=[[1, 2, 3], [4]], temperature=1.0, dtypes={"engine.dtype": dtype}
        )
        trainer.parts = replace(trainer.parts, agreement=check)
        return trainer

    wanted = f"differ by {off:.3g} nats on average; with engine.dtype={dtype} at most .*a tied output head"
    engine = Off()
    with pytest.raises(RunError, match=wanted):
        await fit(checked(engine))
    assert not engine.batches
    assert (await fit(checked(Engine()))).last_step == 4


async def test_without_samples_of_the_present_weights_a_few_tokens_are_sampled_to_compare_on(
    system: ActorSystem, folder: RunFolder
) -> None:
    class Silent(Engine):
        async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
            metrics = await super().train_batch(batch)
            if batch.step < 3:  # as if all of its samples were older
                del metrics["logprob_gap/mean"]
            return metrics

    engine = Silent()
    trainer = make_trainer(system, folder, engine=engine, trainer={"num_steps": 4, "check_agreement_every": 2})
    check = AgreementCheck(trainer.rollout, engine, prompts=[[1, 2, 3]], temperature=1.0, dtypes={"dtype": "float32"})
    trainer.parts = replace(trainer.parts, agreement=check)
    await fit(trainer)
    records = [record for record in folder.metrics() if "loss" in record]
    assert [record.get("logprob_gap/mean") for record in records] == [None, 0.0, 0.0, 0.0]
    assert [record["step"] for record in records if "time/agreement" in record] == [2]
    assert engine.measured == [["old_logprobs"]] * 2, "at the start and after step 2"
    assert engine.measured_kept == [False] * 2, "the replicas have the present weights"


async def test_gradients_that_stay_broken_stop(system: ActorSystem, folder: RunFolder) -> None:
    trainer = make_trainer(system, folder, engine=Engine(grad_norm=float("inf")), trainer={"num_steps": 9})
    with pytest.raises(RunError, match="not finite for 5 steps in a row"):
        await fit(trainer)


async def test_replicas_hold_the_weights_of_the_step_before(system: ActorSystem, folder: RunFolder) -> None:
    await fit(make_trainer(system, folder, trainer={"num_steps": 3}))
    for step in (1, 2, 3):
        lines = (folder.path / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert {tuple(json.loads(line)["policy_versions"]) for line in lines} == {(step - 1,)}


async def test_times_and_counts_of_judgers_are_metrics(system: ActorSystem, folder: RunFolder) -> None:
    await fit(make_trainer(system, folder))
    record = next(record for record in folder.metrics() if "loss" in record)
    assert record["judger/a/ok"] == 1.0
    assert record["time/judger/a/latency_p50"] == 0.5
    parts = ("generate", "judge", "train", "sync", "other")
    assert sum(record[f"time/{part}"] for part in parts) == pytest.approx(record["time/step"], abs=1e-3)


async def test_a_person_sees_steps_completions_and_the_curve(
    system: ActorSystem, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(system, folder)
    await fit(trainer)
    trainer.parts.reporter.summary(list(folder.metrics()), folder.path)
    shown = capsys.readouterr().out
    assert "step 1/4  reward 0." in shown
    assert "held-out accuracy after step 2: greedy" in shown
    assert "completions of step 2" in shown
    assert "reward and held-out accuracy" in shown
    assert "train reward: 0." in shown
    assert (folder.path / "learning_curve.png").is_file()
