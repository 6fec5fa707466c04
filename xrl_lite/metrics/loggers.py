"""Where metrics go, by name. A logger is small: numbers of a step, tables, an end.

What a logger needs is imported when it is opened; whether it is installed is checked before anything costly starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from xrl_lite.errors import ConfigError, UnknownNameError, did_you_mean
from xrl_lite.lazy import is_installed
from xrl_lite.log import get_logger

logger = get_logger(__name__)

ALWAYS = ("console", "jsonl")
"""Not opened here: lines on the console, and metrics.jsonl, which a run needs itself."""


class MetricLogger(Protocol):
    """Takes metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step; may be called several times for one."""
        ...

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Take a table, of sample completions for example."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@dataclass(frozen=True)
class LoggerRun:
    """What a logger is told of the run."""

    name: str
    """Name of the run."""
    project: str
    """What it belongs to."""
    folder: Path
    """Folder of the run; a logger that writes files has a folder of its own in it."""
    settings: Mapping[str, Any]
    """Settings of the run, as JSON has them."""
    options: Mapping[str, Any]
    """Settings of the logger, handed to the library."""


class TensorBoardLogger:
    """Event files in ``tensorboard/`` of the run's folder: ``tensorboard --logdir runs``."""

    def __init__(self, run: LoggerRun) -> None:
        writer = import_module("tensorboardX").SummaryWriter
        self._writer: Any = writer(logdir=str(run.folder / "tensorboard"), **run.options)
        self._writer.add_text("settings", f"```\n{dict(run.settings)}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text(name, _markdown(columns, rows), step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Weights & Biases; ``options: {mode: offline}`` needs no network, ``wandb sync`` uploads it later."""

    def __init__(self, run: LoggerRun) -> None:
        self._wandb: Any = import_module("wandb")
        options = {"id": run.name, "resume": "allow", **run.options}
        self._run = self._wandb.init(
            project=run.project, name=run.name, dir=str(run.folder), config=dict(run.settings), **options
        )
        # a resumed run goes back to its checkpoint: wandb would refuse steps that it has seen
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({"step": step, name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def close(self) -> None:
        self._run.finish()
        if self._wandb.run is None:  # no other run of this process needs the service, a process that would stay
            self._wandb.teardown()


class TrackioLogger:
    """Trackio: wandb's interface, kept on this machine."""

    def __init__(self, run: LoggerRun) -> None:
        self._trackio: Any = import_module("trackio")
        self._run: Any = self._trackio.init(
            project=run.project, name=run.name, config=dict(run.settings), resume="allow", **run.options
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        frame = import_module("pandas").DataFrame([list(row) for row in rows], columns=list(columns))
        self._run.log({name: self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow; ``options: {tracking_uri: ...}``, or ``mlflow.db`` in the run's folder."""

    def __init__(self, run: LoggerRun) -> None:
        client = import_module("mlflow.tracking").MlflowClient
        options = dict(run.options)
        uri = options.pop("tracking_uri", f"sqlite:///{run.folder / 'mlflow.db'}")
        self._client: Any = client(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(
                run.project, artifact_location=(run.folder / "mlflow").resolve().as_uri()
            )
        )
        self._run_id: str = self._client.create_run(experiment_id, run_name=run.name, **options).info.run_id
        for name, value in _flat(run.settings):
            self._client.log_param(self._run_id, name, str(value)[:_MAX_PARAM])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        text = _markdown(columns, rows)
        self._client.log_text(self._run_id, text, f"{name.replace('/', '_')}_{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


_MAX_PARAM = 500


@dataclass(frozen=True)
class LoggerKind:
    """A logger that can be named."""

    make: Any
    """Its class."""
    module: str
    """What must be installed."""
    extra: str
    """How to install it."""


LOGGERS: dict[str, LoggerKind] = {
    "tensorboard": LoggerKind(TensorBoardLogger, "tensorboardX", "xrl-lite[tensorboard]"),
    "wandb": LoggerKind(WandbLogger, "wandb", "xrl-lite[wandb]"),
    "trackio": LoggerKind(TrackioLogger, "trackio", "xrl-lite[trackio]"),
    "mlflow": LoggerKind(MlflowLogger, "mlflow", "xrl-lite[mlflow]"),
}
"""Loggers by name, next to console and jsonl."""


class MetricLoggers:
    """Hands metrics to several loggers. One that fails is left out from then on, with a warning: it is not the run.

    Args:
        loggers: By name.
    """

    def __init__(self, loggers: Mapping[str, MetricLogger]) -> None:
        self._loggers = dict(loggers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the numbers of a step; what is no number goes nowhere."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._each("log", step, numbers)
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                self._each("log_table", step, name, ("value", "count"), list(cast("Mapping[str, Any]", value).items()))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Take a table."""
        self._each("log_table", step, name, columns, rows)

    def close(self) -> None:
        """Write what is left."""
        self._each("close")
        self._loggers.clear()

    def __len__(self) -> int:
        return len(self._loggers)

    def _each(self, method: str, *arguments: Any) -> None:
        for name, one in list(self._loggers.items()):
            try:
                getattr(one, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - a library of somebody's must not end the run
                logger.warning("the logger %s failed and is left out from now on: %r", name, error)
                del self._loggers[name]


def check_loggers(names: Sequence[str]) -> None:
    """Check that loggers exist and are installed, without importing them.

    Raises:
        UnknownNameError: there is no logger of a name.
        ConfigError: one is not installed; says how to install it.
    """
    known = (*ALWAYS, *LOGGERS)
    for name in names:
        if name not in known:
            raise UnknownNameError(f"Unknown logger {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")
        if name in LOGGERS and not is_installed(LOGGERS[name].module):
            raise ConfigError(
                f"The logger {name} needs {LOGGERS[name].module}. Install it with: pip install '{LOGGERS[name].extra}'"
            )


def open_loggers(
    names: Sequence[str],
    *,
    name: str,
    project: str,
    folder: Path,
    settings: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> MetricLoggers:
    """Open the loggers of a run.

    Args:
        names: Which; console and jsonl are passed over.
        name: Name of the run.
        project: What it belongs to.
        folder: Folder of the run.
        settings: Settings of the run.
        options: Per logger, handed to its library.

    Raises:
        ConfigError: one cannot be opened.
    """
    check_loggers(names)
    opened: dict[str, MetricLogger] = {}
    for logger_name in names:
        if logger_name in ALWAYS:
            continue
        run = LoggerRun(name, project, folder, settings, (options or {}).get(logger_name, {}))
        try:
            opened[logger_name] = LOGGERS[logger_name].make(run)
        except Exception as error:
            MetricLoggers(opened).close()
            raise ConfigError(f"The logger {logger_name} cannot be opened: {error!r}") from error
    return MetricLoggers(opened)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat += _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat
