"""KL estimators and controllers, the critic's loss, distillation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xrl_lite.algorithms import KLControllerConfig
from xrl_lite.algorithms.critic import explained_variance, value_loss
from xrl_lite.algorithms.distillation import distillation_loss, forward_kl_topk, register_distillation_loss
from xrl_lite.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty, subtract_kl
from xrl_lite.errors import ConfigError, UnknownNameError

X, Y = torch.tensor([-1.0]), torch.tensor([-1.5])


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("kl", "k1"), 0.5),
        (("abs",), 0.5),
        (("mse", "k2"), 0.125),
        (("low_var_kl", "k3"), math.exp(-0.5) + 0.5 - 1),
    ],
)
def test_kl_estimators(names: tuple[str, ...], wanted: float) -> None:
    for name in names:
        assert kl_penalty(X, Y, name).item() == pytest.approx(wanted)
        assert kl_penalty(X, Y, f"{name}+").item() == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["k1+", "k2+", "k3+", "abs+"])
def test_straight_through_has_the_gradient_of_k2(name: str) -> None:
    x = X.clone().requires_grad_()
    kl_penalty(x, Y, name).backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(0.5)


def test_extremes_are_clamped_and_unknown_names_refused() -> None:
    assert kl_penalty(X, torch.tensor([30.0]), "k3").item() == 10.0
    for name in ("full", "k4", "k4+"):
        with pytest.raises(ConfigError, match="k3"):
            kl_penalty(X, Y, name)


def test_k3_is_unbiased_and_never_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    p, q = policy.log_softmax(0), reference.log_softmax(0)
    exact = (p.exp() * (p - q)).sum().item()
    for name in ("k1", "k3"):
        assert (p.exp() * kl_penalty(p, q, name)).sum().item() == pytest.approx(exact, abs=1e-5)
    assert bool((kl_penalty(p, q, "k3") >= 0).all())


def test_a6_nan_of_the_kl_under_the_mask() -> None:
    old, ref = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-1.2, math.nan]])
    rewards, kl = subtract_kl(
        torch.tensor([[1.0, 0.0]]), old, ref, torch.tensor([[1, 0]]), kl_penalty_name="kl", coef=0.5
    )
    assert rewards.tolist() == [[pytest.approx(0.9), 0.0]]
    assert kl == pytest.approx(0.2)


@settings(max_examples=25)
@given(st.floats(0, 2), st.integers(1, 500))
def test_an_adaptive_weight_follows_the_kl(kl: float, num_rows: int) -> None:
    controller = get_kl_controller(KLControllerConfig(type="adaptive", kl_coef=0.2, target_kl=0.5, horizon=1000))
    assert isinstance(controller, AdaptiveKLController)
    controller.update(kl, num_rows)
    error = max(-0.2, min(0.2, kl / 0.5 - 1))
    assert controller.value == pytest.approx(0.2 * (1 + error * num_rows / 1000))


def test_a_fixed_weight_stays() -> None:
    controller = get_kl_controller(KLControllerConfig(kl_coef=0.3))
    controller.update(9.0, 9)
    assert isinstance(controller, FixedKLController)
    assert controller.value == 0.3


# --- critic


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_value_loss_is_what_a_loop_computes(seed: int) -> None:
    rng = random.Random(seed)
    shape = (rng.randint(1, 3), rng.randint(1, 4))
    preds, returns, values = (
        [[rng.uniform(-2, 2) for _ in range(shape[1])] for _ in range(shape[0])] for _ in range(3)
    )
    mask = [[rng.choice([0, 1]) for _ in range(shape[1])] for _ in range(shape[0])]
    mask[0][0] = 1
    total, clipped, count = 0.0, 0, 0
    for i in range(shape[0]):
        for t in range(shape[1]):
            if mask[i][t]:
                v, g, old = preds[i][t], returns[i][t], values[i][t]
                near = max(old - 0.5, min(old + 0.5, v))
                total += 0.5 * max((v - g) ** 2, (near - g) ** 2)
                clipped += (near - g) ** 2 > (v - g) ** 2
                count += 1
            else:
                preds[i][t] = returns[i][t] = values[i][t] = math.nan
    loss, metrics = value_loss(
        *(torch.tensor(rows, dtype=torch.float64) for rows in (preds, returns, values)), torch.tensor(mask)
    )
    assert loss.item() == pytest.approx(total / count)
    assert metrics["vf_clipfrac"].item() == pytest.approx(clipped / count)


def test_value_loss_adds_up_over_micro_batches() -> None:
    preds, returns, values = (torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    whole, _ = value_loss(preds, returns, values, mask)
    parts = [
        value_loss(preds[part], returns[part], values[part], mask[part], batch_num_tokens=6)[0]
        for part in ([2], [0, 1, 3])
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item())


def test_explained_variance() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.full((1, 4), 2.0), returns, mask) == pytest.approx(0.0)


# --- distillation


def test_forward_kl_over_the_whole_vocabulary_is_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 7, generator=generator).double().log_softmax(1) for _ in range(2))
    wanted = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(1)
    assert torch.allclose(forward_kl_topk(student, teacher), wanted)
    ids = teacher.topk(2, dim=1).indices
    some = forward_kl_topk(student.gather(1, ids), teacher.gather(1, ids))
    loop = [
        sum(teacher[t, v].exp().item() * (teacher[t, v] - student[t, v]).item() for v in ids[t].tolist())
        for t in range(3)
    ]
    assert some.tolist() == pytest.approx(loop)


def test_distillation_losses_by_name() -> None:
    assert distillation_loss("k1")(X, Y).item() == pytest.approx(0.5)
    assert distillation_loss("forward_kl_topk") is forward_kl_topk
    register_distillation_loss("test_twice")(lambda student, teacher: 2 * (student - teacher))
    assert distillation_loss("test_twice")(X, Y).item() == pytest.approx(1.0)
    with pytest.raises(UnknownNameError, match="Did you mean 'forward_kl_topk'"):
        distillation_loss("forward_kl_top")
