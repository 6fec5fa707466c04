# pyright: basic
"""Metrics of a step, put together from micro-batches, updates and ranks as if they had been computed at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_LOW_CORRELATION_TOKENS = 2
"""A correlation needs at least so many tokens."""


class WeightedMeans:
    """Means over tokens, of which micro-batches are given with the number of their tokens; extremes by their name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._extremes: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Any], num_tokens: int) -> None:
        """Add the means over some tokens; names that end in max or min are extremes over them."""
        if not num_tokens:
            return
        for name, value in metrics.items():
            number = float(value.detach() if isinstance(value, Tensor) else value)
            if name.endswith(("max", "min")):
                self._keep_extreme(name, number)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + number * num_tokens
                self._weights[name] = self._weights.get(name, 0.0) + num_tokens

    def merge(self, others: Iterable[WeightedMeans]) -> WeightedMeans:
        """Return what one would have that had been given everything."""
        merged = WeightedMeans()
        for part in (self, *others):
            for name, total in part._sums.items():
                merged._sums[name] = merged._sums.get(name, 0.0) + total
                merged._weights[name] = merged._weights.get(name, 0.0) + part._weights[name]
            for name, number in part._extremes.items():
                merged._keep_extreme(name, number)
        return merged

    def result(self) -> dict[str, float]:
        """The means and extremes."""
        return {name: total / self._weights[name] for name, total in self._sums.items()} | self._extremes

    def _keep_extreme(self, name: str, number: float) -> None:
        choose = max if name.endswith("max") else min
        self._extremes[name] = choose(self._extremes.get(name, number), number)


class StepReports:
    """One report per step: counts are summed, maxima are maxima, the rest are means over the updates."""

    def __init__(self) -> None:
        self._reports: list[dict[str, float]] = []

    def add(self, report: dict[str, float]) -> None:
        """Add the report of an update."""
        self._reports.append(report)

    def result(self) -> dict[str, float]:
        """The report of the step."""
        merged: dict[str, float] = {}
        for name in dict.fromkeys(name for report in self._reports for name in report):
            values = [report[name] for report in self._reports if name in report]
            if name in ("num_updates", "num_trained_tokens", "num_trained"):
                merged[name] = sum(values)
            elif name.endswith("max"):
                merged[name] = max(values)
            elif name.endswith("min"):
                merged[name] = min(values)
            else:
                merged[name] = sum(values) / len(values)
        return merged


class LogprobGap:
    """How far the trainer's log-probs are from the rollout engine's, over the trained tokens of a step."""

    def __init__(self) -> None:
        self._count = 0
        self._moments = torch.zeros(7, dtype=torch.float64)
        self._max = 0.0

    def add(self, trainer: Tensor, rollout: Tensor) -> None:
        """Add log-probs of the same tokens, (T,) each."""
        if not len(trainer):
            return
        x, y = trainer.detach().double().cpu(), rollout.double().cpu()
        gap = (x - y).abs()
        self._count += len(x)
        self._moments += torch.stack([x.sum(), y.sum(), x @ x, y @ y, x @ y, gap.sum(), gap @ gap])
        # a plain max of a number and NaN may lose the NaN
        self._max = math.nan if math.isnan(self._max) else torch.maximum(gap.max(), gap.new_tensor(self._max)).item()

    def merge(self, others: Iterable[LogprobGap]) -> LogprobGap:
        """Return what one would have that had been given everything."""
        merged = LogprobGap()
        for part in (self, *others):
            merged._count += part._count
            merged._moments += part._moments
            merged._max = math.nan if math.isnan(part._max) or math.isnan(merged._max) else max(merged._max, part._max)
        return merged

    def metrics(self, prefix: str) -> dict[str, float]:
        """Mean, maximum and deviation of the absolute difference, and the correlation; empty without tokens."""
        if not self._count:
            return {}
        x, y, xx, yy, xy, gap, gap2 = (self._moments / self._count).tolist()
        metrics = {
            f"{prefix}mean": gap,
            f"{prefix}max": self._max,
            f"{prefix}std": max(gap2 - gap * gap, 0.0) ** 0.5,
        }
        spread = (xx - x * x) * (yy - y * y)
        if self._count >= _LOW_CORRELATION_TOKENS and xx - x * x > _TINY and yy - y * y > _TINY:
            metrics[f"{prefix}correlation"] = (xy - x * y) / spread**0.5
        return metrics


class GapsByAge:
    """The gap of tokens that the trainer's weights of the moment sampled, and apart from it that of older tokens.

    The first says whether trainer and rollout engine are one model. The second holds what was learned since, too.
    """

    def __init__(self) -> None:
        self._present, self._older = LogprobGap(), LogprobGap()

    def add(self, trainer: Tensor, rollout: Tensor, is_present: Tensor) -> None:
        """Add log-probs of the same tokens, and whether the weights of the moment sampled them, (T,) each.

        Tokens are left out whose log-prob the rollout engine does not tell (NaN).
        """
        known = ~rollout.cpu().isnan()
        trainer, rollout, is_present = (each.detach().cpu()[known] for each in (trainer, rollout, is_present))
        self._present.add(trainer[is_present], rollout[is_present])
        self._older.add(trainer[~is_present], rollout[~is_present])

    def merge(self, others: Iterable[GapsByAge]) -> GapsByAge:
        """Return what one would have that had been given everything."""
        merged, others = GapsByAge(), list(others)
        merged._present = self._present.merge(other._present for other in others)
        merged._older = self._older.merge(other._older for other in others)
        return merged

    def metrics(self) -> dict[str, float]:
        """``logprob_gap/...`` and ``logprob_gap/older_...``, each only if there are such tokens."""
        return self._present.metrics("logprob_gap/") | self._older.metrics("logprob_gap/older_")


_TINY = 1e-12
