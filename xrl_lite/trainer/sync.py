"""The synchronous mode: generate, train, hand over the weights, and again."""

from __future__ import annotations

from typing import Any, ClassVar

from xrl_lite.replay_buffer import PromptGroup, TrainerMode
from xrl_lite.trainer.base import RLTrainer


class SyncTrainer(RLTrainer):
    """Every sample of a step is of the weights that the step starts from, or of those of the last sync."""

    layout: ClassVar[TrainerMode] = "sync"

    async def on_init_end(self) -> None:
        await self.sync_weights()

    async def prepare_step(self) -> None:
        with self.times.part("rollout"):
            await self.parts.producer.produce_batch(
                self.settings.trainer.groups_per_step, train_step=self.global_step, model_step=self.policy_version
            )

    async def sample_batch(self, batch_size: int) -> tuple[list[PromptGroup], dict[str, Any]]:
        with self.times.part("rollout"):
            groups, metrics = await super().sample_batch(batch_size)
        self._split_rollout_time(groups)
        return groups, metrics

    async def on_sample_end(self) -> None:
        """No request is in flight: the replicas may sleep."""
        if self.settings.sleep_level:
            with self.times.part("sleep"):
                await self.parts.rollout.sleep(self.settings.sleep_level)

    async def on_step_end(self) -> None:
        with self.times.part("sync"):
            if self.settings.sleep_level:
                await self._release_memory()
                await self.parts.rollout.wake_up(("weights",))
            if self.weights_are_due:
                await self.sync_weights()
            if self.settings.sleep_level:
                await self.parts.rollout.wake_up(("kv_cache",))

    async def _release_memory(self) -> None:
        """Make room for the replicas: what the ranks cached is in nobody's use now."""
        await self.parts.engine.release_memory()
        if self.parts.critic is not None:
            await self.parts.critic.release_memory()

    def _split_rollout_time(self, groups: list[PromptGroup]) -> None:
        """All attempts start together, so the slowest response ends generation; judging is what comes after it."""
        total = self.times.parts.pop("rollout")
        timings = [state.extra_fields.pop("timing", None) for group in groups for state in group.states]
        generate = max((timing["generate_s"] for timing in timings if timing), default=total)
        self.times.parts["generate"] = min(generate, total)
        self.times.parts["judge"] = total - self.times.parts["generate"]
