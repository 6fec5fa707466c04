"""Every advantage estimator against a slow float64 loop, its algebra, and its edges."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xrl_lite.algorithms import AlgorithmConfig, get_adv_estimator_fn, register_adv_est
from xrl_lite.algorithms.advantages.groups import zero_variance_groups
from xrl_lite.algorithms.advantages.outcome import dr_grpo_advantages, grpo_advantages, rloo_advantages
from xrl_lite.algorithms.estimators import ADVANTAGE_ESTIMATORS, advantage_estimator
from xrl_lite.errors import ConfigError, PluginError, UnknownNameError

Rows = list[list[float]]
CONFIG = AlgorithmConfig(gamma=0.9, lam=0.8, passk_k=2)
RELATIVE = [name for name in ADVANTAGE_ESTIMATORS if advantage_estimator(name).min_group_size == 2]


@dataclass
class Case:
    """A batch as plain lists: rewards stand on the last trained token, as the trainer puts them."""

    rewards: list[float]
    mask: list[list[int]]
    groups: list[str]
    logp: Rows
    squared: Rows
    values: Rows
    baselines: list[float]

    @property
    def token_rewards(self) -> Rows:
        placed: Rows = []
        for reward, mask in zip(self.rewards, self.mask, strict=True):
            row = [0.0] * len(mask)
            row[max(t for t, bit in enumerate(mask) if bit)] = reward
            placed.append(row)
        return placed

    def inputs(self) -> dict[str, Any]:
        def tensor(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)

        return {
            "token_level_rewards": tensor(self.token_rewards),
            "response_mask": torch.tensor(self.mask),
            "index": self.groups,
            "config": CONFIG,
            "old_log_probs": tensor(self.logp),
            "sum_pi_squared": tensor(self.squared),
            "values": tensor(self.values),
            "reward_baselines": tensor(self.baselines),
            "reward_parts": {},
        }

    def members(self, i: int) -> list[int]:
        return [j for j, group in enumerate(self.groups) if group == self.groups[i]]

    def siblings(self, i: int) -> list[float]:
        return [self.rewards[j] for j in self.members(i)]

    def is_flat(self, i: int) -> bool:
        return max(self.siblings(i)) - min(self.siblings(i)) <= 1e-6


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    groups = [f"g{g}" for g in range(rng.randint(1, 3)) for _ in range(rng.randint(2, 4))]
    width = rng.randint(2, 6)
    masks: list[list[int]] = []
    for _ in groups:
        length = rng.randint(1, width)
        mask = [rng.choice([1, 1, 0]) for _ in range(length)] + [0] * (width - length)
        mask[0] = 1
        masks.append(mask)
    shape = [width] * len(groups)
    return Case(
        rewards=[rng.choice([0.0, 0.0, 0.5, 1.0, -1.0]) for _ in groups],
        mask=masks,
        groups=groups,
        logp=[[rng.uniform(-3, 0) for _ in range(w)] for w in shape],
        squared=[[rng.uniform(0.1, 0.9) for _ in range(w)] for w in shape],
        values=[[rng.uniform(-1, 1) for _ in range(w)] for w in shape],
        baselines=[rng.uniform(0, 1) for _ in groups],
    )


# --- the slow loops


def outcome(formula: Callable[[Case, int], float]) -> Callable[[Case], Rows]:
    """Give each trained token the value of its row; rows of flat groups 0."""

    def estimate(case: Case) -> Rows:
        rows = [0.0 if case.is_flat(i) else formula(case, i) for i in range(len(case.rewards))]
        return [[value * bit for bit in mask] for value, mask in zip(rows, case.mask, strict=True)]

    return estimate


def slow_grpo(case: Case, i: int) -> float:
    rewards = case.siblings(i)
    return (case.rewards[i] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)


def slow_rloo(case: Case, i: int) -> float:
    others = [case.rewards[j] for j in case.members(i) if j != i]
    return case.rewards[i] - statistics.fmean(others)


def slow_opo(case: Case, i: int) -> float:
    lengths = {j: sum(case.mask[j]) for j in case.members(i)}
    return case.rewards[i] - sum(lengths[j] * case.rewards[j] for j in lengths) / sum(lengths.values())


def slow_passk(case: Case, i: int) -> float:
    """By enumerating every choice of k attempts."""
    from itertools import combinations

    members, k = case.members(i), min(CONFIG.passk_k, len(case.members(i)))
    hit = {choice: float(any(case.rewards[j] > 0 for j in choice)) for choice in combinations(members, k)}
    mean = statistics.fmean(hit.values())
    spread = math.sqrt(mean * (1 - mean)) + 1e-6
    right = [j for j in members if case.rewards[j] > 0]
    if len(right) in (0, len(members)):
        return 0.0
    return statistics.fmean(value for choice, value in hit.items() if i in choice) / spread - mean / spread


def slow_grpo_passk(case: Case, i: int) -> float:
    best, second = sorted(case.siblings(i), reverse=True)[:2]
    first = min(j for j in case.members(i) if case.rewards[j] == best)
    return (best - second) / (statistics.stdev(case.siblings(i)) + 1e-6) if i == first else 0.0


def slow_gpg(case: Case, i: int) -> float:
    alpha = len(case.rewards) / max(1, sum(reward != 0 for reward in case.rewards))
    return alpha * (case.rewards[i] - statistics.fmean(case.siblings(i)))


def whitened(rows: Rows, case: Case, keep: Callable[[int], bool] = lambda i: True) -> Rows:
    used = [x for row, mask in zip(rows, case.mask, strict=True) for x, bit in zip(row, mask, strict=True) if bit]
    if len(used) < 2 or max(used) - min(used) < 1e-9:
        return [[0.0] * len(row) for row in rows]
    mean, std = statistics.fmean(used), math.sqrt(statistics.variance(used) + 1e-8)
    return [
        [(x - mean) / std if bit and keep(i) else 0.0 for x, bit in zip(row, mask, strict=True)]
        for i, (row, mask) in enumerate(zip(rows, case.mask, strict=True))
    ]


def slow_baseline(case: Case) -> Rows:
    relative = outcome(lambda c, i: c.rewards[i] - statistics.fmean(c.siblings(i)))(case)
    return whitened(relative, case, keep=lambda i: not case.is_flat(i))


def slow_gdpo(case: Case) -> Rows:
    return whitened(outcome(slow_grpo)(case), case, keep=lambda i: not case.is_flat(i))


def trained(case: Case, i: int) -> list[int]:
    return [t for t, bit in enumerate(case.mask[i]) if bit]


def slow_returns(case: Case, gamma: float) -> Rows:
    result = [[0.0] * len(mask) for mask in case.mask]
    for i in range(len(case.rewards)):
        places = trained(case, i)
        for place, t in enumerate(places):
            result[i][t] = sum(gamma**n * case.token_rewards[i][s] for n, s in enumerate(places[place:]))
    return result


def slow_gae(case: Case) -> Rows:
    result = [[0.0] * len(mask) for mask in case.mask]
    for i in range(len(case.rewards)):
        places = trained(case, i)
        values = [case.values[i][t] for t in places] + [0.0]
        deltas = [case.token_rewards[i][t] + 0.9 * values[n + 1] - values[n] for n, t in enumerate(places)]
        for n, t in enumerate(places):
            result[i][t] = sum((0.9 * 0.8) ** m * delta for m, delta in enumerate(deltas[n:]))
    return whitened(result, case)


def slow_remax(case: Case) -> Rows:
    returns = slow_returns(case, 1.0)
    return [
        [(x - b) * bit for x, bit in zip(row, mask, strict=True)]
        for row, b, mask in zip(returns, case.baselines, case.mask, strict=True)
    ]


def slow_token_baseline(case: Case, *, compact: bool) -> Rows:
    result = [[0.0] * len(mask) for mask in case.mask]

    def position(i: int, t: int) -> int:
        return sum(case.mask[i][:t]) if compact else t

    def reach(i: int) -> int:
        return max(position(i, t) for t in trained(case, i))

    def weight(i: int, t: int) -> float:
        return sum(1 - 2 * math.exp(case.logp[i][s]) + case.squared[i][s] for s in trained(case, i) if s <= t)

    for i in range(len(case.rewards)):
        second = sorted((reach(j) for j in case.members(i)), reverse=True)[1]
        for t in trained(case, i):
            here = [(j, s) for j in case.members(i) for s in trained(case, j) if position(j, s) == position(i, t)]
            total = sum(weight(j, s) for j, s in here) + 1e-8
            baseline = sum(case.rewards[j] * weight(j, s) for j, s in here) / total
            result[i][t] = case.rewards[i] - (baseline if position(i, t) <= second else 0.0)
            if case.is_flat(i):
                result[i][t] = 0.0
    return result


SLOW: dict[str, Callable[[Case], Rows]] = {
    "gae": slow_gae,
    "grpo": outcome(slow_grpo),
    "grpo_vectorized": outcome(slow_grpo),
    "dr_grpo": outcome(lambda case, i: case.rewards[i] - statistics.fmean(case.siblings(i))),
    "rloo": outcome(slow_rloo),
    "rloo_vectorized": outcome(slow_rloo),
    "opo": outcome(slow_opo),
    "passk": outcome(slow_passk),
    "grpo_passk": outcome(slow_grpo_passk),
    "gpg": outcome(slow_gpg),
    "gdpo": slow_gdpo,
    "reinforce_plus_plus": lambda case: whitened(slow_returns(case, 0.9), case),
    "reinforce_plus_plus_baseline": slow_baseline,
    "remax": slow_remax,
    "optimal_token_baseline": lambda case: slow_token_baseline(case, compact=False),
    "tir_optimal_token_baseline": lambda case: slow_token_baseline(case, compact=True),
}


def test_every_estimator_has_a_loop() -> None:
    assert set(SLOW) == {name for name in ADVANTAGE_ESTIMATORS if not name.startswith("test_")}


@pytest.mark.parametrize("name", sorted(SLOW))
@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_estimator_is_what_a_loop_computes(name: str, seed: int) -> None:
    case = make_case(seed)
    advantages, _ = get_adv_estimator_fn(name)(**case.inputs())
    wanted = SLOW[name](case)
    for row, expected in zip(advantages.tolist(), wanted, strict=True):
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-7)


@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_returns_of_gae_are_advantages_before_whitening_plus_values(seed: int) -> None:
    case = make_case(seed)
    _, returns = get_adv_estimator_fn("gae")(**case.inputs())
    for i in range(len(case.rewards)):
        places = trained(case, i)
        # lam = 1 would make it the reward to go; with 0.8 the last one still is
        assert returns[i, places[-1]].item() == pytest.approx(case.rewards[i])


# --- algebra


@pytest.mark.parametrize("name", sorted(SLOW))
@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    case = make_case(seed)
    order = list(range(len(case.rewards)))
    random.Random(seed).shuffle(order)
    inputs = case.inputs()
    moved = {
        key: value[order] if isinstance(value, Tensor) else [value[i] for i in order] if key == "index" else value
        for key, value in inputs.items()
    }
    before, after = (get_adv_estimator_fn(name)(**kw)[0] for kw in (inputs, moved))
    if name == "grpo_passk":  # of two equally good attempts the first is the best one, but then it gets 0
        before, after = before.sum(dim=1).abs().sort().values, after.sum(dim=1).abs().sort().values
        assert torch.allclose(before, after, atol=1e-9)
    else:
        assert torch.allclose(before[order], after, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(RELATIVE) - {"gpg", "gdpo", "reinforce_plus_plus_baseline"} | {"remax"}))
@settings(max_examples=12)
@given(st.integers(0, 100_000))
def test_a_group_does_not_see_the_others(name: str, seed: int) -> None:
    case = make_case(seed)
    inputs = case.inputs()
    together = get_adv_estimator_fn(name)(**inputs)[0]
    for group in set(case.groups):
        places = [i for i, other in enumerate(case.groups) if other == group]
        alone = {
            key: value[places] if isinstance(value, Tensor) else [value[i] for i in places] if key == "index" else value
            for key, value in inputs.items()
        }
        assert torch.allclose(get_adv_estimator_fn(name)(**alone)[0], together[places], atol=1e-12)


@pytest.mark.parametrize("name", [name for name in RELATIVE if name not in ("passk", "gpg")])
@settings(max_examples=12)
@given(st.integers(0, 100_000), st.floats(-3, 3))
def test_relative_estimators_do_not_see_a_shift(name: str, seed: int, shift: float) -> None:
    case = make_case(seed)
    before = get_adv_estimator_fn(name)(**case.inputs())[0]
    case.rewards = [reward + shift for reward in case.rewards]
    after = get_adv_estimator_fn(name)(**case.inputs())[0]
    if name.endswith("optimal_token_baseline"):  # the tail of the longest row has no baseline
        lengths = torch.tensor([len(trained(case, i)) for i in range(len(case.rewards))])
        shared = before.new_ones(before.shape, dtype=torch.bool)
        for i in range(len(case.rewards)):
            last = [max(trained(case, j)) for j in case.members(i)]
            shared[i, sorted(last)[-2] + 1 :] = False
            if name.startswith("tir"):
                count = sorted(int(lengths[j]) for j in case.members(i))[-2]
                shared[i, trained(case, i)[count:]] = False
        before, after = before * shared, after * shared
    assert torch.allclose(before, after, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "grpo_passk"])
@settings(max_examples=12)
@given(st.integers(0, 100_000), st.floats(0.5, 4))
def test_normalised_estimators_do_not_see_a_scale(name: str, seed: int, scale: float) -> None:
    case = make_case(seed)
    before = get_adv_estimator_fn(name)(**case.inputs())[0]
    case.rewards = [reward * scale for reward in case.rewards]
    assert torch.allclose(before, get_adv_estimator_fn(name)(**case.inputs())[0], atol=1e-4)


@settings(max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_relative_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for estimate in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        values = estimate(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64))
        assert values.sum().item() == pytest.approx(0.0, abs=1e-8)


# --- edges


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize(("reward", "size"), [(0.35, 8), (0.1, 7), (0.7, 12), (0.6, 9), (0.0, 4), (1.0, 1)])
def test_equal_rewards_and_single_attempts_give_exactly_zero(name: str, reward: float, size: int) -> None:
    # a second group that has a signal, so that whitening has something to shift by
    rewards = torch.tensor([reward] * size + [1.0, 0.0, 0.0], dtype=torch.float32)
    rows = torch.zeros(size + 3, 4)
    rows[:, 3] = rewards
    mask = torch.ones(size + 3, 4)
    mask[0, :2] = 0
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rows,
        response_mask=mask,
        index=[0] * size + [1] * 3,
        config=CONFIG,
        old_log_probs=torch.full((size + 3, 4), -0.5),
        sum_pi_squared=torch.full((size + 3, 4), 0.4),
    )
    assert advantages[:size].tolist() == [[0.0] * 4] * size
    assert advantages[size:].abs().sum() > 0


@pytest.mark.parametrize("name", sorted(set(SLOW) - {"gae"}))
def test_missing_rewards_are_left_out_of_the_statistics(name: str) -> None:
    case = make_case(3)
    case.groups = ["g"] * len(case.groups)
    case.rewards = [float(i % 2) for i in range(len(case.rewards))]
    keep = list(range(1, len(case.rewards)))
    inputs = case.inputs()
    rest = {
        key: value[keep] if isinstance(value, Tensor) else [value[i] for i in keep] if key == "index" else value
        for key, value in inputs.items()
    }
    inputs["token_level_rewards"][0, 0] = math.nan
    whole, alone = (get_adv_estimator_fn(name)(**kw)[0] for kw in (inputs, rest))
    assert whole[0].tolist() == [0.0] * whole.shape[1]
    assert torch.allclose(whole[keep], alone)


def test_trl_5773_means_over_the_three_scored() -> None:
    rewards = torch.tensor([1.0, 0.0, math.nan, 1.0])
    values = grpo_advantages(rewards, torch.zeros(4, dtype=torch.int64)).tolist()
    assert values == pytest.approx([0.577, -1.155, 0.0, 0.577], abs=1e-3)


@pytest.mark.parametrize("name", sorted(SLOW))
def test_nan_under_the_mask_stays_there(name: str) -> None:
    case = make_case(11)
    inputs = case.inputs()
    under = inputs["response_mask"] == 0
    assert bool(under.any())
    for key in ("old_log_probs", "sum_pi_squared", "values"):
        inputs[key][under] = math.nan
    advantages, returns = get_adv_estimator_fn(name)(**inputs)
    assert bool(torch.isfinite(advantages).all() and torch.isfinite(returns).all())


def test_pass_at_k_of_nothing_right_is_zero_and_of_few_attempts_has_no_wrong_signs() -> None:
    zeros = get_adv_estimator_fn("passk")(
        token_level_rewards=torch.tensor([[0.0], [-1.0]]), response_mask=torch.ones(2, 1), index=[0, 0], config=CONFIG
    )[0]
    assert zeros.tolist() == [[0.0], [0.0]]
    few = get_adv_estimator_fn("passk")(
        token_level_rewards=torch.tensor([[1.0], [0.0]]),
        response_mask=torch.ones(2, 1),
        index=[0, 0],
        config=AlgorithmConfig(passk_k=4),
    )[0]
    assert few.tolist() == [[0.0], [0.0]]


def test_gdpo_normalises_each_part_by_itself() -> None:
    parts = {"right": torch.tensor([1.0, 0.0, 1.0, 0.0]), "short": torch.tensor([100.0, 100.0, 0.0, 0.0])}
    config = AlgorithmConfig(advantage="gdpo", gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[1.0, 1.0])
    estimate = get_adv_estimator_fn("gdpo")
    rows = {"token_level_rewards": torch.zeros(4, 1), "response_mask": torch.ones(4, 1), "index": [0] * 4}
    advantages = estimate(**rows, config=config, reward_parts=parts)[0].flatten().tolist()
    assert advantages == pytest.approx([1.2247, 0.0, 0.0, -1.2247], abs=1e-3)
    with pytest.raises(ConfigError, match=r"names \['short'\], which are no parts of the rewards: \['right'\]"):
        estimate(**rows, config=config, reward_parts={"right": parts["right"]})


def test_without_the_standard_deviation_grpo_is_dr_grpo() -> None:
    inputs = make_case(5).inputs()
    plain = get_adv_estimator_fn("grpo")(**inputs | {"config": AlgorithmConfig(norm_adv_by_std_in_grpo=False)})[0]
    assert torch.equal(plain, get_adv_estimator_fn("dr_grpo")(**inputs)[0])


def test_a_row_without_trained_tokens_still_counts_for_its_siblings() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[0, 0], [1, 1]])
    advantages = get_adv_estimator_fn("rloo")(token_level_rewards=rewards, response_mask=mask, index=[0, 0])[0]
    assert advantages.tolist() == [[0.0, 0.0], [-1.0, -1.0]]


def test_a_greedy_baseline_that_is_missing_takes_its_row_out() -> None:
    advantages, _ = get_adv_estimator_fn("remax")(
        token_level_rewards=torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
        response_mask=torch.ones(2, 2),
        reward_baselines=torch.tensor([0.25, math.nan]),
    )
    assert advantages.tolist() == [[0.75, 0.75], [0.0, 0.0]]


def test_groups_without_signal_are_counted() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, math.nan, 1.0])
    assert zero_variance_groups(rewards, torch.tensor([0, 0, 1, 1, 2, 2])) == (2, 3)


# --- user code


def test_a_users_estimator_of_verls_form_is_registered_and_found() -> None:
    @register_adv_est("test_best_only", requires={"old_log_probs"}, min_group_size=2)
    def best_only(token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any, **_: Any) -> Any:
        scores = token_level_rewards.sum(dim=-1)
        advantages = (scores == scores.max()).float().unsqueeze(-1) * response_mask * config.get("scale", 2.0)
        return advantages, advantages

    assert get_adv_estimator_fn("test_best_only") is best_only
    assert register_adv_est("test_best_only", requires={"old_log_probs"}, min_group_size=2)(best_only) is best_only
    assert advantage_estimator("test_best_only").requires == {"old_log_probs"}
    with pytest.raises(PluginError, match="taken"):
        register_adv_est("test_best_only")(lambda **_: None)
    with pytest.raises(UnknownNameError, match="Did you mean 'rloo'"):
        get_adv_estimator_fn("rlooo")
