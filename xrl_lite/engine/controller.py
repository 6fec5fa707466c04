"""The training ranks as seen from the driver: one call reaches them all.

::

    train_batch --> engine/0 .. engine/n-1, each with the whole batch --> answer of engine/0
                       '--> one dies or raises: the others are ended, its error is raised

Waits for    the ranks, each call with the deadline of `EngineConfig`
Is woken by  the actor layer: a result, a rank's own exception, its death, or the deadline
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.actors import share
from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.preload import MODEL_MODULES
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import CriticConfig, EngineConfig
from xrl_lite.errors import ActorDiedError, ActorError, RankError
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from torch import Tensor

    from xrl_lite.actors import ActorSystem
    from xrl_lite.actors.placement import Bundle
    from xrl_lite.algorithms.weights import WeightBucket, WeightOffer, WeightSender

logger = get_logger(__name__)

_OTHERS_WITHIN_S = 2.0
"""How long, after a first rank failed, the others have to say what they failed of: the first to notice that a rank is
lost is not the one that was lost."""


class RankGroup:
    """Starts the ranks of an engine and speaks to them.

    A call ends for all ranks together. When one of them dies or raises, the others are ended within seconds, whatever
    they wait for, and the error of the one that began it is raised; the controller then takes no more calls, since
    fresh ranks would have the initial weights. A single rank that raises stays.

    Args:
        worker: Class of the actors.
        system: Where the ranks run.
        name: Of the actors, before their number.
        config: Settings of the engine.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
        bundle: Where the ranks are placed, each on an accelerator of it; without it, each claims one that nobody else
            has, on a machine that has some.
        options: For the worker.
    """

    def __init__(
        self,
        worker: type,
        system: ActorSystem,
        *,
        name: str,
        config: EngineConfig,
        model_path: str,
        num_updates: int,
        seed: int,
        bundle: Bundle | None = None,
        **options: Any,
    ) -> None:
        from xrl_lite.actors import RestartPolicy
        from xrl_lite.engine.ranks import RankPlace  # loads torch

        self._config = config
        size = config.num_ranks
        meeting = Path(tempfile.mkdtemp(prefix="xrl-lite-ranks-"))
        weakref.finalize(self, shutil.rmtree, meeting, ignore_errors=True)
        self._ranks: list[Any] = []
        try:
            for rank in range(size):
                place = RankPlace(
                    rank=rank, num_ranks=size, meeting=meeting / "store", timeout_s=config.collective_timeout_s
                )
                handle = system.spawn(
                    worker,
                    kwargs={
                        "config": config,
                        "model_path": model_path,
                        "num_updates": num_updates,
                        "seed": seed,
                        "place": place,
                        **options,
                    },
                    name=f"{name}/{rank}",
                    num_cpus=config.num_cpus,
                    **_device_of(rank, bundle, system),
                    num_threads=config.num_threads or max(1, len(os.sched_getaffinity(0)) // size),
                    preload=MODEL_MODULES,
                    start_timeout_s=config.start_timeout_s,
                    # a fresh rank has the initial weights: going on with them would silently undo the training
                    restart=RestartPolicy(max_restarts=0),
                )
                self._ranks.append(handle)
        except BaseException:
            self.kill()  # those that were started wait for the one that could not be
            raise

    async def ready(self) -> None:
        """Wait until every rank has loaded the model."""
        await self._together("loading the model", [rank.ready() for rank in self._ranks])

    async def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        """Write the state of the ranks into a folder that does not exist yet."""
        await self._call("save_checkpoint", folder, hf_folder=hf_folder)

    async def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks it is of."""
        await self._call("load_checkpoint", folder)

    async def release_memory(self) -> None:
        """Give device memory that is cached and not in use back, for others on the same device."""
        await self._call("release_memory")

    def kill(self) -> None:
        """End all ranks at once and for good."""
        for rank in self._ranks:
            rank.kill()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Let the ranks end what they do, by force after `grace_s`, and wait until nothing of them is left."""
        for stopping in [rank.stop(grace_s) for rank in self._ranks]:
            await stopping

    def _for_all(self, batch: TrainBatch) -> Any:
        return batch if len(self._ranks) == 1 else share(batch)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on every rank and return what the first one answers."""
        within = self._config.step_timeout_s
        calls = [getattr(rank, method).options(timeout_s=within).remote(*args, **kwargs) for rank in self._ranks]
        return (await self._together(method, calls))[0]

    async def _ask_first(self, method: str, *args: Any) -> Any:
        """Call a method that is the first rank's alone; it ends for all ranks as one that reaches them all."""
        call = getattr(self._ranks[0], method).options(timeout_s=self._config.step_timeout_s).remote(*args)
        return (await self._together(method, [call]))[0]

    async def _together(self, phase: str, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        results: list[Any] = [None] * len(calls)
        failures: dict[int, Exception] = {}
        # its deadline is set by the first failure: a rank that waits for the failed one is not waited for
        scope = anyio.CancelScope()

        async def wait(rank: int, call: Awaitable[Any]) -> None:
            try:
                results[rank] = await call
            except Exception as error:  # noqa: BLE001 raised below, once it is clear whose it is
                failures[rank] = error
                scope.deadline = min(scope.deadline, anyio.current_time() + _OTHERS_WITHIN_S)

        try:
            with scope:
                async with anyio.create_task_group() as waiting:
                    for rank, call in enumerate(calls):
                        waiting.start_soon(wait, rank, call)
        except BaseException:
            self.kill()  # cancelled: its process was replaced by one with the initial weights
            raise
        if not failures:
            return results
        culprit = min(failures, key=lambda rank: (_is_consequence(failures[rank]), rank))
        error = failures[culprit]
        if len(calls) > 1:
            error.add_note(f"Raised by rank {culprit} of {len(calls)} in {phase}; the other ranks were ended.")
        if len(calls) > 1 or isinstance(error, ActorError):
            self.kill()
            await self.stop(0.0)
        raise error


class TrainingController(RankGroup):
    """The ranks that train the policy.

    Args:
        system: Where the ranks run.
        config: Settings of the engine.
        algorithm: Settings of the loss.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
        weights_dtype: Type in which weights are handed over; the engine's when not given.
        bundle: Where they are placed, see `RankGroup`.
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
        weights_dtype: str | None = None,
        bundle: Bundle | None = None,
    ) -> None:
        from xrl_lite.engine.worker import EngineWorker  # loads torch

        super().__init__(
            EngineWorker,
            system,
            name="engine",
            config=config,
            model_path=model_path,
            num_updates=num_updates,
            seed=seed,
            bundle=bundle,
            algorithm=algorithm,
            weights_dtype=weights_dtype,
        )

    async def measure(
        self, batch: TrainBatch, names: Sequence[str], *, kept_policy: bool = False
    ) -> dict[str, list[list[float]]]:
        """Return quantities of the response tokens; 0 where a token is not trained on.

        Args:
            batch: The trajectories.
            names: Of ``old_logprobs``, ``ref_logprobs``, ``teacher_logprobs``, ``sum_pi_squared``.
            kept_policy: The policy is that of the weights that `keep_policy` kept, not of the present ones.
        """
        return await self._call("measure", self._for_all(batch), names, kept_policy=kept_policy)

    async def keep_policy(self) -> None:
        """Keep the present weights, for `measure` to compute with when it is asked to, until the next call."""
        await self._call("keep_policy")

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Make the updates of one step; return its metrics."""
        return await self._call("train_batch", self._for_all(batch))

    async def export_weights(self) -> dict[str, Tensor]:
        """Return every weight under its Hugging Face name."""
        return await self._call("export_weights")

    async def devices(self) -> list[str]:
        """Return where the weights are."""
        return await self._call("devices")

    async def attach_weights(self, sender: WeightSender) -> None:
        """Give the first rank its end of the way on which weights leave."""
        await self._ask_first("attach_weights", sender)

    async def open_weights(self, version: int, *, adapters_only: bool = False) -> WeightOffer:
        """Begin to hand over the present weights, as `version`; with LoRA perhaps the adapter alone."""
        return await self._call("open_weights", version, adapters_only=adapters_only)

    async def peft_config(self) -> dict[str, Any] | None:
        """Return the settings of the adapter, as in peft's adapter_config.json; None where there is none."""
        return await self._call("peft_config")

    async def send_weights(self, number: int, num_receivers: int) -> WeightBucket:
        """Hand over a bucket."""
        return await self._ask_first("send_weights", number, num_receivers)

    async def interrupt_weights(self) -> None:
        """Have a `send_weights` that waits for receivers raise."""
        await self._ask_first("interrupt_weights")

    async def close_weights(self) -> None:
        """End handing over."""
        await self._ask_first("close_weights")


class CriticController(RankGroup):
    """The ranks that train the critic.

    Args:
        system: Where the ranks run.
        config: Settings of the critic.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
        bundle: Where they are placed, see `RankGroup`.
    """

    def __init__(
        self,
        system: ActorSystem,
        *,
        config: CriticConfig,
        model_path: str,
        num_updates: int,
        seed: int,
        bundle: Bundle | None = None,
    ) -> None:
        from xrl_lite.engine.critic import CriticWorker  # loads torch

        super().__init__(
            CriticWorker,
            system,
            name="critic",
            config=config,
            model_path=model_path,
            num_updates=num_updates,
            seed=seed,
            bundle=bundle,
        )

    async def values(self, batch: TrainBatch) -> list[list[float]]:
        """Return the present value of the state in which each response token was chosen; 0 where none is trained on."""
        return await self._call("values", self._for_all(batch))

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Make the updates of one step towards `TrainBatch.returns`; return their metrics."""
        return await self._call("train_batch", self._for_all(batch))


def _device_of(rank: int, bundle: Bundle | None, system: ActorSystem) -> dict[str, Any]:
    """What is said to `spawn`: a rank sees no accelerator that it is not given."""
    if bundle is None:
        return {"num_accelerators": min(1, system.num_accelerators)}
    return {"bundle": bundle, "accelerators": bundle.claim.accelerators[rank : rank + 1]}


def _is_consequence(error: Exception) -> int:
    """How far an error is from what began it: a death, a rank's own exception, or just being left alone."""
    if isinstance(error, ActorDiedError):
        return 0
    return 2 if isinstance(error, RankError) else 1
