"""The composition root: settings in, a running system out. This is the only place where parts are connected.

::

    rows --> Sampler --> AgentLoopManager --> agent loop --> RolloutController --> rollout/0..n   (actors)
                              |                   '--------> Judger ------------> judger/...      (actors)
                         ReplayBuffer
                              |
                          RLTrainer --> TrainingController --> engine/0..n                        (actors)
                              '-------> WeightSync: engine/0 ==> rollout/0..n

Everything that is not the driver is an actor of one `ActorSystem`, which ends them all.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeVar

import anyio

from xrl_lite.actors import ActorSystem, CPUResourceManager, clear_cpu_resource_manager, set_cpu_resource_manager
from xrl_lite.agent_loop import AgentLoopManager, ProduceLimits
from xrl_lite.algorithms.preload import MODEL_MODULES
from xrl_lite.config import RunConfig, dump_config
from xrl_lite.config.check import CheckedData, check_data, check_installed, check_model, check_resources
from xrl_lite.data import EncodePrompt, Row, Sampler, make_group
from xrl_lite.data.tokenizer import Tokenizer, check_model_folder
from xrl_lite.engine.controller import TrainingController
from xrl_lite.engine.tiny_model_config import cached_tiny_model
from xrl_lite.errors import ConfigError, errors_as_themselves
from xrl_lite.judger import Judger, build_judger, self_test
from xrl_lite.log import logged_to
from xrl_lite.registry import load_object
from xrl_lite.replay_buffer import ReplayBuffer
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.trainer.base import RLTrainer, RunSummary, TrainerParts, TrainerSettings
from xrl_lite.trainer.checkpoint import (
    HUGGINGFACE,
    STATE,
    CheckpointCallback,
    CheckpointStore,
    find_checkpoint,
    require_complete,
)
from xrl_lite.trainer.evaluation import Evaluator
from xrl_lite.trainer.report import ConsoleReporter, Reporter
from xrl_lite.trainer.run_folder import CHECKPOINTS, RunFolder
from xrl_lite.trainer.stop import StopRequest, stop_on_signals
from xrl_lite.trainer.sync import SyncTrainer
from xrl_lite.weight_sync import WeightSync

TRAINERS: dict[str, type[RLTrainer]] = {"sync": SyncTrainer}
"""Trainer modes."""

T = TypeVar("T")


async def train(config: RunConfig, *, reporter: Reporter | None = None) -> RunSummary | None:
    """Train as the settings say, and return how it ended; None if it was stopped before the first step.

    Ctrl-C (or SIGTERM) once ends after the step that is running, with a checkpoint, or at once where no step has begun;
    twice ends at once.

    Raises:
        ConfigError: settings, rows or model cannot be used; nothing was started.
        RunError, ActorError, JudgerError, WeightSyncError, CheckpointError: the run cannot go on.
    """
    reporter = reporter or ConsoleReporter()
    check_installed()
    data = check_data(config)
    check_model(config)
    check_resources(config, data.judger_config)
    callback = build_callback(config)
    summary = None
    with closing(open_folder(config)) as folder, logged_to(folder.logs / "driver.log"):
        checkpoint = find_checkpoint(config.checkpoint.resume, folder.checkpoints)
        if checkpoint is None and folder.has_run:
            reporter.note(f"the run in {folder.path} never came to a checkpoint: starting it over from step 1")
            folder.start_over()
        named = config.model_copy(update={"name": folder.path.name})
        (folder.path / "config.yaml").write_text(dump_config(named), encoding="utf-8")
        reporter.note(f"run folder {folder.path}: {len(data.train)} rows to train on, {len(data.evaluation)} held out")
        async with actor_system(config, log_dir=folder.logs) as system:
            stop = StopRequest()

            def kill() -> None:
                reporter.finish()
                system.kill_all()

            with (
                system.dump_on_signal(),
                stop_on_signals(stop, kill=kill, note=reporter.note),
                anyio.CancelScope() as starting,
            ):
                stop.cancel = starting.cancel  # until the first step there is nothing to finish
                model_path = await prepare_model(config, system, reporter)
                trainer = await build_trainer(config, data, model_path, folder, system, reporter, callback, stop)
                # what is loaded stays: a full collection would walk over all of it, 0.2 s in the middle of a step
                gc.freeze()
                summary = await trainer.fit(checkpoint)
        reporter.summary(list(folder.metrics()), folder.path)
    return summary


async def build_trainer(
    config: RunConfig,
    data: CheckedData,
    model_path: str,
    folder: RunFolder,
    system: ActorSystem,
    reporter: Reporter,
    callback: CheckpointCallback,
    stop: StopRequest,
) -> RLTrainer:
    """Start the actors and connect the parts, as in the drawing above."""
    engine = TrainingController(
        system,
        config=config.engine,
        algorithm=config.resolved_algorithm,
        model_path=model_path,
        num_updates=config.num_updates,
        seed=config.seed,
    )
    tokenizer = load_tokenizer(config, model_path)
    rollout = RolloutController(
        system, config=config.rollout, model_path=model_path, decode=tokenizer.decode, seed=config.seed
    )
    judger = build_judger(data.judger_config, system=system)
    replay_buffer = ReplayBuffer()
    manager = build_manager(config, data, tokenizer.encode, rollout, judger, replay_buffer)
    await self_test_judger(judger, data.train[0], tokenizer.encode)
    await engine.ready()
    await rollout.ready()
    reporter.note("trainer and rollout engine have loaded the model, the judger passed its test")
    parts = TrainerParts(
        engine=engine,
        weight_sync=WeightSync(source=engine, targets=rollout.adapters, gate=rollout),
        manager=manager,
        replay_buffer=replay_buffer,
        evaluator=build_evaluator(config, data.evaluation, manager, tokenizer.encode),
        judger=judger,
        folder=folder,
        store=CheckpointStore(folder.checkpoints, keep=config.checkpoint.keep),
        callback=callback,
        reporter=reporter,
    )
    settings = TrainerSettings(
        trainer=config.trainer,
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        report=config.report,
        algorithm=config.resolved_algorithm,
        max_tokens=config.engine.max_tokens_per_micro_batch,
    )
    return TRAINERS[config.trainer.mode](parts, settings, stop)


async def evaluate(
    config: RunConfig, checkpoint: Path | None = None, *, reporter: Reporter | None = None
) -> dict[str, float]:
    """Return the held-out accuracy of a checkpoint, or of the model the run starts from.

    Args:
        config: Settings of the run.
        checkpoint: Folder of a checkpoint, or a Hugging Face folder.
        reporter: Is told what happens.

    Raises:
        ConfigError: there are no held-out rows, or the checkpoint holds no model.
    """
    reporter = reporter or ConsoleReporter()
    check_installed()
    data = check_data(config)
    check_model(config)
    check_resources(config, data.judger_config)
    if not data.evaluation:
        raise ConfigError("There is nothing to evaluate on: evaluation.data is not set.")
    async with actor_system(config, log_dir=None) as system:
        given = model_of_checkpoint(checkpoint) if checkpoint else None
        model_path = given or await prepare_model(config, system, reporter)
        tokenizer = load_tokenizer(config, model_path)
        rollout = RolloutController(
            system, config=config.rollout, model_path=model_path, decode=tokenizer.decode, seed=config.seed
        )
        judger = build_judger(data.judger_config, system=system)
        manager = build_manager(config, data, tokenizer.encode, rollout, judger, ReplayBuffer())
        evaluator = build_evaluator(config, data.evaluation, manager, tokenizer.encode)
        assert evaluator is not None, "there are held-out rows"
        await rollout.ready()
        return await evaluator.evaluate()


async def build_model(config: RunConfig, *, reporter: Reporter | None = None) -> str:
    """Build and warm up the model of `model.build`, unless it is cached; return its folder."""
    async with actor_system(config, log_dir=None) as system:
        return await prepare_model(config, system, reporter or ConsoleReporter())


def run_until_done(function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on uvloop and return its result."""
    return anyio.run(function, backend_options={"use_uvloop": True})


# --- the parts


@asynccontextmanager
async def actor_system(config: RunConfig, *, log_dir: Path | None) -> AsyncIterator[ActorSystem]:
    """Run the actor system and the manager of its CPU slots; errors from inside come out as themselves."""
    with errors_as_themselves():
        async with ActorSystem(num_cpus=config.num_cpus, log_dir=log_dir, seed=config.seed) as system:
            set_cpu_resource_manager(CPUResourceManager(capacity=system))
            try:
                yield system
            finally:
                clear_cpu_resource_manager()


def open_folder(config: RunConfig) -> RunFolder:
    """Take the run's folder; one that holds no run yet, unless the run there goes on."""
    resume = config.checkpoint.resume
    goes_on = resume == "auto" or Path(resume).resolve().parent == (config.folder / CHECKPOINTS).resolve()
    return RunFolder(config.folder) if goes_on else RunFolder.unused(config.folder)


async def prepare_model(config: RunConfig, system: ActorSystem, reporter: Reporter) -> str:
    """Return the model's folder or hub id; a model to be built is built once, in an actor, and cached."""
    if config.model.build is None:
        assert config.model.path is not None, "one of the two is given"
        return config.model.path
    cache_dir = config.model.cache_dir.expanduser()
    cached = cached_tiny_model(config.model.build, cache_dir)
    if cached is None:
        from xrl_lite.engine.model_builder import TinyModelBuilder  # loads torch

        reporter.note("building the model and warming it up; this is done once")
        builder: Any = system.spawn(TinyModelBuilder, name="model_builder", num_cpus=0.1, preload=MODEL_MODULES)
        cached = await builder.build.remote(config.model.build, cache_dir)
        await builder.stop()
        reporter.note(f"the model is built: {cached}")
    return str(cached)


def model_of_checkpoint(checkpoint: Path) -> str:
    """Return the model folder inside a checkpoint, or the folder itself if it is one.

    Raises:
        ConfigError: there is no model in it.
        CheckpointError: the checkpoint is torn.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"There is no checkpoint folder {checkpoint}.")
    if not (checkpoint / STATE).exists():
        check_model_folder(checkpoint)
        return str(checkpoint)
    inside = require_complete(checkpoint) / HUGGINGFACE
    if not inside.is_dir():
        raise ConfigError(f"{checkpoint} holds no Hugging Face folder: it was made with checkpoint.export_hf=false.")
    return str(inside)


def load_tokenizer(config: RunConfig, model_path: str) -> Tokenizer:
    """Load the model's tokenizer, or the one that the agent loop names."""
    return Tokenizer.load(config.task.agent_loop_config.hf_checkpoint or model_path)


def build_manager(
    config: RunConfig,
    data: CheckedData,
    encode: EncodePrompt,
    rollout: RolloutController,
    judger: Judger,
    replay_buffer: ReplayBuffer,
) -> AgentLoopManager:
    """Make what turns rows into judged groups."""
    sampler = config.task.sampler_config
    limit = config.trainer.max_failed_groups
    return AgentLoopManager(
        agent_loop=config.task.agent_loop_config.build_local(rollout, judger),
        sampler=Sampler(
            data.train,
            encode=encode,
            group_size=sampler.prompt_repeat_k,
            seed=config.seed,
            shuffle=sampler.shuffle,
            max_prompt_tokens=sampler.max_prompt_tokens,
            task_name=config.task.task_name,
        ),
        replay_buffer=replay_buffer,
        limits=ProduceLimits(max_failed_groups=4 * config.trainer.groups_per_step if limit is None else limit),
    )


def build_evaluator(
    config: RunConfig, rows: Sequence[Row], manager: AgentLoopManager, encode: EncodePrompt
) -> Evaluator | None:
    """Make the evaluator, if there are held-out rows."""
    if not rows:
        return None
    return Evaluator(
        manager,
        rows=rows,
        encode=encode,
        sample_params=config.evaluation.sample_params,
        success_score=config.evaluation.success_score,
    )


def build_callback(config: RunConfig) -> CheckpointCallback:
    """Load the user's checkpoint callback, or one that does nothing."""
    callback = load_object(config.checkpoint.callback) if config.checkpoint.callback else CheckpointCallback
    return callback(config=config)


async def self_test_judger(judger: Judger, row: Row, encode: EncodePrompt) -> None:
    """Let the judger prove itself on a right and a wrong answer to a row."""
    state = make_group(row, encode(row.prompt), group_id=0, group_size=1)[0]
    await self_test(judger, state)
