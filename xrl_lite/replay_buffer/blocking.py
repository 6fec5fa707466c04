"""Buffers of the user's that are written like verl's: with a plain ``def sample`` that blocks until it has a batch.

::

    trainer --await sample()--> worker thread: the user's sample(), which looks, takes and waits
                                      |  ^
                     groups, take, evict, wait_for_change      each is run on the event loop of the buffer
                                      v  |
                                event loop: groups go on being admitted, finished and failed

Waits for    `wait_for_change`: a group that has changed since the last look, or its time limit
Is woken by  the buffer; cancelling the trainer's wait ends it with an exception in the user's thread
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread

from xrl_lite.replay_buffer.buffer import Metrics, ReplayBuffer
from xrl_lite.replay_buffer.groups import GroupStatus, PromptGroup

_looked: ContextVar[anyio.Event | None] = ContextVar("looked", default=None)
"""Is set by the first change after the last look; each call of `sample` has a context, and so a value, of its own."""


class BlockingReplayBuffer(ReplayBuffer):
    """Base of samplers that block.

    ::

        class MySampler(BlockingReplayBuffer):
            def sample(self, global_steps, partition_id, batch_size):
                while len(ready := self.groups(partition_id, GroupStatus.FINISHED)) < batch_size:
                    self.wait_for_change(timeout_s=2.0)
                return self.take([group.uid for group in ready[:batch_size]], global_steps), {}

    The trainer awaits it all the same: `sample` runs in a thread of its own. Inside it, use only the four methods
    below, which may be called from that thread.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        written = cls.__dict__.get("sample")
        if written is not None and not inspect.iscoroutinefunction(written):
            cls.sample = _in_a_thread(written)

    def groups(self, partition_id: str, *statuses: GroupStatus) -> list[PromptGroup]:
        """Return the groups of a partition, oldest first; all of them if no status is given."""

        def look() -> tuple[list[PromptGroup], anyio.Event]:
            self.end_overdue_leases()
            order = self.table.partition(partition_id).order.values()
            return [group for group in order if not statuses or group.status in statuses], self.next_change

        groups, change = anyio.from_thread.run_sync(look)
        _looked.set(change)
        return groups

    def take(self, uids: Sequence[str], global_steps: int) -> list[PromptGroup]:
        """Take groups out of the buffer to train on them, with their attempts."""
        return anyio.from_thread.run(self.take_groups, uids, global_steps)

    def evict(self, uids: Sequence[str], reason: str, *, refill: bool = True) -> None:
        """Let groups leave untrained; `refill` has as many new ones generated."""

        async def leave() -> None:
            self.discard([group for uid in uids if (group := self.table.get(uid)) is not None], reason)
            if refill and uids:
                await self.ask_for(len(uids))

        anyio.from_thread.run(leave)

    def wait_for_change(self, timeout_s: float | None = None) -> None:
        """Block until a group has changed since `groups` was last called, or the time is over."""
        looked = _looked.get()

        async def wait() -> None:
            with anyio.move_on_after(timeout_s):
                if looked is None or not looked.is_set():
                    await self.changed()

        anyio.from_thread.check_cancelled()
        anyio.from_thread.run(wait)
        _looked.set(None)


def _in_a_thread(sample: Callable[..., tuple[list[PromptGroup], Metrics]]) -> Any:
    @wraps(sample)
    async def run(
        self: BlockingReplayBuffer, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[list[PromptGroup], Metrics]:
        self.at_step(global_steps)
        call = partial(sample, self, global_steps, partition_id, batch_size)
        return await anyio.to_thread.run_sync(call)

    return run
