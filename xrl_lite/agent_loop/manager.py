"""Keeps groups running until a batch of them has ended.

::

    sampler --group--> admitted in the buffer --> agent loop --> finished, or failure and a replacement is drawn

Waits for    the agent loops; their waits have deadlines
Is woken by  a group that ends

A failed attempt is data: its siblings go on. Anything else (a dead engine, a bug) ends `produce_batch`: all groups in
flight are cancelled and awaited, then the error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

import anyio
from pydantic import Field, model_validator

from xrl_lite.agent_loop.base import AGENT_LOOPS, AgentLoop, AgentLoopConfig, check_batch_judge
from xrl_lite.agent_loop.single_turn import SingleTurnAgentLoopConfig
from xrl_lite.data import RolloutState, Sampler, SamplerConfig
from xrl_lite.errors import RunError, errors_as_themselves
from xrl_lite.judger import AnyJudgerConfig
from xrl_lite.log import get_logger
from xrl_lite.replay_buffer import GroupStatus, ReplayBuffer
from xrl_lite.settings import Settings, chosen_by_type

logger = get_logger(__name__)

TRAIN = "train"
"""Partition of the buffer that training draws from."""


AnyAgentLoopConfig = Annotated[
    AgentLoopConfig, *chosen_by_type(AGENT_LOOPS.resolve, AGENT_LOOPS.name_of, default="single_turn")
]
"""Settings of any agent loop: an object, or a mapping whose `type` names it (single_turn when not given)."""


class TaskSpecConfig(Settings):
    """One thing to train on: its rows, how attempts are made, how they are judged."""

    task_name: str
    """Name of the task in metrics and logs."""

    sampler_config: SamplerConfig
    """Rows, and attempts per prompt."""

    agent_loop_config: AnyAgentLoopConfig = Field(default_factory=SingleTurnAgentLoopConfig)
    """How an attempt is made."""

    judger_config: AnyJudgerConfig | None = Field(
        default=None, json_schema_extra={"settings": "xrl_lite.judger:JudgerConfig"}
    )
    """How an attempt is judged; by the data source of the rows when not given."""

    @model_validator(mode="after")
    def _check_batch_judge(self) -> Self:
        if self.judger_config is not None:
            check_batch_judge(self.agent_loop_config, self.judger_config)
        return self


@dataclass(frozen=True)
class ProduceLimits:
    """When producing gives up."""

    max_failed_groups: int
    """Groups that may fail while one batch is produced."""


class AgentLoopManager:
    """Produces batches of groups into the buffer.

    Args:
        agent_loop: Makes attempts.
        sampler: Draws groups.
        replay_buffer: Takes finished groups.
        limits: When to give up.
    """

    def __init__(
        self, *, agent_loop: AgentLoop, sampler: Sampler, replay_buffer: ReplayBuffer, limits: ProduceLimits
    ) -> None:
        self.agent_loop = agent_loop
        self.sampler = sampler
        self.replay_buffer = replay_buffer
        self._limits = limits

    async def produce_batch(self, batch_size: int, *, train_step: int) -> None:
        """Put `batch_size` finished groups into the buffer; failed ones are replaced.

        Raises:
            RunError: too many groups failed; has the reason of the last.
        """
        failures: list[str] = []
        missing = batch_size
        while missing:
            groups = [self.sampler.sample() for _ in range(missing)]
            uids = [await self._admit(group, train_step) for group in groups]
            with errors_as_themselves():
                async with anyio.create_task_group() as running:
                    for uid, group in zip(uids, groups, strict=True):
                        running.start_soon(partial(self._run_group, uid, group), name=f"group-{uid}")
            failed = [uid for uid in uids if self.replay_buffer.status(uid) is GroupStatus.FAILURE]
            failures += [self.replay_buffer.reason(uid) for uid in failed]
            missing = len(failed)
            self._give_up_if_hopeless(failures, batch_size)

    async def evaluate(self, groups: Sequence[list[RolloutState]], **kwargs: Any) -> list[list[RolloutState]]:
        """Run groups that the buffer never sees, and return them in order."""
        finished = list(groups)

        async def run(index: int, group: list[RolloutState]) -> None:
            finished[index] = await self.agent_loop.generate_group(group, **kwargs)

        with errors_as_themselves():
            async with anyio.create_task_group() as running:
                for index, group in enumerate(groups):
                    running.start_soon(run, index, group)
        return finished

    async def _admit(self, group: list[RolloutState], train_step: int) -> str:
        uid = str(group[0].group_id)
        await self.replay_buffer.admit(uid, partition_id=TRAIN, global_steps=train_step)
        return uid

    async def _run_group(self, uid: str, group: list[RolloutState]) -> None:
        await self.replay_buffer.start(uid)
        await self.replay_buffer.finish(uid, await self.agent_loop.generate_group(group))

    def _give_up_if_hopeless(self, failures: list[str], batch_size: int) -> None:
        if failures:
            logger.warning("%d group(s) failed and were replaced; the last: %s", len(failures), failures[-1])
        if len(failures) > self._limits.max_failed_groups:
            raise RunError(
                f"{len(failures)} groups failed while a batch of {batch_size} was produced, more than "
                f"max_failed_groups={self._limits.max_failed_groups}. The last one: {failures[-1]}"
            )
