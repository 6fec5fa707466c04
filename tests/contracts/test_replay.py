"""A whole run in virtual time: one seed gives one order of events, whatever goes wrong; a record can be repeated."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.build import make_state, without_times
from tests.fake_run import Engine, Judger, fit, make_trainer
from xrl_lite.actors import ActorSystem, Fault, FaultPlan, VirtualClock
from xrl_lite.agent_loop import ProduceLimits, TaskSpecConfig
from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.data import RolloutState
from xrl_lite.errors import ConfigError, RunError
from xrl_lite.replay_buffer import (
    GroupStatus,
    PromptGroup,
    ReplayBuffer,
    ReplayBufferConfig,
    SQLiteStore,
    build_replay_buffer,
)
from xrl_lite.replay_buffer.events import Event, EventLog, read_events
from xrl_lite.trainer import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
from xrl_lite.trainer.base import TrainerSettings
from xrl_lite.trainer.modes import trainer_class
from xrl_lite.trainer.replay import RecordedGroups, RecordedStore, ReplaySettings, Script, replay
from xrl_lite.trainer.report import QuietReporter
from xrl_lite.trainer.run_folder import RunFolder


class SlowEngine(Engine):
    """Trains for a second, and asks for a stop in a step if told to."""

    def __init__(self, stop_in_step: int) -> None:
        super().__init__()
        self.stop_in_step = stop_in_step
        self.stop: Any = None

    async def train_batch(self, batch: Any) -> dict[str, float]:
        await anyio.sleep(1.0)
        self.stop.requested = batch.step == self.stop_in_step
        return await super().train_batch(batch)


class SlowJudger(Judger):
    """Judges as long as chance has it, and loses some attempts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        await anyio.sleep(self.random.paretovariate(1.2))
        return await super().judge(rollout_state)


def scripted_faults(seed: int) -> FaultPlan:
    """Delays and deaths of the two replicas, at calls that the seed picks."""
    chance = random.Random(seed)
    calls = {name: chance.sample(range(2, 30), 6) for name in ("rollout/0", "rollout/1")}
    return FaultPlan(
        Fault(actor=name, action="kill", at_call=call)
        if place == 0
        else Fault(actor=name, action="delay", at_call=call, delay_s=chance.expovariate(0.5))
        for name, chosen in calls.items()
        for place, call in enumerate(chosen)
    )


def run_of(
    folder: Path, seed: int, *, mode: str = "sync", advantage: str = "grpo", stop_in_step: int = 0
) -> tuple[list[Event], list[dict[str, Any]]]:
    """Run in virtual time; return events and metrics."""
    run = RunFolder(folder / "run")
    clock = VirtualClock()
    events = EventLog(run.path / "events.jsonl", clock=clock.time)

    async def main() -> None:
        faults = scripted_faults(seed)
        async with ActorSystem(num_cpus=4, backend="inline", clock=clock, seed=seed, faults=faults) as system:
            engine = SlowEngine(stop_in_step)
            trainer = make_trainer(
                system,
                run,
                mode=mode,
                engine=engine,
                judger=SlowJudger(seed),
                events=events,
                rollout={"num_replicas": 2},
                max_failed_groups=20,
                algorithm={"advantage": advantage},
            )
            engine.stop = trainer.stop
            await fit(trainer)

    try:
        clock.run(main())
    finally:
        events.close()
        run.close()
    return list(read_events(run.path / "events.jsonl")), without_times(list(run.metrics()))


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_seed_gives_the_same_events_and_metrics_whatever_goes_wrong(mode: str, tmp_path: Path) -> None:
    events, metrics = run_of(tmp_path / "a", 1, mode=mode)
    assert run_of(tmp_path / "b", 1, mode=mode) == (events, metrics)
    names = {event["event"] for event in events}
    assert names >= {"began", "admitted", "started", "ended", "stored", "sampled", "trained", "synced", "saved"}
    assert run_of(tmp_path / "c", 2, mode=mode)[0] != events


# --- repeating a record


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Returns a function that repeats events and leaves its metrics in `folder`."""
    folder = RunFolder(tmp_path / "replay")

    def repeat(events: list[Event], mode: str = "sync", advantage: str = "grpo") -> int:
        task = TaskSpecConfig.model_validate(
            {
                "task_name": "task",
                "sampler_config": {"data": {"task": "addition"}, "prompt_repeat_k": 8},
                "produce_strategy_config": {"type": "sync"}
                if mode == "sync"
                else {"type": "async", "max_staleness": 1},
            }
        )
        settings = ReplaySettings(
            trainer=TrainerSettings(
                trainer=TrainerConfig(mode=mode, num_steps=4, groups_per_step=2),
                evaluation=EvaluationConfig(every_steps=2),
                checkpoint=CheckpointConfig(every_steps=2),
                report=ReportConfig(completions_every=0),
                algorithm=AlgorithmConfig(advantage=advantage),
            ),
            tasks=[task],
            replay_buffer=ReplayBufferConfig(),
            limits=ProduceLimits(max_failed_groups=20),
        )
        return replay(events, trainer_class(mode), settings, folder=folder, reporter=QuietReporter())

    repeat.folder = folder  # type: ignore[attr-defined]
    yield repeat
    folder.close()


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_record_is_repeated_with_the_rewards_it_had(mode: str, tmp_path: Path, replayed: Any) -> None:
    events, metrics = run_of(tmp_path / "a", seed=7, mode=mode)
    assert replayed(events, mode) == len(events)
    names = ("reward", "reward_std", "frac_reward_zero_std", "off_policy/max", "eval/greedy/accuracy")
    again = without_times(list(replayed.folder.metrics()))
    assert [[record.get(name) for name in names] for record in again] == [
        [record.get(name) for name in names] for record in metrics
    ]


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_greedy_answers_are_repeated_with_the_rewards_they_had(mode: str, tmp_path: Path, replayed: Any) -> None:
    events, metrics = run_of(tmp_path / "a", seed=7, mode=mode, advantage="remax")
    scores = [event["scores"] for event in events if event["event"] == "baselines"]
    assert {0.0, 1.0} <= {score for step in scores for score in step}
    assert replayed(events, mode, "remax") == len(events)
    names = ("advantages/mean", "advantages/min", "advantages/max")
    again = without_times(list(replayed.folder.metrics()))
    assert [[record.get(name) for name in names] for record in again] == [
        [record.get(name) for name in names] for record in metrics
    ]


async def test_what_was_given_back_and_what_could_not_be_kept_are_so_again(tmp_path: Path) -> None:
    async def begin(buffer: ReplayBuffer) -> list[PromptGroup]:
        states = [make_state(response_model_steps=[3, 3])]
        return [await buffer.admit(uid, global_steps=4, states=states) for uid in ("given back", "lost")]

    events = tmp_path / "events.jsonl"
    store = SQLiteStore(tmp_path / "buffer.sqlite")
    recorded = build_replay_buffer(ReplayBufferConfig(), store=store, events=EventLog(events))
    first, second = [recorded.start(group.uid, global_steps=4) for group in await begin(recorded)]
    recorded.put_back(first)
    await recorded.finish(second, [make_state(extra_fields={"lock": threading.Lock()})])
    await recorded.close()

    script = Script(list(read_events(events)))
    again = build_replay_buffer(ReplayBufferConfig(), store=RecordedStore(script, None, []), events=script)
    manager = RecordedGroups(script, again)
    async with manager.running():
        given_back, lost = await begin(again)
        manager.generate_sequences([given_back, lost])
        await script.end()
    assert (given_back.status, given_back.min_version) == (GroupStatus.ABORTED, 3)
    assert (lost.status, lost.reason) == (GroupStatus.FAILURE, recorded.reason("lost"))


def test_a_torn_record_is_repeated_up_to_its_end(tmp_path: Path, replayed: Any) -> None:
    events, _ = run_of(tmp_path / "a", seed=7)
    half = len(events) // 2
    assert replayed(events[:half]) == half


def test_of_a_resumed_run_only_what_came_since_is_repeated_and_that_is_said(
    tmp_path: Path, replayed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _ = run_of(tmp_path / "a", seed=7)
    since, _ = run_of(tmp_path / "b", seed=8)
    assert replayed(before + since) == len(since)
    said = " ".join(capsys.readouterr().out.split())
    assert f"the {len(since)} events since then are repeated, the {len(before)} before are not" in said


def test_a_run_that_was_stopped_stops_again(tmp_path: Path, replayed: Any) -> None:
    events, _ = run_of(tmp_path / "a", seed=3, stop_in_step=3)
    assert [event["event"] for event in events[-2:]] == ["saved", "over"]
    assert replayed(events) == len(events)


def test_a_decision_that_is_another_now_is_named(tmp_path: Path, replayed: Any) -> None:
    events, _ = run_of(tmp_path / "a", seed=7)
    sampled = next(event for event in events if event["event"] == "sampled")
    sampled["groups"] = ["task-7", "task-8"]
    with pytest.raises(RunError, match=rf"event {sampled['n']}.*Recorded: .*'task-7', 'task-8'.*Now: .*'task-0'"):
        replayed(events)


def test_what_nothing_leads_to_is_named(tmp_path: Path, replayed: Any) -> None:
    events, _ = run_of(tmp_path / "a", seed=7)
    last = events.pop()["n"] - 1  # all but "over"
    events.append({"n": last + 1, "t": 0.0, "event": "trained", "step": 5})
    with pytest.raises(RunError, match=rf"stands still before event {last + 1}"):
        replayed(events)


def test_a_file_without_a_beginning_is_refused(replayed: Any) -> None:
    with pytest.raises(ConfigError, match="no event `began`"):
        replayed([{"n": 1, "t": 0.0, "event": "trained", "step": 1}])
