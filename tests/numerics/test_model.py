"""Trainer and rollout engine on a real (random) model: packing changes nothing, and both sides agree."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from xrl_lite.algorithms.digest import weights_digest
from xrl_lite.algorithms.packing import collate, micro_batches, pack_groups
from xrl_lite.algorithms.weights import WeightManifest, spec_of, tensor_checksum
from xrl_lite.data import SampleParams
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig, OptimizerConfig, PolicyLossConfig
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
        advantages=[rng.uniform(-1, 1) for _ in responses],
        groups=[i // attempts for i in range(len(responses))],
    )


def plain_logprobs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return token_logprobs(logits, torch.tensor(response)).tolist()


def test_packed_attempts_have_the_logprobs_of_rows_of_their_own(tiny_model_folder: Path) -> None:
    engine, batch = make_engine(tiny_model_folder), make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    rows = pack_groups(batch.prompts, batch.responses, max_tokens_per_row=64)
    assert len(rows) == len(PROMPTS)
    packed = list(micro_batches(rows, max_tokens=1000))
    for part, logprobs in zip(packed, engine.infer_batch(packed), strict=True):
        wanted = [x for i in part.trajectories for x in plain_logprobs(model, batch.prompts[i], batch.responses[i])]
        assert logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


@given(st.integers(0, 1000), st.integers(4, 40), st.integers(8, 200))
def test_packing_keeps_every_response_token_once_in_order(seed: int, row_limit: int, batch_limit: int) -> None:
    batch = make_batch(seed)
    rows = pack_groups(batch.prompts, batch.responses, max_tokens_per_row=row_limit)
    packed = list(micro_batches(rows, max_tokens=batch_limit))
    seen = [index for part in packed for index in part.trajectories]
    assert sorted(seen) == list(range(len(batch)))
    for part in packed:
        assert part.targets.tolist() == [token for i in part.trajectories for token in batch.responses[i]]
        flat = part.input_ids.flatten()
        assert part.predicted_at.max() < len(flat)


def test_attempts_in_a_row_do_not_see_each_other() -> None:
    mask = collate(pack_groups([[1, 2], [1, 2]], [[3, 4], [5]], max_tokens_per_row=9)).attention_mask[0, 0]
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
    flat = TrainBatch(**{**vars(batch), "advantages": [0.0] * len(batch)})
    assert worker.train_batch(flat)["num_updates"] == 0.0
    assert weights_digest(worker.export_weights()) == before


def test_a_group_without_signal_counts_in_the_mean_over_tokens(tiny_model_folder: Path) -> None:
    def grad_norm(batch: TrainBatch) -> float:
        worker = EngineWorker(config=EngineConfig(), model_path=str(tiny_model_folder), num_updates=1, seed=0)
        return worker.train_batch(batch)["grad_norm"]

    batch = make_batch()
    flat = [0.0 if group else advantage for group, advantage in zip(batch.groups, batch.advantages, strict=True)]
    live = batch.select([i for i, group in enumerate(batch.groups) if group == 0])
    share = sum(map(len, live.responses)) / sum(map(len, batch.responses))
    mixed = TrainBatch(**{**vars(batch), "advantages": flat})
    assert grad_norm(mixed) == pytest.approx(grad_norm(live) * share, rel=1e-4)


def test_the_schedule_goes_on_in_steps_without_signal(tiny_model_folder: Path) -> None:
    config = EngineConfig(optimizer=OptimizerConfig(learning_rate=1.0, schedule="linear"), num_mini_batches=2)
    worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=8, seed=0)
    batch = make_batch()
    flat = TrainBatch(**{**vars(batch), "advantages": [0.0] * len(batch)})
    rates = [worker.train_batch(flat)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.9375, 0.6875, 0.4375, 0.1875])


def test_several_updates_per_step_use_the_logprobs_from_before(tiny_model_folder: Path) -> None:
    config = EngineConfig(num_mini_batches=3, num_epochs=2, optimizer=OptimizerConfig(learning_rate=1e-2))
    worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=6, seed=0)
    metrics = worker.train_batch(make_batch())
    assert metrics["num_updates"] == 6.0
    assert metrics["kl"] > 0


def test_kl_to_the_initial_policy_is_zero_at_the_start(tiny_model_folder: Path) -> None:
    config = EngineConfig(loss=PolicyLossConfig(kl_coef=0.1), optimizer=OptimizerConfig(learning_rate=1e-2))
    worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=2, seed=0)
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
    await replica.submit(requests)
    return await results_of(replica, requests)


async def results_of(replica: TorchReplica, requests: list[GenerateRequest]) -> list[GenerateResult]:
    outcomes: dict[str, GenerateResult | RolloutError] = {}
    while len(outcomes) < len(requests):
        outcomes |= (await replica.collect(10.0)).ended
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
        assert result.logprobs == pytest.approx(plain_logprobs(model, request.prompt_ids, result.token_ids), abs=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_what_else_is_in_the_batch_changes_no_bit_of_a_sample(num_threads: int, tiny_model_folder: Path) -> None:
    torch.set_num_threads(num_threads)
    replica = TorchReplica(config=RolloutConfig(max_batch_size=16), model_path=str(tiny_model_folder), replica=0)
    requests = [
        GenerateRequest(**{**vars(request), "sample_params": SampleParams(max_tokens=1 + 7 * number % 60)})
        for number, request in enumerate(make_requests(24))
    ]
    together = await generate(replica, requests)
    for request, result in zip(requests[::4], together[::4], strict=True):
        (alone,) = await generate(replica, [request])
        assert (alone.token_ids, alone.logprobs) == (result.token_ids, result.logprobs)


async def test_requests_join_a_batch_that_runs(replica: TorchReplica) -> None:
    long, short = make_requests(2)
    long = GenerateRequest(**{**vars(long), "sample_params": SampleParams(max_tokens=100), "stream": True})
    await replica.submit([long])
    while not (await replica.collect(10.0)).progress:
        pass
    assert len((await generate(replica, [short]))[0].token_ids) == 12
    assert (await replica.health()).num_running == 1
    (result,) = await results_of(replica, [long])
    assert len(result.token_ids) == 100


@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_a_response_that_was_cut_off_goes_on_as_if_it_had_not_been(replica: TorchReplica, cut: int) -> None:
    (request,) = make_requests(1)
    (whole,) = await generate(replica, [request])
    rest = GenerateRequest(
        request_id="rest",
        prompt_ids=request.prompt_ids + whole.token_ids[:cut],
        sample_params=SampleParams(max_tokens=12 - cut),
        seed=request.seed,
        num_sampled=cut,
    )
    (result,) = await generate(replica, [rest])
    assert result.token_ids == whole.token_ids[cut:]


async def test_little_memory_makes_requests_wait_and_loses_none(tiny_model_folder: Path) -> None:
    config = RolloutConfig(engine_options={"kv_cache_bytes": 200_000})
    replica = TorchReplica(config=config, model_path=str(tiny_model_folder), replica=0)
    requests = make_requests(12, max_tokens=80)
    tight = await generate(replica, requests)
    roomy = TorchReplica(config=RolloutConfig(), model_path=str(tiny_model_folder), replica=0)
    assert [r.token_ids for r in tight] == [r.token_ids for r in await generate(roomy, requests)]


async def test_aborted_requests_keep_their_tokens_and_others_go_on(replica: TorchReplica) -> None:
    requests = [GenerateRequest(**{**vars(request), "stream": True}) for request in make_requests(3, max_tokens=110)]
    await replica.submit(requests)
    while not (await replica.collect(10.0)).progress:
        pass
    assert await replica.abort(["0", "unknown"]) == 1
    first, *others = await results_of(replica, requests)
    assert first.finish_reason == "abort"
    assert 0 < len(first.token_ids) == len(first.logprobs) < 110
    assert {other.finish_reason for other in others} <= {"stop", "length"}


async def test_a_paused_engine_computes_nothing_and_can_still_abort(replica: TorchReplica) -> None:
    one, other = make_requests(2, max_tokens=50)
    await replica.pause()
    await replica.submit([one, other])
    await replica.abort([one.request_id])
    assert (await results_of(replica, [one]))[0].finish_reason == "abort"
    await replica.resume()
    assert len((await results_of(replica, [other]))[0].token_ids) == 50


async def test_a_step_that_fails_fails_its_requests_and_the_next_ones_are_served(
    replica: TorchReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(4)
    wanted = [result.token_ids for result in await generate(replica, requests)]

    def broken(*_: Any) -> Any:
        raise ValueError("out of luck")

    monkeypatch.setattr(replica._batch, "_sample", broken)
    with pytest.raises(RolloutError, match="ValueError: out of luck"):
        await generate(replica, requests)
    monkeypatch.undo()
    assert [result.token_ids for result in await generate(replica, requests)] == wanted


async def test_penalties_lower_what_occurred(replica: TorchReplica) -> None:
    (plain,) = await generate(replica, make_requests(1, temperature=0.0, max_tokens=20))
    (changed,) = await generate(replica, make_requests(1, temperature=0.0, max_tokens=20, frequency_penalty=2.0))
    assert len(set(changed.token_ids)) > len(set(plain.token_ids))
    (unique,) = await generate(replica, make_requests(1, temperature=0.0, max_tokens=20, presence_penalty=1e4))
    assert len(set(unique.token_ids)) == 20


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


async def test_a_prompt_that_is_too_long_is_refused(replica: TorchReplica) -> None:
    request = GenerateRequest(request_id="long", prompt_ids=[5] * 500, sample_params=SampleParams(), seed=0)
    with pytest.raises(RolloutError, match="got 500"):
        await generate(replica, [request])


async def push(replica: TorchReplica, weights: dict[str, torch.Tensor], version: int) -> dict[str, str]:
    manifest = WeightManifest(version=version, tensors=tuple(spec_of(*item) for item in weights.items()))
    await replica.prepare_weights(manifest)
    checksums = await replica.load_weights(Bucket(weights))
    assert await replica.finish_weights() == version
    return checksums


class Bucket:
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def tensors(self) -> Any:
        return iter(self.weights.items())


async def test_new_weights_are_used_and_each_token_knows_its_version(
    replica: TorchReplica, tiny_model_folder: Path
) -> None:
    weights = {name: tensor + 0.3 for name, tensor in make_engine(tiny_model_folder).get_per_tensor_param()}
    (request,) = make_requests(1, temperature=0.0, max_tokens=110)
    request = GenerateRequest(**{**vars(request), "stream": True})
    await replica.submit([request])
    while not (await replica.collect(10.0)).progress:
        pass
    checksums = await push(replica, weights, version=7)
    assert checksums == {name: tensor_checksum(tensor, sampled=False) for name, tensor in weights.items()}
    (result,) = await results_of(replica, [request])
    assert len(result.token_ids) == 110
    change = result.policy_versions.index(7)
    assert result.policy_versions == [0] * change + [7] * (110 - change)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.load_state_dict(weights, strict=False)
    # what was sampled after the change is of the new weights alone: no key or value of the old ones is left
    wanted = plain_logprobs(model, request.prompt_ids, result.token_ids)[change:]
    assert result.logprobs[change:] == pytest.approx(wanted, abs=1e-4)


async def test_weights_that_do_not_fit_are_refused_by_name(replica: TorchReplica, tiny_model_folder: Path) -> None:
    weights = dict(make_engine(tiny_model_folder).get_per_tensor_param())
    name = next(iter(weights))
    with pytest.raises(WeightSyncError, match=f"rollout/0: tensor '{name}' has shape"):
        await push(replica, {**weights, name: torch.zeros(3)}, version=1)
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.wieght' is not in the model. Did you mean"):
        await push(replica, {**weights, "model.norm.wieght": torch.zeros(3)}, version=1)
    del weights[name]
    with pytest.raises(WeightSyncError, match=f"'{name}' of the model was not sent"):
        await push(replica, weights, version=1)
    assert len(await generate(replica, make_requests(1))) == 1
