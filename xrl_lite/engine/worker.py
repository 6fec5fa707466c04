"""One training rank as an actor: batches in, metrics and weights out.

The rank turns trajectories into packed micro-batches, so that only lists cross the process boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xrl_lite.algorithms.losses import kl_estimate, policy_loss, token_weights
from xrl_lite.algorithms.packing import PackedBatch, micro_batches, pack_groups
from xrl_lite.algorithms.weights import WeightBucket, WeightOffer, WeightSender, devices_of
from xrl_lite.engine.base import BaseEngine, EngineRegistry
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig
from xrl_lite.registry import load_plugins

if TYPE_CHECKING:
    from collections.abc import Sequence

LOW_CORRELATION_TOKENS = 2
"""A correlation needs at least so many tokens."""


class EngineWorker:
    """Hosts an engine on one rank.

    Args:
        config: Settings of the engine.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of this rank.
    """

    def __init__(self, *, config: EngineConfig, model_path: str, num_updates: int, seed: int) -> None:
        load_plugins()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        engine = EngineRegistry.get("language_model", config.backend, device)
        self._config = config
        self._engine: BaseEngine = engine(model_path=model_path, config=config, num_updates=num_updates, seed=seed)
        self._engine.initialize()
        self._num_updates = 0
        self._sender: WeightSender

    def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Make the updates of one step; return its metrics.

        Trajectories whose advantage is 0 cost no computation unless the KL to the initial policy is in the loss.
        """
        parts = [self._weigh(part) for part in _split_by_group(batch, self._config.num_mini_batches)]
        old: list[list[list[float]]] | None = None
        if len(parts) * self._config.num_epochs > 1:
            old = [self._compute_logprobs(part.batch) for part in parts]
        reports: list[dict[str, float]] = []
        for _ in range(self._config.num_epochs):
            for number, part in enumerate(parts):
                report = {"learning_rate": self._engine.learning_rate, "num_updates": 0.0}
                if len(part.batch):
                    report |= self._update(part, old[number] if old else None)
                reports.append(report)
                self._engine.lr_scheduler_step()
        return _merge(reports)

    def export_weights(self) -> dict[str, Tensor]:
        """Return every weight under its Hugging Face name."""
        return dict(self._engine.get_per_tensor_param())

    def devices(self) -> list[str]:
        """Return where the weights are: "cpu", or the unique ids of GPUs."""
        return devices_of(tensor for _, tensor in self._engine.get_per_tensor_param())

    def attach_weights(self, sender: WeightSender) -> None:
        """Take this rank's end of the way on which weights leave; it lives as long as the rank, or until the next."""
        self._sender = sender

    def open_weights(self, version: int) -> WeightOffer:
        """Begin to hand over the present weights, as `version`."""
        parameters = self._engine.get_per_tensor_param()
        return self._sender.open(parameters, version=version, num_updates=self._num_updates)

    def send_weights(self, number: int, num_receivers: int) -> WeightBucket:
        """Hand over a bucket."""
        return self._sender.send(number, num_receivers)

    def close_weights(self) -> None:
        """End handing over."""
        self._sender.close()

    def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        """Write the engine's state, and the model as a Hugging Face folder beside it."""
        folder.mkdir(parents=True)
        self._engine.save_checkpoint(folder)
        if hf_folder is not None:
            self._engine.save_hf(hf_folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self._engine.load_checkpoint(folder)

    def _weigh(self, batch: TrainBatch) -> _WeightedBatch:
        """Weigh every token of an update, then leave out the trajectories that add nothing to its gradient."""
        weights = token_weights(batch.response_masks, self._config.loss.aggregation)
        kept = [i for i in range(len(batch)) if self._contributes(batch, i)]
        return _WeightedBatch(batch.select(kept), [weights[i] for i in kept])

    def _contributes(self, batch: TrainBatch, index: int) -> bool:
        signal = batch.advantages[index] != 0.0 or self._config.loss.kl_coef > 0
        return signal and any(batch.response_masks[index])

    def _update(self, part: _WeightedBatch, old: list[list[float]] | None) -> dict[str, float]:
        config, batch, weights = self._config.loss, part.batch, part.weights
        gap = _LogprobGap()

        def loss_function(logprobs: Tensor, packed: PackedBatch) -> tuple[Tensor, dict[str, float]]:
            order = packed.trajectories
            rollout = _flat([batch.rollout_logprobs[i] for i in order])
            # with a single update the policy that is trained is the one that sampled: no second forward is needed
            old_logprobs = logprobs.detach() if old is None else _flat([old[i] for i in order])
            token_weight = _flat([weights[i] for i in order])
            gap.add(old_logprobs, rollout, token_weight > 0)
            loss, sums = policy_loss(
                logprobs,
                old_logprobs,
                _flat([[batch.advantages[i]] * len(batch.responses[i]) for i in order]),
                token_weight,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
            )
            if config.kl_coef > 0:
                kl = kl_estimate(logprobs, self._initial_logprobs(packed, batch.temperature), config.kl_estimator)
                used = token_weight > 0
                loss = loss + config.kl_coef * (kl[used] * token_weight[used]).sum()
                sums["kl_to_initial"] = kl[used].sum().item()
            return loss, sums

        packed = list(self._pack(batch))
        metrics = self._engine.train_batch(packed, loss_function, temperature=batch.temperature)
        self._num_updates += math.isfinite(metrics["grad_norm"])
        num_tokens = sum(map(sum, batch.response_masks))
        per_token = {name: metrics[name] / num_tokens for name in metrics.keys() - {"loss", "grad_norm"}}
        return {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            **per_token,
            **gap.metrics(),
            "num_trained_tokens": float(num_tokens),
            "num_trained": float(len(batch)),
            "num_updates": 1.0,
        }

    def _initial_logprobs(self, packed: PackedBatch, temperature: float) -> Tensor:
        with self._engine.disable_adapter():
            return self._engine.infer_batch([packed], temperature=temperature)[0]

    def _compute_logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probs of each trajectory's response under the present weights."""
        packed = list(self._pack(batch))
        result: list[list[float]] = [[] for _ in range(len(batch))]
        for part, logprobs in zip(packed, self._engine.infer_batch(packed, temperature=batch.temperature), strict=True):
            position = 0
            for index in part.trajectories:
                length = len(batch.responses[index])
                result[index] = logprobs[position : position + length].tolist()
                position += length
        return result

    def _pack(self, batch: TrainBatch) -> Sequence[PackedBatch]:
        rows = pack_groups(batch.prompts, batch.responses, max_tokens_per_row=self._config.max_tokens_per_row)
        return list(micro_batches(rows, max_tokens=self._config.max_tokens_per_micro_batch))


@dataclass(frozen=True)
class _WeightedBatch:
    """The trajectories of one update that have a gradient, and the weight of each of their tokens in the whole."""

    batch: TrainBatch
    weights: list[list[float]]


class _LogprobGap:
    """How far the trainer's log-probs are from the rollout engine's, over the tokens trained on."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, trainer: Tensor, rollout: Tensor, used: Tensor) -> None:
        self._pairs.append((trainer[used].double(), rollout[used].double()))

    def metrics(self) -> dict[str, float]:
        trainer = torch.cat([pair[0] for pair in self._pairs])
        rollout = torch.cat([pair[1] for pair in self._pairs])
        gap = (trainer - rollout).abs()
        metrics = {"logprob_gap/mean": gap.mean().item(), "logprob_gap/max": gap.max().item()}
        if len(trainer) >= LOW_CORRELATION_TOKENS and trainer.std() > 0 and rollout.std() > 0:
            metrics["logprob_gap/correlation"] = torch.corrcoef(torch.stack([trainer, rollout]))[0, 1].item()
        return metrics


def _flat(values: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=torch.float32)


def _split_by_group(batch: TrainBatch, num_parts: int) -> list[TrainBatch]:
    """Split into parts of (nearly) equal numbers of groups; a group is never split."""
    groups = list(dict.fromkeys(batch.groups))
    parts: list[TrainBatch] = []
    for number in range(num_parts):
        wanted = set(groups[number * len(groups) // num_parts : (number + 1) * len(groups) // num_parts])
        parts.append(batch.select([i for i, group in enumerate(batch.groups) if group in wanted]))
    return parts


def _merge(reports: list[dict[str, float]]) -> dict[str, float]:
    """One report per step: counts are summed, maxima are maxima, the rest are means over the updates."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        if name in ("num_updates", "num_trained_tokens", "num_trained"):
            merged[name] = sum(values)
        elif name.endswith("/max"):
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged
