"""Generation and training take turns on the same devices, and nobody waits for the slowest responses.

More groups are begun than a step needs (`over_sample_threshold`, `num_warmup_batches`). Once there is a batch, whatever
is still in flight is interrupted: it waits in the buffer while the trainer computes, and goes on in the next step, from
its tokens with `enable_partial_rollout`. So a sequence may hold tokens of several policies; each is labelled with the
version that made it.

::

    step n      generate ............ | interrupt, sleep | train ... | wake up, weights
    step n+1    go on, generate ..... | ...
"""

from __future__ import annotations

from typing import ClassVar

from xrl_lite.replay_buffer import TrainerMode
from xrl_lite.trainer.sync import SyncTrainer


class ColocateAsyncTrainer(SyncTrainer):
    """Takes the groups that are done, and interrupts the others while it trains."""

    layout: ClassVar[TrainerMode] = "colocate_async"

    async def on_sample_end(self) -> None:
        with self.times.part("pause"):
            await self.parts.producer.pause_produce()
        await super().on_sample_end()

    async def on_step_end(self) -> None:
        await super().on_step_end()
        self.parts.producer.continue_produce(self.policy_version)
