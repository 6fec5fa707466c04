"""Prompt groups between generation and training.

::

    admit           start              finish(states)
    -----> PENDING -----> RUNNING ------------------------> FINISHED --sample--> trained
              ^     lease   |  '---fail, deadline, death---> FAILURE --sample--> dropped, replaced
              |             '----abort(states)--.
              |                                 v
              '-----------start---------- ABORTED, EXPIRED <-- too old (the expired attempts are made again)

Waits for    `sample`: until a batch can be taken
             `finish`, `abort`: until the attempts are on the disk
Is woken by  whatever changes the state of a group; nothing is polled. A worker that is silent is ended by the deadline
             of its lease, at which a waiting `sample` wakes up by itself

Groups are taken in the order they were admitted, not in the order they finished: otherwise short answers would be
trained on first, and the age of what is left would have no bound (`xrl_lite.replay_buffer.eviction`).
"""

from __future__ import annotations

import heapq
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from xrl_lite.data import RolloutState, Status, split_sessions
from xrl_lite.errors import BufferStarvedError, LeaseError, RunError
from xrl_lite.log import get_logger
from xrl_lite.replay_buffer.config import ReplayBufferConfig
from xrl_lite.replay_buffer.events import Events, attempts_of
from xrl_lite.replay_buffer.eviction import (
    TRAIN,
    EvictionPolicy,
    GroupFacts,
    Reason,
    TrainerMode,
    Waiting,
    classify,
    refills,
    select,
    span,
)
from xrl_lite.replay_buffer.groups import PARKED, TERMINAL, GroupStatus, GroupTable, Lease, Partition, PromptGroup
from xrl_lite.replay_buffer.metrics import SampleTally
from xrl_lite.replay_buffer.store import GroupStore, MemoryStore

logger = get_logger(__name__)

RefillFn = Callable[[int], Awaitable[None] | None]
"""Generates so many further groups; returns once they are admitted."""

Metrics = dict[str, Any]
"""Numbers by name, and ``_dapo_filtered_reward_counts``: value of the filter's metric -> groups."""

BYTES_PER_TOKEN = 100
"""What a response token takes in memory as Python numbers: id, log-prob, mask, version."""

_SHOWN = 8


@dataclass
class Draw:
    """One call of `sample`."""

    global_steps: int
    partition_id: str
    batch_size: int
    credit: int = 0
    """Groups that may still be generated to make up for filtered ones."""
    draining: bool = False
    """Whether there is enough, and only what is in flight is waited for."""
    starved: bool = False
    """Whether what is there has to do."""


class ReplayBuffer:
    """Holds groups until a whole batch can be trained on.

    A subclass may replace `sample`. One that is written like verl's, with a plain blocking ``def sample``, derives from
    `xrl_lite.replay_buffer.BlockingReplayBuffer` instead.

    Args:
        trainer_mode: sync, colocate_async or separate_async.
        trainer_config: Settings of that mode, for subclasses.
        max_off_policy_threshold: See `ReplayBufferConfig`.
        max_off_policy_strategy: See `ReplayBufferConfig`.
        sampler_kwargs: Settings of a subclass.
        refill_fn: Generates replacements for groups that were evicted.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        trainer_mode: TrainerMode = "sync",
        trainer_config: Any = None,
        max_off_policy_threshold: int = 8,
        max_off_policy_strategy: str = "drop",
        sampler_kwargs: Mapping[str, Any] | None = None,
        refill_fn: RefillFn | None = None,
    ) -> None:
        if max_off_policy_strategy not in ("drop", "wait"):
            raise ValueError(f"max_off_policy_strategy must be drop or wait, got {max_off_policy_strategy!r}.")
        self.trainer_mode: TrainerMode = trainer_mode
        self.trainer_config = trainer_config
        self.sampler_kwargs = dict(sampler_kwargs or {})
        self.refill_fn = refill_fn
        self.policy = EvictionPolicy(
            mode=trainer_mode,
            max_off_policy_threshold=max_off_policy_threshold,
            max_off_policy_strategy=max_off_policy_strategy,
        )
        self.settings = ReplayBufferConfig()
        self.max_failed_groups: int | None = None
        self.store: GroupStore = MemoryStore()
        self.events = Events()
        self.filtered_rewards: Counter[float] = Counter()
        self.table = GroupTable()
        self._num_admitted = 0
        self._step = 0
        self._changed = anyio.Event()
        self._deadlines: list[tuple[float, str, int]] = []
        self._held: dict[str, set[str]] = {}
        self._memory_bytes = 0
        self._tally = SampleTally()
        self.outcomes: Counter[GroupStatus] = Counter()
        self.last_failure = ""

    def configure(
        self,
        settings: ReplayBufferConfig,
        *,
        store: GroupStore | None = None,
        max_failed_groups: int | None = None,
        events: Events | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> ReplayBuffer:
        """Take over settings, before the first group is admitted; return the buffer itself.

        Args:
            settings: All of them; the two that the constructor takes are read from here.
            store: Where groups are kept.
            max_failed_groups: Failures during one `sample` after which nothing is to be hoped for; None for no limit.
            events: Is told what happens.
            clock: Seconds; leases and waits are measured by it.
        """
        assert not len(self.table), "settings come before the first group"
        self.settings = settings
        self.policy = settings.eviction_policy(self.trainer_mode)
        self.store = store or self.store
        self.max_failed_groups = max_failed_groups
        self.events = events or self.events
        self._clock = clock
        return self

    def limit_age(self, max_off_policy_threshold: int) -> None:
        """Lower the threshold of the settings, where it is higher: who begins groups counts on it."""
        lower = min(self.policy.max_off_policy_threshold, max_off_policy_threshold)
        self.policy = replace(self.policy, max_off_policy_threshold=lower)

    _clock: Callable[[], float] = staticmethod(anyio.current_time)

    # --- generating side

    async def admit(
        self,
        uid: str,
        *,
        partition_id: str = TRAIN,
        global_steps: int,
        task_name: str = "",
        states: Sequence[RolloutState] = (),
    ) -> PromptGroup:
        """Note a group that will be generated; this fixes its place in the order."""
        group = self.new_group(
            uid, partition_id=partition_id, global_steps=global_steps, task_name=task_name, states=states
        )
        self.admit_all([group])
        return group

    def new_group(
        self,
        uid: str,
        *,
        partition_id: str,
        global_steps: int,
        task_name: str = "",
        states: Sequence[RolloutState] = (),
    ) -> PromptGroup:
        """Return a group that `admit_all` takes."""
        row = states[0].extra_fields.get("row") if states else None
        return PromptGroup(
            uid=uid,
            partition_id=partition_id,
            global_steps=global_steps,
            task_name=task_name,
            row=row if isinstance(row, int) else None,
            states=list(states),
        )

    def admit_all(self, groups: Sequence[PromptGroup], notes: Mapping[str, Any] | None = None) -> None:
        """Note several groups at once, in order, along with values that belong to this very moment.

        Raises:
            RunError: one of them is in the buffer already.
        """
        for group in groups:
            if self.table.get(group.uid) is not None:
                raise RunError(f"Group {group.uid!r} is in the buffer already.")
            group.ordinal, group.since = self._num_admitted, self._clock()
            self._num_admitted += 1
            self.table.add(group)
            self.events.record(
                "admitted",
                group=group.uid,
                partition=group.partition_id,
                task=group.task_name,
                step=group.global_steps,
                row=group.row,
            )
        self.store.admit(groups, dict(notes or {}))
        self._notify()

    def start(
        self, uid: str, *, worker: str = "driver", timeout_s: float | None = None, global_steps: int | None = None
    ) -> Lease:
        """Begin to work on a group; return the lease that its result must come with.

        Args:
            uid: A group that is pending, aborted or expired. An expired one becomes the youngest.
            worker: Who works on it.
            timeout_s: Seconds after which the group counts as failed; None for no limit.
            global_steps: Step it is dispatched for now. Ignored for a group that goes on with tokens it has: they are
                as old as they are.
        """
        self.end_overdue_leases()
        group = self._group(uid, "start")
        if group.status in (*TERMINAL, GroupStatus.RUNNING):
            raise RunError(f"Group {uid!r} cannot become running: it is {group.status.value}, not pending.")
        group.num_leases += 1
        deadline = None if timeout_s is None else self._clock() + timeout_s
        lease = group.lease = Lease(uid, group.num_leases, worker, deadline)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, uid, lease.number))
        self._held.setdefault(worker, set()).add(uid)
        was_expired = group.status is GroupStatus.EXPIRED
        with self.table.changing(group):
            group.status = GroupStatus.RUNNING
            if global_steps is not None and (was_expired or group.min_version is None):
                group.global_steps = global_steps
        if was_expired:
            self.table.move_last(group)
        group.last_event = f"started on {worker}"
        self.events.record("started", group=uid, worker=worker, step=group.global_steps)
        self.store.update(group)
        self._notify()
        return lease

    def note(self, lease: Lease, event: str) -> None:
        """Say what a worker is at; shown when somebody waits for the group for long."""
        self._leased(lease).last_event = event

    async def finish(self, lease: Lease, states: Sequence[RolloutState]) -> GroupStatus:
        """Hand over a group. With fewer than `min_sessions` good attempts it becomes a failure.

        Returns once the attempts are on the disk, with the status that the group then has: a failure, too, if they
        hold something that cannot be kept there.

        Raises:
            LeaseError: the lease is over; nothing was written.
            RunError: the reward lacks the metric that groups are filtered by.
        """
        group = self._leased(lease)
        good = [state for state in states if state.status is Status.COMPLETED]
        num_good = len(split_sessions(good))
        if num_good < self.settings.min_sessions:
            bad = [state for state in states if state.status is not Status.COMPLETED]
            reasons = list(dict.fromkeys(state.error_msg or state.status.value for state in bad))
            num_sessions = len(split_sessions(states))
            enough = f"{num_good} of {num_sessions} attempts, {self.settings.min_sessions} needed: " if good else ""
            return await self._end(group, GroupStatus.FAILURE, states, enough + ("; ".join(reasons) or "no attempt"))
        group.num_rows = len(good)
        group.metric, group.is_uniform = self._filter_value(group, good)
        return await self._end(group, GroupStatus.FINISHED, states)

    async def fail(self, lease: Lease, reason: str, states: Sequence[RolloutState] = ()) -> None:
        """Note that nothing will come of a group. Good attempts in `states` stay trainable where the mode keeps them.

        Raises:
            LeaseError: the lease is over.
        """
        group = self._leased(lease)
        group.num_rows = sum(state.status is Status.COMPLETED for state in states)
        await self._end(group, GroupStatus.FAILURE, states, reason)

    async def abort(self, lease: Lease, states: Sequence[RolloutState]) -> None:
        """Hand over what there is of an interrupted group; it keeps its place, and waits to be started again.

        Raises:
            LeaseError: the lease is over.
        """
        await self._end(self._leased(lease), GroupStatus.ABORTED, states)

    def put_back(self, lease: Lease) -> None:
        """Give up a group; it keeps its place, and waits to be started again. A lease that is over is none."""
        group = self.table.get(lease.uid)
        if group is not None and group.lease == lease:
            self._release(group)
            with self.table.changing(group):
                group.status = GroupStatus.ABORTED
                group.measure()  # attempts that ended before it was given up are kept, and grow old
            group.last_event = f"given back by {lease.worker}"
            if self.events.listens:
                self.events.record("given_back", group=group.uid, attempts=attempts_of(group.states))
            self.store.update(group)
            self._notify()

    def fail_worker(self, worker: str, reason: str) -> list[str]:
        """Turn every group that a worker holds into a failure; return their uids."""
        held = sorted(self._held.get(worker, ()))
        for uid in held:
            self.revoke(uid, f"{worker} died: {reason}")
        return held

    def revoke(self, uid: str, reason: str) -> None:
        """Turn a group into a failure, whoever works on it: what it writes from now on is refused."""
        self._fail_now(self._group(uid, "fail"), reason)

    def end_overdue_leases(self) -> list[str]:
        """Turn groups whose lease has run out into failures; return their uids."""
        overdue: list[str] = []
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, uid, number = heapq.heappop(self._deadlines)
            group = self.table.get(uid)
            if group is not None and group.lease is not None and group.lease.number == number:
                late = f"{group.lease.worker} did not end it within its deadline; last event: {group.last_event}"
                self._fail_now(group, late)
                overdue.append(uid)
        return overdue

    def expire(self, group: PromptGroup) -> None:
        """Mark a group some attempts of which were reset, to be made again. It keeps its place."""
        self._count_memory(group, -1)
        with self.table.changing(group):
            group.status = GroupStatus.EXPIRED
            group.measure()
        group.last_event = "some attempts were too old"
        self.events.record("expired", group=group.uid)
        self.store.write_states(group)
        self._notify()

    async def load(self, groups: Sequence[PromptGroup]) -> None:
        """Bring the attempts of groups back into memory."""
        spilled = [group for group in groups if group.is_spilled]
        if spilled:
            for group, states in zip(spilled, await self.store.load_states(spilled), strict=True):
                group.states, group.is_spilled = states, False
                self._count_memory(group, 1)

    def at_step(self, global_steps: int) -> None:
        """Say which step is being sampled for: going back to a checkpoint before it undoes what leaves from now on."""
        self._step = global_steps

    def evict_stale(self, group: PromptGroup, global_steps: int) -> None:
        """Let a group leave that is too old for a step; it is counted as such."""
        self.at_step(global_steps)
        self._tally.evicted(group, (Reason.STALE,), global_steps)
        self.discard([group], Reason.STALE.value)

    def discard(self, groups: Sequence[PromptGroup], reason: str) -> None:
        """Let groups leave untrained, whoever works on them, in the step that is being sampled for."""
        for group in groups:
            self._forget(group)
        if groups:
            self.store.drop(groups, reason, self._step)
            self.events.record("dropped", groups=[group.uid for group in groups], reason=reason)
            self._notify()

    # --- training side

    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[list[PromptGroup], Metrics]:
        """Take the groups to train on next, waiting until there is a whole batch of them.

        What must not be trained on is evicted on the way, counted, and replaced through `refill_fn`.

        Args:
            global_steps: Step that trains on them.
            partition_id: train or val.
            batch_size: Groups, not attempts.

        Returns:
            The groups, oldest first, with their attempts, and metrics.

        Raises:
            BufferStarvedError: filters and failures ate more groups than allowed.
            RunError: nothing could be trained on, or groups are to be replaced and nobody can.

        Cancelling leaves the groups where they were.
        """
        self.at_step(global_steps)
        draw = Draw(global_steps, partition_id, batch_size)
        report_at = self._clock() + self.settings.report_wait_s
        while True:
            await self.events.turn("dropped", "sampled")
            self.end_overdue_leases()
            if await self._refill(draw, self.evict_unusable(global_steps, partition_id)):
                continue  # meanwhile groups may have ended that must be evicted too
            chosen = self._choose(draw)
            if chosen is not None:
                return await self._take(draw, chosen)
            if self._clock() >= report_at:
                logger.warning("%s", self.describe_wait(partition_id, batch_size))
                report_at = self._clock() + self.settings.report_wait_s
            await self._wait_until(report_at)

    def evict_unusable(self, global_steps: int, partition_id: str) -> int:
        """Let go of what must not be trained on in a step; return how many groups are to replace it.

        They are counted in the metrics of the next `sample`.
        """
        self.at_step(global_steps)
        evicted: dict[str, frozenset[Reason]] = {}
        groups: list[PromptGroup] = []
        for group, reasons in self._unusable(global_steps, partition_id):
            evicted[group.uid] = reasons
            groups.append(group)
            self._tally.evicted(group, reasons, global_steps)
            if Reason.UNIFORM in reasons and group.metric is not None:
                self.filtered_rewards[group.metric] += 1
        if groups:
            logger.info("evicted %s", ", ".join(f"{uid} ({_names(why)})" for uid, why in evicted.items()))
            for group in groups:
                self.discard([group], _names(evicted[group.uid]))
        return refills(evicted, self.policy)

    def has_unusable(self, global_steps: int, partition_id: str) -> bool:
        """Whether `evict_unusable` would let go of anything."""
        return any(True for _ in self._unusable(global_steps, partition_id))

    def check_starvation(self, global_steps: int, partition_id: str, batch_size: int) -> bool:
        """Look at what was evicted since the last batch; return whether a smaller one has to do.

        Raises:
            BufferStarvedError: it is too much, and the settings say that this is an error.
        """
        problem = self._starvation(global_steps, batch_size)
        if problem is None:
            return False
        num_sampleable = self.count(partition_id, *TERMINAL)
        if self.settings.on_starvation == "continue":
            logger.warning("%s Going on, as on_starvation=continue says.", problem)
            self._tally.start_over()
            return False
        if self.settings.on_starvation == "train_partial" and num_sampleable:
            logger.warning("%s Training on %d group(s) instead.", problem, num_sampleable)
            return True
        raise BufferStarvedError(problem)

    async def take_groups(self, uids: Sequence[str], global_steps: int) -> list[PromptGroup]:
        """Take groups out to train on them in a step, with their attempts. Cancelling leaves them where they were."""
        groups = [self._group(uid, "take") for uid in uids]
        await self.load(groups)  # before they leave: what has left makes room for others
        for group in groups:
            self._forget(group)
        self.store.take(groups, global_steps)
        self.events.record("sampled", step=global_steps, groups=[group.uid for group in groups])
        self._notify()
        return groups

    async def ask_for(self, num_groups: int) -> None:
        """Have further groups generated.

        Raises:
            RunError: nobody can.
        """
        if self.refill_fn is None:
            raise RunError(
                f"{num_groups} group(s) were evicted and are to be replaced, but the buffer has no refill_fn to ask."
            )
        answer = self.refill_fn(num_groups)
        if inspect.isawaitable(answer):
            await answer

    async def changed(self) -> None:
        """Return when a group has changed, or a lease is over. Look at the state first: what was before is not told."""
        await self._wait_until(None)

    @property
    def next_change(self) -> anyio.Event:
        """Is set when a group changes from now on."""
        return self._changed

    def wake(self) -> None:
        """Let everybody who waits for a change look again: something that they depend on has changed elsewhere."""
        self._notify()

    def status(self, uid: str) -> GroupStatus:
        """Return where a group stands."""
        return self._group(uid, "look up").status

    def reason(self, uid: str) -> str:
        """Return why a group failed."""
        return self._group(uid, "look up").reason

    def count(self, partition_id: str, *statuses: GroupStatus) -> int:
        """Return how many groups of a partition have one of the statuses; any if none is given."""
        by_status = self.table.partition(partition_id).by_status
        return sum(by_status[status] for status in statuses or GroupStatus)

    def num_waiting(self, partition_id: str) -> int:
        """Return how many groups stand in line to be trained on, finished or not: what pacing bounds.

        Those that `take_groups` is about to return still do.
        """
        return self.count(partition_id) - self.count(partition_id, GroupStatus.FAILURE, *PARKED)

    def in_line(self, partition_id: str) -> Iterator[PromptGroup]:
        """Yield the groups that stand in line to be trained on, oldest first."""
        for group in self.table.partition(partition_id).order.values():
            if group.status not in (GroupStatus.FAILURE, *PARKED):
                yield group

    @property
    def num_admitted(self) -> int:
        """Groups admitted over the whole run."""
        return self._num_admitted

    def describe_wait(self, partition_id: str, batch_size: int) -> str:
        """Say what a batch waits for: group, age, worker, and what was last heard of it."""
        partition = self.table.partition(partition_id)
        missing = [group for group in partition.order.values() if group.status is not GroupStatus.FINISHED]
        now = self._clock()
        lines = [
            f"  {group.uid}: {group.status.value} for {now - group.since:.0f} s, "
            f"{group.lease.worker if group.lease else 'nobody works on it'}, last: {group.last_event}"
            for group in missing[:_SHOWN]
        ]
        more = [f"  and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
        finished = partition.by_status[GroupStatus.FINISHED]
        return "\n".join(
            [
                f"waiting for {batch_size} groups of {partition_id}; {finished} are finished. Not finished:",
                *lines,
                *more,
            ]
            if missing
            else [f"waiting for {batch_size} groups of {partition_id}; {finished} are finished, no other is admitted."]
        )

    # --- over the life of the run

    async def restore(self, step: int, *, keep_newer: bool) -> dict[str, Any]:
        """Go on from what the store holds, as it was at the end of a step. Returns the notes of the last admission.

        Args:
            step: Step of the checkpoint; 0 for none.
            keep_newer: Go on with what was admitted and generated since (async modes), so that nothing is lost or
                trained twice. Otherwise it is thrown away, to be drawn and generated again to the same bits.

        Groups that were being worked on wait to be started again; they are dispatched anew, for the step after `step`.
        """
        assert not len(self.table), "a run goes on before it begins"
        stored = await self.store.rewind(step, keep_newer=keep_newer)
        for group in stored.groups:
            group.since = self._clock()
            if group.status in (GroupStatus.PENDING, GroupStatus.RUNNING):
                group.status = GroupStatus.ABORTED
            if group.status not in TERMINAL:
                group.measure()  # what was not written is not there any more
                group.global_steps = max(group.global_steps, step + 1)
                group.last_event = "found after a restart"
            elif group.status is GroupStatus.FINISHED and self.policy.filter_metric is not None:
                (states,) = await self.store.load_states([group])
                good = [state for state in states if state.status is Status.COMPLETED]
                group.metric, group.is_uniform = self._filter_value(group, good)
            group.pool_key = self._pool_key(group)
            self.table.add(group)
        found = [
            {
                "group": group.uid,
                "partition": group.partition_id,
                "task": group.task_name,
                "row": group.row,
                "step": group.global_steps,
                "status": group.status.value,
                "reason": group.reason,
            }
            for group in stored.groups
        ]
        self.events.record("restored", step=step, groups=found, notes=stored.notes)
        self._num_admitted = stored.next_ordinal
        self.at_step(step + 1)
        self._notify()
        return stored.notes

    async def flush(self) -> None:
        """Wait until the store would survive a kill as the buffer is now; a checkpoint needs it."""
        await self.store.flush()

    def checkpointed(self, oldest_step: int) -> None:
        """Let the store delete what nothing goes back to: the oldest checkpoint is of this step."""
        keep = self.settings.storage.keep_steps
        if keep is not None:
            self.store.forget(oldest_step - keep)

    async def close(self) -> None:
        """End the store."""
        try:
            await self.store.close()
        finally:
            self.events.close()

    def __len__(self) -> int:
        return len(self.table)

    # --- ending of groups

    def _group(self, uid: str, what: str) -> PromptGroup:
        group = self.table.get(uid)
        if group is None:
            raise RunError(f"Cannot {what} group {uid!r}: it is not in the buffer.")
        return group

    def _leased(self, lease: Lease) -> PromptGroup:
        self.end_overdue_leases()
        group = self.table.get(lease.uid)
        if group is None or group.lease != lease:
            now = f"it is {group.status.value}" if group else "it is no longer in the buffer"
            why = f": {group.reason}" if group and group.reason else ""
            raise LeaseError(
                f"{lease.worker} no longer holds group {lease.uid!r} (lease {lease.number}), so what it wrote is "
                f"refused; {now}{why}."
            )
        return group

    async def _end(
        self, group: PromptGroup, status: GroupStatus, states: Sequence[RolloutState], reason: str = ""
    ) -> GroupStatus:
        self._release(group)
        group.states, group.reason = list(states), reason
        group.measure()
        if self.events.listens:
            attempts = attempts_of(group.states)
            self.events.record("ended", group=group.uid, status=status.value, reason=reason, attempts=attempts)
        group.status, before = status, group.status
        self.store.write_states(group)
        group.status = before
        # shield: the write cannot be called back, so the group must not stay behind as running
        with anyio.CancelScope(shield=True):
            await self.store.flush()
        await self.events.turn("stored", group=group.uid)
        refusal = self.store.refusal(group)
        if self.table.get(group.uid) is not group:
            return status  # it was discarded meanwhile
        with self.table.changing(group):
            if refusal is not None:
                status, group.reason, group.states, group.num_rows = GroupStatus.FAILURE, refusal, [], 0
                group.measure()
            group.status = status
            group.pool_key = self._pool_key(group)
        group.last_event = status.value
        self.events.record("stored", group=group.uid, status=status.value, reason=refusal)
        self._note_outcome(group)
        self._spill_if_full(group)
        self._notify()
        return status

    def _fail_now(self, group: PromptGroup, reason: str) -> None:
        self._release(group)
        with self.table.changing(group):
            group.status = GroupStatus.FAILURE
        group.reason = group.last_event = reason
        self.events.record("failed", group=group.uid, reason=reason)
        self._note_outcome(group)
        self.store.update(group)
        self._notify()

    def _note_outcome(self, group: PromptGroup) -> None:
        self.outcomes[group.status] += 1
        if group.status is GroupStatus.FAILURE:
            self.last_failure = group.reason

    def _release(self, group: PromptGroup) -> None:
        if group.lease is not None:
            self._held[group.lease.worker].discard(group.uid)
            if not self._held[group.lease.worker]:
                del self._held[group.lease.worker]
            group.lease = None

    def _forget(self, group: PromptGroup) -> None:
        self._release(group)
        self.table.remove(group)
        self._count_memory(group, -1)

    def _count_memory(self, group: PromptGroup, sign: int) -> None:
        if group.status is GroupStatus.FINISHED and not group.is_spilled:
            self._memory_bytes += sign * _size_bytes(group)

    def _pool_key(self, group: PromptGroup) -> int:
        return (group.min_version or 0) if self.settings.replay_policy == "staleness" else 0

    def _filter_value(self, group: PromptGroup, good: Sequence[RolloutState]) -> tuple[float | None, bool]:
        metric = self.policy.filter_metric
        if metric is None or group.partition_id != TRAIN:
            return None, False
        values: set[float] = set()
        for state in good:
            value = (state.reward or {}).get(metric)
            if value is None:
                raise RunError(
                    f"Groups are filtered by {metric!r} (filter_groups.metric), but the reward of sample "
                    f"{state.rollout_id} of group {group.uid!r} has only {sorted(state.reward or {})}."
                )
            values.add(float(value))
        # one attempt has nothing to be compared with, and is no evidence that the prompt is too easy or too hard
        return (values.copy().pop() if len(values) == 1 else None), len(values) == 1 and len(split_sessions(good)) > 1

    def _spill_if_full(self, group: PromptGroup) -> None:
        if group.status is not GroupStatus.FINISHED:
            return
        size = _size_bytes(group)
        if self.store.is_durable and self._memory_bytes + size > self.settings.storage.max_memory_bytes:
            group.states, group.is_spilled = [], True
        else:
            self._memory_bytes += size

    # --- one draw

    def _unusable(self, global_steps: int, partition_id: str) -> Iterator[tuple[PromptGroup, frozenset[Reason]]]:
        for group in self._suspects(global_steps, self.table.partition(partition_id)):
            reasons = classify(_facts(group), global_steps=global_steps, partition_id=partition_id, policy=self.policy)
            if reasons:
                yield group, reasons

    def _suspects(self, global_steps: int, partition: Partition) -> list[PromptGroup]:
        """Groups that may have to be evicted: failures, uniform ones, and what is older than the threshold."""
        uids = dict.fromkeys(partition.suspects)
        for dispatched_for, same_age in partition.terminal_ages.items():
            if span(global_steps, dispatched_for) > self.policy.max_off_policy_threshold:
                uids.update(dict.fromkeys(same_age))
        return [self._group(uid, "evict") for uid in uids]

    async def _refill(self, draw: Draw, num_replacements: int) -> bool:
        """Have groups generated for those that were evicted; return whether anybody was asked."""
        draw.credit += num_replacements
        if self._filters_in_sync:
            draw.draining = draw.draining or self._num_sampleable(draw) >= draw.batch_size
            if draw.draining:
                draw.credit = 0
        is_short = self._num_sampleable(draw) < draw.batch_size
        if draw.starved or not (draw.credit or is_short):
            return False
        draw.starved = self.check_starvation(draw.global_steps, draw.partition_id, draw.batch_size)
        if draw.starved or draw.credit == 0:
            return False
        allowed = draw.credit
        if self._filters_in_sync:
            limit = self.settings.filter_groups.max_inflight_gen_batches * draw.batch_size
            allowed = min(allowed, max(0, limit - self._num_unfinished(draw)))
        if allowed:
            draw.credit -= allowed
            await self.ask_for(allowed)
        return allowed > 0

    def _starvation(self, global_steps: int, size: int) -> str | None:
        tally = self._tally
        if self.max_failed_groups is not None and tally.num_failed > self.max_failed_groups:
            return (
                f"{tally.num_failed} groups failed while a batch of {size} was produced, more than "
                f"max_failed_groups={self.max_failed_groups}. The last one: {tally.last_failure}"
            )
        limit = self.settings.filter_groups.max_filtered_batches * size
        if tally.num_uniform + tally.num_stale <= limit:
            return None
        if tally.num_stale > tally.num_uniform:
            return (
                f"{tally.num_stale} finished groups were too old for step {global_steps} while a batch of {size} "
                f"was waited for. Raise max_off_policy_threshold ({self.policy.max_off_policy_threshold}), or admit "
                f"fewer groups ahead of training."
            )
        return (
            f"{tally.num_uniform} groups were filtered while a batch of {size} was waited for: in each, every attempt "
            f"has the same {self.policy.filter_metric!r}. Value: groups {tally.histogram()}. Is the task too easy or "
            f"too hard for the model? See filter_groups.max_filtered_batches and on_starvation."
        )

    def _choose(self, draw: Draw) -> list[str] | None:
        partition = self.table.partition(draw.partition_id)
        size = min(draw.batch_size, self._num_sampleable(draw)) if draw.starved else draw.batch_size
        if self._num_sampleable(draw) < size or size == 0:
            return None
        if (draw.draining or draw.starved) and self._is_refilled_only_if_asked and self._num_unfinished(draw):
            return None
        if self._too_old_is_unfinished(draw, partition):
            return None
        policy = self.policy if draw.partition_id == TRAIN else EvictionPolicy(mode="sync", stragglers="wait")
        return select(
            self._in_order(partition),
            batch_size=size,
            global_steps=draw.global_steps,
            ages=partition.ages,
            policy=policy,
        )

    def _in_order(self, partition: Partition) -> Iterator[Waiting]:
        for group in partition.order.values():
            if group.status not in PARKED:
                yield Waiting(group.uid, group.global_steps, ready=group.status in TERMINAL)

    def _too_old_is_unfinished(self, draw: Draw, partition: Partition) -> bool:
        if self.policy.max_off_policy_strategy != "wait" or self.trainer_mode == "sync" or draw.partition_id != TRAIN:
            return False
        ages = partition.unfinished_ages
        return bool(ages) and span(draw.global_steps, min(ages)) >= self.policy.max_off_policy_threshold

    async def _take(self, draw: Draw, uids: Sequence[str]) -> tuple[list[PromptGroup], Metrics]:
        groups = [self._group(uid, "take") for uid in uids]
        if not any(group.num_rows for group in groups) and draw.partition_id == TRAIN:
            raise RunError(
                f"None of the {len(groups)} groups of step {draw.global_steps} has an attempt to train on. The first: "
                f"{groups[0].reason}. Set sync_refill_failed_groups to replace failed groups."
            )
        groups = await self.take_groups(uids, draw.global_steps)
        if draw.draining:
            self._drop_surplus(draw)
        metrics, self._tally = self._tally.metrics(groups, draw.global_steps), SampleTally()
        return groups, metrics | self.queue_metrics(draw.partition_id)

    def queue_metrics(self, partition_id: str) -> dict[str, float]:
        """Return how many groups wait in each status."""
        by_status = self.table.partition(partition_id).by_status
        oldest = self.table.oldest_version(partition_id)
        return {
            "buffer/size": float(len(self.table)),
            **({} if oldest is None else {"buffer/oldest_version": float(oldest)}),
            "buffer/memory_mb": self._memory_bytes / 1e6,
            **{f"buffer/{status.value}": float(by_status[status]) for status in GroupStatus},
        }

    def _drop_surplus(self, draw: Draw) -> None:
        """The sync mode keeps nothing between steps: it would be of older weights."""
        surplus = [
            group for group in self.table.partition(draw.partition_id).order.values() if group.status in TERMINAL
        ]
        self._tally.num_surplus += len(surplus)
        self.discard(surplus, "surplus")

    # --- waiting

    @property
    def _is_refilled_only_if_asked(self) -> bool:
        """Whether what is in flight comes to an end; otherwise whatever leaves is replaced at once."""
        return self.trainer_mode != "separate_async"

    @property
    def _filters_in_sync(self) -> bool:
        return self.trainer_mode == "sync" and self.policy.filter_metric is not None

    def _num_sampleable(self, draw: Draw) -> int:
        return self.count(draw.partition_id, *TERMINAL)

    def _num_unfinished(self, draw: Draw) -> int:
        return self.count(draw.partition_id) - self.count(draw.partition_id, *TERMINAL, *PARKED)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _wait_until(self, moment: float | None) -> None:
        """Wait for a change, at most until a moment, or until the next lease is over."""
        moments = [moment] if moment is not None else []
        if self._deadlines:
            moments.append(self._deadlines[0][0])
        if not moments:
            await self._changed.wait()
            return
        with anyio.move_on_after(max(0.0, min(moments) - self._clock())):
            await self._changed.wait()
        self.end_overdue_leases()


def _facts(group: PromptGroup) -> GroupFacts:
    return GroupFacts(
        global_steps=group.global_steps,
        finished=group.status is GroupStatus.FINISHED,
        num_rows=group.num_rows,
        uniform=group.is_uniform,
    )


def _size_bytes(group: PromptGroup) -> int:
    return 4096 + group.num_tokens * BYTES_PER_TOKEN


def _names(reasons: frozenset[Reason]) -> str:
    return ", ".join(sorted(reason.value for reason in reasons))
