"""Groups to batches: what is trained on, what is left out, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.build import make_state
from xrl_lite.algorithms.advantages import grpo_advantages
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.errors import RunError
from xrl_lite.trainer.prepare import prepare_train_data


def prepare(*groups: list[RolloutState]) -> tuple[TrainBatch, dict[str, float]]:
    return prepare_train_data(groups, estimator=grpo_advantages)


def scored(score: float, **fields: Any) -> RolloutState:
    return make_state(reward={"score": score}, **fields)


def test_tokens_advantages_and_masks_have_the_length_of_the_response() -> None:
    batch, metrics = prepare([scored(1.0), scored(0.0, response_ids=[7], logprobs=[-0.3], response_mask=[1])])
    assert [len(r) for r in batch.responses] == [2, 1] == [len(m) for m in batch.response_masks]
    assert batch.advantages[0] == -batch.advantages[1] > 0
    assert batch.groups == [0, 0]
    assert metrics["reward"] == 0.5
    assert metrics["reward_std"] == 0.5
    assert metrics["frac_reward_zero_std"] == 0.0
    assert metrics["num_tokens"] == 3


def test_a_missing_mask_means_every_token() -> None:
    batch, _ = prepare([scored(1.0, response_mask=None), scored(0.0, response_mask=[0, 1])])
    assert batch.response_masks == [[1, 1], [0, 1]]


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED, Status.FILTERED])
def test_lost_attempts_are_left_out_and_their_siblings_kept(status: Status) -> None:
    lost = make_state(status=status, reward=None, response_ids=[])
    batch, metrics = prepare([scored(1.0), lost, scored(0.0)])
    assert len(batch) == 2
    assert batch.advantages == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert metrics["completions/failed"] == 1.0


def test_a_group_of_equal_rewards_has_no_advantage_and_is_counted() -> None:
    batch, metrics = prepare([scored(0.35), scored(0.35)], [scored(1.0), scored(0.0)])
    assert batch.advantages[:2] == [0.0, 0.0]
    assert metrics["frac_reward_zero_std"] == 0.5


def test_reward_parts_that_only_some_samples_have_are_averaged_over_those() -> None:
    _, metrics = prepare([make_state(reward={"score": 1.0, "format": 0.5}), make_state(reward={"score": 0.0})])
    assert metrics["rewards/format/mean"] == 0.5
    assert metrics["rewards/score/mean"] == 0.5


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"reward": None}, "reward: it is None"),
        ({"reward": {"acc": True}}, r"reward\['score'\]"),
        ({"reward": {"score": math.nan}}, "must be a finite number, got nan"),
        ({"reward": {"score": "1"}}, "must be a finite number, got '1'"),
        ({"response_ids": []}, "response_ids: it is empty"),
        ({"response_mask": [1]}, "response_mask: it has 1 values for 2 response tokens"),
        ({"logprobs": [-0.1]}, "logprobs: it has 1 values for 2 response tokens"),
        ({"logprobs": None}, "logprobs: it has None for 2 response tokens"),
    ],
)
def test_what_cannot_be_trained_on_names_sample_and_field(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RunError, match=rf"Sample 42 of group 0 .*{wanted}"):
        prepare([scored(0.0), make_state(rollout_id=42, **fields)])


def test_a_bool_is_a_score() -> None:
    batch, _ = prepare([make_state(reward={"score": True}), make_state(reward={"score": False})])
    assert batch.advantages[0] > 0


def test_two_temperatures_in_a_step_are_refused() -> None:
    other = scored(0.0, sample_params=SampleParams(temperature=0.5))
    with pytest.raises(RunError, match=r"one temperature, got \[0.5, 1.0\]"):
        prepare([scored(1.0), other])
