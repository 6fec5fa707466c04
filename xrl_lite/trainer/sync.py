"""The synchronous mode: generate, train, hand over the weights, and again."""

from __future__ import annotations

from typing import Any

from xrl_lite.replay_buffer import TRAIN, PromptGroup
from xrl_lite.trainer.base import RLTrainer


class SyncTrainer(RLTrainer):
    """Every sample of a step is of the weights that the step starts from."""

    async def on_init_end(self) -> None:
        await self.parts.weight_sync.sync(self.global_step)

    async def sample_batch(self, batch_size: int) -> tuple[list[PromptGroup], dict[str, Any]]:
        producer, buffer = self.parts.producer, self.parts.replay_buffer
        with self.times.part("rollout"):
            async with producer.running():
                await producer.produce_batch(batch_size, train_step=self.global_step)
                groups, metrics = await buffer.sample(self.global_step, TRAIN, batch_size)
        self._split_rollout_time(groups)
        return groups, metrics | producer.metrics()

    async def on_sample_end(self) -> None:
        """Nothing to do: no request is in flight."""

    async def on_step_end(self) -> None:
        with self.times.part("sync"):
            await self.parts.weight_sync.sync(self.global_step)

    def _split_rollout_time(self, groups: list[PromptGroup]) -> None:
        """All attempts start together, so the slowest response ends generation; judging is what comes after it."""
        total = self.times.parts.pop("rollout")
        timings = [state.extra_fields.pop("timing", None) for group in groups for state in group.states]
        generate = max((timing["generate_s"] for timing in timings if timing), default=total)
        self.times.parts["generate"] = min(generate, total)
        self.times.parts["judge"] = total - self.times.parts["generate"]
