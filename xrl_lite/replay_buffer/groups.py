"""Prompt groups, and a table of them in which every question that is asked often is answered in constant time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from xrl_lite.data import RolloutState, version_range

K = TypeVar("K")


class GroupStatus(Enum):
    """Where a group stands."""

    PENDING = "pending"
    """Admitted; nobody works on it yet."""
    RUNNING = "running"
    """Being generated and judged, under a lease."""
    FINISHED = "finished"
    """Enough attempts can be trained on."""
    FAILURE = "failure"
    """Nothing will come of it; has a reason."""
    ABORTED = "aborted"
    """Interrupted: to be continued, or run again."""
    EXPIRED = "expired"
    """Some attempts were too old and are to be made again."""


TERMINAL = (GroupStatus.FINISHED, GroupStatus.FAILURE)
"""Nobody will work on such a group any more."""


PARKED = (GroupStatus.EXPIRED,)
"""Such a group is in no order: nobody waits for it until it is started again, as the youngest."""

AGEING = (GroupStatus.FINISHED, GroupStatus.ABORTED, GroupStatus.EXPIRED)
"""Such a group holds tokens that wait, and grow old."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a group. Travels to other processes; a write with one that is over is refused."""

    uid: str
    """The group."""
    number: int
    """Counts the leases of the group."""
    worker: str
    """Who works on it."""
    deadline: float | None
    """When it is over, on the clock of the buffer; None for never."""


@dataclass(slots=True, kw_only=True)
class PromptGroup:
    """All attempts at one prompt draw."""

    uid: str
    """Names the draw, unique in the run."""
    partition_id: str
    """train or val."""
    global_steps: int
    """Step it was dispatched for: the one it would be on-policy in."""
    task_name: str = ""
    """Task it belongs to."""
    ordinal: int = 0
    """Place in the order of admission."""
    row: int | None = None
    """Row of the data set that it was drawn from."""
    status: GroupStatus = GroupStatus.PENDING
    """Where it stands."""
    states: list[RolloutState] = field(default_factory=list[RolloutState])
    """The attempts; failed ones included. Empty while they are only on the disk."""
    reason: str = ""
    """Why it is a failure."""
    lease: Lease | None = None
    """Who works on it."""
    num_leases: int = 0
    """Leases it has had."""
    since: float = 0.0
    """When it was admitted, on the clock of the buffer."""
    last_event: str = "admitted"
    """What happened to it last."""
    num_rows: int = 0
    """Attempts that can be trained on."""
    num_tokens: int = 0
    """Response tokens of all attempts."""
    metric: float | None = None
    """The one value of the filter's metric that all rows have; None if they differ, or nothing is filtered."""
    is_uniform: bool = False
    """Whether there are several rows with one value of the filter's metric."""
    min_version: int | None = None
    """Oldest policy version among its tokens."""
    max_version: int | None = None
    """Newest policy version among its tokens."""
    pool_key: int = 0
    """Where it stands in its pool: lower ones first."""
    is_spilled: bool = False
    """Whether its attempts are only on the disk."""

    def measure(self) -> None:
        """Set what is known of its attempts as a whole: tokens and policy versions."""
        versions = [versions for state in self.states if (versions := version_range(state)) is not None]
        self.min_version = min((oldest for oldest, _ in versions), default=None)
        self.max_version = max((newest for _, newest in versions), default=None)
        self.num_tokens = sum(len(state.response_ids or ()) for state in self.states)


class Pool:
    """Groups of one task in one status, lowest key first, then in the order they came."""

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[str, None]] = {}
        self._size = 0

    def add(self, key: int, uid: str) -> None:
        """Put a group last among those with its key."""
        self._buckets.setdefault(key, OrderedDict())[uid] = None
        self._size += 1

    def discard(self, key: int, uid: str) -> None:
        """Take a group out."""
        bucket = self._buckets[key]
        del bucket[uid]
        self._size -= 1
        if not bucket:
            del self._buckets[key]

    @property
    def lowest(self) -> int | None:
        """The lowest key; None if there is no group."""
        return min(self._buckets, default=None)

    def __iter__(self) -> Iterator[str]:
        for key in sorted(self._buckets):
            yield from self._buckets[key]

    def __len__(self) -> int:
        return self._size


@dataclass(slots=True)
class Partition:
    """The groups of one partition."""

    order: OrderedDict[str, PromptGroup] = field(default_factory=OrderedDict[str, PromptGroup])
    """Admission order. An OrderedDict: taking from its front stays cheap, in a dict the holes would be walked over."""
    by_status: Counter[GroupStatus] = field(default_factory=Counter[GroupStatus])
    ages: Counter[int] = field(default_factory=Counter[int])
    """Dispatch step -> groups."""
    unfinished_ages: Counter[int] = field(default_factory=Counter[int])
    """Dispatch step -> groups that somebody works on, or will."""
    terminal_ages: dict[int, OrderedDict[str, None]] = field(default_factory=dict[int, OrderedDict[str, None]])
    """Dispatch step -> finished groups."""
    suspects: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """Failures and uniform groups: what may have to be evicted whatever its age."""


class GroupTable:
    """Every group by name, in order of admission, by status, by age and by task."""

    def __init__(self) -> None:
        self._groups: dict[str, PromptGroup] = {}
        self._partitions: dict[str, Partition] = {}
        self._pools: dict[tuple[str, str, GroupStatus], Pool] = {}
        self._versions: dict[tuple[str, str], Pool] = {}

    def get(self, uid: str) -> PromptGroup | None:
        """Return a group, or None if it is not here (any more)."""
        return self._groups.get(uid)

    def partition(self, partition_id: str) -> Partition:
        """Return a partition; an empty one if it has no group yet."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = self._partitions[partition_id] = Partition()
        return partition

    def pool(self, partition_id: str, task_name: str, status: GroupStatus) -> Pool:
        """Return the groups of a task in a status."""
        return _pool_of(self._pools, (partition_id, task_name, status))

    def by_version(self, partition_id: str, task_name: str) -> Pool:
        """Return the groups of a task that hold tokens and may become too old, oldest version first."""
        return _pool_of(self._versions, (partition_id, task_name))

    def oldest_version(self, partition_id: str) -> int | None:
        """Return the oldest policy version among tokens that wait; None if there are none."""
        pools = (pool for (partition, _), pool in self._versions.items() if partition == partition_id)
        return min((pool.lowest for pool in pools if pool.lowest is not None), default=None)

    def add(self, group: PromptGroup) -> None:
        """Add a group at the end of its partition."""
        self._groups[group.uid] = group
        self.partition(group.partition_id).order[group.uid] = group
        self._enter(group)

    def remove(self, group: PromptGroup) -> None:
        """Take a group out."""
        self._leave(group)
        del self._groups[group.uid]
        del self.partition(group.partition_id).order[group.uid]

    def move_last(self, group: PromptGroup) -> None:
        """Give a group the last place of its partition."""
        self.partition(group.partition_id).order.move_to_end(group.uid)

    @contextmanager
    def changing(self, group: PromptGroup) -> Generator[None, None, None]:
        """Let what a group is listed under be changed inside: status, steps, versions, pool key, uniformity."""
        self._leave(group)
        try:
            yield
        finally:
            self._enter(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[PromptGroup]:
        return iter(self._groups.values())

    def _enter(self, group: PromptGroup) -> None:
        partition = self.partition(group.partition_id)
        partition.by_status[group.status] += 1
        if group.status not in PARKED:
            partition.ages[group.global_steps] += 1
        if group.status not in (*TERMINAL, *PARKED):
            partition.unfinished_ages[group.global_steps] += 1
        elif group.status is GroupStatus.FINISHED:
            partition.terminal_ages.setdefault(group.global_steps, OrderedDict())[group.uid] = None
        if group.status is GroupStatus.FAILURE or (group.status is GroupStatus.FINISHED and group.is_uniform):
            partition.suspects[group.uid] = None
        self.pool(group.partition_id, group.task_name, group.status).add(group.pool_key, group.uid)
        if group.status in AGEING and group.min_version is not None:
            self.by_version(group.partition_id, group.task_name).add(group.min_version, group.uid)

    def _leave(self, group: PromptGroup) -> None:
        partition = self.partition(group.partition_id)
        partition.by_status[group.status] -= 1
        if group.status not in PARKED:
            _decrease(partition.ages, group.global_steps)
        if group.status not in (*TERMINAL, *PARKED):
            _decrease(partition.unfinished_ages, group.global_steps)
        elif group.status is GroupStatus.FINISHED:
            same_age = partition.terminal_ages[group.global_steps]
            del same_age[group.uid]
            if not same_age:
                del partition.terminal_ages[group.global_steps]
        partition.suspects.pop(group.uid, None)
        self.pool(group.partition_id, group.task_name, group.status).discard(group.pool_key, group.uid)
        if group.status in AGEING and group.min_version is not None:
            self.by_version(group.partition_id, group.task_name).discard(group.min_version, group.uid)


def _pool_of(pools: dict[K, Pool], key: K) -> Pool:
    pool = pools.get(key)
    if pool is None:
        pool = pools[key] = Pool()
    return pool


def _decrease(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
