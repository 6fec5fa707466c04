"""Groups to batches: what is trained on, what is left out, what is refused; and the advantages of what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.build import make_state
from xrl_lite.agent_loop.base import mask_unfinished
from xrl_lite.algorithms import AlgorithmConfig, register_adv_est
from xrl_lite.algorithms.config import KLControllerConfig
from xrl_lite.algorithms.packing import collate, pack_groups
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.data.rollout_state import MultimodalInfo
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import RunError
from xrl_lite.trainer.advantages import AdvantageStep
from xrl_lite.trainer.prepare import prepare_train_data


async def no_engine(batch: TrainBatch, names: list[str], *, kept_policy: bool) -> dict[str, list[list[float]]]:
    raise AssertionError(f"nothing is needed, but {names} was asked for")


async def estimate(batch: TrainBatch, measure: Any = no_engine, **settings: Any) -> tuple[TrainBatch, dict[str, float]]:
    return await AdvantageStep(AlgorithmConfig(**settings))(batch, measure)


def scored(score: float, **fields: Any) -> RolloutState:
    return make_state(reward={"score": score}, **fields)


async def test_tokens_advantages_and_masks_have_the_length_of_the_response() -> None:
    batch, metrics = prepare_train_data(
        [[scored(1.0), scored(0.0, response_ids=[7], logprobs=[-0.3], response_mask=[1])]]
    )
    batch, _ = await estimate(batch)
    assert [len(r) for r in batch.responses] == [2, 1] == [len(m) for m in batch.response_masks]
    assert [len(a) for a in batch.advantages] == [2, 1]
    assert batch.advantages[0][0] == -batch.advantages[1][0] > 0
    assert batch.groups == [0, 0]
    assert metrics["reward"] == 0.5
    assert metrics["reward_std"] == 0.5
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["num_tokens"] == 3


def test_each_response_token_has_the_version_that_sampled_it_as_far_as_the_agent_tells() -> None:
    agent: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "logprobs": [-0.1] * 3}
    batch, _ = prepare_train_data(
        [
            [
                scored(1.0, response_model_steps=[3, 4]),
                scored(0.0, response_model_steps=None),
                scored(0.0, response_model_steps=[5], **agent),
                scored(0.0, response_model_steps=[5, 6, 6], **agent),
            ]
        ]
    )
    assert batch.policy_versions == [[3, 4], [-1, -1], [5, 5], [-1, -1]]


def test_lengths_are_counted_with_and_without_what_was_cut_off() -> None:
    cut = scored(0.0, response_ids=[7] * 6, logprobs=[-0.3] * 6, response_mask=[1] * 6, finish_reason="length")
    _, metrics = prepare_train_data([[scored(1.0), cut]])
    lengths = {name: metrics[f"completions/{name}_length"] for name in ("min", "mean", "max", "mean_terminated")}
    assert lengths == {"min": 2.0, "mean": 4.0, "max": 6.0, "mean_terminated": 2.0}
    assert metrics["completions/clipped_ratio"] == 0.5


async def test_a_missing_mask_means_every_token_and_masked_ones_have_no_advantage() -> None:
    batch, _ = prepare_train_data([[scored(1.0, response_mask=None), scored(0.0, response_mask=[0, 1])]])
    assert batch.response_masks == [[1, 1], [0, 1]]
    batch, _ = await estimate(batch, advantage="dr_grpo")
    assert batch.advantages == [[0.5, 0.5], [0.0, -0.5]]


async def test_an_attempt_that_is_not_trained_on_still_counts_in_its_group() -> None:
    group = [scored(1.0), scored(0.0, finish_reason="length")]
    mask_unfinished([[state] for state in group])
    batch, metrics = prepare_train_data([group])
    batch, _ = await estimate(batch, advantage="dr_grpo")
    assert (batch.response_masks, metrics["reward"]) == ([[1, 1], [0, 0]], 0.5)
    assert batch.advantages == [[0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED, Status.FILTERED])
async def test_lost_attempts_are_left_out_and_their_siblings_kept(status: Status) -> None:
    lost = make_state(status=status, reward=None, response_ids=[])
    batch, metrics = prepare_train_data([[scored(1.0), lost, scored(0.0)]])
    batch, _ = await estimate(batch)
    assert [row[0] for row in batch.advantages] == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert metrics["completions/failed"] == 1.0


async def test_a_group_of_equal_rewards_has_no_advantage_and_is_counted() -> None:
    batch, metrics = prepare_train_data([[scored(0.35), scored(0.35)], [scored(1.0), scored(0.0)]])
    batch, _ = await estimate(batch)
    assert batch.advantages[:2] == [[0.0, 0.0], [0.0, 0.0]]
    assert (metrics["frac_reward_zero_std"], metrics["num_groups_zero_std"]) == (0.5, 1.0)


def test_reward_parts_that_only_some_samples_have_are_averaged_over_those() -> None:
    groups = [[make_state(reward={"score": 1.0, "format": 0.5}), make_state(reward={"score": 0.0})]]
    batch, metrics = prepare_train_data(groups)
    assert metrics["rewards/format/mean"] == 0.5
    assert (metrics["rewards/score/mean"], metrics["rewards/score/std"]) == (0.5, 0.5)
    assert batch.reward_parts is not None
    assert math.isnan(batch.reward_parts["format"][1])


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"reward": None}, "reward: it is None"),
        ({"reward": {"acc": True}}, r"reward\['score'\]"),
        ({"reward": {"score": math.nan}}, "must be a finite number, got nan"),
        ({"reward": {"score": "1"}}, "must be a finite number, got '1'"),
        ({"prompt_ids": None}, "prompt_ids: it is empty"),
        ({"response_ids": []}, "response_ids: it is empty"),
        ({"response": None}, "response: it is None"),
        ({"response_mask": [1]}, "response_mask: it has 1 values for 2 response tokens"),
        ({"response_mask": [1, 2]}, r"response_mask: it must hold 0 and 1 only, got \[1, 2\]"),
        ({"logprobs": [-0.1]}, "logprobs: it has 1 values for 2 response tokens"),
        ({"logprobs": [-0.1, math.nan]}, "logprobs: not all are finite"),
        ({"prompt_ids": [1] * 9}, "have 11 tokens, more than engine.max_tokens_per_micro_batch=10"),
        ({"mm_info": MultimodalInfo(pixel_values=[1.0])}, "mm_info: it has images"),
        ({"input_ids": [1, 2], "labels": [-100]}, "labels: it has 1 values for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "labels: all are -100"),
        ({"input_ids": [1, 2], "labels": [-100, 9]}, "labels: at 1 it has 9, input_ids has 2"),
    ],
)
def test_what_cannot_be_trained_on_names_sample_and_field(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RunError, match=rf"Sample 42 of group 0 .*{wanted}"):
        prepare_train_data([[scored(0.0), make_state(rollout_id=42, **fields)]], max_tokens=10)


def test_a_part_that_the_estimator_needs_is_missed_early() -> None:
    with pytest.raises(RunError, match=r"Sample 42 .*reward\['format'\]: it must be a finite number, got None"):
        prepare_train_data([[make_state(rollout_id=42)]], reward_keys=["format"])


def test_logprobs_that_an_agent_does_not_tell_are_nan_where_a_token_is_trained_on() -> None:
    rows: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}
    batch, _ = prepare_train_data(
        [[scored(1.0, logprobs=None, response_mask=[1, 0]), scored(0.0, logprobs=None, **rows), scored(0.0)]]
    )
    assert [[math.isnan(value) for value in row] for row in batch.rollout_logprobs] == [
        [True, False],
        [True, False],
        [False, False],
    ]


def test_logprobs_that_the_algorithm_needs_are_missed_with_a_way_out() -> None:
    lacking = make_state(rollout_id=42, logprobs=None)
    with pytest.raises(RunError, match=r"Sample 42 .*logprobs: there are none. .*leave rollout_correction out"):
        prepare_train_data([[scored(1.0), lacking]], needs_logprobs=True)


def test_nan_of_a_token_that_was_not_sampled_does_not_matter() -> None:
    batch, _ = prepare_train_data([[scored(1.0, response_mask=[1, 0], logprobs=[-0.1, math.nan])]])
    assert batch.rollout_logprobs == [[-0.1, 0.0]]


def test_a_bool_is_a_score() -> None:
    batch, _ = prepare_train_data([[make_state(reward={"score": True}), make_state(reward={"score": False})]])
    assert batch.rewards == [1.0, 0.0]


def test_two_temperatures_in_a_step_are_refused() -> None:
    other = scored(0.0, sample_params=SampleParams(temperature=0.5))
    with pytest.raises(RunError, match=r"one temperature, got \[0.5, 1.0\]"):
        prepare_train_data([[scored(1.0), other]])


def test_a_batch_of_failures_is_empty() -> None:
    batch, metrics = prepare_train_data([[make_state(status=Status.FAILED, reward=None)]])
    assert len(batch) == 0
    assert metrics["completions/failed"] == 1.0
    assert "reward" not in metrics


# --- sessions


def test_rows_that_an_agent_built_are_split_at_the_first_label() -> None:
    state = scored(
        1.0,
        response_ids=None,
        input_ids=[1, 2, 3, 4, 5],
        labels=[-100, -100, 3, -100, 5],
        logprobs=[math.nan, 0, -0.3, 0, -0.5],
    )
    batch, _ = prepare_train_data([[state]])
    assert (batch.prompts, batch.responses, batch.response_masks) == ([[1, 2]], [[3, 4, 5]], [[1, 0, 1]])
    assert batch.rollout_logprobs == [[-0.3, 0.0, -0.5]]


async def test_a_session_of_two_trajectories_is_one_attempt() -> None:
    first = make_state(session_id="a", reward=None, response_ids=[1], logprobs=[-1.0], response_mask=[1])
    groups = [[first, scored(1.0, session_id="a"), scored(0.0, session_id="b"), scored(0.0)]]
    batch, metrics = prepare_train_data(groups)
    assert (batch.sessions[0], len(set(batch.sessions))) == (batch.sessions[1], 3)
    assert metrics["reward"] == pytest.approx(1 / 3)
    batch, _ = await estimate(batch, advantage="dr_grpo")
    third = pytest.approx(-1 / 3)
    assert batch.advantages[0] == [pytest.approx(2 / 3)]
    assert batch.advantages[1] == [pytest.approx(2 / 3)] * 2
    assert batch.advantages[2:] == [[third, third]] * 2


async def test_discounts_run_through_the_trajectories_of_a_session() -> None:
    @register_adv_est("test_to_go")
    def to_go(token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
        return torch.tensor([[1.0, 2.0, 3.0]]) * response_mask, None

    first = make_state(session_id="a", reward=None, response_ids=[1], logprobs=[-1.0], response_mask=[1])
    batch, _ = prepare_train_data([[first, scored(1.0, session_id="a")]])
    batch, _ = await estimate(batch, advantage="test_to_go")
    assert batch.advantages == [[1.0], [2.0, 3.0]]


def test_turns_trajectories_and_calls_of_tools_are_counted_per_attempt() -> None:
    def after(turns: int, calls: int, **failures: int) -> dict[str, Any]:
        counts = {"calls": calls, "truncated": 0, "failures": failures}
        return {"num_turns": turns, "stopped_by": "no_tool_call", "tool_counts": counts}

    one = [scored(1.0, session_id="a", extra_fields=after(4, 1, malformed=1)) for _ in range(2)]
    other, failed = scored(0.0, extra_fields=after(2, 3)), make_state(status=Status.FAILED, reward=None)
    _, metrics = prepare_train_data([[*one, other, failed]])
    assert (metrics["num_turns/mean"], metrics["num_turns/max"], metrics["num_turns/min"]) == (3.0, 4.0, 2.0)
    assert metrics["trajectories_per_attempt"] == 1.5
    assert (metrics["tools/num_calls"], metrics["tools/failure_frequency"]) == (4.0, 0.25)
    assert (metrics["tools/failures/malformed"], metrics["stopped_by/no_tool_call"]) == (1.0, 1.0)
    assert not any(name.startswith(("num_turns", "tools/")) for name in prepare_train_data([[scored(1.0)]])[1])


# --- the advantages


async def test_the_reward_stands_on_the_last_trained_token() -> None:
    batch, _ = prepare_train_data([[scored(2.0, response_mask=[1, 0]), scored(1.0, response_mask=[1, 1])]])
    seen: list[Any] = []

    @register_adv_est("test_seen")
    def look(token_level_rewards: Any, response_mask: Any, index: Any, **_: Any) -> Any:
        seen.append((token_level_rewards.tolist(), response_mask.tolist(), list(index)))
        return token_level_rewards, token_level_rewards

    await estimate(batch, advantage="test_seen")
    assert seen == [([[2.0, 0.0], [0.0, 1.0]], [[1, 0], [1, 1]], [0, 0])]


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        (torch.zeros(2), r"returned advantages of shape \(2,\), expected \(2, 2\)"),
        (torch.full((2, 2), math.inf), "not finite"),
    ],
)
async def test_advantages_of_the_wrong_form_are_refused(returned: Any, wanted: str) -> None:
    register_adv_est(f"test_wrong_{wanted}")(lambda **_: (returned, returned))
    batch, _ = prepare_train_data([[scored(1.0), scored(0.0)]])
    with pytest.raises(RunError, match=wanted):
        await estimate(batch, advantage=f"test_wrong_{wanted}")


def measured(**values: list[list[float]]) -> Any:
    async def measure(batch: TrainBatch, names: list[str], *, kept_policy: bool) -> dict[str, list[list[float]]]:
        assert set(names) == set(values)
        return values

    return measure


async def test_a_users_estimator_computes_with_the_mask() -> None:
    batch, _ = prepare_train_data([[scored(2.0, response_mask=[1, 0]), scored(1.0, response_mask=[1, 1])]])

    @register_adv_est("test_inverse")
    def inverse(token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
        return token_level_rewards - (1 - response_mask) / response_mask.sum(1, keepdim=True), None

    batch, _ = await estimate(batch, advantage="test_inverse")
    assert batch.advantages == [[2.0, 0.0], [0.0, 1.0]]


async def test_kl_in_the_reward_is_subtracted_token_by_token_and_adapts() -> None:
    settings: dict[str, Any] = {
        "advantage": "reinforce_plus_plus",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.1, "horizon": 20},
    }
    step = AdvantageStep(AlgorithmConfig(**settings))
    batch, _ = prepare_train_data([[scored(1.0, response_mask=[1, 1]), scored(0.0, response_mask=[1, 0])]])
    old, ref = [[-1.0, -2.0], [-1.0, 9.0]], [[-1.2, -2.0], [-1.0, math.nan]]
    batch, metrics = await step(batch, measured(old_logprobs=old, ref_logprobs=ref))
    # returns 1 - 0.5 * 0.2, 1 and 0
    mean, std = 1.9 / 3, torch.tensor([0.9, 1.0, 0.0]).double().std().item()
    assert batch.advantages[0] == pytest.approx([(0.9 - mean) / std, (1 - mean) / std], abs=1e-5)
    assert batch.advantages[1] == pytest.approx([-mean / std, 0.0], abs=1e-5)
    assert metrics["reward_kl_penalty"] == pytest.approx(0.05)  # 0.1 of the one row, 0 of the other
    assert metrics["reward_kl_penalty_coeff"] == 0.5
    assert step.state_dict()["kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 2 / 20))
    other = AdvantageStep(AlgorithmConfig(**settings))
    other.load_state_dict(step.state_dict())
    assert other.state_dict() == step.state_dict()


async def test_a_resumed_run_has_the_fixed_weight_of_the_kl_that_its_settings_say() -> None:
    batch, _ = prepare_train_data([[scored(1.0), scored(0.0)]])
    ones = [[1.0, 1.0]] * 2

    def step(controller: KLControllerConfig) -> AdvantageStep:
        return AdvantageStep(AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=controller))

    for before in (KLControllerConfig(kl_coef=0.5), KLControllerConfig(kl_coef=0.5, type="adaptive")):
        earlier, now = step(before), step(KLControllerConfig(kl_coef=0.1))
        now.load_state_dict(earlier.state_dict())
        _, metrics = await now(batch, measured(old_logprobs=ones, ref_logprobs=ones))
        assert metrics["reward_kl_penalty_coeff"] == 0.1


async def test_returns_for_a_critic_are_kept_where_there_are_values() -> None:
    batch, _ = prepare_train_data([[scored(1.0), scored(0.0)]])
    batch, _ = await estimate(replace(batch, values=[[0.5, 0.25], [0.5, 0.25]]), advantage="gae")
    assert batch.returns == [[1.0, 1.0], [0.0, 0.0]]
    mean, std = 0.125, torch.tensor([0.5, 0.75, -0.5, -0.25]).double().std().item()
    assert batch.advantages[0] == pytest.approx([(0.5 - mean) / std, (0.75 - mean) / std], abs=1e-6)


async def test_rejected_tokens_are_not_trained_on_and_the_reward_moves() -> None:
    batch, _ = prepare_train_data([[scored(1.0), scored(0.0)]])
    old = [[-0.1, -3.0], [-0.1, -0.2]]  # the second token of the first attempt is far from what sampled it
    batch, metrics = await estimate(
        batch,
        measured(old_logprobs=old),
        advantage="dr_grpo",
        rollout_correction={"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
    )
    assert batch.response_masks == [[1, 0], [1, 1]]
    assert batch.advantages == [[0.5, 0.0], [-0.5, -0.5]]
    assert batch.rollout_is_weights is not None
    assert batch.rollout_is_weights[0] == pytest.approx([1.0, math.exp(-2.8)], abs=1e-6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25


async def test_distillation_by_gradient_adds_the_teachers_preference() -> None:
    batch, _ = prepare_train_data([[scored(1.0), scored(0.0)]])
    batch, _ = await estimate(
        batch,
        measured(old_logprobs=[[-1.0, -1.0]] * 2, teacher_logprobs=[[-0.5, -2.0]] * 2),
        advantage="dr_grpo",
        distillation={"teacher": "t", "use_policy_gradient": True, "coef": 2.0},
    )
    assert batch.advantages == [[1.5, -1.5], [0.5, -2.5]]


# --- the nine cases of XTuner's test_prepare_train_data, with its advantages made as long as its labels


def fake_estimator(name: str, values: Sequence[float], seen: list[Any] | None = None) -> str:
    def fake(token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
        if seen is not None:
            seen.append(token_level_rewards.sum(dim=1).tolist())
        return torch.tensor(values).unsqueeze(1) * response_mask, None

    register_adv_est(name)(fake)
    return name


def xtuner_layout(batch: TrainBatch, row: int) -> dict[str, list[Any]]:
    """What the model of a row sees and is trained on: inputs without the last token, labels and advantages at them."""
    groups = pack_groups(
        [batch.prompts[row]],
        [batch.responses[row]],
        masks=[batch.response_masks[row]],
        max_tokens_per_row=99,
    )
    packed = collate([groups])
    ids = packed.input_ids[0].tolist()[:-1]
    labels, advantages = [-100] * len(ids), [0.0] * len(ids)
    trained = [a for a, bit in zip(batch.advantages[row], batch.response_masks[row], strict=True) if bit]
    for place, target, advantage in zip(packed.predicted_at.tolist(), packed.targets.tolist(), trained, strict=True):
        labels[place], advantages[place] = target, advantage
    return {"input_ids": ids, "labels": labels, "advantages": advantages}


def peer_state(**fields: Any) -> RolloutState:
    defaults = {"prompt_ids": [10, 11, 12], "response_ids": [20, 21, 22], "logprobs": [0.1, 0.2, 0.3]}
    return make_state(**{**defaults, "response_mask": None, **fields})


async def test_peer_1_text_layout() -> None:
    batch, metrics = prepare_train_data([[peer_state(response_mask=[1, 0, 1])]])
    batch, _ = await estimate(batch, advantage=fake_estimator("test_peer_1", [1.5]))
    assert xtuner_layout(batch, 0) == {
        "input_ids": [10, 11, 12, 20, 21],
        "labels": [-100, -100, 20, -100, 22],
        "advantages": [0.0, 0.0, 1.5, 0.0, 1.5],
    }
    assert batch.rollout_logprobs == [[0.1, 0.0, 0.3]]
    assert metrics["reward"] == 1.0
    assert (metrics["completions/mean_length"], metrics["prompts/mean_length"]) == (3.0, 3.0)


async def test_peer_2_a_rerolled_state_without_mask() -> None:
    batch, _ = prepare_train_data([[peer_state(response_ids=[30, 31], logprobs=[0.1, 0.2])]])
    batch, _ = await estimate(batch, advantage=fake_estimator("test_peer_2", [1.0]))
    layout = xtuner_layout(batch, 0)
    assert layout["labels"] == [-100, -100, 30, 31]
    assert layout["advantages"] == [0.0, 0.0, 1.0, 1.0]


async def test_peer_3_two_samples() -> None:
    seen: list[Any] = []
    groups = [[peer_state(reward={"score": 3.0}), peer_state(reward={"score": -1.0})]]
    batch, metrics = prepare_train_data(groups)
    batch, more = await estimate(batch, advantage=fake_estimator("test_peer_3", [1.5, -2.0], seen))
    assert batch.advantages == [[1.5] * 3, [-2.0] * 3]
    assert (metrics["reward_min"], metrics["reward_max"], metrics["reward"]) == (-1.0, 3.0, 1.0)
    assert (more["advantages/min"], more["advantages/max"]) == (-2.0, 1.5)
    assert seen == [[3.0, -1.0]]


def test_peer_4_the_prompt_that_the_model_saw() -> None:
    state = peer_state(extra_fields={"train_prompt_ids": [100, 101]}, response_ids=[102, 103], logprobs=[0.1, 0.2])
    batch, _ = prepare_train_data([[state]])
    assert xtuner_layout(batch, 0)["input_ids"] == [100, 101, 102]


def test_peer_5_an_invalid_group_is_left_out() -> None:
    batch, metrics = prepare_train_data([[peer_state(status=Status.FAILED)], [peer_state()]])
    assert (len(batch), batch.groups) == (1, [1])
    assert metrics["completions/failed"] == 1.0


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        pytest.param({"reward": {"acc": 1}}, "score", id="6"),
        pytest.param({"logprobs": [0.1]}, "logprobs", id="7"),
        pytest.param({"response_mask": [1]}, "response_mask", id="8"),
        pytest.param({"prompt_ids": [1] * 20}, "23 tokens", id="9"),
    ],
)
def test_peer_6_to_9_refusals(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RunError, match=wanted):
        prepare_train_data([[peer_state(**fields)]], max_tokens=16)
