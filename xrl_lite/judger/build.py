"""From settings to a running judger: local, one worker, or a pool of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from xrl_lite import actors
from xrl_lite.actors import (
    CPUResourcesConfig,
    RestartPolicy,
    register_cpu_resources,
    unregister_cpu_resources,
)
from xrl_lite.errors import ConfigError, PayloadError
from xrl_lite.judger.base import Judger
from xrl_lite.judger.composed import ComposedJudger
from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig, JudgerConfigLike
from xrl_lite.judger.gate import Gate
from xrl_lite.judger.native import NativeJudger
from xrl_lite.judger.outcome import JudgementPolicy
from xrl_lite.judger.pool import JudgerPool
from xrl_lite.judger.rate_limit import RateLimiter
from xrl_lite.judger.remote import ConcurrentJudgerActor, JudgerActor, RayJudgerProxy, RemoteJudger
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from xrl_lite.actors import ActorHandle, ActorSystem

logger = get_logger(__name__)

_RESTART = RestartPolicy(max_restarts=300, window_s=60.0, backoff_s=0.0)
"""Samples that crash cost two restarts each, a batch may hold many of them, and waiting would not make them better; a
worker that cannot even start uses this up in a moment."""

PRELOAD = ("xrl_lite.judger.config", "xrl_lite.judger.remote")
"""Imported once, so that a worker that was replaced is there again at once."""


def build_judger(config: JudgerConfigLike, system: ActorSystem | None = None) -> Judger:
    """Return the judger that settings describe. Returns at once; workers start meanwhile.

    Args:
        config: Settings of one judger, or of a composed one.
        system: The actor system that workers belong to; the default one when not given.

    Raises:
        ConfigError: a judger has no reward code, or code that cannot be sent to a worker.
        ValueError: `cpu_resources` is set, but there is no `CPUResourceManager`.
        ResourceError: there are not enough CPU slots.
    """
    if isinstance(config, ComposedJudgerConfig):
        return _build_composed(config, system)
    if config.reward_handler is None and type(config).build_local is JudgerConfig.build_local:
        raise ConfigError(
            f"judger {config.judger_name!r} has no reward_handler. Give a callable, 'package.module:name', "
            f"'file.py:name' or 'http://host/path'."
        )
    judger = config.build_local()
    judger.policy = config.policy
    if config.cpu_resources is None:
        return _limited(judger, config)
    if not isinstance(cast("object", judger), Judger):
        raise ConfigError(
            f"judger {config.judger_name!r} sets cpu_resources, but {type(judger).__name__} inherits only BaseJudger: "
            f"only payloads travel to workers. Inherit Judger, or leave cpu_resources out."
        )
    return _limited(_build_remote(config, config.cpu_resources, judger, system), config)


def _limited(judger: Judger, config: JudgerConfig) -> Judger:
    """Let the outermost judger keep to the limits: it is the one place that all judgements pass."""
    judger.gate = Gate(config.max_pending)
    if config.rate_limit is not None:
        judger.rate_limiter = RateLimiter(config.rate_limit)
    return judger


def _build_composed(config: ComposedJudgerConfig, system: ActorSystem | None) -> Judger:
    branches: dict[str, Judger] = {}
    try:
        for name, branch in config.branches.items():
            branches[name] = build_judger(branch, system=system)
        return ComposedJudger(
            branches,
            merge_fn=config.merge_function(),
            judger_name=config.judger_name,
            policy=JudgementPolicy(on_error=config.on_error, max_initial_failures=config.max_initial_failures),
        )
    except BaseException:
        for built in branches.values():  # a branch that does not fit must not leave the workers of the others behind
            built.close()
        raise


def _build_remote(
    config: JudgerConfig, resources: CPUResourcesConfig, local: Judger, system: ActorSystem | None
) -> Judger:
    """Start workers; `local` stays here for `preprocess` and `postprocess`, one for all replicas."""
    name = config.judger_name
    pool = register_cpu_resources(f"judger:{name}", resources)
    release = _Release(pool)
    concurrency = _concurrency_per_worker(config, local)
    try:
        handles = _spawn(config, resources, concurrency, system or actors.default_system())
    except BaseException:
        release()
        raise
    replicas = [
        RemoteJudger(
            handle,
            name,
            local,
            policy=config.policy,
            max_concurrency=concurrency,
            can_take_many=concurrency == 1,
        )
        for handle in handles
    ]
    if len(replicas) == 1:
        replicas[0].on_close = release
        return replicas[0]
    judger_pool = JudgerPool(list[Judger](replicas), name, policy=config.policy)
    judger_pool.on_close = release
    return judger_pool


def _concurrency_per_worker(config: JudgerConfig, local: Judger) -> int:
    if not (isinstance(local, NativeJudger) and local.runs_here) or local.wraps_async:
        return config.concurrency_per_worker
    if config.max_concurrency is not None and config.max_concurrency > 1:
        logger.warning(
            "judger %r: a worker runs one call of a sync function at a time, not max_concurrency=%d. Give it more "
            "workers (cpu_resources.num_workers), or an async function.",
            config.judger_name,
            config.max_concurrency,
        )
    return 1  # in the main thread, where a call that hangs can be ended


def _spawn(
    config: JudgerConfig, resources: CPUResourcesConfig, concurrency: int, system: ActorSystem
) -> list[RayJudgerProxy]:
    handles: list[ActorHandle] = []
    stem = system.free_stem(f"judger/{config.judger_name}")
    try:
        for index in range(resources.num_workers):
            handle = system.spawn(
                JudgerActor if concurrency == 1 else ConcurrentJudgerActor,
                config,
                name=f"{stem}/{index}",
                num_cpus=resources.num_cpus_per_worker,
                memory_bytes=None if system.backend == "ray" else resources.cpu_memory_per_worker,  # no ceilings there
                max_concurrency=concurrency,
                restart=_RESTART,
                preload=PRELOAD,
                background=True,
            )
            handles.append(handle)
    except BaseException as error:
        for handle in handles:
            handle.kill()
        if isinstance(error, PayloadError):
            raise ConfigError(
                f"judger {config.judger_name!r} cannot be sent to a worker process: {error} Give reward_handler as "
                f"'package.module:name' or 'file.py:name', make what it uses inside the function, or leave "
                f"cpu_resources out to run it here."
            ) from error
        raise
    return cast("list[RayJudgerProxy]", handles)  # their methods are found at run time


class _Release:
    """Gives a resource pool back, once."""

    def __init__(self, pool: str) -> None:
        self._pool: str | None = pool

    def __call__(self) -> None:
        if self._pool is not None:
            unregister_cpu_resources(self._pool)
        self._pool = None
