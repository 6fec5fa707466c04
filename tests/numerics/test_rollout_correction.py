"""Rollout correction against slow loops, and what its settings refuse."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from xrl_lite.algorithms import AlgorithmConfig, RolloutCorrectionConfig
from xrl_lite.algorithms.correction_config import PRESETS, REJECTIONS
from xrl_lite.algorithms.rollout_correction import correct_rollout, mismatch_metrics
from xrl_lite.errors import ConfigError

Rows = list[list[float]]


class Case:
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        num_rows, width = rng.randint(1, 5), rng.randint(1, 6)
        self.old: Rows = [[rng.uniform(-3, 0) for _ in range(width)] for _ in range(num_rows)]
        self.rollout: Rows = [[x + rng.uniform(-0.8, 0.8) for x in row] for row in self.old]
        self.mask = [[rng.choice([1, 1, 0]) for _ in range(width)] for _ in range(num_rows)]
        self.mask[0][0] = 1

    def log_ratios(self, i: int) -> list[float]:
        return [self.old[i][t] - self.rollout[i][t] for t, bit in enumerate(self.mask[i]) if bit]

    def places(self) -> list[tuple[int, int]]:
        return [(i, t) for i, row in enumerate(self.mask) for t, bit in enumerate(row) if bit]

    def correct(self, **changes: Any) -> Any:
        old, rollout = (torch.tensor(rows, dtype=torch.float64) for rows in (self.old, self.rollout))
        return correct_rollout(old, rollout, torch.tensor(self.mask), RolloutCorrectionConfig(**changes))


def slow_ratio(case: Case, level: str, i: int, t: int) -> float:
    match level:
        case "token":
            return math.exp(case.old[i][t] - case.rollout[i][t])
        case "sequence":
            return math.exp(sum(case.log_ratios(i)))
        case _:
            return math.exp(statistics.fmean(case.log_ratios(i)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("threshold", [1.3, "0.7_1.4"])
@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_weights_are_what_a_loop_computes(level: str, threshold: float | str, seed: int) -> None:
    case = Case(seed)
    result = case.correct(rollout_is=level, rollout_is_threshold=threshold)
    expected = torch.zeros(result.weights.shape, dtype=torch.float64)
    for i, t in case.places():
        ratio = slow_ratio(case, level, i, t)
        if threshold == 1.3:
            expected[i, t] = min(ratio, 1.3)
        else:
            expected[i, t] = ratio if 0.7 <= ratio <= 1.4 else 0.0
    assert torch.allclose(result.weights, expected)
    used = [expected[place].item() for place in case.places()]
    metrics = {name.removeprefix("rollout_corr/rollout_is_"): value for name, value in result.metrics.items()}
    assert metrics["mean"] == pytest.approx(statistics.fmean(used))
    if any(used):
        effective = statistics.fmean(used) ** 2 / statistics.fmean(w * w for w in used)
        assert metrics["eff_sample_size"] == pytest.approx(effective)
    if threshold != 1.3:
        outside = [not 0.7 <= slow_ratio(case, level, i, t) <= 1.4 for i, t in case.places()]
        assert metrics["oob_ratio"] == pytest.approx(statistics.fmean(outside))


def test_two_sided_truncation_and_the_mean_of_one() -> None:
    case = Case(1)
    floored = case.correct(rollout_is="token", rollout_is_threshold=1.1, rollout_is_floor=0.9)
    used = torch.stack([floored.weights[place] for place in case.places()])
    assert used.min() >= 0.9
    assert used.max() <= 1.1
    normed = case.correct(rollout_is="token", rollout_is_batch_normalize=True)
    assert torch.stack([normed.weights[p] for p in case.places()]).mean().item() == pytest.approx(1.0)
    rows = case.correct(rollout_is="sequence", rollout_is_threshold=9.0, rollout_is_batch_normalize=True)
    per_row = [max(row) for row, mask in zip(rows.weights.tolist(), case.mask, strict=True) if any(mask)]
    assert statistics.fmean(per_row) == pytest.approx(1.0)


DIVERGENCES: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}


@pytest.mark.parametrize("option", REJECTIONS)
@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_rejection_is_what_a_loop_computes(option: str, seed: int) -> None:
    case = Case(seed)
    threshold: float | str = "0.8_1.5" if option.endswith("k1") else 0.03
    low, high = (math.log(0.8), math.log(1.5)) if option.endswith("k1") else (-math.inf, 0.03)
    result = case.correct(rollout_rs=option, rollout_rs_threshold=threshold)
    measure = DIVERGENCES[option[-2:]]
    for i, t in case.places():
        values = [measure(d) for d in case.log_ratios(i)]
        kept = {
            "token": low <= measure(case.old[i][t] - case.rollout[i][t]) <= high,
            "seq_sum": low <= sum(values) <= high,
            "seq_mean": low <= statistics.fmean(values) <= high,
            "seq_max": low <= min(values) and max(values) <= high,
        }[option[:-3]]
        assert result.mask[i, t].item() == kept
    assert not bool(result.mask[torch.tensor(case.mask) == 0].any())
    lost = statistics.fmean(not result.mask[place].item() for place in case.places())
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost)


@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_mismatch_is_what_a_loop_computes(seed: int) -> None:
    case = Case(seed)
    metrics = mismatch_metrics(
        *(torch.tensor(rows, dtype=torch.float64) for rows in (case.old, case.rollout)), torch.tensor(case.mask).bool()
    )
    rows = [i for i, mask in enumerate(case.mask) if any(mask)]
    flat = [d for i in rows for d in case.log_ratios(i)]

    def log_ppl(values: Rows, i: int) -> float:
        return -statistics.fmean(x for x, bit in zip(values[i], case.mask[i], strict=True) if bit)

    wanted = {
        "kl": statistics.fmean(-d for d in flat),
        "k3_kl": statistics.fmean(math.exp(d) - 1 - d for d in flat),
        "training_ppl": statistics.fmean(math.exp(log_ppl(case.old, i)) for i in rows),
        "rollout_log_ppl": statistics.fmean(log_ppl(case.rollout, i) for i in rows),
        "log_ppl_diff_max": max(log_ppl(case.old, i) - log_ppl(case.rollout, i) for i in rows),
        "chi2_token": statistics.fmean(math.exp(2 * d) for d in flat) - 1,
        "chi2_seq": statistics.fmean(math.exp(2 * sum(case.log_ratios(i))) for i in rows) - 1,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)


@given(st.integers(0, 100_000))
@settings(max_examples=5)
def test_without_a_mismatch_nothing_is_changed(seed: int) -> None:
    case = Case(seed)
    case.rollout = case.old
    for name in set(PRESETS) - {"disabled"}:
        result = case.correct(**PRESETS[name])
        assert result.mask.tolist() == torch.tensor(case.mask).bool().tolist()
        assert result.weights is None or torch.equal(result.weights, torch.tensor(case.mask).double())
        assert result.metrics["rollout_corr/k3_kl"] == 0.0


def test_bounds_of_k1_are_bounds_of_the_ratio_itself() -> None:
    def kept(ratio: float) -> bool:
        old = torch.tensor([[math.log(ratio)]])
        config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.25")
        return bool(correct_rollout(old, torch.zeros(1, 1), torch.ones(1, 1), config).mask)

    assert [kept(ratio) for ratio in (0.45, 0.55, 0.79, 1.2, 1.3, 1.9)] == [False, True, True, True, False, False]


def test_nan_under_the_mask_reaches_no_weight_and_no_metric() -> None:
    old = torch.tensor([[-1.0, math.nan]])
    config = RolloutCorrectionConfig.preset("decoupled_seq_is_rs")
    result = correct_rollout(old, torch.tensor([[-1.1, math.nan]]), torch.tensor([[1, 0]]), config)
    assert isinstance(result.weights, Tensor)
    assert result.weights.tolist() == [[pytest.approx(math.exp(0.1)), 0.0]]
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_a_batch_without_tokens_is_left_alone() -> None:
    config = RolloutCorrectionConfig.preset("decoupled_geo_rs_token_tis")
    result = correct_rollout(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), config)
    assert result.mask.tolist() == [[False, False]]


# --- settings


@pytest.mark.parametrize(
    ("given_settings", "wanted"),
    [
        ({"rollout_is_threshold": True}, "got a bool"),
        ({"rollout_is_threshold": 0}, "must be a number above 0"),
        ({"rollout_is_threshold": "2_1"}, "lower must be below upper"),
        ({"rollout_is_threshold": "a_b"}, "'lower_upper'"),
        ({"rollout_is": "row"}, "'token'"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "Did you mean 'token_k"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "one upper bound"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"}, "one for each of"),
        ({"loss_type": "reinforce"}, "Set bypass_mode"),
        ({"bypass_mode": True, "rollout_is": "token"}, "would be ignored"),
        ({"rollout_is_floor": 3.0}, "rollout_is_floor goes with"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(given_settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValidationError, match=wanted):
        RolloutCorrectionConfig(**given_settings)


def test_thresholds_are_shared_or_one_each() -> None:
    shared = RolloutCorrectionConfig(rollout_rs="token_k1,seq_max_k1", rollout_rs_threshold=2).rejections
    assert [(r.lower, r.upper) for r in shared] == [(0.5, 2.0), (0.5, 2.0)]
    each = RolloutCorrectionConfig(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_3.0,0.01").rejections
    assert [(r.lower, r.upper) for r in each] == [(0.5, 3.0), (None, 0.01)]
    assert RolloutCorrectionConfig(rollout_is_threshold=[0.5, 2]).is_bounds == (0.5, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_setting_and_dumps_as_what_it_was(name: str) -> None:
    config = AlgorithmConfig(rollout_correction=name)  # type: ignore[arg-type]
    assert (config.rollout_correction is None) == (name == "disabled")
    assert AlgorithmConfig.model_validate(config.model_dump(mode="json")) == config
    if config.rollout_correction is not None:
        changed = AlgorithmConfig(rollout_correction={"preset": name, "rollout_is_batch_normalize": True})  # type: ignore[arg-type]
        assert changed.rollout_correction == RolloutCorrectionConfig.preset(name, rollout_is_batch_normalize=True)


def test_an_unknown_preset_names_the_closest() -> None:
    with pytest.raises(ValidationError, match="Did you mean 'decoupled_geo_rs'"):
        AlgorithmConfig(rollout_correction="decouple_geo_rs")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'bypass_pg_is'"):
        RolloutCorrectionConfig.preset("bypass_pg")
