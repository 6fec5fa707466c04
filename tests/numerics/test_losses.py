"""The policy loss against a naive loop, and what must not change it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xrl_lite.algorithms.losses import kl_estimate, policy_loss, token_weights
from xrl_lite.errors import ConfigError


def naive(logp: list[float], old: list[float], adv: list[float], weight: list[float]) -> float:
    total = 0.0
    for new, before, a, w in zip(logp, old, adv, weight, strict=True):
        ratio = math.exp(new - before)
        loss = max(-a * ratio, -a * min(max(ratio, 0.8), 1.28))
        if a < 0:
            loss = min(loss, -a * 3.0)
        total += w * loss
    return total


@given(st.integers(0, 10_000))
def test_loss_is_what_a_loop_computes(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    logp, old = ([rng.uniform(-4, 0) for _ in range(size)] for _ in range(2))
    adv, weight = [rng.uniform(-2, 2) for _ in range(size)], [rng.uniform(0.1, 1) for _ in range(size)]
    loss, _ = policy_loss(*map(torch.tensor, (logp, old, adv, weight)), clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(naive(logp, old, adv, weight), rel=1e-4, abs=1e-5)


def test_nan_under_the_mask_reaches_neither_loss_nor_gradient() -> None:
    logp = torch.tensor([-1.0, math.nan], requires_grad=True)
    loss, _ = policy_loss(logp, torch.tensor([-1.0, math.nan]), torch.ones(2), torch.tensor([0.5, 0.0]))
    loss.backward()
    assert loss.item() == -0.5
    assert logp.grad is not None
    assert logp.grad.tolist() == [-0.5, 0.0]


def test_clipped_tokens_are_counted_by_side() -> None:
    logp = torch.log(torch.tensor([2.0, 0.5, 1.0]))
    _, sums = policy_loss(logp, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), torch.ones(3))
    assert (sums["clip_high"], sums["clip_low"]) == (1.0, 1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_weights_do_not_depend_on_how_a_step_is_split(aggregation: str) -> None:
    masks = [[1, 1, 0], [1], [0, 0], [1, 1, 1, 1]]
    weights = token_weights(masks, aggregation)  # type: ignore[arg-type]
    assert [[w > 0 for w in row] for row in weights] == [[bit == 1 for bit in mask] for mask in masks]
    totals = {"token_mean": 1.0, "seq_mean_token_mean": 1.0, "seq_mean_token_sum": 7 / 3}
    assert sum(map(sum, weights)) == pytest.approx(totals[aggregation])


def test_weights_of_nothing_are_zero() -> None:
    assert token_weights([[0, 0]], "token_mean") == [[0.0, 0.0]]
    with pytest.raises(ConfigError, match="token_mean"):
        token_weights([[1]], "mean")  # type: ignore[arg-type]


def test_kl_estimators() -> None:
    x, y = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(x, y, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(x, y, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(x, y, "abs").item() == pytest.approx(0.5)
    assert kl_estimate(x, y, "k3").item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert kl_estimate(x, torch.tensor([30.0]), "k3").item() == 10.0
