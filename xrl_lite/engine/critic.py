"""One rank of a critic's engine as an actor: values of states out, and training towards returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xrl_lite.algorithms.aggregation import BatchInfo, session_num_tokens
from xrl_lite.algorithms.critic import value_loss
from xrl_lite.algorithms.losses.tokens import LossConfig
from xrl_lite.algorithms.objective import rows_from_flat
from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.algorithms.rows import pad_rows
from xrl_lite.engine.base import ValueOutputs
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import CriticConfig
from xrl_lite.engine.rank_worker import RankWorker, split_by_group
from xrl_lite.engine.ranks import RankPlace, on_all_ranks
from xrl_lite.engine.step_metrics import StepReports, WeightedMeans


class CriticWorker(RankWorker):
    """Hosts the engine of a critic on one rank.

    Args:
        config: Settings of the critic.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
        place: Which rank this is, and where it meets the others.
    """

    def __init__(
        self,
        *,
        config: CriticConfig,
        model_path: str,
        num_updates: int,
        seed: int,
        place: RankPlace = RankPlace(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(
            "value_model", config=config, model_path=model_path, num_updates=num_updates, seed=seed, place=place
        )
        self._critic = config

    @on_all_ranks
    def values(self, batch: TrainBatch) -> list[list[float]]:
        """Return the value of the state in which each response token was chosen; 0 where none is trained on."""
        packed = self._pack(batch)
        outputs: list[ValueOutputs] = self._engine.infer_batch(packed)
        return self._of_all_ranks(batch, packed, [output.values for output in outputs])

    @on_all_ranks
    def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Make the updates of one step towards the batch's returns; return their metrics, ``critic/...``.

        A trajectory without a reward has no return, so it is left out.
        """
        rewards = batch.rewards or [0.0] * len(batch)
        batch = batch.select(
            [i for i in range(len(batch)) if any(batch.response_masks[i]) and not math.isnan(rewards[i])]
        )
        steps = StepReports()
        for _ in range(self._config.num_epochs):
            for part in split_by_group(batch, self._config.num_mini_batches):
                report = {"lr": self._engine.learning_rate}
                if len(part):
                    report |= self._update(part)
                steps.add(report)
                self._engine.lr_scheduler_step()
        return {f"critic/{name}": value for name, value in steps.result().items()}

    def _update(self, part: TrainBatch) -> dict[str, float]:
        size = self._engine.get_data_parallel_size()
        info = BatchInfo.of(
            part.response_masks,
            part.sessions,
            dp_size=size,
            loss_scale_factor=self._critic.loss_scale_factor,
        )
        tokens = session_num_tokens(part.response_masks, part.sessions)
        means, loss_sum = WeightedMeans(), 0.0

        def loss_function(outputs: ValueOutputs, packed: PackedBatch) -> Tensor:
            nonlocal loss_sum
            if not packed.trajectories:
                return outputs.values.sum()  # of nothing: the rank only takes part
            device = outputs.values.device
            session_tokens = torch.tensor([tokens[part.sessions[i]] for i in packed.trajectories], device=device)
            counts = LossConfig(batch=info, session_num_tokens=session_tokens).global_batch_info
            rows = _Rows.of(part, packed, device)
            loss, metrics = value_loss(
                rows_from_flat(outputs.values, rows.mask),
                rows.returns,
                rows.values,
                rows.mask,
                cliprange_value=self._critic.cliprange_value,
                loss_agg_mode=self._critic.loss_agg_mode,
                **counts,
            )
            means.add(metrics, len(packed.targets))
            loss_sum += loss.item()
            return loss

        done = self._engine.train_batch(self._pack(part), loss_function)
        return {
            "vf_loss": sum(self._engine.all_gather(loss_sum)) / size,
            "grad_norm": done["grad_norm"],
            **means.merge(self._others(means)).result(),
        }


@dataclass(frozen=True)
class _Rows:
    """Rows of a micro-batch, (N, T) each."""

    mask: Tensor
    returns: Tensor
    values: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, packed: PackedBatch, device: torch.device) -> _Rows:
        assert batch.values is not None, "measured before"
        assert batch.returns is not None, "estimated before"
        order = packed.trajectories
        mask = pad_rows([batch.response_masks[i] for i in order]).bool()
        returns, values = (pad_rows([rows[i] for i in order]) for rows in (batch.returns, batch.values))
        return cls(mask.to(device), returns.to(device), values.to(device))
