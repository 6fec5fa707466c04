"""Which accelerators the training ranks and the replicas of a run compute on.

::

    sync, colocate_async    |  0         |  1         |  2         |  3         |   they take turns
                            |  engine/0  |  engine/1  |
                            |  critic/0  |  critic/1  |
                            |  rollout/0 (two of them)|  rollout/1              |

    separate_async          |  engine/0  |  engine/1  |  rollout/0              |   at the same time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xrl_lite.actors import Resources
from xrl_lite.errors import ResourceError

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.actors.placement import Bundle
    from xrl_lite.config.run_config import RunConfig

SHARED_MEMORY_SHARE = 0.5
"""Share of a device's memory that a replica takes where it computes on the trainer's."""


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """How many accelerators each side needs, and whether they are the same ones."""

    num_for_training: int
    """One for each rank; those of a critic are on the accelerators of the policy's."""
    num_for_rollout: int
    """Of all replicas."""
    take_turns: bool
    """Whether trainer and replicas compute one after the other."""

    @property
    def num_devices(self) -> int:
        """Accelerators of the run."""
        sides = self.num_for_training, self.num_for_rollout
        return max(sides) if self.take_turns else sum(sides)

    @property
    def shared(self) -> bool:
        """Whether there are accelerators on which both sides compute."""
        return self.take_turns and min(self.num_for_training, self.num_for_rollout) > 0


def plan_devices(config: RunConfig, available: int) -> DevicePlan:
    """Return how the run divides the machine's accelerators.

    Args:
        config: Settings of the run.
        available: How many there are.

    Raises:
        ResourceError: it needs more; says what of, and what to change.
    """
    rollout = config.rollout
    plan = DevicePlan(
        num_for_training=max(engine.num_ranks for _, engine in config.engines) if available else 0,
        num_for_rollout=rollout.num_replicas * rollout.accelerators_of(available),
        take_turns=config.trainer.layout != "separate_async",
    )
    if plan.num_devices > available:
        raise ResourceError(_refusal(config, plan, available))
    return plan


def _refusal(config: RunConfig, plan: DevicePlan, available: int) -> str:
    mode, replicas = config.trainer.mode, config.rollout.num_replicas
    asked = (
        f"the training ranks ask for {plan.num_for_training} accelerators (engine.num_ranks), the replicas for "
        f"{plan.num_for_rollout} (rollout.num_replicas={replicas} times {plan.num_for_rollout // replicas})"
    )
    if plan.take_turns:
        return (
            f"{asked}, and there are {available}. With trainer.mode={mode} both take turns on the same ones, so the "
            f"larger number counts: lower engine.num_ranks, rollout.num_replicas or rollout.num_accelerators."
        )
    return (
        f"{asked}, and there are {available}. With trainer.mode={mode} both compute at the same time, each on "
        f"accelerators of its own. Use trainer.mode=colocate_async or sync, in which they take turns on the same "
        f"ones; or lower engine.num_ranks, rollout.num_replicas or rollout.num_accelerators."
    )


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Where the ranks and the replicas of a run are placed."""

    training: Bundle | None = None
    """Of the ranks of policy and critic; None on a machine without accelerators."""
    rollout: Bundle | None = None
    """Of the replicas, the same one where both take turns; None where they use no accelerators."""

    @property
    def shared(self) -> bool:
        """Whether ranks and replicas take turns on the same accelerators."""
        return self.training is not None and self.training is self.rollout


def reserve_devices(config: RunConfig, system: ActorSystem) -> Devices:
    """Reserve accelerators, and the CPU slots of the actors on them, before any of these is started.

    Raises:
        ResourceError: there are not that many.
    """
    plan = plan_devices(config, system.num_accelerators)
    training_cpus = sum(engine.num_ranks * engine.num_cpus for _, engine in config.engines)
    rollout_cpus = config.rollout.num_replicas * config.rollout.num_cpus
    if plan.shared:
        both = Resources(num_cpus=training_cpus + rollout_cpus, num_accelerators=plan.num_devices)
        bundle = system.reserve([both], name="devices")[0]
        return Devices(training=bundle, rollout=bundle)
    sides = {
        "training": Resources(num_cpus=training_cpus, num_accelerators=plan.num_for_training),
        "rollout": Resources(num_cpus=rollout_cpus, num_accelerators=plan.num_for_rollout),
    }
    on_devices = {side: wanted for side, wanted in sides.items() if wanted.num_accelerators}
    if not on_devices:
        return Devices()
    group = system.reserve(list(on_devices.values()), name="devices")
    return Devices(**dict(zip(on_devices, group.bundles, strict=True)))


def with_shared_devices(config: RunConfig) -> RunConfig:
    """Return the settings for replicas on the trainer's accelerators, with what they leave open filled in."""
    given = config.rollout
    filled = {
        "sleep_level": 1 if given.sleep_level is None else given.sleep_level,
        "device_memory_share": given.device_memory_share or SHARED_MEMORY_SHARE,
    }
    return config.model_copy(update={"rollout": given.model_copy(update=filled)})
