# pyright: basic
"""What every rank of a training engine does as an actor, whatever it trains: batches in, lists and metrics out.

Every rank gets the whole batch, so it knows the counts of all ranks without asking, and turns its share of it into
packed micro-batches. Only lists cross the process boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from xrl_lite.algorithms.packing import PackedBatch, collate, pack_groups
from xrl_lite.algorithms.planning import plan_micro_batches
from xrl_lite.engine.base import BaseEngine, EngineRegistry
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig
from xrl_lite.engine.ranks import RankPlace, join, on_all_ranks, platform_of_rank
from xrl_lite.registry import load_plugins

T = TypeVar("T")


class RankWorker:
    """Hosts an engine on one rank.

    Args:
        model_type: ``language_model`` or ``value_model``.
        config: Settings of the engine.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
        place: Which rank this is, and where it meets the others.
        options: For the engine.
    """

    def __init__(
        self,
        model_type: str,
        *,
        config: EngineConfig,
        model_path: str,
        num_updates: int,
        seed: int,
        place: RankPlace,
        **options: Any,
    ) -> None:
        load_plugins()
        platform = platform_of_rank()
        engine = EngineRegistry.find(
            model_type, config.backend, device=platform.device_name, vendor=platform.vendor_name
        )
        self.place = place
        join(place, platform, always=config.always_shards)
        self._config = config
        self._engine: BaseEngine = engine(
            model_path=model_path, config=config, num_updates=num_updates, seed=seed + place.rank, **options
        )
        self._engine.initialize()

    @on_all_ranks
    def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        """Write the engine's state, and the model as a Hugging Face folder beside it."""
        if self.place.rank == 0:
            folder.mkdir(parents=True)
        self._engine.all_gather(None)  # the folder is there
        self._engine.save_checkpoint(folder)
        if hf_folder is not None:
            self._engine.save_hf(hf_folder)

    @on_all_ranks
    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self._engine.load_checkpoint(folder)

    @on_all_ranks
    def release_memory(self) -> None:
        """Give device memory that is cached and not in use back."""
        platform_of_rank().empty_cache()

    def _pack(self, batch: TrainBatch) -> list[PackedBatch]:
        """The micro-batches of this rank."""
        groups = pack_groups(
            batch.prompts,
            batch.responses,
            masks=batch.response_masks,
            max_tokens_per_row=self._config.max_tokens_per_row,
        )
        plan = plan_micro_batches(
            groups,
            max_tokens=self._config.max_tokens_per_micro_batch,
            num_ranks=self._engine.get_data_parallel_size(),
        )
        return [collate(rows) for rows in plan[self._engine.get_data_parallel_rank()]]

    def _of_all_ranks(
        self, batch: TrainBatch, packed: Sequence[PackedBatch], flat: Sequence[Tensor]
    ) -> list[list[float]]:
        """Put the values of each rank's trained tokens where they belong."""
        mine: dict[int, list[float]] = {}
        for part, values in zip(packed, flat, strict=True):
            remaining = iter(values.tolist())
            for index in part.trajectories:
                mine[index] = [next(remaining) if bit else 0.0 for bit in batch.response_masks[index]]
        everything = {index: values for share in self._engine.all_gather(mine) for index, values in share.items()}
        return [everything[index] for index in range(len(batch))]

    def _others(self, own: T) -> list[T]:
        """The parts of the other ranks."""
        parts = self._engine.all_gather(own)
        return [part for rank, part in enumerate(parts) if rank != self._engine.get_data_parallel_rank()]


def split_by_group(batch: TrainBatch, num_parts: int) -> list[TrainBatch]:
    """Split into parts of (nearly) equal numbers of groups; a group is never split."""
    groups = list(dict.fromkeys(batch.groups))
    parts: list[TrainBatch] = []
    for number in range(num_parts):
        wanted = set(groups[number * len(groups) // num_parts : (number + 1) * len(groups) // num_parts])
        parts.append(batch.select([i for i, group in enumerate(batch.groups) if group in wanted]))
    return parts
