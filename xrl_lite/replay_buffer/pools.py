"""The buffer as XTuner's producers see it: groups of a task in pools, one per status.

COMPLETED groups wait to be trained on. ABORTED and EXPIRED ones wait to be made again, all of them or only the attempts
that were too old; they keep their place in the order of admission meanwhile. FIFO or oldest tokens first, as
`ReplayBufferConfig.replay_policy` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from xrl_lite.data import RolloutState, Status, get_group_status, update_sample_version
from xrl_lite.data.staleness import discard_rollout_state, expire_stale_states, refresh_seq_staleness
from xrl_lite.replay_buffer.buffer import ReplayBuffer
from xrl_lite.replay_buffer.eviction import TRAIN
from xrl_lite.replay_buffer.groups import GroupStatus, PromptGroup

_STATUS = {
    Status.COMPLETED: GroupStatus.FINISHED,
    Status.ABORTED: GroupStatus.ABORTED,
    Status.EXPIRED: GroupStatus.EXPIRED,
    Status.FAILED: GroupStatus.FAILURE,
    Status.FILTERED: GroupStatus.FAILURE,
    Status.INIT: GroupStatus.PENDING,
}
_CAN_EXPIRE = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)


class TaskPools:
    """Groups by task and status.

    Args:
        buffer: Holds them.
        partition_id: Partition that is looked at.
    """

    def __init__(self, buffer: ReplayBuffer, partition_id: str = TRAIN) -> None:
        self._buffer = buffer
        self._partition = partition_id

    async def put(
        self,
        items: Sequence[RolloutState],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
    ) -> None:
        """Put in a group that was generated elsewhere; nothing for an empty one.

        Args:
            items: Its attempts.
            task_name: Their task.
            model_step: Version that made the tokens that have none yet.
            current_train_step: Step whose batch it is for; None looks at no age.
            stale_threshold: Staleness at which a sequence is too old.
            token_stale_threshold: Staleness at which a token is.
            expired_groups_retryable: Keep what is too old, to be made again; otherwise it is discarded.
        """
        if not items:
            return
        for state in items:
            if model_step is not None:
                update_sample_version(state, model_step)
        status = self._settle(
            items, current_train_step, stale_threshold, token_stale_threshold, retryable=expired_groups_retryable
        )
        if status is Status.EXPIRED and not expired_groups_retryable:
            _discard(items)
            return
        buffer = self._buffer
        uid = f"{task_name}-put-{buffer.num_admitted}"
        await buffer.admit(
            uid, partition_id=self._partition, global_steps=current_train_step or 0, task_name=task_name, states=items
        )
        await self._move(buffer.start(uid, worker="put").uid, items, status)

    async def get(self, batch_size: int, task_name: str, group_status: Status) -> list[list[RolloutState]]:
        """Take up to `batch_size` groups out, in the order of the policy."""
        groups = self._first(batch_size, task_name, group_status)
        await self._buffer.load(groups)
        self._buffer.discard(groups, "taken")
        return [group.states for group in groups]

    async def count(self, task_name: str, group_status: Status) -> int:
        """Return how many groups of a task have a status."""
        return len(self._buffer.table.pool(self._partition, task_name, _STATUS[group_status]))

    async def count_statuses(
        self, task_names: Iterable[str], statuses: Iterable[Status]
    ) -> dict[str, dict[Status, int]]:
        """Return task -> status -> groups."""
        wanted = list(statuses)
        return {task: {status: await self.count(task, status) for status in wanted} for task in task_names}

    async def is_ready(self, batch_sizes: Mapping[str, int]) -> bool:
        """Whether each task has its number of completed groups."""
        return all([await self.count(task, Status.COMPLETED) >= size for task, size in batch_sizes.items()])

    async def take_batch(
        self, batch_sizes: Mapping[str, int], *, global_steps: int = 0
    ) -> tuple[dict[str, list[list[RolloutState]]], dict[str, int]]:
        """Take completed groups to train on; return task -> groups, maybe fewer than asked for, and their counts."""
        taken: dict[str, list[list[RolloutState]]] = {}
        for task, size in batch_sizes.items():
            groups = self._first(size, task, Status.COMPLETED)
            taken[task] = [
                group.states for group in await self._buffer.take_groups([group.uid for group in groups], global_steps)
            ]
        return taken, {task: len(groups) for task, groups in taken.items()}

    async def refresh_staleness(
        self,
        *,
        current_train_step: int,
        task_stale_thresholds: Mapping[str, int],
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        statuses: Sequence[Status] | None = None,
    ) -> dict[str, int]:
        """Look at the age of what waits; return for each task how many groups are EXPIRED now, or were discarded.

        Only groups with a token at a bound are looked into, so what is fresh costs nothing.
        """
        tokens, retryable = task_token_stale_thresholds or {}, expired_groups_retryable_by_task or {}
        wanted = [_STATUS[status] for status in statuses or _CAN_EXPIRE]
        return {
            task: await self._refresh(
                task, wanted, current_train_step, threshold, tokens.get(task), retryable=retryable.get(task, True)
            )
            for task, threshold in task_stale_thresholds.items()
        }

    async def _refresh(
        self,
        task: str,
        statuses: Sequence[GroupStatus],
        step: int,
        threshold: int,
        token_threshold: int | None,
        *,
        retryable: bool,
    ) -> int:
        buffer, num_expired = self._buffer, 0
        if GroupStatus.EXPIRED in statuses:
            num_expired = len(buffer.table.pool(self._partition, task, GroupStatus.EXPIRED))
        lowest = min(threshold, threshold if token_threshold is None else token_threshold)
        for uid in self._older_than(task, step - lowest):
            group = buffer.table.get(uid)
            if group is None or group.status not in statuses or group.status is GroupStatus.EXPIRED:
                continue
            await buffer.load([group])
            if expire_stale_states(
                group.states,
                current_train_step=step,
                stale_threshold=threshold,
                token_stale_threshold=token_threshold,
                retryable=retryable,
            ):
                num_expired += 1
                await buffer.events.turn("expired", "dropped")
                if retryable:
                    buffer.expire(group)
                else:
                    buffer.evict_stale(group, step)
                    _discard(group.states)
        return num_expired

    def _older_than(self, task: str, version: int) -> list[str]:
        """Groups with a token of an older version, oldest first."""
        found: list[str] = []
        for uid in self._buffer.table.by_version(self._partition, task):
            group = self._buffer.table.get(uid)
            assert group is not None, "listed groups exist"
            assert group.min_version is not None, "they have tokens"
            if group.min_version >= version:
                break
            found.append(uid)
        return found

    def _first(self, count: int, task: str, status: Status) -> list[PromptGroup]:
        pool = self._buffer.table.pool(self._partition, task, _STATUS[status])
        groups = [self._buffer.table.get(uid) for uid in islice(pool, max(0, count))]
        return [group for group in groups if group is not None]

    def _settle(
        self,
        items: Sequence[RolloutState],
        step: int | None,
        threshold: int | None,
        token_threshold: int | None,
        *,
        retryable: bool,
    ) -> Status:
        if step is not None:
            refresh_seq_staleness(items, step)
            if get_group_status(list(items)) in _CAN_EXPIRE:
                expire_stale_states(
                    items,
                    current_train_step=step,
                    stale_threshold=threshold,
                    token_stale_threshold=token_threshold,
                    retryable=retryable,
                )
        return get_group_status(list(items))

    async def _move(self, uid: str, items: Sequence[RolloutState], status: Status) -> None:
        buffer = self._buffer
        group = buffer.table.get(uid)
        assert group is not None, "it was just started"
        assert group.lease is not None, "it was just started"
        if status is Status.COMPLETED:
            await buffer.finish(group.lease, items)
        elif status in (Status.ABORTED, Status.EXPIRED):
            await buffer.abort(group.lease, items)
            if status is Status.EXPIRED:
                buffer.expire(group)
        else:
            await buffer.fail(group.lease, status.value, items)


def _discard(items: Sequence[RolloutState]) -> None:
    for state in items:
        status = state.status
        discard_rollout_state(state)
        state.status = status
