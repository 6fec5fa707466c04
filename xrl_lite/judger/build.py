"""From settings to a running judger: local, one worker, or a pool of workers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from xrl_lite import actors
from xrl_lite.actors import RestartPolicy, register_cpu_resources
from xrl_lite.errors import ConfigError, PayloadError
from xrl_lite.judger.base import Judger
from xrl_lite.judger.composed import ComposedJudger
from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig, JudgerConfigLike
from xrl_lite.judger.outcome import JudgementPolicy
from xrl_lite.judger.pool import JudgerPool
from xrl_lite.judger.remote import ConcurrentJudgerActor, JudgerActor, RemoteJudger

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem

_RESTART = RestartPolicy(max_restarts=300, window_s=60.0)
"""Samples that hang or crash cost one restart each, and a batch may hold many of them; a worker that cannot even start
uses this up in a moment."""


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
        return ComposedJudger(
            {name: build_judger(branch, system=system) for name, branch in config.branches.items()},
            merge_fn=config.merge_function(),
            judger_name=config.judger_name,
            policy=JudgementPolicy(on_error=config.on_error, max_initial_failures=config.max_initial_failures),
        )
    judger = config.build_local()
    judger.policy = config.policy
    if config.cpu_resources is None:
        return judger
    return _build_remote(config, judger, system)


def _build_remote(config: JudgerConfig, local: Judger, system: ActorSystem | None) -> Judger:
    """Start workers; `local` stays here for `preprocess` and `postprocess`, one for all replicas."""
    assert config.cpu_resources is not None
    resources = config.cpu_resources
    name = config.judger_name
    register_cpu_resources(f"judger:{name}", resources)
    concurrency = config.concurrency_per_worker
    spawn: Any = partial(
        (system or actors.default_system()).spawn,
        JudgerActor if concurrency == 1 else ConcurrentJudgerActor,
        config,
        num_cpus=resources.num_cpus_per_worker,
        memory_bytes=resources.cpu_memory_per_worker,
        max_concurrency=concurrency,
        restart=_RESTART,
    )
    try:
        handles = [spawn(name=f"judger/{name}/{index}") for index in range(resources.num_workers)]
    except PayloadError as error:
        raise ConfigError(
            f"judger {name!r} cannot be sent to a worker process: {error} Give reward_handler as 'package.module:name' "
            f"or 'file.py:name', make what it uses inside the function, or leave cpu_resources out to run it here."
        ) from error
    replicas: list[Judger] = [
        RemoteJudger(handle, name, local, policy=config.policy, max_concurrency=concurrency) for handle in handles
    ]
    return replicas[0] if len(replicas) == 1 else JudgerPool(replicas, name, policy=config.policy)
