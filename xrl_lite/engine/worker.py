"""One rank of the policy's engine as an actor: batches in, metrics and weights out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.aggregation import BatchInfo, session_num_tokens
from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.distillation import TOP_K, distillation_loss
from xrl_lite.algorithms.losses.tokens import LossConfig
from xrl_lite.algorithms.objective import LossRows, objective, rows_from_flat
from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.algorithms.policy_losses import get_policy_loss_fn, policy_loss
from xrl_lite.algorithms.rollout_correction import correct_rollout
from xrl_lite.algorithms.rows import pad_rows, unpad_rows
from xrl_lite.algorithms.weights import WeightBucket, WeightOffer, WeightSender, devices_of
from xrl_lite.engine.base import OutputRequest, TokenOutputs
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig
from xrl_lite.engine.rank_worker import RankWorker, split_by_group
from xrl_lite.engine.ranks import RankPlace, on_all_ranks
from xrl_lite.engine.step_metrics import GapsByAge, StepReports, WeightedMeans
from xrl_lite.registry import load_object

_QUANTITIES = {
    "old_logprobs": "logprobs",
    "ref_logprobs": "logprobs",
    "teacher_logprobs": "logprobs",
    "sum_pi_squared": "sum_pi_squared",
}
"""What can be measured, and which output of the engine it is."""

_SEEDS = 1_000_003


class EngineWorker(RankWorker):
    """Hosts the engine of the policy on one rank.

    Args:
        config: Settings of the engine.
        algorithm: Settings of the loss.
        model_path: Hugging Face folder or hub id.
        num_updates: Updates of the whole run.
        seed: Seed of the run.
        weights_dtype: Type in which weights are handed over; the engine's when not given.
        place: Which rank this is, and where it meets the others.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model_path: str,
        num_updates: int,
        seed: int,
        algorithm: AlgorithmConfig | None = None,
        weights_dtype: str | None = None,
        place: RankPlace = RankPlace(),  # noqa: B008 - frozen
    ) -> None:
        algorithm = algorithm or AlgorithmConfig()
        super().__init__(
            "language_model",
            config=config,
            model_path=model_path,
            num_updates=num_updates,
            seed=seed,
            place=place,
            keep_reference=algorithm.needs_reference,
            teacher_path=algorithm.distillation.teacher if algorithm.distillation else None,
        )
        self._algorithm = algorithm
        self._loss = policy_loss(algorithm.policy_loss.loss_mode)
        correction = algorithm.rollout_correction
        replaced = correction is not None and correction.loss_type == "reinforce"
        self._loss_function = get_policy_loss_fn("reinforce" if replaced else algorithm.policy_loss.loss_mode)
        self._weights_dtype = weights_dtype
        self._num_updates = 0
        self._sender: WeightSender

    @on_all_ranks
    def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Make the updates of one step; return its metrics.

        Trajectories that have no gradient cost no computation: those of advantage 0, unless the loss says otherwise or
        something else is in the loss.
        """
        batch = self._with_old_logprobs(batch)
        parts = split_by_group(batch, self._config.num_mini_batches)
        steps, gaps = StepReports(), GapsByAge()
        for epoch in range(self._config.num_epochs):
            for number, part in enumerate(parts):
                report = {"learning_rate": self._engine.learning_rate, "num_updates": 0.0}
                update, correction_metrics = self._prepare(part)
                if len(update.batch):
                    place = (batch.part * self._config.num_epochs + epoch) * len(parts) + number
                    seed = batch.step * _SEEDS + place  # the same on all ranks
                    # later log-probs of the trainer are not those the tokens were sampled with
                    before = epoch == 0 and (number == 0 or not self._bypass)
                    report |= self._update(update, seed, gaps if before else GapsByAge())
                steps.add(report | correction_metrics)
                self._engine.lr_scheduler_step()
        return steps.result() | gaps.merge(self._others(gaps)).metrics()

    @on_all_ranks
    def measure(
        self, batch: TrainBatch, names: Sequence[str], *, kept_policy: bool = False
    ) -> dict[str, list[list[float]]]:
        """Return quantities of the response tokens; 0 where a token is not trained on.

        Args:
            batch: The trajectories.
            names: Of ``old_logprobs``, ``ref_logprobs``, ``teacher_logprobs``, ``sum_pi_squared``.
            kept_policy: The policy is that of the weights that `keep_policy` kept, not of the present ones.
        """
        with self._engine.use_kept_policy() if kept_policy else nullcontext():
            return self._measure(batch, names)

    @on_all_ranks
    def keep_policy(self) -> None:
        """Keep the present weights, for `measure` to compute with when it is asked to, until the next call."""
        self._engine.keep_policy()

    def _measure(self, batch: TrainBatch, names: Sequence[str]) -> dict[str, list[list[float]]]:
        packed = self._pack(batch)
        request = OutputRequest(sum_pi_squared="sum_pi_squared" in names)
        measured: dict[str, list[list[float]]] = {}
        policies = {"ref_logprobs": self._engine.disable_adapter, "teacher_logprobs": self._engine.use_teacher}
        by_policy: dict[str, list[TokenOutputs]] = {}
        for name in names:
            policy = name if name in policies else "own"
            if policy not in by_policy:
                with policies.get(name, nullcontext)():
                    by_policy[policy] = self._engine.infer_batch(
                        packed, temperature=batch.temperature, request=request if policy == "own" else OutputRequest()
                    )
            values = [getattr(output, _QUANTITIES[name]) for output in by_policy[policy]]
            measured[name] = self._of_all_ranks(batch, packed, values)
        return measured

    @on_all_ranks
    def export_weights(self) -> dict[str, Tensor]:
        """Return every weight under its Hugging Face name."""
        return {name: tensor.cpu() for name, tensor in self._engine.get_per_tensor_param()}

    @on_all_ranks
    def devices(self) -> list[str]:
        """Return where the weights are: "cpu", or the unique ids of GPUs."""
        return devices_of(shard.values for shard in self._engine.get_per_tensor_param_shard())

    def attach_weights(self, sender: WeightSender) -> None:
        """Take this rank's end of the way on which weights leave; it lives as long as the rank, or until the next."""
        self._sender = sender

    @on_all_ranks
    def open_weights(self, version: int, *, adapters_only: bool = False) -> WeightOffer | None:
        """Begin to hand over the present weights, as `version`; the first rank gathers them as it takes them.

        Args:
            version: Policy version that whoever takes them has then.
            adapters_only: With LoRA, hand over the adapter alone.
        """
        parameters = self._engine.get_per_tensor_param(adapters_only=adapters_only)
        if self.place.rank != 0:
            for _ in parameters:
                pass
            return None
        adapter = self._engine.peft_config if adapters_only else None
        if adapter is None and self._weights_dtype not in (None, self._config.dtype):
            dtype = getattr(torch, self._weights_dtype)
            parameters = ((name, weight.to(dtype)) for name, weight in parameters)
        return self._sender.open(parameters, version=version, num_updates=self._num_updates, adapter=adapter)

    @on_all_ranks
    def peft_config(self) -> dict[str, Any] | None:
        """Return the settings of the adapter, as in peft's adapter_config.json; None where there is none."""
        return self._engine.peft_config

    def send_weights(self, number: int, num_receivers: int) -> WeightBucket:
        """Hand over a bucket."""
        return self._sender.send(number, num_receivers)

    async def interrupt_weights(self) -> None:
        """Have a `send_weights` that waits for receivers raise; async, so that it runs beside it."""
        self._sender.interrupt()

    def close_weights(self) -> None:
        """End handing over."""
        self._sender.close()

    # --- before an update

    @property
    def _bypass(self) -> bool:
        correction = self._algorithm.rollout_correction
        return correction is not None and correction.bypass_mode

    def _with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Fix the old policy before the first update, where it is not the policy of the only update itself."""
        if self._bypass:
            return replace(batch, old_logprobs=batch.rollout_logprobs)
        if batch.old_logprobs is not None or (self._config.updates_per_batch == 1 and self._loss.selection is None):
            return batch
        needed = [i for i in range(len(batch)) if self._contributes(batch, i)]
        old = [[0.0] * len(response) for response in batch.responses]
        if needed:
            for index, values in zip(needed, self._measure_logprobs(batch.select(needed)), strict=True):
                old[index] = values
        return replace(batch, old_logprobs=old)

    def _measure_logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return self._measure(batch, ["old_logprobs"])["old_logprobs"]

    def _prepare(self, part: TrainBatch) -> tuple[_Update, dict[str, float]]:
        """Count the tokens of an update, then leave out the trajectories that add nothing to its gradient."""
        part, metrics = self._corrected_by_present(part)
        masks, tokens = part.response_masks, session_num_tokens(part.response_masks, part.sessions)
        info = BatchInfo.of(
            masks,
            part.sessions,
            part.advantages,
            dp_size=self._engine.get_data_parallel_size(),
            loss_scale_factor=self._algorithm.loss_scale_factor,
        )
        kept = [i for i in range(len(part)) if self._contributes(part, i)]
        batch = part.select(kept)
        return _Update(batch, info, [tokens[session] for session in batch.sessions]), metrics

    def _corrected_by_present(self, part: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """bypass_mode: weigh and reject by the policy as it is now."""
        correction = self._algorithm.rollout_correction
        if correction is None or not correction.bypass_mode or not part.num_trained_tokens:
            return part, {}
        if correction.rollout_is is None and not correction.rejections:
            return part, {}
        mask = pad_rows(part.response_masks).bool()
        present, rollout = pad_rows(self._measure_logprobs(part)), pad_rows(part.rollout_logprobs)
        result = correct_rollout(present, rollout, mask, correction)
        lengths = list(map(len, part.responses))
        weights = None if result.weights is None else unpad_rows(result.weights, lengths)
        masks = [[int(bit) for bit in row] for row in unpad_rows(result.mask, lengths)]
        return replace(part, response_masks=masks, rollout_is_weights=weights), result.metrics

    def _contributes(self, batch: TrainBatch, index: int) -> bool:
        if not any(batch.response_masks[index]):
            return False
        algorithm = self._algorithm
        every_token = algorithm.use_kl_loss or algorithm.entropy_coeff > 0 or algorithm.distillation is not None
        return every_token or not self._loss.skips_zero_advantage or any(batch.advantages[index])

    # --- an update

    def _update(self, update: _Update, seed: int, gaps: GapsByAge) -> dict[str, float]:
        batch = update.batch
        selected = self._select(batch, seed)
        micro_batches = self._with_other_models(self._pack(batch), batch)
        means, loss_sum = WeightedMeans(), 0.0

        def loss_function(outputs: TokenOutputs, packed: PackedBatch) -> Tensor:
            nonlocal loss_sum
            if not packed.trajectories:
                return outputs.logprobs.sum()  # of nothing: the rank only takes part
            mask = pad_rows([batch.response_masks[i] for i in packed.trajectories]).bool()
            rows = self._rows(update, outputs, packed, mask.to(outputs.logprobs.device), selected)
            gaps.add(*self._both_sides(batch, outputs, packed, mask))
            config = LossConfig(
                self._algorithm.policy_loss,
                batch=update.info,
                session_num_tokens=torch.tensor(
                    [update.session_tokens[i] for i in packed.trajectories], device=outputs.logprobs.device
                ),
            )
            loss, metrics = objective(rows, algorithm=self._algorithm, policy_loss=self._loss_function, config=config)
            means.add(metrics, len(packed.targets))
            loss_sum += loss.item()
            return loss

        request = OutputRequest(entropy=True, entropy_gradient=self._algorithm.entropy_coeff > 0)
        done = self._engine.train_batch(micro_batches, loss_function, temperature=batch.temperature, request=request)
        num_ranks = self._engine.get_data_parallel_size()
        self._num_updates += math.isfinite(done["grad_norm"])
        return {
            "loss": sum(self._engine.all_gather(loss_sum)) / num_ranks,
            "grad_norm": done["grad_norm"],
            **means.merge(self._others(means)).result(),
            "num_trained_tokens": float(batch.num_trained_tokens),
            "num_trained": float(len(batch)),
            "num_updates": 1.0,
        }

    def _select(self, batch: TrainBatch, seed: int) -> Tensor | None:
        """Let the loss choose tokens over the whole update, (N, T) bool."""
        if self._loss.selection is None:
            return None
        choose = load_object(self._loss.selection) if isinstance(self._loss.selection, str) else self._loss.selection
        assert batch.old_logprobs is not None, "made before the first update"
        now, old = pad_rows(self._measure_logprobs(batch)), pad_rows(batch.old_logprobs)
        mask = pad_rows(batch.response_masks).bool()
        return choose(old, now, pad_rows(batch.advantages), mask, self._algorithm.policy_loss, seed)

    def _rows(
        self, update: _Update, outputs: TokenOutputs, packed: PackedBatch, mask: Tensor, selected: Tensor | None
    ) -> LossRows:
        batch, order, device = update.batch, packed.trajectories, outputs.logprobs.device

        def rows(values: list[list[float]] | None) -> Tensor | None:
            return None if values is None else pad_rows([values[i] for i in order]).to(device)

        log_prob = rows_from_flat(outputs.logprobs, mask)
        advantages, old = rows(batch.advantages), rows(batch.old_logprobs)
        assert advantages is not None
        return LossRows(
            log_prob=log_prob,
            # with a single update the policy that is trained is the old one: no second forward is needed
            old_log_prob=log_prob.detach() if old is None else old,
            advantages=advantages,
            mask=mask,
            entropy=None if outputs.entropy is None else rows_from_flat(outputs.entropy, mask),
            rollout_is_weights=rows(batch.rollout_is_weights),
            ref_log_prob=(
                rows(batch.ref_logprobs if self._algorithm.use_kl_loss else None)
                if packed.ref_logprobs is None
                else rows_from_flat(packed.ref_logprobs, mask)
            ),
            distillation=self._distillation(outputs, packed, mask),
            selected=None if selected is None else selected[order][:, : mask.shape[1]].to(device),
        )

    def _with_other_models(self, packed: list[PackedBatch], batch: TrainBatch) -> list[PackedBatch]:
        """Let reference and teacher compute before the update: all ranks together, those with nothing to do too."""
        algorithm, temperature = self._algorithm, batch.temperature
        if algorithm.use_kl_loss and batch.ref_logprobs is None:
            with self._engine.disable_adapter():
                outputs = self._engine.infer_batch(packed, temperature=temperature)
            packed = [replace(p, ref_logprobs=o.logprobs) for p, o in zip(packed, outputs, strict=True)]
        distillation = algorithm.distillation
        if distillation is None or distillation.use_policy_gradient:
            return packed
        top_k = distillation.top_k if distillation.loss_mode == TOP_K else 0
        with self._engine.use_teacher():
            outputs = self._engine.infer_batch(packed, temperature=temperature, request=OutputRequest(top_k=top_k))
        return [
            replace(p, candidates=o.top_ids, teacher_logprobs=o.top_logprobs if top_k else o.logprobs)
            for p, o in zip(packed, outputs, strict=True)
        ]

    def _distillation(self, outputs: TokenOutputs, packed: PackedBatch, mask: Tensor) -> Tensor | None:
        if packed.teacher_logprobs is None:
            return None
        assert self._algorithm.distillation is not None, "there is a teacher"
        student = outputs.logprobs if packed.candidates is None else outputs.candidate_logprobs
        assert student is not None, "there are candidates"
        loss = distillation_loss(self._algorithm.distillation.loss_mode)
        return rows_from_flat(loss(student, packed.teacher_logprobs), mask)

    def _both_sides(
        self, batch: TrainBatch, outputs: TokenOutputs, packed: PackedBatch, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the same tokens by trainer and rollout engine, and whether of the same weights, (T,) each."""
        order = packed.trajectories
        trainer = outputs.logprobs
        if batch.old_logprobs is not None and not self._bypass:
            trainer = pad_rows([batch.old_logprobs[i] for i in order])[mask]
        is_present = torch.ones_like(trainer, dtype=torch.bool)
        if batch.policy_versions is not None:
            versions = pad_rows([batch.policy_versions[i] for i in order], dtype=torch.int64)
            is_present = versions[mask] == batch.step - 1
        return trainer, pad_rows([batch.rollout_logprobs[i] for i in order])[mask], is_present


@dataclass(frozen=True)
class _Update:
    """The trajectories of one optimizer update that have a gradient, and the counts of all of it."""

    batch: TrainBatch
    info: BatchInfo
    session_tokens: list[int]
    """Trained tokens of the session of each trajectory."""
