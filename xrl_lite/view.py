"""What `xrl-lite view` shows of a run, read from its folder, also while the run goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xrl_lite.errors import ConfigError, StorageError
from xrl_lite.trainer.report import accuracies, learning_curves, plot, shorten, step_line
from xrl_lite.trainer.run_folder import BUFFER, METRICS, read_lines, rollout_files

_NUM_STEPS_SHOWN = 20
_ORDERS: dict[str, Callable[[dict[str, Any]], float]] = {
    "drawn": lambda attempt: 0.0,
    "best": lambda attempt: -_score(attempt, missing=float("-inf")),
    "worst": lambda attempt: _score(attempt, missing=float("inf")),
    "longest": lambda attempt: -len(attempt["response_ids"] or ()),
}


def overview(run: Path, *, width: int) -> Iterator[RenderableType]:
    """Yield steps, evaluations, learning curve, and what became of the groups of a run.

    Args:
        run: Folder of the run.
        width: Characters in a line of the curve.

    Raises:
        ConfigError: there is no run in the folder.
        StorageError: its buffer cannot be read.
    """
    records = list(read_lines(_existing(run) / METRICS))
    if not records:
        yield Text(f"{run} has no step yet; {run / 'logs' / 'driver.log'} says what it is doing.")
        return
    steps = [record for record in records if "loss" in record or "skipped_step" in record]
    for record in _spread(steps, _NUM_STEPS_SHOWN):
        yield Text(f"step {record['step']:>{len(str(steps[-1]['step']))}}  {step_line(record)}")
    for record in records:
        if found := accuracies(record):
            yield Text(f"held-out accuracy after step {record['step']}: {found}", style="bold")
    if curves := learning_curves(records):
        yield Text.from_ansi(plot(curves, width=width))
    yield from _outcomes(records)
    yield from _groups(run)


def attempts(
    run: Path, *, step: int | None = None, group: str | None = None, order: str = "drawn", num_shown: int = 16
) -> Iterator[RenderableType]:
    """Yield attempts that were trained on: a table of a step's, or those of one group in full.

    Args:
        run: Folder of the run.
        step: The step; negative counts from the last. Without it, all steps are searched for the group.
        group: Number or uid of a group.
        order: drawn, best, worst or longest first.
        num_shown: How many at most; at least 1.

    Raises:
        ConfigError: the run kept no attempts, or not those.
    """
    if num_shown < 1:
        raise ConfigError(f"--num-shown must be at least 1, got {num_shown}.")
    files = rollout_files(_existing(run))
    if not files:
        raise ConfigError(f"{run} has no rollouts/step_*.jsonl: no step was made, or report.save_rollouts was false.")
    if step is not None:
        step = list(files)[step] if -len(files) <= step < 0 else step
        if step not in files:
            raise ConfigError(f"{run} has no attempts of step {step}. It has those of {min(files)} to {max(files)}.")
        files = {step: files[step]}
    found = [(number, attempt) for number, file in files.items() for attempt in read_lines(file)]
    if group is not None:
        found = [(number, attempt) for number, attempt in found if group in _names(attempt)]
    if not found:
        raise ConfigError(f"{run} has no attempts of a group {group!r}; `--step -1` shows those of the last step.")
    found.sort(key=lambda item: _ORDERS[order](item[1]))  # a stable sort: equals stay as they were drawn
    shown = found[:num_shown]
    if group is None:
        yield _attempt_table(step, [attempt for _, attempt in shown])
    else:
        yield _text_panel("prompt", _conversation(shown[0][1]["prompt"]))
        for number, attempt in shown:
            yield _text_panel(
                f"step {number}, attempt {attempt['rollout_id']}: {_verdict(attempt)}", attempt["response"]
            )
    if len(shown) < len(found):
        yield Text(f"{len(shown)} of {len(found)}; --num-shown shows more.")


def _existing(run: Path) -> Path:
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not the folder of a run: there is no config.yaml in it.")
    return run


def _spread(items: Sequence[dict[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    """Yield at most so many items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        yield from items
    else:
        yield from (items[round(place * (len(items) - 1) / (most - 1))] for place in range(most))


def _outcomes(records: Sequence[dict[str, Any]]) -> Iterator[Table]:
    totals: dict[str, dict[str, float]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("judger/"):
                judger, _, outcome = name.removeprefix("judger/").rpartition("/")
                counts = totals.setdefault(judger, {})
                counts[outcome] = counts.get(outcome, 0) + value
    if totals:
        outcomes = list(dict.fromkeys(outcome for counts in totals.values() for outcome in counts))
        table = Table("judger", *outcomes, title="judgements", title_justify="left")
        for judger, counts in totals.items():
            table.add_row(judger, *(f"{counts.get(outcome, 0):.0f}" for outcome in outcomes))
        yield table


def _groups(run: Path) -> Iterator[Table]:
    """Count the groups in the buffer's file by what became of them."""
    file = run / BUFFER
    if not file.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)) as connection:
            rows = connection.execute(
                "SELECT task_name, status, reason, count(*), sum(num_tokens) FROM groups "
                "GROUP BY task_name, status, reason ORDER BY task_name, count(*) DESC"
            ).fetchall()
    except sqlite3.Error as error:
        raise StorageError(f"What became of the groups cannot be read from {file}: {error}") from error
    if rows:
        table = Table("task", "became", "why", "groups", "tokens", title="groups of prompts", title_justify="left")
        for task, status, reason, count, tokens in rows:
            table.add_row(Text(task), status, Text(shorten(reason)), str(count), str(tokens))
        yield table


def _attempt_table(step: int | None, found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"attempts of step {step}", title_justify="left")
    for name in ("group", "score", "tokens", "ended by", "prompt", "response", "ground truth"):
        table.add_column(name, overflow="fold")
    for attempt in found:
        cells = (
            *(str(attempt["group_id"]), _verdict(attempt), str(len(attempt["response_ids"] or ()))),
            *(attempt["finish_reason"] or attempt["status"], str(attempt["prompt"][-1]["content"])),
            *(attempt["response"] or "", str(attempt["ground_truth"])),
        )
        table.add_row(*(Text(shorten(cell)) for cell in cells))
    return table


def _text_panel(title: str, text: str | None) -> Panel:
    return Panel(Text(text or ""), title=Text(title), title_align="left")


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _names(attempt: dict[str, Any]) -> tuple[str, str]:
    return str(attempt["group_id"]), f"{attempt['task']}-{attempt['group_id']}"


def _verdict(attempt: dict[str, Any]) -> str:
    if attempt["reward"] is None:
        return attempt["error"] or attempt["status"]
    return f"{attempt['reward']['score']:g}"


def _score(attempt: dict[str, Any], *, missing: float) -> float:
    return missing if attempt["reward"] is None else float(attempt["reward"]["score"])
