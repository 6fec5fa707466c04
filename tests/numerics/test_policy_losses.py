"""Every policy loss and aggregation against a slow float64 loop, its algebra, its edges, and what it learns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xrl_lite.algorithms import AlgorithmConfig, PolicyLossConfig, get_policy_loss_fn, register_policy_loss
from xrl_lite.algorithms.advantages.outcome import grpo_advantages
from xrl_lite.algorithms.aggregation import MODES, BatchInfo, agg_loss, session_num_tokens
from xrl_lite.algorithms.losses.tokens import LossConfig
from xrl_lite.algorithms.objective import LossRows, objective
from xrl_lite.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from xrl_lite.errors import ConfigError, PluginError, UnknownNameError
from xrl_lite.registry import load_object

Rows = list[list[float]]
SETTINGS = PolicyLossConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    dro_beta=0.4,
    clip_cov_ratio=0.2,
    clip_cov_lb=0.05,
    kl_cov_ratio=0.2,
    pos_sft_loss_weight=0.3,
    pos_policy_loss_weight=0.7,
    positive_loss_factor=1.5,
    negative_loss_factor=0.5,
)
LOW, HIGH = 0.2, 0.28


@dataclass
class Case:
    logp: Rows
    old: Rows
    adv: Rows
    mask: list[list[int]]
    weights: Rows | None

    def tensors(self) -> dict[str, Any]:
        def tensor(rows: Any) -> Tensor:
            return torch.tensor(rows, dtype=torch.float64)

        return {
            "old_log_prob": tensor(self.old),
            "log_prob": tensor(self.logp).requires_grad_(),
            "advantages": tensor(self.adv),
            "response_mask": torch.tensor(self.mask),
            "rollout_is_weights": None if self.weights is None else tensor(self.weights),
        }

    def trained(self) -> list[tuple[int, int]]:
        return [(i, t) for i, row in enumerate(self.mask) for t, bit in enumerate(row) if bit]

    def row(self, i: int) -> list[int]:
        return [t for t, bit in enumerate(self.mask[i]) if bit]


def make_case(seed: int, *, weighted: bool | None = None) -> Case:
    rng = random.Random(seed)
    shape = (rng.randint(1, 5), rng.randint(1, 6))

    def rows(low: float, high: float) -> Rows:
        return [[rng.uniform(low, high) for _ in range(shape[1])] for _ in range(shape[0])]

    mask = [[rng.choice([1, 1, 0]) for _ in range(shape[1])] for _ in range(shape[0])]
    mask[0][0] = 1
    sequence_level = [rng.uniform(-2, 2) for _ in range(shape[0])]
    logp = rows(-3, -0.01)
    return Case(
        logp=logp,
        old=[[min(x + rng.uniform(-0.6, 0.6), -0.001) for x in row] for row in logp],
        adv=[[a] * shape[1] for a in sequence_level] if rng.random() < 0.5 else rows(-2, 2),
        mask=mask,
        weights=rows(0.1, 2) if (rng.random() < 0.5 if weighted is None else weighted) else None,
    )


# --- the slow loops: loss of one token


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(a: float, r: float, *, dual: float | None = None) -> float:
    loss = max(-a * r, -a * clip(r, 1 - LOW, 1 + HIGH))
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


def ratio(case: Case, i: int, t: int) -> float:
    return math.exp(case.logp[i][t] - case.old[i][t])


def slow_vanilla(case: Case, i: int, t: int) -> float:
    return surrogate(case.adv[i][t], ratio(case, i, t), dual=3.0)


def slow_gspo(case: Case, i: int, t: int) -> float:
    row = case.row(i)
    return surrogate(case.adv[i][t], math.exp(sum(case.logp[i][s] - case.old[i][s] for s in row) / len(row)))


def slow_sapo(case: Case, i: int, t: int) -> float:
    a, tau = case.adv[i][t], 1.0 if case.adv[i][t] > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (ratio(case, i, t) - 1)))


def slow_cispo(case: Case, i: int, t: int) -> float:
    return -case.adv[i][t] * clip(ratio(case, i, t), 1 - LOW, 1 + HIGH) * case.logp[i][t]


def slow_geo_mean(case: Case, i: int, t: int) -> float:
    row, kept = case.row(i), 0.0
    for s in row:
        d, sign = case.logp[i][s] - case.old[i][s], math.copysign(1.0, case.adv[i][s])
        kept += sign * min(sign * d, sign * clip(d, -LOW, HIGH))
    loss = -sum(case.adv[i][s] for s in row) / len(row) * math.exp(kept / len(row))
    if case.weights is not None:
        loss *= math.exp(sum(math.log(case.weights[i][s]) for s in row) / len(row))
    return loss


def slow_dppo_tv(case: Case, i: int, t: int) -> float:
    a, moved = case.adv[i][t], math.exp(case.logp[i][t]) - math.exp(case.old[i][t])
    kept = moved <= HIGH if a > 0 else moved >= -LOW
    return -a * min(ratio(case, i, t), 20.0) * case.logp[i][t] * kept


def slow_dppo_kl(case: Case, i: int, t: int) -> float:
    a, p, q = case.adv[i][t], math.exp(case.logp[i][t]), math.exp(case.old[i][t])
    kl = q * (case.old[i][t] - case.logp[i][t]) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    kept = kl <= HIGH or p <= q if a > 0 else kl <= LOW or p >= q
    return -a * min(ratio(case, i, t), 20.0) * case.logp[i][t] * kept


def slow_likelihood(case: Case, i: int, t: int) -> float:
    return -case.adv[i][t] * case.logp[i][t]


def slow_dro(case: Case, i: int, t: int) -> float:
    return -(case.adv[i][t] * case.logp[i][t] - 0.2 * (case.logp[i][t] - case.old[i][t]) ** 2)


def slow_oreal(case: Case, i: int, t: int) -> float:
    signs = [case.adv[i][t] for i, t in case.trained()]
    a, total = case.adv[i][t], len(signs)
    if a > 0:
        return 1.5 * total / sum(s > 0 for s in signs) * (0.7 * slow_vanilla(case, i, t) - 0.3 * case.logp[i][t])
    return 0.5 * total / sum(s < 0 for s in signs) * slow_vanilla(case, i, t)


def covariance(case: Case) -> dict[tuple[int, int], float]:
    tokens = case.trained()
    mean_a = sum(case.adv[i][t] for i, t in tokens) / len(tokens)
    mean_l = sum(case.logp[i][t] for i, t in tokens) / len(tokens)
    return {(i, t): (case.adv[i][t] - mean_a) * (case.logp[i][t] - mean_l) for i, t in tokens}


def slow_kl_cov(case: Case, i: int, t: int) -> float:
    values = covariance(case)
    chosen = sorted(values, key=lambda place: -values[place])[: max(int(0.2 * len(values)), 1)]
    loss = -case.adv[i][t] * ratio(case, i, t)
    return loss + 0.1 * abs(case.logp[i][t] - case.old[i][t]) if (i, t) in chosen else loss


SLOW: dict[str, Callable[[Case, int, int], float]] = {
    "vanilla": slow_vanilla,
    "gspo": slow_gspo,
    "sapo": slow_sapo,
    "cispo": slow_cispo,
    "geo_mean": slow_geo_mean,
    "dppo_tv": slow_dppo_tv,
    "dppo_kl": slow_dppo_kl,
    "gpg": slow_likelihood,
    "reinforce": slow_likelihood,
    "dro": slow_dro,
    "oreal": slow_oreal,
    "kl_cov": slow_kl_cov,
}
LOSSES = sorted([*SLOW, "clip_cov"])
"""clip_cov draws at random: it has a test of its own."""


def slow_aggregate(losses: dict[tuple[int, int], float], case: Case, mode: str, *, scale: float) -> float:
    rows = [[losses[i, t] for t in case.row(i)] for i in range(len(case.mask)) if case.row(i)]
    match mode:
        case "token-mean":
            return sum(losses.values()) / len(losses)
        case "token-sum":
            return sum(losses.values())
        case "seq-mean-token-sum":
            return sum(map(sum, rows)) / len(rows)
        case "seq-mean-token-sum-norm":
            return sum(map(sum, rows)) / len(rows) / scale
        case _:  # a session per row
            return sum(sum(row) / len(row) for row in rows) / len(rows)


def test_every_loss_has_a_loop() -> None:
    assert set(LOSSES) == {name for name in POLICY_LOSSES if not name.startswith("test_")}


@pytest.mark.parametrize("name", sorted(SLOW))
@settings(max_examples=15)
@given(st.integers(0, 100_000))
def test_loss_is_what_a_loop_computes(name: str, seed: int) -> None:
    case = make_case(seed)
    mode = policy_loss(name).aggregation or "token-mean"
    losses = {(i, t): SLOW[name](case, i, t) for i, t in case.trained()}
    if case.weights is not None and name != "geo_mean":
        losses = {(i, t): loss * case.weights[i][t] for (i, t), loss in losses.items()}
    wanted = slow_aggregate(losses, case, mode, scale=1.0)
    loss, metrics = get_policy_loss_fn(name)(**case.tensors(), loss_agg_mode=mode, config=SETTINGS)
    assert loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-10)
    ratios = [(ratio(case, i, t), case.logp[i][t] - case.old[i][t]) for i, t in case.trained()]
    assert float(metrics["kl"]) == pytest.approx(sum(r - 1 - d for r, d in ratios) / len(ratios), abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15)
@given(st.integers(0, 100_000))
def test_aggregation_is_what_a_loop_computes(mode: str, seed: int) -> None:
    case = make_case(seed)
    losses = {(i, t): case.adv[i][t] for i, t in case.trained()}
    loss = agg_loss(torch.tensor(case.adv, dtype=torch.float64), torch.tensor(case.mask), mode, loss_scale_factor=7.0)
    assert loss.item() == pytest.approx(slow_aggregate(losses, case, mode, scale=7.0))


@settings(max_examples=15)
@given(st.integers(0, 100_000))
def test_clip_cov_takes_out_a_share_of_the_candidates(seed: int) -> None:
    case = make_case(seed, weighted=False)
    inputs = case.tensors()
    loss, _ = get_policy_loss_fn("clip_cov")(**inputs, config=SETTINGS)
    loss.backward()
    values = covariance(case)
    clipped = {
        (i, t): -case.adv[i][t] * clip(ratio(case, i, t), 1 - LOW, 1 + HIGH) > -case.adv[i][t] * ratio(case, i, t)
        for i, t in case.trained()
    }
    candidates = [place for place, value in values.items() if 0.05 < value < 5.0 and not clipped[place]]
    gradient = inputs["log_prob"].grad
    silent = [place for place in case.trained() if gradient[place] == 0 and not clipped[place]]
    assert set(silent) <= set(candidates)
    assert len(silent) == min(len(candidates), max(int(0.2 * len(values)), 1))


# --- gradients


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_old_policy_the_gradient_raises_what_was_better(name: str) -> None:
    case = make_case(8, weighted=False)
    case.old = [list(row) for row in case.logp]
    inputs = case.tensors()
    mode = policy_loss(name).aggregation or "token-mean"
    # one token left alone by kl_cov and clip_cov at the most
    loss, _ = get_policy_loss_fn(name)(
        **inputs, loss_agg_mode=mode, config=SETTINGS.model_copy(update={"clip_cov_ratio": 1e-9})
    )
    loss.backward()
    mask, gradient = inputs["response_mask"].bool(), inputs["log_prob"].grad
    advantages = inputs["advantages"]
    if name == "geo_mean":
        advantages = (advantages * mask).sum(dim=1, keepdim=True).expand_as(advantages)
    right = (gradient.sign() == -advantages.sign())[mask]
    assert int((~right).sum()) <= (1 if name == "clip_cov" else 0)
    assert gradient[~mask].tolist() == [0.0] * int((~mask).sum())


@pytest.mark.parametrize("name", LOSSES)
def test_nan_under_the_mask_reaches_neither_loss_nor_gradient(name: str) -> None:
    case = make_case(21, weighted=True)
    inputs = case.tensors()
    clean = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    under = inputs["response_mask"] == 0
    assert bool(under.any())
    results: list[tuple[float, Tensor]] = []
    for poisoned in (False, True):
        batch = {key: value.clone() for key, value in clean.items()}
        if poisoned:
            for key in ("old_log_prob", "log_prob", "advantages", "rollout_is_weights"):
                batch[key][under] = math.nan
        batch["log_prob"].requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(**batch, config=SETTINGS)
        loss.backward()
        assert all(math.isfinite(float(value)) for value in metrics.values())
        results.append((loss.item(), batch["log_prob"].grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=4)
@given(st.integers(0, 100_000))
def test_splitting_changes_neither_loss_nor_gradient(name: str, mode: str, seed: int) -> None:
    """Rows in micro-batches of two ranks, in another order: the sum of the shares over the ranks is the whole."""
    case = make_case(seed)
    if policy_loss(name).aggregation not in (None, mode):
        return
    rng = random.Random(seed)
    num_rows = len(case.mask)
    sessions = [rng.randrange(2) for _ in range(num_rows)]
    tokens = session_num_tokens(case.mask, sessions)
    whole = {key: value.double() if isinstance(value, Tensor) else value for key, value in case.tensors().items()}
    whole["response_mask"] = whole["response_mask"].bool()
    selection = policy_loss(name).selection
    selected = None
    if isinstance(selection, str):
        selected = load_object(selection)(
            *(whole[key].detach() for key in ("old_log_prob", "log_prob", "advantages", "response_mask")), SETTINGS, 3
        )

    def compute(parts: list[list[int]], num_ranks: int) -> tuple[float, Tensor]:
        leaf = whole["log_prob"].detach().clone().requires_grad_()
        info = BatchInfo.of(case.mask, sessions, case.adv, dp_size=num_ranks, loss_scale_factor=6.0)
        total = leaf.new_zeros(())
        for part in parts:
            rows = {key: None if value is None else value[part] for key, value in whole.items()} | {
                "log_prob": leaf[part]
            }
            config = LossConfig(
                SETTINGS,
                batch=info,
                session_num_tokens=torch.tensor([tokens.get(sessions[i], 0) for i in part]),
            )
            chosen = {} if selected is None else {"selected": selected[part]}
            share, _ = get_policy_loss_fn(name)(**rows, loss_agg_mode=mode, config=config, **chosen)
            total = total + share / num_ranks
        total.backward()
        assert leaf.grad is not None
        return total.item(), leaf.grad

    order = list(range(num_rows))
    rng.shuffle(order)
    cut = rng.randint(0, num_rows)
    one = compute([list(range(num_rows))], 1)
    two = compute([part for part in (order[:cut], order[cut:]) if part], 2)
    assert two[0] == pytest.approx(one[0], rel=1e-6, abs=1e-6)
    assert torch.allclose(two[1], one[1], rtol=1e-6, atol=1e-6)


# --- edges


def test_oreal_with_only_good_tokens_is_finite() -> None:
    loss, _ = get_policy_loss_fn("oreal")(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    assert math.isfinite(loss.item())


def test_clipped_tokens_are_counted_by_side() -> None:
    logp = torch.log(torch.tensor([[2.0, 0.5, 1.0, 4.0]]))
    _, metrics = get_policy_loss_fn("vanilla")(
        torch.zeros(1, 4), logp, torch.tensor([[1.0, -1.0, 1.0, -1.0]]), torch.ones(1, 4)
    )
    shares = {name: float(metrics[name]) for name in ("clip_low", "clip_high", "clip_dual")}
    assert shares == {"clip_low": 0.25, "clip_high": 0.25, "clip_dual": 0.25}


def test_sessions_count_the_same_whatever_rows_they_have() -> None:
    losses, mask = torch.tensor([[1.0, 1.0], [4.0, 0.0], [2.0, 2.0]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    tokens = torch.tensor([3, 3, 2])  # rows 0 and 1 are one session
    loss = agg_loss(losses, mask, "session-mean-token-mean", num_sessions=2, session_num_tokens=tokens)
    assert loss.item() == pytest.approx(((1 + 1 + 4) / 3 + 2) / 2)


def test_an_empty_batch_is_zero_not_nan() -> None:
    for mode in MODES:
        assert agg_loss(torch.full((2, 2), math.nan), torch.zeros(2, 2), mode).item() == 0.0


def test_aggregation_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'token-mean'"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean")
    with pytest.raises(ConfigError, match="With 2 ranks batch_num_tokens must be given"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token-mean", dp_size=2)


def test_a_users_loss_computes_with_the_mask() -> None:
    def inverse(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, *_: Any) -> Any:
        return ((1 - mask) * log_prob).sum() / mask.sum(), {}

    ones = torch.ones(1, 3)
    rows = LossRows(log_prob=-ones, old_log_prob=ones, advantages=ones, mask=torch.tensor([[True, False, True]]))
    loss, _ = objective(rows, algorithm=AlgorithmConfig(), policy_loss=inverse, config=LossConfig())
    assert loss.item() == -0.5


def test_a_users_loss_of_verls_form_is_registered_and_found() -> None:
    @register_policy_loss("test_half")
    def half(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        losses = -advantages * log_prob * config.policy_loss.get("share", 0.5) * config.clip_ratio_high
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}

    config = LossConfig(PolicyLossConfig(loss_mode="test_half", options={"share": 0.25}))
    loss, _ = get_policy_loss_fn("test_half")(
        torch.zeros(1, 1), torch.tensor([[-2.0]]), torch.ones(1, 1), torch.ones(1, 1), "token-mean", config
    )
    assert loss.item() == pytest.approx(2 * 0.25 * 0.2)
    assert (config["share"], config.share, config.get("other", 7)) == (0.25, 0.25, 7)
    with pytest.raises(PluginError, match="taken"):
        register_policy_loss("vanilla")(half)
    with pytest.raises(UnknownNameError, match="Did you mean 'cispo'"):
        get_policy_loss_fn("cisp")


# --- learning


@pytest.mark.parametrize("name", LOSSES)
def test_twenty_steps_raise_the_reward(name: str) -> None:
    """A policy of two tokens from a vocabulary of four, told only that token 2 is good: two updates per batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    groups = torch.arange(8).repeat_interleave(8)
    mode = policy_loss(name).aggregation or "token-mean"
    mean_rewards: list[float] = []
    for _ in range(20):
        old = logits.detach().log_softmax(dim=1)
        tokens = torch.multinomial(old.exp(), 64, replacement=True, generator=generator).T
        rewards = (tokens == 2).double().mean(dim=1)
        mean_rewards.append(rewards.mean().item())
        advantages = grpo_advantages(rewards, groups).unsqueeze(1).expand(64, 2)
        for _ in range(2):
            logp = logits.log_softmax(dim=1).expand(64, 2, 4).gather(2, tokens.unsqueeze(2)).squeeze(2)
            before = old.expand(64, 2, 4).gather(2, tokens.unsqueeze(2)).squeeze(2)
            loss, _ = get_policy_loss_fn(name)(
                before, logp, advantages, torch.ones(64, 2), mode, PolicyLossConfig(loss_mode="vanilla", dro_beta=0.1)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert sum(mean_rewards[-3:]) / 3 > 0.6 > 0.35 > mean_rewards[0]
