"""A critic on a real (random) model: it begins at 0, learns returns, and does not depend on how rows are packed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.numerics.test_model import make_batch
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import CriticConfig, CriticOptimizerConfig, LoraConfig
from xrl_lite.engine.critic import CriticWorker
from xrl_lite.errors import ConfigError


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_critic(folder: Path, **settings: Any) -> CriticWorker:
    config = CriticConfig(**({"optimizer": CriticOptimizerConfig(learning_rate=1e-2)} | settings))
    return CriticWorker(config=config, model_path=str(folder), num_updates=20, seed=0)


def with_returns(critic: CriticWorker, batch: TrainBatch, rewards: list[float] | None = None) -> TrainBatch:
    """Each trajectory is worth how often its first token is even."""
    worth = [float(response[0] % 2 == 0) for response in batch.responses]
    returns = [[value] * len(response) for value, response in zip(worth, batch.responses, strict=True)]
    return replace(batch, values=critic.values(batch), returns=returns, rewards=rewards or worth)


def classifier(origin: Path, folder: Path, num_labels: int) -> Path:
    model = AutoModelForSequenceClassification.from_pretrained(origin, num_labels=num_labels)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(origin).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_it_begins_at_zero_and_learns_what_a_response_is_worth(lora: Any, tiny_model_folder: Path) -> None:
    critic, batch = make_critic(tiny_model_folder, lora=lora), make_batch()
    assert {value for row in critic.values(batch) for value in row} == {0.0}
    losses = [critic.train_batch(with_returns(critic, batch))["critic/vf_loss"] for _ in range(15)]
    assert losses[-1] < 0.3 * losses[0]
    worth = with_returns(critic, batch)
    assert worth.values is not None
    assert worth.returns is not None
    ends = [(value[-1], wanted[-1]) for value, wanted in zip(worth.values, worth.returns, strict=True)]
    assert sum((value > 0.5) == (wanted > 0.5) for value, wanted in ends) >= 0.8 * len(ends)


def test_a_value_stays_near_its_old_one_within_a_step(tiny_model_folder: Path) -> None:
    critic = make_critic(tiny_model_folder, num_epochs=8, cliprange_value=0.01)
    batch = with_returns(critic, make_batch())
    assert critic.train_batch(batch)["critic/vf_clipfrac"] > 0.1
    free = make_critic(tiny_model_folder, num_epochs=8, cliprange_value=100.0)
    assert free.train_batch(batch)["critic/vf_clipfrac"] == 0.0


@pytest.mark.parametrize("mode", ["token-mean", "session-mean-token-mean", "seq-mean-token-sum-norm"])
def test_updates_of_a_critic_do_not_depend_on_packing(mode: Any, tiny_model_folder: Path) -> None:
    found: list[Any] = []
    for limits in ((4096, 16384), (8, 16)):
        critic = make_critic(
            tiny_model_folder,
            loss_agg_mode=mode,
            loss_scale_factor=6.0,
            max_tokens_per_row=limits[0],
            max_tokens_per_micro_batch=limits[1],
        )
        metrics = [critic.train_batch(with_returns(critic, make_batch(seed))) for seed in (0, 1)]
        found.append((metrics, critic.values(make_batch(2))))
    for one, other in zip(*(each[0] for each in found), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    for one, other in zip(*(each[1] for each in found), strict=True):
        assert other == pytest.approx(one, abs=2e-4)


def test_what_has_no_reward_or_no_trained_token_is_left_out(tiny_model_folder: Path) -> None:
    critic = make_critic(tiny_model_folder)
    batch = with_returns(critic, make_batch())
    gaps = [math.nan if i % 2 else 1.0 for i in range(len(batch))]
    half = batch.select(list(range(0, len(batch), 2)))
    with_gaps = make_critic(tiny_model_folder).train_batch(replace(batch, rewards=gaps))
    assert with_gaps == make_critic(tiny_model_folder).train_batch(half)
    nothing = critic.train_batch(replace(batch, rewards=[math.nan] * len(batch)))
    assert set(nothing) == {"critic/lr"}


def test_a_restored_critic_goes_on_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    one, other = make_critic(tiny_model_folder), make_critic(tiny_model_folder)
    one.train_batch(with_returns(one, make_batch(1)))
    one.save_checkpoint(tmp_path / "critic", hf_folder=tmp_path / "hf")
    other.load_checkpoint(tmp_path / "critic")
    assert one.values(make_batch()) == other.values(make_batch())
    exported = make_critic(tmp_path / "hf")
    assert exported.values(make_batch()) == one.values(make_batch())
    batch = with_returns(one, make_batch(2))
    assert one.train_batch(batch) == other.train_batch(batch)


def test_a_reward_model_gives_the_first_values(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = classifier(tiny_model_folder, tmp_path / "reward", 1)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = make_batch()
    values = make_critic(folder).values(batch)
    ids = torch.tensor([batch.prompts[0] + batch.responses[0]])
    with torch.no_grad():
        scores = model.score(model.model(ids).last_hidden_state)[0, len(batch.prompts[0]) - 1 : -1, 0]
    assert values[0] == pytest.approx(scores.tolist(), abs=1e-5)


def test_a_classifier_of_several_labels_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several labels"):
        make_critic(classifier(tiny_model_folder, tmp_path / "three", 3))
