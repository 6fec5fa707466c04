"""From rewards to advantages: what must be measured first, KL in the reward, rollout correction, the estimator.

::

    TrainBatch with rewards --engine--> old, reference and teacher log-probs, as far as something needs them
                            --> importance weights, rejected tokens        (rollout_correction)
                            --> reward of each token, minus the KL         (use_kl_in_reward)
                            --> estimator --> TrainBatch with advantages

A session is one row for the estimator: its trajectories one behind the other, its reward on the last trained token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from xrl_lite.algorithms.config import AlgorithmConfig
from xrl_lite.algorithms.estimators import get_adv_estimator_fn
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


class Measure(Protocol):
    """Asks the engine for quantities of the response tokens, by the names of `TrainBatch`."""

    async def __call__(
        self, batch: TrainBatch, names: list[str], *, kept_policy: bool
    ) -> Mapping[str, list[list[float]]]:
        """Return them under the present weights, or under those of the beginning of the step."""
        ...


MEASURED = {"old_log_probs": "old_logprobs", "ref_log_prob": "ref_logprobs", "sum_pi_squared": "sum_pi_squared"}
"""What estimators call the quantities that an engine can measure, and the fields of `TrainBatch`."""


class AdvantageStep:
    """Everything between the rewards of a step and its update.

    Args:
        config: Settings of the algorithm.
        in_parts: The step is trained in parts: the old policy is that of its beginning, and must be asked for.
    """

    def __init__(self, config: AlgorithmConfig, *, in_parts: bool = False) -> None:
        from xrl_lite.algorithms.kl import get_kl_controller  # loads torch

        self._config = config
        self._in_parts = in_parts
        self._estimate = get_adv_estimator_fn(config.advantage)
        self._kl = get_kl_controller(config.kl_ctrl)

    @property
    def needed(self) -> list[str]:
        """Fields of `TrainBatch` that the engine must measure before the update."""
        config, requirements = self._config, self._config.requirements()
        wanted = {field for name, field in MEASURED.items() if name in requirements}
        correction, distillation = config.rollout_correction, config.distillation
        if config.use_kl_in_reward:
            wanted |= {"old_logprobs", "ref_logprobs"}
        if correction is not None and not correction.bypass_mode:
            wanted |= {"old_logprobs"}
        if self._in_parts and (correction is None or not correction.bypass_mode):
            wanted |= {"old_logprobs"}
        if distillation is not None and distillation.use_policy_gradient:
            wanted |= {"old_logprobs", "teacher_logprobs"}
        return sorted(wanted)

    async def __call__(self, batch: TrainBatch, measure: Measure) -> tuple[TrainBatch, dict[str, float]]:
        """Return the batch with its advantages, and metrics.

        Args:
            batch: Trajectories with rewards, at least one trained token.
            measure: Asks the engine.

        Raises:
            RunError: the estimator returned something else than an advantage for each token.
        """
        if self.needed:
            batch = replace(batch, **dict(await measure(batch, self.needed, kept_policy=self._in_parts)))
        batch, metrics = self._correct(batch)
        if not batch.num_trained_tokens:
            return batch, metrics
        batch, more = self._with_advantages(batch)
        return batch, metrics | more

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"kl_coef": self._kl.value} if self._config.kl_ctrl.type == "adaptive" else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint; a fixed weight of the KL is that of the settings."""
        if self._config.kl_ctrl.type == "adaptive":
            self._kl.value = state.get("kl_coef", self._kl.value)

    def _correct(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        correction = self._config.rollout_correction
        if correction is None or correction.bypass_mode:
            return batch, {}
        from xrl_lite.algorithms.rollout_correction import correct_rollout
        from xrl_lite.algorithms.rows import pad_rows, unpad_rows

        assert batch.old_logprobs is not None, "measured before"
        mask = pad_rows(batch.response_masks).bool()
        result = correct_rollout(pad_rows(batch.old_logprobs), pad_rows(batch.rollout_logprobs), mask, correction)
        lengths = list(map(len, batch.responses))
        masks = [[int(bit) for bit in row] for row in unpad_rows(result.mask, lengths)]
        weights = None if result.weights is None else unpad_rows(result.weights, lengths)
        return replace(batch, response_masks=masks, rollout_is_weights=weights), result.metrics

    def _with_advantages(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        import torch

        from xrl_lite.algorithms.masked import select

        sessions = _Sessions(batch)
        mask = sessions.rows(batch.response_masks).bool()
        rewards = _at_last_trained(sessions.one_each(batch.rewards or []), mask, sessions.lengths)
        rewards, metrics = self._subtract_kl(rewards, mask, sessions, batch)
        inputs = self._inputs(batch, sessions)
        advantages, returns = self._estimate(
            token_level_rewards=rewards, response_mask=mask.long(), index=sessions.index(batch.groups), **inputs
        )
        if advantages.shape != mask.shape:
            raise RunError(
                f"The advantage estimator {self._config.advantage!r} returned advantages of shape "
                f"{tuple(advantages.shape)}, expected {tuple(mask.shape)}: (trajectories, response tokens)."
            )
        advantages = select(self._towards_teacher(advantages.double(), sessions, batch), mask)
        used = advantages[mask]
        if not bool(torch.isfinite(used).all()):
            raise RunError(
                f"The advantage estimator {self._config.advantage!r} returned advantages that are not finite."
            )
        metrics |= {
            "advantages/mean": used.mean().item(),
            "advantages/max": used.max().item(),
            "advantages/min": used.min().item(),
        }
        if batch.values is not None:
            batch = replace(batch, returns=sessions.split(returns))
            metrics |= _quality(sessions.measured(batch.values), returns, mask)
        return replace(batch, advantages=sessions.split(advantages)), metrics

    def _subtract_kl(
        self, rewards: Tensor, mask: Tensor, sessions: _Sessions, batch: TrainBatch
    ) -> tuple[Tensor, dict[str, float]]:
        if not self._config.use_kl_in_reward:
            return rewards, {}
        from xrl_lite.algorithms.kl import subtract_kl

        coef = self._kl.value
        rewards, kl = subtract_kl(
            rewards,
            sessions.measured(batch.old_logprobs),
            sessions.measured(batch.ref_logprobs),
            mask,
            kl_penalty_name=self._config.kl_penalty,
            coef=coef,
        )
        self._kl.update(kl, n_steps=len(rewards))
        return rewards, {"reward_kl_penalty": kl, "reward_kl_penalty_coeff": coef}

    def _inputs(self, batch: TrainBatch, sessions: _Sessions) -> dict[str, Any]:
        """Whatever there is, by the names that estimators know."""
        import torch

        per_token = {
            "old_log_probs": batch.old_logprobs,
            "ref_log_prob": batch.ref_logprobs,
            "rollout_log_probs": batch.rollout_logprobs,
            "rollout_is_weights": batch.rollout_is_weights,
            "sum_pi_squared": batch.sum_pi_squared,
            "values": batch.values,
        }
        inputs: dict[str, Any] = {name: sessions.rows(value) for name, value in per_token.items() if value is not None}
        if batch.reward_baselines is not None:
            inputs["reward_baselines"] = torch.tensor(sessions.one_each(batch.reward_baselines), dtype=torch.float64)
        parts = batch.reward_parts or {}
        inputs["reward_parts"] = {
            name: torch.tensor(sessions.one_each(values), dtype=torch.float64) for name, values in parts.items()
        }
        return inputs | {"config": self._config}

    def _towards_teacher(self, advantages: Tensor, sessions: _Sessions, batch: TrainBatch) -> Tensor:
        distillation = self._config.distillation
        if distillation is None or not distillation.use_policy_gradient:
            return advantages
        signal = sessions.measured(batch.teacher_logprobs) - sessions.measured(batch.old_logprobs)
        task = advantages if distillation.use_task_rewards else advantages * 0.0
        return task + distillation.coef * signal


class _Sessions:
    """Trajectories of a batch as rows of sessions: S sessions, T tokens of the longest."""

    def __init__(self, batch: TrainBatch) -> None:
        self._members: dict[int, list[int]] = {}
        for place, session in enumerate(batch.sessions):
            self._members.setdefault(session, []).append(place)
        self._trajectory_lengths = list(map(len, batch.responses))
        self.lengths = [sum(self._trajectory_lengths[i] for i in places) for places in self._members.values()]

    def rows(self, values: list[list[float]] | list[list[int]]) -> Tensor:
        """(S, T) float64."""
        import torch

        from xrl_lite.algorithms.rows import pad_rows

        joined = [list(chain.from_iterable(values[i] for i in places)) for places in self._members.values()]
        return pad_rows(joined, dtype=torch.float64)

    def measured(self, values: list[list[float]] | None) -> Tensor:
        """Rows of what the engine was asked for."""
        assert values is not None, "asked for by AdvantageStep.needed"
        return self.rows(values)

    def one_each(self, values: list[float]) -> list[float]:
        """Value of each session's last trajectory."""
        return [values[places[-1]] for places in self._members.values()]

    def index(self, groups: list[int]) -> Any:
        """Group of each session, as the array of ids that verl's estimators expect."""
        import numpy as np

        return np.array([groups[places[-1]] for places in self._members.values()], dtype=object)

    def split(self, rows: Tensor) -> list[list[float]]:
        """(S, T) -> a list per trajectory."""
        from xrl_lite.algorithms.rows import unpad_rows

        result: list[list[float]] = [[] for _ in self._trajectory_lengths]
        for values, places in zip(unpad_rows(rows, self.lengths), self._members.values(), strict=True):
            start = 0
            for place in places:
                result[place] = values[start : start + self._trajectory_lengths[place]]
                start += self._trajectory_lengths[place]
        return result


def _quality(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """How well a critic predicted the returns of the trained tokens, (S, T) each."""
    from xrl_lite.algorithms.critic import explained_variance

    metrics = {"critic/values/mean": values[mask].mean().item(), "critic/returns/mean": returns[mask].mean().item()}
    explained = explained_variance(values, returns, mask)
    return metrics if not math.isfinite(explained) else metrics | {"critic/vf_explained_var": explained}


def _at_last_trained(rewards: list[float], mask: Tensor, lengths: list[int]) -> Tensor:
    """Put each reward on the last trained token of its row, (S,) -> (S, T); on the last token where none is trained."""
    import torch

    positions = torch.arange(1, mask.shape[1] + 1)
    last = (mask * positions).amax(dim=1) - 1
    last = torch.where(last < 0, torch.tensor(lengths) - 1, last)
    placed = torch.zeros(mask.shape, dtype=torch.float64)
    placed[torch.arange(len(rewards)), last] = torch.tensor(rewards, dtype=torch.float64)
    return placed
