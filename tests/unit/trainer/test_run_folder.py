"""One run per folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from xrl_lite.errors import RunError
from xrl_lite.trainer.run_folder import RunFolder, read_lines, rollout_files


def test_a_folder_in_use_is_refused_and_free_after_closing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match=r"in use by process \d+"):
        RunFolder(tmp_path / "run")
    folder.close()
    RunFolder(tmp_path / "run").close()


def test_a_new_run_does_not_write_over_an_old_one(tmp_path: Path) -> None:
    for wanted in ("run", "run-2", "run-3"):
        folder = RunFolder.unused(tmp_path / "run")
        assert folder.path.name == wanted
        (folder.path / "config.yaml").write_text("")
        folder.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write to the run folder"):
        RunFolder(tmp_path / "file" / "run")


def test_what_comes_after_a_checkpoint_is_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.write_metrics({"step": step, "reward": 0.5})
        folder.write_rollouts(step, [{"step": step}])
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 4, "rew')
    folder.forget_after(2)
    assert [record["step"] for record in folder.metrics()] == [1, 2]
    assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    folder.close()


def test_a_copy_of_a_file_of_attempts_is_left_alone(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path / "run")) as folder:
        for step in (1, 2):
            folder.write_rollouts(step, [{"step": step}])
        copy = folder.path / "rollouts" / "step_000002_old.jsonl"
        copy.write_text("{}\n")
        assert list(rollout_files(folder.path)) == [1, 2]
        folder.forget_after(1)
        assert list(rollout_files(folder.path)) == [1]
        assert copy.exists()


def test_lines_are_read_whatever_their_texts_hold(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"text": "one\u2028two\x85three"}\n{"text": "torn', encoding="utf-8")
    assert list(read_lines(file)) == [{"text": "one\u2028two\x85three"}]
