"""What can be checked before anything starts: rows, judger, model folder, CPU slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xrl_lite.actors.machine import MILLI, milli_cpus, usable_milli_cpus, visible_accelerators
from xrl_lite.agent_loop import TaskSpecConfig
from xrl_lite.agent_loop.base import check_batch_judge
from xrl_lite.config.devices import plan_devices
from xrl_lite.config.run_config import RunConfig
from xrl_lite.data import Row, load_rows
from xrl_lite.data.tokenizer import check_model_folder
from xrl_lite.engine.tiny_model_config import cached_tiny_model
from xrl_lite.errors import ConfigError, ResourceError
from xrl_lite.judger import AnyJudgerConfig
from xrl_lite.judger.config import leaves
from xrl_lite.judger.data_sources import check_rows, judger_for
from xrl_lite.lazy import is_installed
from xrl_lite.registry import load_object
from xrl_lite.replay_buffer import load_buffer_class
from xrl_lite.trainer.checkpoint import load_callback_class

if TYPE_CHECKING:
    from xrl_lite.config.serve_config import ServeConfig

_ACTORS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class CheckedTask:
    """Rows and judger of a task."""

    config: TaskSpecConfig
    """Its settings."""
    rows: list[Row]
    """Rows to train on."""
    judger_config: AnyJudgerConfig
    """Its judger."""


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """Rows and judgers of a run."""

    tasks: list[CheckedTask]
    """What is trained on; the first task's loop and judger are evaluated with."""
    evaluation: list[Row]
    """Held-out rows; empty without evaluation."""

    @property
    def train(self) -> list[Row]:
        """Rows of all tasks."""
        return [row for task in self.tasks for row in task.rows]

    @property
    def judger_configs(self) -> list[AnyJudgerConfig]:
        """The judgers; tasks with equal settings share one."""
        different: list[AnyJudgerConfig] = []
        for task in self.tasks:
            if task.judger_config not in different:
                different.append(task.judger_config)
        return different


@dataclass(frozen=True, kw_only=True)
class PlannedActor:
    """An actor that the run will start."""

    name: str
    num_cpus: float
    num_threads: int | None


def check_data(config: RunConfig) -> CheckedData:
    """Read and check all rows, and find the judger.

    Raises:
        ConfigError: rows are missing or wrong, or no judger fits them.
    """
    check_user_code(config)
    evaluation_rows = load_rows(config.evaluation.data) if config.evaluation.data else []
    tasks: list[CheckedTask] = []
    for task in config.tasks:
        rows = load_rows(task.sampler_config.data)
        judged = [rows] if tasks else [rows, evaluation_rows]
        judger_config = task.judger_config or judger_for(row.data_source for part in judged for row in part)
        for part in judged:
            check_rows(judger_config, part)
            task.agent_loop_config.check_rows(part)
        check_batch_judge(task.agent_loop_config, judger_config)
        tasks.append(CheckedTask(config=task, rows=rows, judger_config=judger_config))
    data = CheckedData(tasks=tasks, evaluation=evaluation_rows)
    names = [leaf.judger_name for judger in data.judger_configs for leaf in leaves(judger)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"Two judgers with different settings have the name {twice[0]!r}. Give each its own name.")
    return data


def check_user_code(config: RunConfig) -> None:
    """Load what the settings name by path and is needed later only.

    Raises:
        PluginError: it cannot be loaded.
        ConfigError: it is not what it should be.
    """
    load_buffer_class(config.replay_buffer)
    load_callback_class(config.checkpoint.callback)
    if config.agent_loop_manager.agent_loop_manager_class:
        load_object(config.agent_loop_manager.agent_loop_manager_class)
    for task in config.tasks:
        for path in (
            task.produce_strategy_config.is_valid_sample_fn,
            task.produce_strategy_config.should_continue_fn,
        ):
            if path is not None and not callable(load_object(path)):
                raise ConfigError(f"Task {task.task_name}: {path} is no function.")


def check_installed(modules: Sequence[str] = ("torch", "transformers"), *, extra: str = "train") -> None:
    """Check that what a run needs beyond the core is installed, without importing it.

    Raises:
        ConfigError: it is not; says how to install it.
    """
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        raise ConfigError(f"A run needs {' and '.join(missing)}. Install them with: pip install 'xrl-lite[{extra}]'")


def check_model(config: RunConfig | ServeConfig) -> None:
    """Check what a model folder holds; a hub id is checked when it is loaded.

    Raises:
        ConfigError: it is not there, or has no config.json, no tokenizer or no chat template; or peft is missing.
    """
    if isinstance(config, RunConfig) and any(engine.lora is not None for _, engine in config.engines):
        check_installed(("peft",), extra="lora")
    if isinstance(config, RunConfig) and config.has_critic and config.critic.path is not None:
        _require_folder("critic.path", config.critic.path)
    if config.model.path is not None:
        _require_folder("model.path", config.model.path)
        if Path(config.model.path).exists():
            check_model_folder(Path(config.model.path))


def _require_folder(setting: str, path: str) -> None:
    """Refuse a path that leads nowhere and cannot be meant as a hub id."""
    is_hub_id = path.count("/") <= 1 and not path.startswith(("/", ".", "~"))
    if not is_hub_id and not Path(path).exists():
        raise ConfigError(
            f"{setting} {path}: there is no such folder (looked for {Path(path).resolve()}). Give a Hugging Face "
            f"folder, or a hub id such as Qwen/Qwen3-0.6B."
        )


def describe_model(config: RunConfig) -> str:
    """Say where the model comes from."""
    if config.model.build is None:
        return f"model {config.model.path}"
    cached = cached_tiny_model(config.model.build, config.model.cache_dir.expanduser())
    return f"model from {cached}" if cached else "model to be built and warmed up first"


def planned_actors(config: RunConfig, judger_configs: Sequence[AnyJudgerConfig]) -> Iterator[PlannedActor]:
    """Yield every actor of the run with what it takes."""
    for name, engine in config.engines:
        for rank in range(engine.num_ranks):
            yield PlannedActor(name=f"{name}/{rank}", num_cpus=engine.num_cpus, num_threads=engine.num_threads)
    for number in range(config.rollout.num_replicas):
        yield PlannedActor(
            name=f"rollout/{number}", num_cpus=config.rollout.num_cpus, num_threads=config.rollout.num_threads
        )
    for place, task in enumerate(config.tasks, start=1):
        for name, num_cpus in task.agent_loop_config.planned_actors():
            label = name if place == 1 else f"{name} ({task.task_name})"
            yield PlannedActor(name=label, num_cpus=num_cpus, num_threads=max(1, int(num_cpus)))
    for judger in (leaf for judger_config in judger_configs for leaf in leaves(judger_config)):
        resources = judger.cpu_resources
        for number in range(resources.num_workers if resources else 0):
            assert resources is not None, "there are workers"
            yield PlannedActor(
                name=f"judger/{judger.judger_name}/{number}",
                num_cpus=resources.num_cpus_per_worker,
                num_threads=max(1, int(resources.num_cpus_per_worker)),
            )


def available_cpus(config: RunConfig) -> float:
    """CPU slots that the run may hand out."""
    return config.num_cpus or usable_milli_cpus() / MILLI


def check_devices(config: RunConfig) -> None:
    """Check that the machine has the accelerators that training and generation need.

    Raises:
        ResourceError: it has not; says what needs them.
    """
    plan_devices(config, len(visible_accelerators().names))


def check_resources(config: RunConfig, judger_configs: Sequence[AnyJudgerConfig]) -> None:
    """Check that the actors of the run fit on the machine together.

    Raises:
        ResourceError: they do not; lists what each asks for.
    """
    actors = list(planned_actors(config, judger_configs))
    asked, available = sum(milli_cpus(actor.num_cpus) for actor in actors) / MILLI, available_cpus(config)
    if asked > available:
        shown = [f"  {actor.name}  {actor.num_cpus:g}" for actor in actors[:_ACTORS_SHOWN]]
        more = [f"  and {len(actors) - _ACTORS_SHOWN} more"] if len(actors) > _ACTORS_SHOWN else []
        raise ResourceError(
            f"The actors of the run ask for {asked:g} CPU slots, there are {available:g}:\n"
            + "\n".join([*shown, *more])
            + "\nLower num_workers or num_cpus_per_worker of the judger, the agent loop or its tools, num_replicas or "
            "num_cpus of the rollout."
        )
