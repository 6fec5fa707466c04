"""The training ranks as seen from the driver: one call reaches them all.

Waits for    the ranks, each call with the deadline of `EngineConfig`
Is woken by  the actor layer: a result, the rank's own exception, its death, or the deadline
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.preload import MODEL_MODULES
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.actors import ActorSystem
    from xrl_lite.algorithms.weights import WeightBucket, WeightOffer, WeightSender


class TrainingController:
    """Starts the ranks and speaks to them.

    Args:
        system: Where the ranks run.
        config: Settings of the engine.
        algorithm: Settings of the loss.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
    """

    def __init__(
        self,
        system: ActorSystem,
        *,
        config: EngineConfig,
        algorithm: AlgorithmConfig,
        model_path: str,
        num_updates: int,
        seed: int,
    ) -> None:
        from xrl_lite.actors import RestartPolicy
        from xrl_lite.engine.worker import EngineWorker  # loads torch

        self._config = config
        self._rank: Any = system.spawn(
            EngineWorker,
            kwargs={
                "config": config,
                "algorithm": algorithm,
                "model_path": model_path,
                "num_updates": num_updates,
                "seed": seed,
            },
            name="engine/0",
            num_cpus=config.num_cpus,
            num_accelerators=min(1, system.num_accelerators),  # it sees none that it does not claim
            num_threads=config.num_threads or len(os.sched_getaffinity(0)),
            preload=MODEL_MODULES,
            start_timeout_s=config.start_timeout_s,
            # a fresh rank has the initial weights: going on with them would silently undo the training
            restart=RestartPolicy(max_restarts=0),
        )

    async def ready(self) -> None:
        """Wait until every rank has loaded the model."""
        await self._rank.ready()

    async def measure(self, batch: TrainBatch, names: Sequence[str]) -> dict[str, list[list[float]]]:
        """Return quantities of the response tokens under the present weights; 0 where a token is not trained on.

        Args:
            batch: The trajectories.
            names: Of ``old_logprobs``, ``ref_logprobs``, ``teacher_logprobs``, ``sum_pi_squared``.
        """
        return await self._rank.measure.options(timeout_s=self._config.step_timeout_s).remote(batch, names)

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Make the updates of one step; return its metrics."""
        return await self._rank.train_batch.options(timeout_s=self._config.step_timeout_s).remote(batch)

    async def export_weights(self) -> dict[str, Tensor]:
        """Return every weight under its Hugging Face name."""
        return await self._rank.export_weights.options(timeout_s=self._config.step_timeout_s).remote()

    async def devices(self) -> list[str]:
        """Return where the weights are."""
        return await self._rank.devices.remote()

    async def attach_weights(self, sender: WeightSender) -> None:
        """Give the ranks their end of the way on which weights leave."""
        await self._call("attach_weights", sender)

    async def open_weights(self, version: int) -> WeightOffer:
        """Begin to hand over the present weights, as `version`."""
        return await self._call("open_weights", version)

    async def send_weights(self, number: int, num_receivers: int) -> WeightBucket:
        """Hand over a bucket."""
        return await self._call("send_weights", number, num_receivers)

    async def close_weights(self) -> None:
        """End handing over."""
        await self._call("close_weights")

    async def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        """Write the state of the ranks into a folder that does not exist yet."""
        save = self._rank.save_checkpoint.options(timeout_s=self._config.step_timeout_s)
        await save.remote(folder, hf_folder=hf_folder)

    async def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        await self._rank.load_checkpoint.options(timeout_s=self._config.step_timeout_s).remote(folder)

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._rank.method_named(method).options(timeout_s=self._config.step_timeout_s).remote(*arguments)
