"""Actors: objects that live in child processes of their own and are called through handles. Start at `ActorSystem`.

::

    async with ActorSystem(num_cpus=8) as system:
        scorer = system.spawn(Scorer, config, name="judger/0", restart=RestartPolicy())
        score = await scorer.score.options(timeout_s=5.0).remote(payload)

Every call ends in exactly one of: its result; the exception it raised, as itself; `ActorTaskError` (an exception that
does not pickle); `ActorTimeoutError`; `ActorDiedError`; `ActorUnavailableError`; ``CancelledError``.

The same handles stand before three backends: ``process``; ``inline``, in this process, in an order that a seed decides,
with scripted faults (`FaultPlan`) and, if wanted, in virtual time (`VirtualClock`); ``ray`` (extra ``ray``), for those
who outgrow one machine.
"""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.actors.actor import OnCancel
    from xrl_lite.actors.clock import VirtualClock, now
    from xrl_lite.actors.default import default_system, init, shutdown
    from xrl_lite.actors.faults import Fault, FaultPlan
    from xrl_lite.actors.future import CallFuture
    from xrl_lite.actors.handle import ActorHandle, ActorMethod
    from xrl_lite.actors.launcher import AutoAcceleratorWorkers, AutoCPUWorkers, CPUActorLauncher
    from xrl_lite.actors.ledger import Resources
    from xrl_lite.actors.payload import SharedValue, share
    from xrl_lite.actors.placement import Bundle, PlacementGroup
    from xrl_lite.actors.pool import ActorPool
    from xrl_lite.actors.resources import (
        AcceleratorResourcesConfig,
        CPUResourceManager,
        CPUResourcesConfig,
        clear_cpu_resource_manager,
        get_cpu_resource_manager,
        register_cpu_resources,
        set_cpu_resource_manager,
        unregister_cpu_resources,
    )
    from xrl_lite.actors.restart import RestartPolicy
    from xrl_lite.actors.system import ActorSystem

__all__ = [
    "AcceleratorResourcesConfig",
    "ActorHandle",
    "ActorMethod",
    "ActorPool",
    "ActorSystem",
    "AutoAcceleratorWorkers",
    "AutoCPUWorkers",
    "Bundle",
    "CPUActorLauncher",
    "CPUResourceManager",
    "CPUResourcesConfig",
    "CallFuture",
    "Fault",
    "FaultPlan",
    "OnCancel",
    "PlacementGroup",
    "Resources",
    "RestartPolicy",
    "SharedValue",
    "VirtualClock",
    "clear_cpu_resource_manager",
    "default_system",
    "get_cpu_resource_manager",
    "init",
    "now",
    "register_cpu_resources",
    "set_cpu_resource_manager",
    "share",
    "shutdown",
    "unregister_cpu_resources",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
