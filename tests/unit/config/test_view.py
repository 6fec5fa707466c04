"""What is shown of a run's folder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.build import make_state
from xrl_lite.cli import EXIT_ERROR, EXIT_USAGE, main
from xrl_lite.data import RolloutState, Status
from xrl_lite.replay_buffer import PromptGroup, SQLiteStore
from xrl_lite.trainer.base import rollout_record
from xrl_lite.trainer.run_folder import BUFFER, RunFolder


def attempt(group: int, number: int, score: float | None) -> RolloutState:
    reward = None if score is None else {"score": score}
    status = Status.FAILED if score is None else Status.COMPLETED
    error = "the judger timed out" if score is None else None
    return make_state(
        response=f"answer {number}",
        task_name="sums",
        group_id=group,
        rollout_id=number,
        reward=reward,
        status=status,
        error_msg=error,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of three steps; two groups in each."""
    folder = RunFolder(tmp_path / "run")
    (folder.path / "config.yaml").write_text("name: run\n")
    for step in (1, 2, 3):
        record = {"reward": 0.5 * step, "loss": 0.1, "judger/sums/ok": 3, "judger/sums/timeout": 1}
        folder.write_metrics({"step": step, **record})
        groups = (2 * step - 2, 2 * step - 1)
        states = [attempt(group, 10 * group + n, [0.0, 1.0, None][n]) for group in groups for n in range(3)]
        folder.write_rollouts(step, [rollout_record(state) for state in states])
    folder.write_metrics({"step": 3, "eval/greedy/accuracy": 0.75})
    folder.close()
    return folder.path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["view", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_run_is_its_steps_evaluations_and_judgements(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, run)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step ")] == ["1", "2", "3"]
    assert "held-out accuracy after step 3: greedy 0.750" in text
    (counts,) = (line for line in text.splitlines() if "sums" in line)
    assert [word for word in counts.split() if word.isdigit()] == ["9", "3"]


@pytest.mark.parametrize("name", ["run", "exp#1", "a?b", "50%41", "two words"])
async def test_what_became_of_groups_is_counted_from_the_buffer(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run.rename(run.with_name(name))
    store = SQLiteStore(run / BUFFER)
    for number in range(3):
        place = {"uid": f"sums-{number}", "ordinal": number, "partition_id": "train", "global_steps": 1}
        store.admit([PromptGroup(**place, task_name="sums", states=[attempt(number, 0, 1.0)])], {})
    await store.close()
    (line,) = (line for line in shown(capsys, run).splitlines() if "pending" in line)
    assert "3" in line.split()
    assert [path.name for path in run.parent.iterdir()] == [name]


@pytest.mark.parametrize("content", [b"", b"not a database of SQLite, but long enough to be taken for one" * 20])
def test_a_buffer_that_cannot_be_read_is_named(content: bytes, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / BUFFER).write_bytes(content)
    assert f"cannot be read from {run / BUFFER}: " in shown(capsys, run, code=EXIT_ERROR)


def test_the_accuracy_of_a_data_source_does_not_stand_for_the_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(run)
    scores = {"greedy": 0.5, "greedy/a/b": 1.0, "greedy/c": 0.0, "sampled": 0.25}
    folder.write_metrics({"step": 4, **{f"eval/{name}/accuracy": score for name, score in scores.items()}})
    folder.close()
    line = "held-out accuracy after step 4: greedy 0.500, sampled 0.250, greedy/a/b 1.000, greedy/c 0.000"
    assert line in shown(capsys, run)


def test_attempts_come_in_the_order_that_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answers(*options: object) -> list[str]:
        words = shown(capsys, run, "--step", -1, *options).split()
        return [number for word, number in itertools.pairwise(words) if word == "answer" and number.isdigit()]

    assert answers() == ["40", "41", "42", "50", "51", "52"]
    assert answers("--order", "best") == ["41", "51", "40", "50", "42", "52"]
    assert answers("--order", "worst", "--num-shown", 2) == ["40", "50"]


def test_what_no_terminal_can_show_is_escaped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(run)
    folder.write_rollouts(4, [rollout_record(attempt(9, 9, 1.0).model_copy(update={"response": "half \ud83d"}))])
    folder.close()
    assert r"half \ud83d" in shown(capsys, run, "--step", 4)


@pytest.mark.parametrize("name", ["3", "sums-3"])
def test_a_group_is_found_in_whatever_step_it_was(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, run, "--group", name)
    assert "step 2, attempt 31: 1" in text
    assert "step 2, attempt 32: the judger timed out" in text
    assert "answer 30" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "9"], "no attempts of step 9. It has those of 1 to 3"),
        (["--step", "-4"], "no attempts of step -4"),
        (["--group", "77"], "no attempts of a group '77'"),
        (["--group", "3", "--num-shown", "0"], "--num-shown must be at least 1, got 0"),
        (["--step", "-1", "--num-shown", "-2"], "--num-shown must be at least 1, got -2"),
    ],
)
def test_what_is_not_there_is_said(
    options: list[str], words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in shown(capsys, run, *options, code=EXIT_USAGE)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not the folder of a run" in shown(capsys, tmp_path, code=EXIT_USAGE)


def test_a_run_that_goes_on_can_be_looked_at(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = RunFolder(run)
    with owner.metrics_file.open("a") as lines:
        lines.write(json.dumps({"step": 4, "loss": 0.1})[:-3])  # a line that is being written
    assert "step 3" in shown(capsys, run)
    owner.close()
