"""Which groups leave the buffer untrained, and which are trained next. Pure functions over facts.

Terminal groups of the training partition (reference: the two samplers of verl); k groups have the reason:

====================  ===================  ==========================  ==========================================
mode                  stale                uniform (DAPO)              failed
====================  ===================  ==========================  ==========================================
sync                  never                evict, earn 2k refills      kept; with `sync_refill_failed_groups` those
                                                                       without a row are evicted, k refills
colocate, separate    evict (drop only,    evict, k refills            evict, k refills
                      finished only),
                      k refills
====================  ===================  ==========================  ==========================================

A group that has several reasons is evicted once and refilled once. Other partitions (val) are never evicted from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

TrainerMode = Literal["sync", "colocate_async", "separate_async"]
"""How generation and training are laid out."""

TRAIN = "train"
"""Partition that training draws from."""
VAL = "val"
"""Partition of evaluation: nothing in it is ever evicted."""

SYNC_UNIFORM_CREDIT = 2
"""Groups generated for each uniform one in the sync mode: the next ones are likely to be filtered too."""


class Reason(Enum):
    """Why a group is evicted."""

    STALE = "stale"
    """It was dispatched too many steps ago."""
    UNIFORM = "uniform"
    """All its rows have one value of the filter's metric, so there is nothing to compare (DAPO, arXiv:2503.14476)."""
    FAILED = "failed"
    """Nothing came of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionPolicy:
    """What decides about groups."""

    mode: TrainerMode = "sync"
    """Layout of generation and training."""
    max_off_policy_threshold: int = 8
    """Largest span, in steps, from the dispatch of a group to the step that trains on it, both counted."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """drop evicts what is older; wait holds sampling back while anything that is not finished is that old."""
    filter_metric: str | None = None
    """Key of the reward that must differ within a group; None filters nothing."""
    sync_refill_failed_groups: bool = True
    """Replace failed groups in the sync mode instead of training on fewer."""
    stragglers: Literal["wait", "pass"] = "wait"
    """Whether finished groups may be trained on before unfinished older ones, as long as none of these then becomes
    too old."""

    def __post_init__(self) -> None:
        if self.max_off_policy_threshold < 1:
            raise ValueError(f"max_off_policy_threshold must be at least 1, got {self.max_off_policy_threshold}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFacts:
    """What the decision about one terminal group depends on."""

    global_steps: int
    """Step it was dispatched for."""
    finished: bool
    """Whether it is finished; otherwise it is a failure."""
    num_rows: int
    """Rows that can be trained on."""
    uniform: bool
    """Whether its rows all have one value of the filter's metric."""


def span(global_steps: int, dispatched_for: int) -> int:
    """Return the steps from the dispatch of a group to `global_steps`, both counted: 1 in the same step."""
    return global_steps - dispatched_for + 1


def classify(group: GroupFacts, *, global_steps: int, partition_id: str, policy: EvictionPolicy) -> frozenset[Reason]:
    """Return why a terminal group must leave the buffer; empty if it may be trained on."""
    if partition_id != TRAIN:
        return frozenset()
    reasons: set[Reason] = set()
    is_sync = policy.mode == "sync"
    if group.finished:
        too_old = span(global_steps, group.global_steps) > policy.max_off_policy_threshold
        if not is_sync and policy.max_off_policy_strategy == "drop" and too_old:
            reasons.add(Reason.STALE)
        if policy.filter_metric is not None and group.uniform:
            reasons.add(Reason.UNIFORM)
    elif not is_sync or (policy.sync_refill_failed_groups and group.num_rows == 0):
        reasons.add(Reason.FAILED)
    return frozenset(reasons)


def refills(evicted: Mapping[str, frozenset[Reason]], policy: EvictionPolicy) -> int:
    """Return how many groups the evicted ones (uid -> reasons) are to be replaced by."""
    if policy.mode != "sync":
        return len(evicted)
    return sum(SYNC_UNIFORM_CREDIT if Reason.UNIFORM in reasons else 1 for reasons in evicted.values())


# --- pacing


def max_admitted(*, batch_size: int, max_off_policy_threshold: int, policy_version: int, next_step: int) -> int:
    """Return how many groups may be admitted and not yet taken, so that none is trained on too late.

    Groups are taken `batch_size` a step in the order of their admission, so group number n of those that wait is
    trained on in step ``next_step + n // batch_size``. One that is admitted now starts with `policy_version`, is
    dispatched for step ``policy_version + 1``, and must be trained on within `max_off_policy_threshold` steps from it:

        n // batch_size <= policy_version + max_off_policy_threshold - next_step

    Args:
        batch_size: Groups per step.
        max_off_policy_threshold: Largest span; 1 allows only groups of the newest weights.
        policy_version: Version of the weights that generation uses; the step they came out of.
        next_step: Step that the next batch will be trained in.

    Source: TRL's and AReaL's capacity ``(max_staleness + 1) * batch_size`` is the case in which every step hands its
    weights over; this one also holds with a sync interval.
    """
    return max(0, batch_size * (policy_version + max_off_policy_threshold - next_step + 1))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group as the order of training sees it."""

    uid: str
    global_steps: int
    """Step it was dispatched for."""
    ready: bool
    """Whether it can be taken."""


def select(
    order: Iterable[Waiting],
    *,
    batch_size: int,
    global_steps: int,
    ages: Mapping[int, int],
    policy: EvictionPolicy,
) -> list[str] | None:
    """Return the uids to train on in step `global_steps`, oldest first, or None to wait.

    Args:
        order: Groups that have not been evicted, in admission order; read only as far as needed.
        batch_size: Groups to take.
        global_steps: Step that trains on them.
        ages: Dispatch step -> groups in the buffer, ready or not.
        policy: With ``stragglers="wait"`` the oldest `batch_size` groups are taken, once all of them are ready. With
            "pass" the oldest ready ones are, if the rest can still be trained on in time: for every later step t, no
            more than ``batch_size`` groups a step must fall due until t.
    """
    taken: list[Waiting] = []
    passes = False
    for group in order:
        if group.ready:
            taken.append(group)
        elif policy.stragglers == "wait":
            return None
        else:
            passes = True
        if len(taken) == batch_size:
            break
    if len(taken) < batch_size:
        return None
    if passes and not _rest_is_in_time(taken, batch_size, global_steps, ages, policy):
        return None
    return [group.uid for group in taken]


def _rest_is_in_time(
    taken: list[Waiting], batch_size: int, global_steps: int, ages: Mapping[int, int], policy: EvictionPolicy
) -> bool:
    """Whether what stays can be trained on, a batch a step, before it is older than the threshold allows."""
    left = dict(ages)
    for group in taken:
        left[group.global_steps] -= 1
    due = 0
    for dispatched_for in sorted(left):
        due += left[dispatched_for]
        last_step = dispatched_for + policy.max_off_policy_threshold - 1
        if due > batch_size * max(0, last_step - global_steps):
            return False
    return True
