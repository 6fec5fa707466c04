"""Trainer and rollout engine on a real (random) model: packing changes nothing, and both sides agree."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.algorithms.digest import weights_digest
from xrl_lite.algorithms.packing import PackedBatch, collate, pack_groups
from xrl_lite.algorithms.planning import plan_micro_batches
from xrl_lite.data import SampleParams
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig, OptimizerConfig
from xrl_lite.engine.language_model import LanguageModelEngine, token_logprobs
from xrl_lite.engine.worker import EngineWorker
from xrl_lite.errors import RolloutError, WeightSyncError
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult
from xrl_lite.rollout.torch_engine import TorchReplica

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_engine(folder: Path) -> LanguageModelEngine:
    engine = LanguageModelEngine(model_path=str(folder), config=EngineConfig(), num_updates=1, seed=0)
    engine.initialize()
    return engine


def make_batch(seed: int = 0, attempts: int = 4) -> TrainBatch:
    rng = random.Random(seed)
    responses = [[rng.randrange(5, 60) for _ in range(rng.randint(1, 6))] for _ in range(len(PROMPTS) * attempts)]
    return TrainBatch(
        prompts=[PROMPTS[i // attempts] for i in range(len(responses))],
        responses=responses,
        response_masks=[[1] * len(response) for response in responses],
        rollout_logprobs=[[-1.0] * len(response) for response in responses],
        advantages=[[rng.uniform(-1, 1)] * len(response) for response in responses],
        groups=[i // attempts for i in range(len(responses))],
        sessions=list(range(len(responses))),
    )


def pack(batch: TrainBatch, *, row: int = 64, limit: int = 1000) -> list[PackedBatch]:
    groups = pack_groups(batch.prompts, batch.responses, masks=batch.response_masks, max_tokens_per_row=row)
    return [collate(rows) for rows in plan_micro_batches(groups, max_tokens=limit)[0]]


def without_signal(batch: TrainBatch, groups: tuple[int, ...] = (0, 1, 2)) -> TrainBatch:
    kept = [
        [0.0] * len(row) if group in groups else row for row, group in zip(batch.advantages, batch.groups, strict=True)
    ]
    return replace(batch, advantages=kept)


def plain_logprobs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, torch.tensor(response)).tolist()


def test_packed_attempts_have_the_logprobs_of_rows_of_their_own(tiny_model_folder: Path) -> None:
    engine, batch = make_engine(tiny_model_folder), make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    assert len(pack_groups(batch.prompts, batch.responses, max_tokens_per_row=64)) == len(PROMPTS)
    packed = pack(batch)
    for part, outputs in zip(packed, engine.infer_batch(packed), strict=True):
        wanted = [x for i in part.trajectories for x in plain_logprobs(model, batch.prompts[i], batch.responses[i])]
        assert outputs.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


@given(st.integers(0, 1000), st.integers(4, 40), st.integers(8, 200))
def test_packing_keeps_every_response_token_once_in_order(seed: int, row_limit: int, batch_limit: int) -> None:
    batch = make_batch(seed)
    packed = pack(batch, row=row_limit, limit=batch_limit)
    seen = [index for part in packed for index in part.trajectories]
    assert sorted(seen) == list(range(len(batch)))
    for part in packed:
        assert part.targets.tolist() == [token for i in part.trajectories for token in batch.responses[i]]
        flat = part.input_ids.flatten()
        assert part.predicted_at.max() < len(flat)


def test_attempts_in_a_row_do_not_see_each_other() -> None:
    groups = pack_groups([[1, 2], [1, 2]], [[3, 4], [5]], max_tokens_per_row=9)
    mask = collate([groups]).attention_mask[0, 0]
    # positions: p0 p1 a0 a1 b0
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("limits", [(8, 8), (16, 32), (64, 64)])
def test_updates_do_not_depend_on_packing_or_micro_batches(limits: tuple[int, int], tiny_model_folder: Path) -> None:
    def weights_after_an_update(row: int, batch: int) -> dict[str, torch.Tensor]:
        config = EngineConfig(
            max_tokens_per_row=row,
            max_tokens_per_micro_batch=batch,
            optimizer=OptimizerConfig(learning_rate=1e-3, max_grad_norm=1e6),
        )
        worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=10, seed=0)
        metrics = worker.train_batch(make_batch())
        return {**worker.export_weights(), "grad_norm": torch.tensor(metrics["grad_norm"])}

    whole, split = weights_after_an_update(4096, 16384), weights_after_an_update(*limits)
    assert split["grad_norm"].item() == pytest.approx(whole["grad_norm"].item(), rel=1e-4)
    for name, tensor in whole.items():
        # Adam's first update is the sign of the gradient: only where that is about 0 may rounding show
        assert (split[name] - tensor).abs().median() < 1e-6, name


def test_trajectories_without_signal_cost_nothing_and_change_nothing(tiny_model_folder: Path) -> None:
    worker = EngineWorker(config=EngineConfig(), model_path=str(tiny_model_folder), num_updates=1, seed=0)
    before = weights_digest(worker.export_weights())
    batch = make_batch()
    flat = without_signal(batch)
    assert worker.train_batch(flat)["num_updates"] == 0.0
    assert weights_digest(worker.export_weights()) == before


def test_a_group_without_signal_counts_in_the_mean_over_tokens(tiny_model_folder: Path) -> None:
    def grad_norm(batch: TrainBatch) -> float:
        worker = EngineWorker(config=EngineConfig(), model_path=str(tiny_model_folder), num_updates=1, seed=0)
        return worker.train_batch(batch)["grad_norm"]

    batch = make_batch()
    live = batch.select([i for i, group in enumerate(batch.groups) if group == 0])
    share = sum(map(len, live.responses)) / sum(map(len, batch.responses))
    mixed = without_signal(batch, (1, 2))
    assert grad_norm(mixed) == pytest.approx(grad_norm(live) * share, rel=1e-4)


def test_the_schedule_goes_on_in_steps_without_signal(tiny_model_folder: Path) -> None:
    config = EngineConfig(optimizer=OptimizerConfig(learning_rate=1.0, schedule="linear"), num_mini_batches=2)
    worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=8, seed=0)
    batch = make_batch()
    flat = without_signal(batch)
    rates = [worker.train_batch(flat)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.9375, 0.6875, 0.4375, 0.1875])


def test_several_updates_per_step_use_the_logprobs_from_before(tiny_model_folder: Path) -> None:
    config = EngineConfig(num_mini_batches=3, num_epochs=2, optimizer=OptimizerConfig(learning_rate=1e-2))
    worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=6, seed=0)
    metrics = worker.train_batch(make_batch())
    assert metrics["num_updates"] == 6.0
    assert metrics["kl"] > 0


def test_kl_to_the_initial_policy_is_zero_at_the_start(tiny_model_folder: Path) -> None:
    config = EngineConfig(optimizer=OptimizerConfig(learning_rate=1e-2))
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    worker = EngineWorker(config=config, algorithm=algorithm, model_path=str(tiny_model_folder), num_updates=2, seed=0)
    assert worker.train_batch(make_batch())["kl_to_initial"] == pytest.approx(0.0, abs=1e-9)
    assert worker.train_batch(make_batch())["kl_to_initial"] > 0


def test_a_restored_engine_goes_on_bit_for_bit(tiny_model_folder: Path, tmp_path: Path) -> None:
    def worker() -> EngineWorker:
        config = EngineConfig(optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear"))
        return EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=8, seed=0)

    one, other = worker(), worker()
    one.train_batch(make_batch(1))
    one.save_checkpoint(tmp_path / "engine", hf_folder=tmp_path / "huggingface")
    other.load_checkpoint(tmp_path / "engine")
    assert one.train_batch(make_batch(2)) == other.train_batch(make_batch(2))
    assert weights_digest(one.export_weights()) == weights_digest(other.export_weights())
    assert (tmp_path / "huggingface" / "model.safetensors").is_file()


# --- the rollout engine


def make_requests(count: int, **params: Any) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=PROMPTS[i % len(PROMPTS)],
            sample_params=SampleParams(**{"max_tokens": 12, **params}),
            seed=1000 + i,
        )
        for i in range(count)
    ]


async def generate(replica: TorchReplica, requests: list[GenerateRequest]) -> list[GenerateResult]:
    outcomes: dict[str, GenerateResult | RolloutError] = {}
    await replica.submit("batch", requests)
    while len(outcomes) < len(requests):
        outcomes |= await replica.collect("batch")
    return [raised(outcomes[request.request_id]) for request in requests]


def raised(outcome: GenerateResult | RolloutError) -> GenerateResult:
    if isinstance(outcome, RolloutError):
        raise outcome
    return outcome


@pytest.fixture
def replica(tiny_model_folder: Path) -> TorchReplica:
    return TorchReplica(config=RolloutConfig(), model_path=str(tiny_model_folder), replica=0)


async def test_rollout_and_trainer_agree_on_the_same_tokens(replica: TorchReplica, tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    requests = make_requests(24)
    for request, result in zip(requests, await generate(replica, requests), strict=True):
        assert result.logprobs == pytest.approx(plain_logprobs(model, request.prompt_ids, result.token_ids), abs=1e-4)


async def test_what_else_is_in_the_batch_does_not_change_a_sample(replica: TorchReplica) -> None:
    requests = make_requests(24)
    together = await generate(replica, requests)
    for request, result in zip(requests[:6], together, strict=False):
        (alone,) = await generate(replica, [request])
        assert alone.token_ids == result.token_ids
        assert alone.logprobs == pytest.approx(result.logprobs, abs=1e-5)


async def test_another_seed_gives_another_sample(replica: TorchReplica) -> None:
    (request,) = make_requests(1)
    other = GenerateRequest(**{**vars(request), "seed": 77, "request_id": "other"})
    one, two = await generate(replica, [request, other])
    assert one.token_ids != two.token_ids


async def test_greedy_takes_the_likeliest_token(replica: TorchReplica, tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    (request,) = make_requests(1, temperature=0.0, max_tokens=5)
    (result,) = await generate(replica, [request])
    with torch.no_grad():
        wanted = model.generate(torch.tensor([request.prompt_ids]), do_sample=False, max_new_tokens=5)
    assert result.token_ids == wanted[0, len(request.prompt_ids) :].tolist()


async def test_lengths_and_stop_tokens_end_a_response(replica: TorchReplica) -> None:
    (result,) = await generate(replica, make_requests(1, max_tokens=3, temperature=0.0))
    assert (len(result.token_ids), result.finish_reason) == (3, "length")
    first = result.token_ids[0]
    (stopped,) = await generate(replica, make_requests(1, temperature=0.0, stop_token_ids=[first]))
    assert (stopped.token_ids, stopped.finish_reason) == ([first], "stop")


async def test_top_k_of_one_is_greedy(replica: TorchReplica) -> None:
    greedy = await generate(replica, make_requests(3, temperature=0.0))
    top_1 = await generate(replica, make_requests(3, top_k=1))
    top_p = await generate(replica, make_requests(3, top_p=1e-6))
    assert [r.token_ids for r in greedy] == [r.token_ids for r in top_1] == [r.token_ids for r in top_p]


async def test_temperature_is_in_the_logprobs(replica: TorchReplica, tiny_model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    (request,) = make_requests(1, temperature=0.5, max_tokens=1)
    (result,) = await generate(replica, [request])
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids])).logits[0, -1:]
    wanted = token_logprobs(logits / 0.5, torch.tensor(result.token_ids)).tolist()
    assert result.logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [({"repetition_penalty": 1.2}, "no repetition"), ({"presence_penalty": 0.1}, "no repetition, presence")],
)
async def test_what_the_engine_cannot_do_is_refused(
    replica: TorchReplica, change: dict[str, float], wanted: str
) -> None:
    with pytest.raises(RolloutError, match=wanted):
        await generate(replica, make_requests(1, **change))


async def test_a_prompt_that_is_too_long_is_refused(replica: TorchReplica) -> None:
    request = GenerateRequest(request_id="long", prompt_ids=[5] * 500, sample_params=SampleParams(), seed=0)
    with pytest.raises(RolloutError, match="got 500"):
        await generate(replica, [request])


async def test_new_weights_are_used_and_versions_are_known(replica: TorchReplica, tiny_model_folder: Path) -> None:
    before = await generate(replica, make_requests(3, temperature=0.0))
    weights = {name: tensor + 0.3 for name, tensor in make_engine(tiny_model_folder).get_per_tensor_param()}
    assert await replica.update_weights(7, weights) == weights_digest(weights)
    after = await generate(replica, make_requests(3, temperature=0.0))
    assert [r.token_ids for r in after] != [r.token_ids for r in before]
    assert {version for r in after for version in r.policy_versions} == {7}


async def test_weights_that_do_not_fit_are_refused_by_name(replica: TorchReplica, tiny_model_folder: Path) -> None:
    weights = dict(make_engine(tiny_model_folder).get_per_tensor_param())
    name = next(iter(weights))
    with pytest.raises(WeightSyncError, match=f"{name}.*shape"):
        await replica.update_weights(1, {**weights, name: torch.zeros(3)})
    del weights[name]
    with pytest.raises(WeightSyncError, match=f"{name}.*was not sent"):
        await replica.update_weights(1, weights)
