"""A manager of one's own in place of `AgentLoopManager`: at most so many groups at once, those of long prompts first.

Named by its path, it runs the groups of a whole run::

    agent_loop_manager: {agent_loop_manager_class: "examples/own_manager.py:LongestFirst"}

What it must do is in `xrl_lite.agent_loop.RunsGroups`: for every group one lease, and one end of that lease.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from xrl_lite.agent_loop import AgentLoop, AgentLoopManagerConfig
from xrl_lite.errors import RolloutError, errors_as_themselves
from xrl_lite.replay_buffer import Lease, PromptGroup, ReplayBuffer

MAX_GROUPS = 2


class LongestFirst:
    """Runs groups, the longest prompts first: what takes longest does not begin last.

    Args:
        agent_loops: Makes attempts, by task.
        replay_buffer: Groups come from it and go back to it.
        config: Time limits.
    """

    def __init__(
        self, agent_loops: Mapping[str, AgentLoop], *, replay_buffer: ReplayBuffer, config: AgentLoopManagerConfig
    ) -> None:
        self._loops = agent_loops
        self._buffer = replay_buffer
        self._timeout_s = config.group_timeout_s
        self._waiting: list[tuple[int, int, PromptGroup, Lease]] = []
        self._tasks: TaskGroup | None = None
        self._num_running = 0

    @classmethod
    async def create(
        cls,
        *,
        config: AgentLoopManagerConfig,
        agent_loops: Mapping[str, AgentLoop],
        replay_buffer: ReplayBuffer,
        **kwargs: Any,
    ) -> Self:
        """Make a manager; of what else there is (`llm_client`, `judger` ...) it needs nothing."""
        return cls(agent_loops, replay_buffer=replay_buffer, config=config)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let groups run while inside. The trainer enters it if there is one."""
        with errors_as_themselves():
            async with anyio.create_task_group() as self._tasks:
                try:
                    yield
                finally:
                    self._tasks.cancel_scope.cancel()
                    for *_, lease in self._waiting:  # they wait to be begun again
                        self._buffer.put_back(lease)
                    self._waiting.clear()

    def generate_sequences(self, prompts: Sequence[PromptGroup]) -> None:
        """Take groups, and return at once."""
        for group in prompts:
            lease = self._buffer.start(group.uid, worker=type(self).__name__, timeout_s=self._timeout_s)
            heapq.heappush(self._waiting, (-_length(group), group.ordinal, group, lease))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._num_running < MAX_GROUPS:
            assert self._tasks is not None, "inside `running`"
            *_, group, lease = heapq.heappop(self._waiting)
            self._num_running += 1
            self._tasks.start_soon(self._run, group, lease)

    async def _run(self, group: PromptGroup, lease: Lease) -> None:
        try:
            states = await self._loops[group.task_name].generate_group(group.states)
            await self._buffer.finish(lease, states)
        except RolloutError as error:
            await self._buffer.fail(lease, str(error))
        finally:
            self._buffer.put_back(lease)  # only what was cancelled: the others have ended
            self._num_running -= 1
        self._begin()


def _length(group: PromptGroup) -> int:
    return len(group.states[0].prompt_ids or ())
