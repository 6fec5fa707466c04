"""Prompt groups between generation and training.

::

    admit          start             finish(states)
    -----> PENDING -----> RUNNING -----------------> FINISHED ---sample---> gone
                             '-----fail(reason)----> FAILURE  ---sample---> gone, counted

Waits for    `sample`: until the oldest groups of the partition have ended
Is woken by  `finish` and `fail`; nothing is polled

Groups are taken in the order they were admitted, not in the order they finished: otherwise short answers would be
trained on first, and the age of what is left would have no bound.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

import anyio

from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import RunError


class GroupStatus(Enum):
    """Where a group stands."""

    PENDING = "pending"
    """Admitted; nobody works on it yet."""
    RUNNING = "running"
    """Being generated and judged."""
    FINISHED = "finished"
    """At least one attempt can be trained on."""
    FAILURE = "failure"
    """No attempt can be trained on."""


@dataclass
class PromptGroup:
    """All attempts at one prompt draw."""

    uid: str
    """Names the draw, unique in the run."""
    partition_id: str
    """train or val."""
    global_steps: int
    """Step the group was admitted for."""
    status: GroupStatus = GroupStatus.PENDING
    """Where it stands."""
    states: list[RolloutState] = field(default_factory=list[RolloutState])
    """The attempts, once finished; failed ones included."""
    reason: str = ""
    """Why it is a failure."""


class ReplayBuffer:
    """Holds groups until a whole batch of the oldest has ended."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, PromptGroup] = OrderedDict()
        self._changed = anyio.Condition()

    async def admit(self, uid: str, *, partition_id: str, global_steps: int) -> None:
        """Note a group that will be generated; this fixes its place in the order."""
        if uid in self._groups:
            raise RunError(f"Group {uid!r} is in the buffer already.")
        self._groups[uid] = PromptGroup(uid=uid, partition_id=partition_id, global_steps=global_steps)

    async def start(self, uid: str) -> None:
        """Note that a group is being worked on."""
        self._move(uid, GroupStatus.PENDING, GroupStatus.RUNNING)

    async def finish(self, uid: str, states: list[RolloutState]) -> None:
        """Hand over a group. One without any attempt to train on becomes a failure."""
        usable = [state for state in states if state.status == Status.COMPLETED]
        if not usable:
            reasons = list(dict.fromkeys(state.error_msg or state.status.value for state in states))
            await self.fail(uid, "; ".join(reasons) or "no attempt")
            return
        group = self._move(uid, GroupStatus.RUNNING, GroupStatus.FINISHED)
        group.states = states
        await self._notify()

    async def fail(self, uid: str, reason: str) -> None:
        """Note that nothing will come of a group."""
        group = self._move(uid, GroupStatus.RUNNING, GroupStatus.FAILURE)
        group.reason = reason
        await self._notify()

    def status(self, uid: str) -> GroupStatus:
        """Return where a group stands."""
        return self._groups[uid].status

    def reason(self, uid: str) -> str:
        """Return why a group failed."""
        return self._groups[uid].reason

    async def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[list[PromptGroup], dict[str, float]]:
        """Take the `batch_size` oldest groups of a partition, waiting until they have ended.

        Failures are dropped on the way, and counted.

        Args:
            global_steps: Step that trains on them.
            partition_id: train or val.
            batch_size: Groups, not attempts.

        Returns:
            The groups, oldest first, and metrics.

        Cancelling leaves the buffer as it was.
        """
        async with self._changed:
            while (taken := self._oldest(partition_id, batch_size)) is None:
                await self._changed.wait()
            failures = [group for group in self._partition(partition_id) if group.status is GroupStatus.FAILURE]
            for group in (*taken, *failures):
                del self._groups[group.uid]
        staleness = [global_steps - group.global_steps for group in taken]
        return taken, {
            "buffer/failed_groups": float(len(failures)),
            "buffer/size": float(len(self._groups)),
            "off_policy/max": float(max(staleness)),
        }

    def __len__(self) -> int:
        return len(self._groups)

    def _partition(self, partition_id: str) -> list[PromptGroup]:
        return [group for group in self._groups.values() if group.partition_id == partition_id]

    def _oldest(self, partition_id: str, batch_size: int) -> list[PromptGroup] | None:
        alive = [group for group in self._partition(partition_id) if group.status is not GroupStatus.FAILURE]
        oldest = alive[:batch_size]
        ready = len(oldest) == batch_size and all(group.status is GroupStatus.FINISHED for group in oldest)
        return oldest if ready else None

    def _move(self, uid: str, expected: GroupStatus, to: GroupStatus) -> PromptGroup:
        group = self._groups.get(uid)
        if group is None or group.status is not expected:
            now = group.status.value if group else "not in the buffer"
            raise RunError(f"Group {uid!r} cannot become {to.value}: it is {now}, not {expected.value}.")
        group.status = to
        return group

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
