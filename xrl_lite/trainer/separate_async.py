"""Generation and training run side by side, each on devices of its own.

::

    producer    begins a group whenever there is room ------------------------------------------->
                   | finished groups                ^ weights        | finished groups
    trainer     sample | train step n ............. | sync | sample  | train step n+1 ...

Waits for    the producer: room, which every batch that is taken makes (`Producer.advance`)
             the trainer: the oldest groups of the buffer
Is woken by  the buffer

How far generation is ahead, and so how old a sample can be, is bounded by `max_staleness`: a group is begun only if it
will be trained on in time. With 1, a batch is generated while the one before it is trained on.

A weight sync stops the replicas between two tokens. With `enable_partial_rollout` sequences then go on under the new
weights, each token labelled with the version that made it; without it, what is in flight is interrupted and begun anew.

`parameter_sync_step` splits a step: each part is trained on as soon as its groups are there, and all parts are compared
with the policy that the step began with (one proximal policy: Hilton et al. 2021, arXiv:2110.00641). Weights go out
after the last part.

Lending the trainer's devices: a trainer that waits long for samples could generate meanwhile. The places for it are
here. `on_step_begin` and `on_validate_begin` are where such a replica, colocated with a rank, is woken, is given the
weights and joins the turnstile of `RolloutController`; `on_sample_end` is where it leaves, is interrupted (its requests
go on elsewhere from their tokens, as those of a replica that died do) and sleeps. It pays where the time waited in
``time/wait_batch`` exceeds that of waking, syncing and sleeping; none of the built-in modes does it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from xrl_lite.replay_buffer import PromptGroup, TrainerMode
from xrl_lite.trainer.base import RLTrainer


class SeparateAsyncTrainer(RLTrainer):
    """Trains on what is generated meanwhile."""

    layout: ClassVar[TrainerMode] = "separate_async"

    async def on_init_end(self) -> None:
        await self.sync_weights()

    async def on_train_begin(self) -> None:
        trainer = self.settings.trainer
        produce = partial(self.parts.producer.produce_loop, trainer.groups_per_step, last_step=trainer.num_steps)
        self.background.start_soon(produce, name="produce")

    async def on_step_begin(self) -> None:
        self._num_taken = 0
        self._tell_producer()

    async def sample_batch(self, batch_size: int) -> tuple[list[PromptGroup], dict[str, Any]]:
        with self.times.part("wait_batch"):
            await self.parts.producer.refresh_staleness(self.global_step)
            groups, metrics = await super().sample_batch(batch_size)
        self._num_taken += batch_size
        self._tell_producer()  # at once: until then it would count on a batch that has left
        return groups, metrics

    async def on_sample_end(self) -> None:
        """Nothing to do: requests go on."""

    async def on_step_end(self) -> None:
        if not self.weights_are_due:
            return
        producer = self.parts.producer
        if not producer.goes_on_across_syncs:
            with self.times.part("pause"):
                await producer.pause_produce()
        with self.times.part("sync"):
            await self.sync_weights()
        producer.continue_produce(self.policy_version)

    def _tell_producer(self) -> None:
        """Say how much of the step is still wanted; what was taken makes room."""
        num_wanted = self.settings.trainer.groups_per_step - self._num_taken
        next_step = self.global_step if num_wanted else self.global_step + 1
        self.parts.producer.advance(next_step=next_step, policy_version=self.policy_version, num_wanted=num_wanted)
