"""The composition root: settings in, a running system out. This is the only place where parts are connected.

::

    rows --> Sampler --> Producer --> AgentLoopManager --> agent loop --> RolloutController --> rollout/0..n   (actors)
                              |           |                  '--------> Judger ------------> judger/...      (actors)
                            ReplayBuffer -- buffer.sqlite
                              |
                          RLTrainer --> TrainingController --> engine/0..n                        (actors)
                              |-------> CriticController ----> critic/0..n, for gae               (actors)
                              '-------> WeightSync: engine/0 ==> rollout/0..n

Everything that is not the driver is an actor of one `ActorSystem`, which ends them all.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio

from xrl_lite.actors import ActorSystem, CPUResourceManager, clear_cpu_resource_manager, set_cpu_resource_manager
from xrl_lite.actors.placement import Bundle
from xrl_lite.agent_loop import (
    AgentLoop,
    AgentLoopManager,
    ProduceLimits,
    Producer,
    ProducerTask,
    create_agent_loop_manager,
)
from xrl_lite.algorithms.preload import MODEL_MODULES
from xrl_lite.config import RunConfig, dump_config
from xrl_lite.config.check import (
    CheckedData,
    CheckedTask,
    check_data,
    check_devices,
    check_installed,
    check_model,
    check_resources,
)
from xrl_lite.config.devices import reserve_devices, with_shared_devices
from xrl_lite.config.serve_config import ServeConfig
from xrl_lite.data import EncodeRow, Row, Sampler, make_group
from xrl_lite.data.rows import hash_rows
from xrl_lite.data.sampler import naming_rows
from xrl_lite.data.tokenizer import Tokenizer, check_model_folder, max_position_embeddings
from xrl_lite.engine.controller import CriticController, TrainingController
from xrl_lite.engine.tiny_model_config import cached_tiny_model
from xrl_lite.errors import ConfigError, errors_as_themselves
from xrl_lite.gateway import Gateway
from xrl_lite.judger import Judger, SelfTestResult, build_judger, self_test
from xrl_lite.judger.proof import summarize
from xrl_lite.log import logged_to
from xrl_lite.metrics import LoopLag, MetricLoggers, actor_metrics, open_loggers
from xrl_lite.replay_buffer import MemoryStore, ReplayBuffer, SQLiteStore, build_replay_buffer
from xrl_lite.replay_buffer.events import EventLog, Events, read_events
from xrl_lite.rollout.config import truncation_warning
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.rollout.replica import RolloutReplicaRegistry
from xrl_lite.trainer.agreement import NUM_PROMPTS, AgreementCheck
from xrl_lite.trainer.base import RLTrainer, RunSummary, TrainerParts, TrainerSettings
from xrl_lite.trainer.checkpoint import (
    HUGGINGFACE,
    STATE,
    CheckpointCallback,
    CheckpointStore,
    find_checkpoint,
    load_callback_class,
    require_complete,
)
from xrl_lite.trainer.evaluation import EvaluationRecord, Evaluator, code_in
from xrl_lite.trainer.modes import trainer_class
from xrl_lite.trainer.report import ConsoleReporter, QuietReporter, Reporter
from xrl_lite.trainer.run_folder import BUFFER, CHECKPOINTS, EVENTS, RunFolder
from xrl_lite.trainer.stop import StopRequest, stop_on_signals
from xrl_lite.weight_sync import WeightSync, choose_transport, make_transport

RARE_COLLECTIONS = (20_000, 10, 10)
"""Thresholds of the garbage collector in the driver: with the usual ones it takes a fifth of the time of judging."""

T = TypeVar("T")


async def train(config: RunConfig, *, reporter: Reporter | None = None) -> RunSummary | None:
    """Train as the settings say, and return how it ended; None if it was stopped before the first step.

    Ctrl-C (or SIGTERM) once ends after the step that is running, with a checkpoint, or at once where no step has begun;
    twice ends at once.

    Raises:
        ConfigError: settings, rows or model cannot be used; nothing was started.
        RunError, ActorError, JudgerError, WeightSyncError, CheckpointError: the run cannot go on.
    """
    reporter = reporter or (ConsoleReporter() if "console" in config.report.loggers else QuietReporter())
    check_installed()
    data = check_data(config)
    check_model(config)
    check_resources(config, data.judger_configs)
    check_devices(config)
    callback = build_callback(config)
    summary = None
    with closing(open_folder(config)) as folder, logged_to(folder.logs / "driver.log"):
        checkpoint = find_checkpoint(config.checkpoint.resume, folder.checkpoints)
        reporter.note(f"run folder {folder.path}: {len(data.train)} rows to train on, {len(data.evaluation)} held out")
        async with actor_system(config, log_dir=folder.logs) as system:
            stop, lag = StopRequest(), LoopLag()

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
                async with open_trainer(
                    config, data, model_path, folder, system, reporter, callback, stop, lag
                ) as trainer:
                    collect_rarely()
                    async with lag.measured():
                        summary = await trainer.fit(checkpoint)
        reporter.summary(list(folder.metrics()), folder.path)
    return summary


@asynccontextmanager
async def open_trainer(
    config: RunConfig,
    data: CheckedData,
    model_path: str,
    folder: RunFolder,
    system: ActorSystem,
    reporter: Reporter,
    callback: CheckpointCallback,
    stop: StopRequest,
    lag: LoopLag,
) -> AsyncGenerator[RLTrainer]:
    """Start the actors and connect the parts, as in the drawing above; close at the end what is to be closed."""
    repeated = dump_config(as_repeated(config, folder))
    devices = reserve_devices(config, system)
    if devices.shared:
        config = with_shared_devices(config)
    engine = TrainingController(
        system,
        config=config.engine,
        algorithm=config.resolved_algorithm,
        model_path=model_path,
        num_updates=config.num_updates,
        seed=config.seed,
        weights_dtype=config.rollout.dtype,
        bundle=devices.training,
    )
    critic = build_critic(config, model_path, system, devices.training)
    tokenizer = await load_tokenizer(config, model_path)
    async with AsyncExitStack() as stack:
        if devices.shared:  # an engine that measures how much memory there is must not see it taken meanwhile
            await trainers_ready(engine, critic)
        rollout = await stack.enter_async_context(build_rollout(config, model_path, tokenizer, system, devices.rollout))
        judgers = Judgers(data, system)
        replay_buffer = build_buffer(config, folder)
        stack.push_async_callback(replay_buffer.close)
        agent_loops = await open_agent_loops(data, rollout, judgers, tokenizer, model_path, system, stack)
        manager = await build_manager(config, rollout, agent_loops, judgers, replay_buffer)
        encoders = await row_encoders(data.tasks, agent_loops, tokenizer)
        producer = build_producer(config, data, encoders, manager, replay_buffer, note=reporter.note)
        evaluating = evaluating_manager(config, agent_loops)
        encode = encoders[config.task.task_name]
        self_tested = await self_test_judgers(judgers, data.tasks, encoders)
        for task in config.tasks:
            if (warning := truncation_warning(task.agent_loop_config.sample_params)) is not None:
                reporter.note(f"warning: {warning}")
        await trainers_ready(engine, critic)
        await rollout.ready()
        reporter.note("trainer and rollout engine have loaded the model")
        for line in self_tested:
            reporter.note(line)
        weight_sync = stack.enter_context(
            closing(await build_weight_sync(config, engine, rollout, events=replay_buffer.events))
        )
        loggers = stack.enter_context(closing(build_loggers(config, folder)))
        parts = TrainerParts(
            engine=engine,
            critic=critic,
            weight_sync=weight_sync,
            rollout=rollout,
            manager=evaluating,
            producer=producer,
            replay_buffer=replay_buffer,
            evaluator=build_evaluator(config, data.evaluation, evaluating, encode),
            agreement=build_agreement_check(config, data, engine, rollout, encode),
            judger=judgers,
            folder=folder,
            store=CheckpointStore(folder.checkpoints, keep=config.checkpoint.keep),
            callback=callback,
            reporter=reporter,
            loggers=loggers,
            config=repeated,
            health=lambda: actor_metrics(system.statistics()) | rollout.metrics() | lag.metrics(),
        )
        yield trainer_class(config.trainer.mode)(parts, trainer_settings(config), stop)


def replay(config: RunConfig, events: Path, *, output: Path, break_at: int | None = None) -> int:
    """Repeat the order of events of a recorded run, without model and processes; return how many there were.

    Args:
        config: Settings of the run.
        events: Its events.jsonl.
        output: Folder for the metrics of the replay.
        break_at: Number of an event before which a debugger is entered.

    Raises:
        RunError: an event is another than the recorded one; says which.
    """
    from xrl_lite.trainer.replay import ReplaySettings, replay

    with closing(RunFolder(output)) as folder:
        return replay(
            list(read_events(events)),
            trainer_class(config.trainer.mode),
            ReplaySettings(
                trainer=trainer_settings(config),
                tasks=config.tasks,
                replay_buffer=config.replay_buffer,
                limits=produce_limits(config),
            ),
            folder=folder,
            reporter=QuietReporter(),
            break_at=break_at,
        )


async def evaluate(
    config: RunConfig,
    checkpoint: Path | None = None,
    *,
    reporter: Reporter | None = None,
    record: Path | None = None,
) -> dict[str, float]:
    """Return the held-out accuracy of a checkpoint, or of the model the run starts from.

    Args:
        config: Settings of the run.
        checkpoint: Folder of a checkpoint, or a Hugging Face folder.
        reporter: Is told what happens.
        record: File that keeps what was answered; an evaluation that was stopped goes on from it.

    Raises:
        ConfigError: there are no held-out rows, or the checkpoint holds no model.
        RunError: the record is of another evaluation: of another model, of other rows, or judged in another way.
    """
    reporter = reporter or ConsoleReporter()
    check_installed()
    data = check_data(config)
    given = model_of_checkpoint(checkpoint) if checkpoint else None
    if given is None:
        check_model(config)
    check_resources(config, data.judger_configs)
    if not data.evaluation:
        raise ConfigError("There is nothing to evaluate on: evaluation.data is not set.")
    async with actor_system(config, log_dir=None) as system:
        model_path = given or await prepare_model(config, system, reporter)
        tokenizer = await load_tokenizer(config, model_path)
        async with AsyncExitStack() as stack:
            rollout = await stack.enter_async_context(build_rollout(config, model_path, tokenizer, system))
            judgers = Judgers(data, system)
            agent_loops = await open_agent_loops(data, rollout, judgers, tokenizer, model_path, system, stack)
            encode = (await row_encoders(data.tasks, agent_loops, tokenizer))[config.task.task_name]
            evaluator = build_evaluator(config, data.evaluation, evaluating_manager(config, agent_loops), encode)
            assert evaluator is not None, "there are held-out rows"
            await rollout.ready()
            about = what_is_evaluated(config, model_path, data.evaluation)
            return await evaluator.evaluate(EvaluationRecord(record, about) if record else None)


def what_is_evaluated(config: RunConfig, model_path: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return everything that answers and scores depend on; of code, the files that the settings name."""
    how = config.task.model_dump(mode="json", include={"agent_loop_config", "judger_config"})
    return {
        "model": model_path,
        "dtype": config.rollout.dtype,
        "seed": config.seed,
        "evaluation": config.evaluation.model_dump(mode="json"),
        "rows": hash_rows(rows),
        "task": how,
        "code": code_in(how),
    }


def collect_rarely() -> None:
    """Have the garbage collector leave what is loaded alone: walking over all of it stops everything for 0.2 s."""
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)


async def serve(
    config: ServeConfig,
    *,
    api_key: str | None = None,
    on_ready: Callable[[Gateway], None] = lambda _: None,
    reporter: Reporter | None = None,
) -> None:
    """Serve a model to agents until SIGINT or SIGTERM.

    Args:
        config: Settings.
        api_key: Key of whoever makes sessions; a random one when not given.
        on_ready: Is given the gateway once it answers.
        reporter: Is told what happens.

    Raises:
        ConfigError: settings or model cannot be used.
        OSError: the port is taken.
        ActorError: the engine cannot be started.
    """
    check_installed()
    check_model(config)
    async with actor_system(config, log_dir=None) as system:
        model_path = await prepare_model(config, system, reporter or ConsoleReporter())
        tokenizer = await in_daemon_thread(partial(Tokenizer.load, model_path))
        controller = RolloutController(
            system,
            config=config.rollout,
            model_path=model_path,
            decode=tokenizer.decode,
            seed=config.seed,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        async with controller as rollout:
            await rollout.ready()
            gateway = Gateway(
                rollout,
                tokenizer=tokenizer,
                config=config.gateway,
                sample_params=config.sample_params,
                max_trajectory_tokens=config.rollout.max_model_len or max_position_embeddings(model_path),
                api_key=api_key,
            )
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async with gateway:
                    collect_rarely()
                    on_ready(gateway)
                    async for _ in signals:
                        break


async def build_model(config: RunConfig, *, reporter: Reporter | None = None) -> str:
    """Build and warm up the model of `model.build`, unless it is cached; return its folder."""
    async with actor_system(config, log_dir=None) as system:
        return await prepare_model(config, system, reporter or ConsoleReporter())


def run_until_done(function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on uvloop and return its result."""
    return anyio.run(function, backend_options={"use_uvloop": True})


# --- the parts


@asynccontextmanager
async def actor_system(config: RunConfig | ServeConfig, *, log_dir: Path | None) -> AsyncGenerator[ActorSystem]:
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
    return RunFolder(config.folder) if _goes_on(config) else RunFolder.unused(config.folder)


def _goes_on(config: RunConfig) -> bool:
    resume = config.checkpoint.resume
    return resume == "auto" or Path(resume).resolve().parent == (config.folder / CHECKPOINTS).resolve()


def as_repeated(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Return the settings that repeat the run in a folder from where it began, in a folder of its own."""
    if not _goes_on(config):
        return config.model_copy(update={"name": folder.path.name})
    from_the_start = config.checkpoint.model_copy(update={"resume": "never"})
    return config.model_copy(update={"name": folder.path.name, "checkpoint": from_the_start})


async def prepare_model(config: RunConfig | ServeConfig, system: ActorSystem, reporter: Reporter) -> str:
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


async def load_tokenizer(config: RunConfig, model_path: str) -> Tokenizer:
    """Load the model's tokenizer, or the one that the agent loop names. A hub that does not answer takes minutes."""
    path = config.task.agent_loop_config.hf_checkpoint or model_path
    return await in_daemon_thread(partial(Tokenizer.load, path))


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Return what a call returns. When cancelled it is left behind; the end of this process does not wait for it."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # from now on whoever waits may be cancelled, but the answer may not

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await asyncio.wrap_future(answer)


def build_rollout(
    config: RunConfig, model_path: str, tokenizer: Tokenizer, system: ActorSystem, bundle: Bundle | None = None
) -> RolloutController:
    """Start the replicas; the controller is to be entered."""
    settings = config.rollout
    if any(task.produce_strategy_config.enable_partial_rollout for task in config.tasks):
        # attempts of the other tasks come here without their tokens
        settings = settings.model_copy(update={"partial_rollout": True})
    if config.engine.lora is not None and adapter_goes_alone(config):
        settings = settings.model_copy(update={"adapter_rank": config.engine.lora.rank})
    return RolloutController(
        system,
        config=settings,
        model_path=model_path,
        decode=tokenizer.decode,
        seed=config.seed,
        eos_token_ids=tokenizer.eos_token_ids,
        bundle=bundle,
    )


def adapter_goes_alone(config: RunConfig) -> bool:
    """Whether the replicas are sent the LoRA adapter, and no weights."""
    takes_it = RolloutReplicaRegistry.get(config.rollout.engine).takes_adapters
    return config.engine.lora is not None and config.rollout.adapter_sync == "alone" and takes_it


def build_critic(
    config: RunConfig, model_path: str, system: ActorSystem, bundle: Bundle | None
) -> CriticController | None:
    """Start the critic's ranks, where the estimator needs values."""
    if not config.has_critic:
        return None
    return CriticController(
        system,
        config=config.resolved_critic,
        model_path=config.critic.path or model_path,
        num_updates=config.num_critic_updates,
        seed=config.seed,
        bundle=bundle,
    )


async def trainers_ready(engine: TrainingController, critic: CriticController | None) -> None:
    """Wait until all ranks have loaded their models."""
    await engine.ready()
    if critic is not None:
        await critic.ready()


async def build_weight_sync(
    config: RunConfig, engine: TrainingController, rollout: RolloutController, *, events: Events
) -> WeightSync:
    """Make the way of the weights: the one of the settings, or the one that fits where both sides are."""
    settings = config.rollout
    name: str = settings.weight_transport
    if name == "auto":
        name = choose_transport(frozenset(await engine.devices()), await rollout.devices())
    for adapter in rollout.adapters:
        if adapter.transports and name not in adapter.transports:
            raise ConfigError(
                f"rollout.weight_transport={name!r}: the {settings.engine} engine takes weights by "
                f"{', '.join(adapter.transports)}. Set one of these."
            )
    transport = make_transport(
        name,
        folder=settings.weight_folder,
        bucket_bytes=settings.weight_bucket_bytes,
        timeout_s=settings.sync_timeout_s,
    )
    return WeightSync(
        source=engine,
        targets=rollout.adapters,
        gate=rollout,
        transport=transport,
        max_unchanged=settings.max_unchanged_syncs,
        on_synced=lambda version: events.record("synced", version=version),
        adapters_only=adapter_goes_alone(config),
    )


def build_agreement_check(
    config: RunConfig, data: CheckedData, engine: TrainingController, rollout: RolloutController, encode: EncodeRow
) -> AgreementCheck:
    """Make the comparison of trainer and rollout engine, on prompts of the first task."""
    return AgreementCheck(
        rollout,
        engine,
        prompts=[encode(row) for row in data.tasks[0].rows[: 2 * NUM_PROMPTS]],
        temperature=config.task.agent_loop_config.sample_params.temperature,
        dtypes={
            "engine.dtype": config.engine.dtype,
            "engine.compute_dtype": config.engine.compute_dtype or config.engine.dtype,
            "rollout.dtype": config.rollout.dtype,
        },
    )


class Judgers:
    """The judgers of the tasks, and what they count together.

    Args:
        data: The tasks; those with equal settings share a judger.
        system: Where judger workers run.
    """

    def __init__(self, data: CheckedData, system: ActorSystem) -> None:
        self._configs = data.judger_configs
        self._judgers = [build_judger(judger_config, system=system) for judger_config in self._configs]

    def of(self, task: CheckedTask) -> Judger:
        """Return the judger of a task."""
        return self._judgers[self._configs.index(task.judger_config)]

    def statistics(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return counts and times per judger since the last reset."""
        together: dict[str, dict[str, float]] = {}
        for judger in self._judgers:
            together |= judger.statistics(reset=reset)
        return together


def build_buffer(config: RunConfig, folder: RunFolder) -> ReplayBuffer:
    """Open the replay buffer of the run's folder."""
    storage = config.replay_buffer.storage
    return build_replay_buffer(
        config.replay_buffer,
        trainer_mode=config.trainer.layout,
        trainer_config=config.trainer,
        store=SQLiteStore(folder.path / BUFFER, compression_level=storage.compression_level)
        if storage.durable
        else MemoryStore(),
        max_failed_groups=config.max_failed_groups,
        events=EventLog(folder.path / EVENTS) if config.report.save_events else None,
    )


async def open_agent_loops(
    data: CheckedData,
    rollout: RolloutController,
    judgers: Judgers,
    tokenizer: Tokenizer,
    model_path: str,
    system: ActorSystem,
    stack: AsyncExitStack,
) -> dict[str, AgentLoop]:
    """Make the agent loop of each task, wait until it can serve, and have it closed with the stack."""
    agent_loops: dict[str, AgentLoop] = {}
    for task in data.tasks:
        agent_loop = task.config.agent_loop_config.build(
            rollout, judgers.of(task), tokenizer=tokenizer, model_path=model_path, system=system
        )
        stack.push_async_callback(agent_loop.aclose)
        await agent_loop.ready()
        agent_loops[task.config.task_name] = agent_loop
    return agent_loops


async def row_encoders(
    tasks: Sequence[CheckedTask], agent_loops: Mapping[str, AgentLoop], tokenizer: Tokenizer
) -> dict[str, EncodeRow]:
    """Return what makes tokens of the rows of each task, with the tools that its loop has."""
    return {
        task.config.task_name: naming_rows(
            task.config.agent_loop_config.row_encoder(
                tokenizer, tools=await agent_loops[task.config.task_name].tool_schemas()
            ),
            task_name=task.config.task_name,
        )
        for task in tasks
    }


async def build_manager(
    config: RunConfig,
    rollout: RolloutController,
    agent_loops: Mapping[str, AgentLoop],
    judgers: Judgers,
    replay_buffer: ReplayBuffer,
) -> Any:
    """Make what runs groups: ours, or the user's."""
    strategies = {task.task_name: task.produce_strategy_config for task in config.tasks}
    return await create_agent_loop_manager(
        config.agent_loop_manager,
        llm_client=rollout,
        replay_buffer=replay_buffer,
        agent_loops=agent_loops,
        judger=judgers,
        partial_rollout=frozenset(name for name, strategy in strategies.items() if strategy.enable_partial_rollout),
        is_valid={name: strategy.is_valid for name, strategy in strategies.items()},
        needs_logprobs=config.algorithm.needs_rollout_logprobs,
    )


def evaluating_manager(config: RunConfig, agent_loops: Mapping[str, AgentLoop]) -> AgentLoopManager:
    """Make what runs evaluations: always ours, and past the buffer."""
    return AgentLoopManager(agent_loops, replay_buffer=ReplayBuffer(), config=config.agent_loop_manager)


def build_producer(
    config: RunConfig,
    data: CheckedData,
    encoders: Mapping[str, EncodeRow],
    manager: Any,
    replay_buffer: ReplayBuffer,
    *,
    note: Callable[[str], None],
) -> Producer:
    """Make what turns rows into groups."""
    tasks = [
        ProducerTask(
            name=task.config.task_name,
            weight=task.config.weight,
            strategy=task.config.produce_strategy_config,
            sampler=Sampler(
                task.rows,
                encode=encoders[task.config.task_name],
                group_size=task.config.sampler_config.prompt_repeat_k,
                seed=config.seed,
                shuffle=task.config.sampler_config.shuffle,
                max_prompt_tokens=task.config.sampler_config.max_prompt_tokens,
                task_name=task.config.task_name,
            ),
        )
        for task in data.tasks
    ]
    return Producer(
        tasks,
        manager=manager,
        replay_buffer=replay_buffer,
        limits=produce_limits(config),
        sync_weights_interval=config.trainer.sync_weights_interval,
        num_warmup_batches=config.trainer.num_warmup_batches,
        note=note,
    )


def produce_limits(config: RunConfig) -> ProduceLimits:
    """Return when producing slows down and gives up."""
    return ProduceLimits(
        max_failed_groups=config.max_failed_groups,
        backoff_s=config.agent_loop_manager.backoff_s,
        max_backoff_s=config.agent_loop_manager.max_backoff_s,
    )


def trainer_settings(config: RunConfig) -> TrainerSettings:
    """Return what the loop reads."""
    return TrainerSettings(
        trainer=config.trainer,
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        report=config.report,
        algorithm=config.resolved_algorithm,
        sleep_level=config.rollout.sleep_level or 0,
        max_tokens=config.engine.max_tokens_per_micro_batch,
    )


def build_evaluator(
    config: RunConfig, rows: Sequence[Row], manager: AgentLoopManager, encode: EncodeRow
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
        num_samples=config.evaluation.num_samples,
    )


def build_loggers(config: RunConfig, folder: RunFolder) -> MetricLoggers:
    """Open the loggers that the settings name."""
    return open_loggers(
        config.report.loggers,
        name=folder.path.name,
        project=config.report.project,
        folder=folder.path,
        settings=config.model_dump(mode="json"),
        options=config.report.logger_options,
    )


def build_callback(config: RunConfig) -> CheckpointCallback:
    """Load the user's checkpoint callback, or one that does nothing."""
    return load_callback_class(config.checkpoint.callback)(config=config)


async def self_test_judgers(
    judgers: Judgers, tasks: Sequence[CheckedTask], encoders: Mapping[str, EncodeRow]
) -> list[str]:
    """Let every judger prove itself on a right and a wrong answer to a row of its own; return a line about each."""
    results: list[SelfTestResult] = []
    for task in tasks:
        first_of_source = {str(row.data_source): row for row in reversed(task.rows)}
        for row in first_of_source.values():
            state = make_group(row, encoders[task.config.task_name](row), group_id=0, group_size=1)[0]
            results += await self_test(judgers.of(task), state)
    return summarize(results)
