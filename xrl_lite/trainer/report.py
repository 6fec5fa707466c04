# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a person sees of a run: a line per step, tables of completions, and the learning curve at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from xrl_lite.data import RolloutState

_STEP_COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("±", "reward_std", "{:.2f}"),
    ("flat", "frac_reward_zero_std", "{:.0%}"),
    ("len", "completions/mean_length", "{:.1f}"),
    ("loss", "loss", "{:+.4f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("gap", "logprob_gap/mean", "{:.1e}"),
    ("old", "off_policy/max", "{:.0f}"),
    ("tok/s", "time/tokens_per_s", "{:.0f}"),
    ("s", "time/step", "{:.2f}"),
)
_SPLIT = ("generate", "judge", "wait_batch", "pause", "train", "sync", "other")
_ACCURACY = "/accuracy"
_MAX_CELL = 160


class Reporter(Protocol):
    """Is told what happens."""

    def note(self, text: str) -> None:
        """Say something that happens once."""
        ...

    def start(self, *, num_steps: int, first_step: int) -> None:
        """Training begins."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A step ended."""
        ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation ended."""
        ...

    def completions(self, step: int, states: Sequence[RolloutState]) -> None:
        """Show sample completions."""
        ...

    def finish(self) -> None:
        """No step will follow; stop drawing."""
        ...

    def summary(self, records: Sequence[dict[str, float]], folder: Path) -> None:
        """The run ended; `records` are the lines of metrics.jsonl, `folder` is the run's."""
        ...


class ConsoleReporter:
    """Lines on any output; on a terminal also a progress bar with the time left.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._num_steps = 0
        self._started = time.perf_counter()

    def note(self, text: str) -> None:
        self._console.print(Text(f"[{time.perf_counter() - self._started:6.1f} s] {text}"))

    def start(self, *, num_steps: int, first_step: int) -> None:
        self._num_steps = num_steps
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._progress.add_task("steps", total=num_steps, completed=first_step - 1)
            self._progress.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        width = len(str(self._num_steps))
        self._console.print(Text(f"step {step:>{width}}/{self._num_steps}  {step_line(metrics)}"))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._console.print(Text(f"held-out accuracy after step {step}: {accuracies(metrics)}", style="bold"))

    def completions(self, step: int, states: Sequence[RolloutState]) -> None:
        table = Table(title=f"completions of step {step}", title_justify="left")
        columns, rows = completion_table(states)
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(shorten(cell)) for cell in row))
        self._console.print(table)

    def finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, records: Sequence[dict[str, float]], folder: Path) -> None:
        curves = learning_curves(records)
        if curves:
            self._console.print(Text.from_ansi(plot(curves, width=min(self._console.width, 100))))
            _save_png(curves, folder / "learning_curve.png")
        for label, (_, values) in curves.items():
            self._console.print(Text(f"{label}: {values[0]:.3f} -> {values[-1]:.3f}", style="bold"))
        self.note(f"everything is in {folder}")


def step_line(metrics: dict[str, float]) -> str:
    """Return what a step's line says, from a record of metrics.jsonl."""
    parts = [f"{label} {form.format(metrics[name])}" for label, name, form in _STEP_COLUMNS if name in metrics]
    split = " ".join(f"{name} {metrics[f'time/{name}']:.2f}" for name in _SPLIT if f"time/{name}" in metrics)
    return f"{'  '.join(parts)} ({split})"


def accuracies(metrics: dict[str, float]) -> str:
    """Return the accuracies in a record of metrics.jsonl, with their names; empty if it has none.

    Those of single data sources stand behind those of all rows.
    """
    found = {_name_of_accuracy(name): value for name, value in metrics.items() if name.endswith(_ACCURACY)}
    return ", ".join(f"{name} {found[name]:.3f}" for name in sorted(found, key=lambda name: "/" in name))


def _name_of_accuracy(metric: str) -> str:
    return metric.removeprefix("eval/").removesuffix(_ACCURACY)


def completion_table(states: Sequence[RolloutState]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return column names and rows of a table of sample completions."""
    rows = [
        [
            str(state.message[-1]["content"]),
            str(state.response),
            str((state.reward_model or {}).get("ground_truth")),
            str(state.reward["score"] if state.reward else state.error_msg or state.status.value),
        ]
        for state in states
    ]
    return ("prompt", "completion", "ground truth", "score"), rows


class QuietReporter(ConsoleReporter):
    """Says what happens once, and draws no line per step: for runs whose numbers go to other loggers only."""

    def start(self, *, num_steps: int, first_step: int) -> None:
        """Draw no progress."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Draw no line."""


def learning_curves(records: Sequence[dict[str, float]]) -> dict[str, tuple[list[float], list[float]]]:
    """Return steps and values of reward and accuracies, by name, from the records of metrics.jsonl."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            label = "train reward" if name == "reward" else _name_of_accuracy(name)
            if name == "reward" or name.endswith(_ACCURACY):
                steps, values = curves.setdefault(label, ([], []))
                steps.append(record["step"])
                values.append(value)
    return curves


def plot(curves: dict[str, tuple[list[float], list[float]]], *, width: int) -> str:
    """Return a drawing of `learning_curves` for a terminal, so many characters wide."""
    import plotext  # the end of a run is early enough

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, 18)
    plotext.title("reward and held-out accuracy")
    plotext.xlabel("step")
    for (label, (steps, values)), marker in zip(curves.items(), "·o+x*#", strict=False):
        plotext.plot(steps, values, label=label, marker=marker)
    return plotext.build()


def _save_png(curves: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, (steps, values) in curves.items():
        axes.plot(steps, values, label=label, linewidth=1 if label == "train reward" else 2)
    axes.set_xlabel("step")
    axes.set_ylabel("reward, accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def shorten(text: str) -> str:
    """Return a text, or as much of it as a cell of a table holds."""
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 2]} …"
