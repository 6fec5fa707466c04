"""A run that is killed again and again, anywhere: every prompt is trained on exactly once."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.build import without_times
from tests.processes.resume_bodies import Life
from xrl_lite.actors import ActorSystem
from xrl_lite.errors import ActorDiedError
from xrl_lite.trainer.run_folder import BUFFER, RunFolder

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

MODES = ["sync", "colocate_async", "separate_async"]
NUM_STEPS = 12
ENDLESS = 1000
GROUPS_PER_STEP = 2


@pytest.fixture(scope="module")
def system() -> Iterator[ActorSystem]:
    system = ActorSystem(num_cpus=8)
    first = system.spawn(Life, preload=["tests.fake_run"])
    first.ready().result(60.0)
    first.stop().result(60.0)
    yield system
    system.shutdown_now()


def live(system: ActorSystem, folder: Path, mode: str, num_steps: int, turns: int | None = None) -> int:
    life = system.spawn(Life, preload=["tests.fake_run"])
    try:
        return life.live.remote(folder, mode, num_steps, turns).result(60.0)
    finally:
        life.stop(grace_s=0.0).result(60.0)


def waiting(folder: Path) -> set[int]:
    """Return the numbers of the groups that a run has drawn and would still train on."""
    with closing(sqlite3.connect(folder / BUFFER)) as connection:
        uids = connection.execute("SELECT uid FROM groups WHERE status NOT IN ('trained', 'dropped', 'failure')")
        return {int(uid.removeprefix("task-")) for (uid,) in uids}


def kill_and_resume(system: ActorSystem, folder: Path, mode: str, *, num_kills: int, seed: int) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run that was killed so often, at moments that the seed chooses."""
    draw = random.Random(f"{mode}/{seed}")
    turns = live(system, folder / "whole", mode, NUM_STEPS)
    for _ in range(num_kills):
        with pytest.raises(ActorDiedError):  # how many turns a step takes varies, so that this run has no end
            live(system, folder / "killed", mode, ENDLESS, draw.randrange(2 + 2 * turns // num_kills))
    run = RunFolder(folder / "killed")
    num_steps = max((line["step"] for line in run.trained()), default=0) + 2
    run.close()
    live(system, folder / "killed", mode, num_steps)
    run = RunFolder(folder / "killed")
    lines, records = list(run.trained()), list(run.metrics())
    run.close()
    numbers = [int(line["uid"].removeprefix("task-")) for line in lines]
    in_order = list(range(num_steps * GROUPS_PER_STEP))
    if mode == "colocate_async":  # what is passed over is trained on later, or waits at the end
        assert len(set(numbers)) == len(in_order)
        assert set(range(max(numbers))) - set(numbers) <= waiting(run.path)
    else:
        assert numbers == in_order
    assert [line["step"] for line in lines] == [1 + n // GROUPS_PER_STEP for n in in_order]
    assert len({line["row"] for line in lines}) == len(lines)
    assert [record["step"] for record in records if "loss" in record] == list(range(1, num_steps + 1))
    return records


@pytest.mark.parametrize("mode", MODES)
def test_b2_b3_killed_anywhere_a_run_trains_on_every_prompt_once(
    mode: str, system: ActorSystem, tmp_path: Path
) -> None:
    records = kill_and_resume(system, tmp_path, mode, num_kills=4, seed=0)
    stale = [record["off_policy/max"] for record in records if "loss" in record]
    assert max(stale) <= (0 if mode == "sync" else 2)
    if mode == "sync":
        live(system, tmp_path / "undisturbed", mode, max(record["step"] for record in records))
        undisturbed = RunFolder(tmp_path / "undisturbed")
        assert without_times(records) == without_times(list(undisturbed.metrics()))
        undisturbed.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_twenty_kills_lose_and_double_nothing(mode: str, system: ActorSystem, tmp_path: Path) -> None:
    kill_and_resume(system, tmp_path, mode, num_kills=20, seed=1)
