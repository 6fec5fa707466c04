"""Decides which groups are run, and when.

::

    samplers (by weight) --new--.
    buffer: aborted, expired ---+--> admitted in the buffer --> manager.generate_sequences
                                |
    produce_batch   for one batch, and a little more (sync, colocate_async)
    produce_loop    for ever, as far ahead as no group becomes too old (separate_async)
    refill          in place of groups that the buffer evicted

Waits for    groups to end (`produce_batch`); room for another (`produce_loop`); a while, after failures (all)
Is woken by  the buffer, at every change of a group, and by `advance`, which moves the bound of the age

Pacing comes first, dropping last: a group is begun only if it will be trained on in time when a batch is taken a step,
oldest first (`max_admitted`). What was interrupted, or was found after a restart, has its place in that order already,
and goes on from there before anything is drawn.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from textwrap import shorten
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from xrl_lite.agent_loop.strategy import ProduceStrategyConfig, SyncProduceStrategyConfig
from xrl_lite.data import RolloutState, SamplerState, Status, calculate_group_effective_response_masks
from xrl_lite.errors import RunError
from xrl_lite.log import get_logger
from xrl_lite.replay_buffer import TRAIN, GroupStatus, PromptGroup, ReplayBuffer, TaskPools, max_admitted

logger = get_logger(__name__)

NOTE = "producer"
"""Name under which the state of the producer is kept with the admissions."""

_REASON_WIDTH = 200
"""Characters of a failure that are told: that of a group holds those of all its attempts."""


class DrawsGroups(Protocol):
    """Draws prompts."""

    def sample(self) -> list[RolloutState]:
        """Return the next group."""
        ...

    def again(self, *, row: int, group_id: int) -> list[RolloutState]:
        """Return a group that was drawn before."""
        ...

    def state_dict(self) -> SamplerState:
        """Return how far it is."""
        ...

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on from there."""
        ...


@dataclass(kw_only=True)
class ProducerTask:
    """One task of the producer."""

    name: str
    """Its name."""
    sampler: DrawsGroups
    """Draws its prompts."""
    strategy: ProduceStrategyConfig = field(default_factory=SyncProduceStrategyConfig)
    """How far ahead."""
    weight: float = 1.0
    """Its share."""


@dataclass(frozen=True, kw_only=True)
class ProduceLimits:
    """When producing slows down and gives up."""

    max_failed_groups: int
    """Groups that may fail in a row, or while one batch is produced."""
    backoff_s: float = 0.5
    """Wait after nothing but failures; doubled each time."""
    max_backoff_s: float = 30.0
    """Longest such wait."""


class Producer:
    """Keeps groups running.

    Args:
        tasks: What to draw from.
        manager: Runs groups: an `AgentLoopManager`, or what takes its place.
        replay_buffer: Where groups are admitted; it is given this producer's `refill`.
        limits: When to give up.
        sync_weights_interval: Steps from one weight sync to the next.
        num_warmup_batches: Batches to be ahead of the one that is wanted; None for as many as can be trained on in time
            (`produce_loop`), or none (`produce_batch`).
        note: Told of failures that make it wait.

    Raises:
        RunError: no task, or two of one name.
    """

    def __init__(
        self,
        tasks: Sequence[ProducerTask],
        *,
        manager: Any,
        replay_buffer: ReplayBuffer,
        limits: ProduceLimits,
        sync_weights_interval: int = 1,
        num_warmup_batches: int | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.tasks = {task.name: task for task in tasks}
        if not tasks or len(self.tasks) != len(tasks):
            raise RunError(f"A producer needs tasks with names of their own, got {[task.name for task in tasks]}.")
        self.manager = manager
        self.replay_buffer = replay_buffer
        self._limits = limits
        self._interval = sync_weights_interval
        self._num_warmup_batches = num_warmup_batches
        self._note = note
        self._pools = TaskPools(replay_buffer)
        self._credit = dict.fromkeys(self.tasks, 0.0)
        self._next_step, self._policy_version, self._num_wanted = 1, 0, 0
        self._is_looping = self._is_paused = False
        self._fruitless = 0
        self._seen: Counter[GroupStatus] = Counter()
        replay_buffer.refill_fn = self.refill
        threshold = min(task.strategy.stale_threshold(self._interval) for task in tasks)
        if threshold > self._interval:  # otherwise nothing is carried over from one version to the next
            replay_buffer.limit_age(threshold)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Let groups run while inside (`AgentLoopManager.running`)."""
        running = getattr(self.manager, "running", None)
        if running is None:
            yield  # a manager of the user's own runs where it likes
        else:
            async with running():
                yield

    # --- a batch at a time

    async def produce_batch(self, batch_size: int, *, train_step: int, model_step: int | None = None) -> None:
        """Have a batch generated: begin it, and wait as far as the strategies want.

        With the sync strategy it is begun only: `ReplayBuffer.sample` waits for it, and replaces what fails.

        Args:
            batch_size: Groups of all tasks together.
            train_step: Step it is for.
            model_step: Version of the weights that generate; of the step before when not given.

        Raises:
            BufferStarvedError: too many groups failed.
        """
        if batch_size < 1:
            raise RunError(f"A batch has at least one group, got {batch_size}.")
        self.advance(next_step=train_step, policy_version=train_step - 1 if model_step is None else model_step)
        await self.refresh_staleness(train_step)
        shares = self._take_turns(batch_size)
        await self._go_on_with_interrupted(sum(self._target(self.tasks[name], share) for name, share in shares.items()))
        async with anyio.create_task_group() as tasks:
            for name, share in shares.items():
                if share:
                    tasks.start_soon(self._produce, self.tasks[name], share, batch_size)

    async def _produce(self, task: ProducerTask, share: int, batch_size: int) -> None:
        strategy = task.strategy
        if isinstance(strategy, SyncProduceStrategyConfig) and strategy.should_continue_fn is None:
            await self._dispatch(task, share - self._count(task))
            return
        goes_on = strategy.should_continue
        while goes_on(self._count(task, GroupStatus.FINISHED), share):
            if self.replay_buffer.has_unusable(self._next_step, TRAIN):
                await self.replay_buffer.events.turn("dropped")
                self.replay_buffer.evict_unusable(self._next_step, TRAIN)
            if self.replay_buffer.check_starvation(self._next_step, TRAIN, batch_size):
                return  # what there is has to do
            missing = self._target(task, share) - self._count(task)
            if missing > 0:
                await self._back_off()
                await self._dispatch(task, missing)
            elif self._count(task, GroupStatus.RUNNING) == 0:
                logger.warning(
                    "task %s: should_continue_fn wants more than %d groups, and nothing runs", task.name, share
                )
                return
            else:
                await self.replay_buffer.changed()

    def _target(self, task: ProducerTask, share: int) -> int:
        """Groups to have in the buffer, in whatever state."""
        trigger = task.strategy.tail_batch_trigger_size
        if 0 < trigger <= self._in_pool(task, GroupStatus.EXPIRED):
            return share  # the tail batch: what is old is made again, nothing on top
        return share * (1 + (self._num_warmup_batches or 0)) + ceil(task.strategy.over_sample_threshold * share)

    # --- for ever

    async def produce_loop(self, batch_size: int, *, last_step: int | None = None) -> None:
        """Keep as many groups in the buffer as can be trained on in time; ends only by cancelling, or with an error.

        Args:
            batch_size: Groups a step.
            last_step: Step after which nothing is trained.

        Raises:
            RunError: groups have been failing for so long that there is no hope.
        """
        self._is_looping = True
        try:
            while True:
                await anyio.lowlevel.checkpoint()  # a change may have come together with the end
                await self.replay_buffer.events.turn("admitted", "started")
                if self._is_paused or not await self._fill(batch_size, last_step):
                    await self.replay_buffer.changed()
        finally:
            self._is_looping = False

    async def _fill(self, batch_size: int, last_step: int | None) -> bool:
        """Begin what there is room for; return whether there was any."""
        buffer = self.replay_buffer
        allowed = self._allowed(batch_size, last_step)
        await self._go_on_with_interrupted(allowed)
        if allowed <= buffer.num_waiting(TRAIN):
            return False
        await self._back_off()
        allowed = 0 if self._is_paused else self._allowed(batch_size, last_step)  # paused meanwhile
        room = max(0, allowed - buffer.num_waiting(TRAIN))
        for name, share in self._take_turns(room).items():
            await self._dispatch(self.tasks[name], share)
        return True

    def _allowed(self, batch_size: int, last_step: int | None) -> int:
        """Return how many groups may stand in line."""
        thresholds = [task.strategy.stale_threshold(self._interval) for task in self.tasks.values()]
        admitted = max_admitted(
            batch_size=batch_size,
            max_off_policy_threshold=min(self.replay_buffer.policy.max_off_policy_threshold, *thresholds),
            policy_version=self._policy_version,
            next_step=self._next_step,
        )
        if last_step is not None:
            admitted = min(admitted, batch_size * (last_step - self._next_step + 1))
        if self._num_wanted:
            admitted -= batch_size - self._num_wanted
        if self._num_warmup_batches is not None:
            admitted = min(admitted, self._num_wanted + self._num_warmup_batches * batch_size)
        return admitted

    def advance(self, *, next_step: int, policy_version: int, num_wanted: int = 0) -> None:
        """Say where training is; makes room for further groups.

        Args:
            next_step: Step that the next batch will be trained in.
            policy_version: Version of the weights that generate.
            num_wanted: Groups that this step still waits for; 0 while an earlier step is trained.
        """
        self._next_step, self._policy_version, self._num_wanted = next_step, policy_version, num_wanted
        self.replay_buffer.at_step(next_step)
        self.replay_buffer.wake()

    async def refresh_staleness(self, train_step: int) -> dict[str, int]:
        """Look for groups that are too old for a step; return how many of each task are expired."""
        tasks = self.tasks.values()
        return await self._pools.refresh_staleness(
            current_train_step=train_step,
            task_stale_thresholds={task.name: task.strategy.stale_threshold(self._interval) for task in tasks},
            task_token_stale_thresholds={
                task.name: task.strategy.token_stale_threshold(self._interval) for task in tasks
            },
            expired_groups_retryable_by_task={task.name: task.strategy.expired_groups_retryable for task in tasks},
        )

    def mask_stale_tokens(self, groups: Sequence[PromptGroup], train_step: int) -> None:
        """Leave tokens out of training that are too old for the token bound of their task."""
        for group in groups:
            threshold = self.tasks[group.task_name].strategy.token_stale_threshold(self._interval)
            masks = calculate_group_effective_response_masks(
                group.states, current_train_step=train_step, token_stale_threshold=threshold
            )
            for state, mask in zip(group.states, masks, strict=True):
                if mask is not None and state.status is Status.COMPLETED:
                    state.response_mask = mask

    # --- pausing

    async def pause_produce(self) -> float:
        """Begin no group, and bring those in flight to an end; return the seconds it took.

        What is finishing is collected, the rest is stored as aborted.
        """
        self._is_paused = True
        pause = getattr(self.manager, "pause", None)
        if pause is None:
            return 0.0
        paused = pause()
        return await paused if inspect.isawaitable(paused) else 0.0

    def continue_produce(self, model_step: int) -> None:
        """Go on, with weights of a version."""
        self._is_paused = False
        self.advance(next_step=self._next_step, policy_version=model_step)

    # --- single groups

    async def refill(self, num_groups: int) -> None:
        """Begin groups in place of evicted ones; `produce_loop` does so by itself, as there is room.

        After nothing but failures it waits first, longer each time: whatever is broken should not eat the data set.
        """
        if self._is_looping:
            return
        await self._back_off()
        for name, share in self._take_turns(num_groups).items():
            await self._dispatch(self.tasks[name], share)

    def waiting(self) -> list[dict[str, Any]]:
        """Return the groups that were drawn and not trained on yet, oldest first, as values that JSON can hold."""
        groups = sorted(
            (group for group in self.replay_buffer.table if group.partition_id == TRAIN),
            key=lambda group: group.ordinal,
        )
        return [
            {"task": group.task_name, "group_id": int(group.uid.rpartition("-")[2]), "row": group.row}
            for group in groups
        ]

    def draw_again(self, waiting: Sequence[Mapping[str, Any]]) -> None:
        """Admit groups that `waiting` returned, as interrupted ones: nothing is left of what they had."""
        groups: list[PromptGroup] = []
        for group in waiting:
            task = self.tasks[group["task"]]
            groups.append(self._group_of(task, task.sampler.again(row=group["row"], group_id=group["group_id"])))
        for group in groups:
            group.status = GroupStatus.ABORTED
        if groups:
            self.replay_buffer.admit_all(groups, {NOTE: self.state_dict()})

    @property
    def goes_on_across_syncs(self) -> bool:
        """Whether what is in flight may get new weights, in all tasks."""
        return all(task.strategy.enable_partial_rollout for task in self.tasks.values())

    @property
    def busy_s(self) -> float:
        """Seconds, so far, in which groups were being run; 0 where the manager does not count them."""
        return getattr(self.manager, "busy_s", 0.0)

    def metrics(self) -> dict[str, float]:
        """Return what became of the groups of each task since the last call, where the manager counts them."""
        counts = getattr(self.manager, "counts", None)
        metrics: dict[str, float] = {}
        for name, count in counts(reset=True).items() if counts else ():
            metrics |= count.metrics(name)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return how far the samplers are, as values that JSON can hold."""
        return {
            "samplers": {name: task.sampler.state_dict() for name, task in self.tasks.items()},
            "credit": dict(self._credit),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            RunError: the state is of other tasks.
        """
        if set(state["samplers"]) != set(self.tasks):
            raise RunError(
                f"The checkpoint is of the tasks {sorted(state['samplers'])}, this run has {sorted(self.tasks)}. "
                f"Use the tasks it was made with, or start anew."
            )
        for name, sampler_state in state["samplers"].items():
            self.tasks[name].sampler.load_state_dict(sampler_state)
        self._credit.update(state["credit"])

    async def _dispatch(self, task: ProducerTask, num_groups: int) -> None:
        """Begin groups: first those that wait to be run again, then new ones."""
        if num_groups < 1:
            return
        await self.replay_buffer.events.turn("admitted", "started")
        again = self._to_be_made_again(task, num_groups)
        await self._run(again)
        new = [self._group_of(task, task.sampler.sample()) for _ in range(num_groups - len(again))]
        if new:
            self.replay_buffer.admit_all(new, {NOTE: self.state_dict()})
            await self._run(new)

    async def _run(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            has_tokens = group.min_version is not None
            if group.status is GroupStatus.EXPIRED or (group.status is GroupStatus.ABORTED and not has_tokens):
                with self.replay_buffer.table.changing(group):
                    group.global_steps = self._policy_version + 1
        if groups:
            answer = self.manager.generate_sequences(groups)
            if inspect.isawaitable(answer):
                await answer

    def _to_be_made_again(self, task: ProducerTask, num_groups: int) -> list[PromptGroup]:
        trigger, num_expired = task.strategy.tail_batch_trigger_size, self._in_pool(task, GroupStatus.EXPIRED)
        expired = self._listed(task, GroupStatus.EXPIRED, num_groups) if 0 <= trigger <= num_expired else []
        return expired + self._listed(task, GroupStatus.ABORTED, num_groups - len(expired))

    async def _go_on_with_interrupted(self, num_places: int) -> None:
        """Run what was interrupted and stands among the first in line; what stands behind would grow too old."""
        if not any(self._in_pool(task, GroupStatus.ABORTED) for task in self.tasks.values()):
            return
        first = islice(self.replay_buffer.in_line(TRAIN), max(0, num_places))
        groups = [group for group in first if group.status is GroupStatus.ABORTED]
        if groups:
            await self.replay_buffer.events.turn("started")
            await self._run(groups)

    def _group_of(self, task: ProducerTask, states: list[RolloutState]) -> PromptGroup:
        return self.replay_buffer.new_group(
            f"{task.name}-{states[0].group_id}",
            partition_id=TRAIN,
            global_steps=self._policy_version + 1,
            task_name=task.name,
            states=states,
        )

    def _listed(self, task: ProducerTask, status: GroupStatus, count: int | None = None) -> list[PromptGroup]:
        pool = self.replay_buffer.table.pool(TRAIN, task.name, status)
        groups = [self.replay_buffer.table.get(uid) for uid in islice(pool, count)]
        return [group for group in groups if group is not None]

    def _in_pool(self, task: ProducerTask, status: GroupStatus) -> int:
        return len(self.replay_buffer.table.pool(TRAIN, task.name, status))

    def _count(self, task: ProducerTask, *statuses: GroupStatus) -> int:
        """Groups of a task that are finished, or run: what need not be begun."""
        wanted = statuses or (GroupStatus.FINISHED, GroupStatus.RUNNING, GroupStatus.PENDING)
        return sum(self._in_pool(task, status) for status in wanted)

    def _take_turns(self, num_groups: int) -> dict[str, int]:
        """Split groups among the tasks by their weights, exactly over time: no task waits for ever for its share."""
        total = sum(task.weight for task in self.tasks.values())
        turns = dict.fromkeys(self.tasks, 0)
        for _ in range(num_groups):
            for name, task in self.tasks.items():
                self._credit[name] += task.weight / total
            name = max(self._credit, key=self._credit.__getitem__)
            self._credit[name] -= 1.0
            turns[name] += 1
        return turns

    async def _back_off(self) -> None:
        """Wait a while if everything has failed since the last time, longer each time.

        Raises:
            RunError: it has been failing for too long.
        """
        outcomes = self.replay_buffer.outcomes - self._seen
        self._seen = self.replay_buffer.outcomes.copy()
        failed, succeeded = outcomes[GroupStatus.FAILURE], outcomes[GroupStatus.FINISHED]
        if succeeded or not failed:
            self._fruitless = 0 if succeeded else self._fruitless
            return
        self._fruitless += failed
        if self._is_looping and self._fruitless > self._limits.max_failed_groups:
            raise RunError(
                f"The last {self._fruitless} groups all failed, more than max_failed_groups="
                f"{self._limits.max_failed_groups}. The last one: {self.replay_buffer.last_failure}"
            )
        rounds = self._fruitless.bit_length() - 1
        delay_s = min(self._limits.backoff_s * 2**rounds, self._limits.max_backoff_s)
        told = f"the last {self._fruitless} group(s) all failed; waiting {delay_s:.1f} s before others are drawn"
        logger.warning("%s", told)
        reason = shorten(self.replay_buffer.last_failure, width=_REASON_WIDTH, placeholder=" ...")
        self._note(f"{told}. The last one: {reason}")
        await anyio.sleep(delay_s)
