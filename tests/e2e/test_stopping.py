"""A run that is interrupted, at any place and by any means: what is left is nothing, or a checkpoint to go on from."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.build import run_settings, without_times
from tests.conftest import children_of, describe
from xrl_lite.trainer.checkpoint import complete_checkpoints

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

GONE_WITHIN_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


def write_config(folder: Path, model: Path, **changes: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(run_settings(folder, model, **changes)), encoding="utf-8")
    return path


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "xrl_lite.cli", "train", str(config), *overrides]


@contextmanager
def running(config: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, ended with all below it at the latest when the block ends."""
    process = subprocess.Popen(
        command(config, *overrides), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        below = children_of(process.pid)
        for pid in {process.pid, *below}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read output up to a line that says so; the test's time limit ends a wait in vain."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"no line says {text!r}:\n{''.join(lines)}")


def assert_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    left = pids
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid)}
        time.sleep(0.02)
    assert not left, [describe(pid) for pid in left]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def trained_steps(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "runs" / "test" / "metrics.jsonl").read_text().splitlines()
    return [record for record in without_times([json.loads(line) for line in lines]) if "loss" in record]


TWO_RANKS = {
    "trainer.num_steps": 16,
    "engine.num_ranks": 2,
    "engine.num_cpus": 0.25,
    "evaluation": {},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> list[dict[str, object]]:
    """The steps of a run on two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder, tiny_model_folder, **TWO_RANKS)
    subprocess.run(command(config), cwd=ROOT, check=True, capture_output=True)
    return trained_steps(folder)


@pytest.mark.slow
def test_interrupted_once_it_saves_and_a_resumed_run_ends_as_if_never_stopped(
    tmp_path: Path, tiny_model_folder: Path, never_stopped: list[dict[str, object]]
) -> None:
    config = write_config(tmp_path, tiny_model_folder, **TWO_RANKS)
    with running(config) as process:
        wait_for_line(process, "step  2/")
        below = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "checkpoint.resume=auto" in output
    assert_gone(below)
    assert complete_checkpoints(tmp_path / "runs" / "test" / "checkpoints")

    subprocess.run(command(config, "checkpoint.resume=auto"), cwd=ROOT, check=True, capture_output=True)
    assert trained_steps(tmp_path) == never_stopped


def test_interrupted_twice_it_ends_at_once(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = write_config(tmp_path, tiny_model_folder, **{"evaluation": {}})
    judging, _ = hold_judgement(tmp_path, 8)  # of the first step, behind those by which the judger proves itself
    with running(config, "task.judger_config.request_timeout=600") as process:
        wait_for_file(judging)
        below = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        wait_for_line(process, "SIGINT: stopping after this step")  # two at once would be one
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=120)[0]
    assert process.returncode == -signal.SIGINT, shown
    assert_gone(below)


HOLDING = """
import itertools, pathlib, time

calls = itertools.count(1)
judging, may_end = map(pathlib.Path, {files})

def by_length(response, label, extra_info):
    if next(calls) == {number}:
        judging.touch()
        while not may_end.exists():
            time.sleep(0.01)
    return {{"score": float(len(response) % 2)}}
"""


def hold_judgement(folder: Path, number: int) -> tuple[Path, Path]:
    """Have one judgement of a run leave the first file when it begins, and wait for the second."""
    judging, may_end = folder / "judging", folder / "may_end"
    code = HOLDING.format(files=[str(judging), str(may_end)], number=number)
    (folder / "rewards.py").write_text(code, encoding="utf-8")
    return judging, may_end


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come within 120 s"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_and_ends_as_if_never_stopped(
    tmp_path: Path, tiny_model_folder: Path, never_stopped: list[dict[str, object]]
) -> None:
    config = write_config(tmp_path, tiny_model_folder, **TWO_RANKS)
    with running(config) as process:
        wait_for_line(process, "step  3/")
        below = children_of(process.pid)
        assert len(below) >= 6, [describe(pid) for pid in below]
        process.kill()  # wherever it is after its third step
        process.wait()
        assert_gone(below)

    subprocess.run(command(config, "checkpoint.resume=auto"), cwd=ROOT, check=True, capture_output=True)
    assert trained_steps(tmp_path) == never_stopped


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_whatever_process_is_killed_every_prompt_is_trained_once(
    mode: str, tmp_path: Path, tiny_model_folder: Path
) -> None:
    changes: dict[str, object] = {"trainer.mode": mode, "evaluation": {}, "checkpoint": {"every_steps": 4}}
    if mode != "sync":
        changes["task.produce_strategy_config"] = {"type": "async", "max_staleness": 1, "enable_partial_rollout": True}
    config = write_config(tmp_path, tiny_model_folder, **changes, **{"trainer.num_steps": 48})
    resume = "checkpoint.resume=auto"
    for number, victim in enumerate(("rollout/0", "judger/by_length/0", "engine/0", "the driver")):
        with running(config, resume, f"trainer.num_steps={12 * (number + 1)}") as process:
            wait_for_line(process, f"step {12 * number + 2 + number:>2}/")
            os.kill(process.pid if victim == "the driver" else pid_of(process, victim), signal.SIGKILL)
            output = process.communicate(timeout=120)[0]
        assert (process.returncode == 0) == (number < 2), f"{victim} was killed:\n{output}"
    subprocess.run(command(config, resume), cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "test" / "trained.jsonl").read_text().splitlines()]
    assert [line["uid"] for line in lines] == [f"addition-{n}" for n in range(48 * 4)]
    assert [line["step"] for line in lines] == [1 + n // 4 for n in range(48 * 4)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_a_hub_that_never_answers_is_asked_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    config = write_config(tmp_path, Path("some/model"), evaluation={})
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE")
        with running(config) as process:
            asked, _ = hub.accept()
            with asked:
                below = children_of(process.pid)
                process.send_signal(number)
                output = process.communicate(timeout=40)[0]
    assert process.returncode == 130, output
    assert "stopping before the first step" in output
    assert_gone(below)


def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = write_config(tmp_path, tiny_model_folder, **{"trainer.num_steps": 1000, "evaluation": {}})
    with running(config) as process:
        wait_for_line(process, "step    1/")
        os.kill(pid_of(process, "engine/0"), signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "engine/0" in output
    assert "SIGKILL" in output


def test_a_killed_replica_is_replaced_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    config = write_config(tmp_path, tiny_model_folder, **{"trainer.num_steps": 4, "evaluation": {}})
    judging, may_end = hold_judgement(tmp_path, 24)  # of the second step
    with running(config) as process:
        wait_for_file(judging)
        os.kill(pid_of(process, "rollout/0"), signal.SIGKILL)
        may_end.touch()
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "step 4/4" in output


def pid_of(process: subprocess.Popen[str], actor: str) -> int:
    """The child whose process title or log names the actor."""
    log = f"{actor}.log"
    for pid in children_of(process.pid):
        try:
            target = os.readlink(f"/proc/{pid}/fd/1")
            title = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if target.endswith(log) or title == actor:
            return pid
    raise AssertionError(f"no process of {actor} among {[describe(pid) for pid in children_of(process.pid)]}")


def test_a_folder_in_use_is_refused_with_the_owner(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = write_config(tmp_path, tiny_model_folder, **{"trainer.num_steps": 1000, "evaluation": {}})
    with running(config) as process:
        wait_for_line(process, "[")
        second = subprocess.run(command(config), cwd=ROOT, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert f"in use by process {process.pid}" in second.stderr
