"""The folder of a run: who may write to it, and what lies where.

::

    runs/<name>/
        config.yaml          the resolved settings
        metrics.jsonl        a line per step and per evaluation
        trained.jsonl        a line per trained group: step, uid, task, row, policy_version [oldest, newest]
        rollouts/            step_*.jsonl: every trained attempt
        buffer.sqlite        everything that was generated (xrl_lite.replay_buffer.sqlite_store)
        events.jsonl         what happened, in its order (xrl_lite.replay_buffer.events)
        logs/                driver.log and one log per actor
        checkpoints/         step_*/, complete ones only
        learning_curve.png
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from xrl_lite.data.json_text import split_lines
from xrl_lite.errors import RunError
from xrl_lite.replay_buffer import PromptGroup

LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
BUFFER = "buffer.sqlite"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
CONFIG = "config.yaml"


class RunFolder:
    """A folder that this process alone writes to, until it closes it or ends, however it ends.

    Args:
        path: The folder; made if it does not exist.

    Raises:
        RunError: another process is using it; says which.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        self.logs = path / "logs"
        self.checkpoints = path / CHECKPOINTS
        self.metrics_file = path / METRICS
        self.trained_file = path / "trained.jsonl"

    @classmethod
    def unused(cls, path: Path) -> RunFolder:
        """Take `path`, or `path-2`, `path-3`, ... if it holds an earlier run.

        Raises:
            RunError: `path` is in use right now.
        """
        folder, number = cls(path), 1
        while folder.has_run:
            folder.close()
            number += 1
            folder = cls(path.with_name(f"{path.name}-{number}"))
        return folder

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / CONFIG).exists()

    def write_config(self, text: str) -> None:
        """Write config.yaml, in place of the one that is there."""
        _replace(self.path / CONFIG, text)

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        _append(self.metrics_file, [record])

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl; a torn last line is left out."""
        return read_lines(self.metrics_file)

    def write_trained(self, step: int, groups: Sequence[PromptGroup]) -> None:
        """Add the groups that a step was trained on to trained.jsonl."""
        records = [
            {
                "step": step,
                "uid": group.uid,
                "task": group.task_name,
                "row": group.row,
                "policy_version": [group.min_version, group.max_version],
            }
            for group in groups
        ]
        _append(self.trained_file, records)

    def trained(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of trained.jsonl; a torn last line is left out."""
        return read_lines(self.trained_file)

    def start_over(self) -> None:
        """Drop what an earlier run left that never came to a checkpoint."""
        self.forget_after(-1)

    def forget_after(self, step: int) -> None:
        """Drop what was written for steps after `step`: they will be run again."""
        for file in (self.metrics_file, self.trained_file):
            _keep_until(step, file)
        for written, file in rollout_files(self.path).items():
            if written > step:
                file.unlink()

    def write_rollouts(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write the attempts that a step was trained on."""
        file = self.path / "rollouts" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(record, default=str) + "\n" for record in records), encoding="utf-8")

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.close()


def rollout_files(folder: Path) -> dict[int, Path]:
    """Return the files of trained attempts in the folder of a run, by step, in order."""
    return paths_by_step(folder / "rollouts", suffix=".jsonl")


def paths_by_step(folder: Path, *, suffix: str = "") -> dict[int, Path]:
    """Return what is named ``step_<number><suffix>`` and nothing else, by step, in order."""
    name = re.compile(rf"step_(\d+){re.escape(suffix)}")
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := name.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _append(file: Path, records: Sequence[dict[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(record) + "\n" for record in records))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a .jsonl file; none if there is no such file, and a torn last line is left out."""
    if not file.exists():
        return
    for line in split_lines(file.read_text(encoding="utf-8")):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _keep_until(step: int, file: Path) -> None:
    if not file.exists():
        return
    kept = [record for record in read_lines(file) if record["step"] <= step]
    _replace(file, "".join(json.dumps(record) + "\n" for record in kept))


def _replace(file: Path, text: str) -> None:
    """Write a file aside and rename it, so that a kill leaves the old one or the new one."""
    aside = file.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


def _lock(path: Path) -> IO[str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"Cannot write to the run folder {path}: {error}. Choose another with output_dir.") from error
    try:
        # the kernel drops the lock with the process, so a killed run never blocks its folder
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise RunError(
            f"The run folder {path} is in use by process {owner}. Wait for it, stop it, or choose another name."
        ) from error
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
