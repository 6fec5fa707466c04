"""Trainer and rollout engine on a real (random) model: packing changes nothing, and both sides agree."""

from __future__ import annotations

import math
import random
import re
import shutil
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.algorithms.digest import weights_digest
from xrl_lite.algorithms.packing import PackedBatch, collate, pack_groups
from xrl_lite.algorithms.planning import plan_micro_batches
from xrl_lite.algorithms.weights import WeightManifest, spec_of, tensor_checksum
from xrl_lite.data import SampleParams
from xrl_lite.engine.base import EngineRegistry, OutputRequest
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig, OptimizerConfig
from xrl_lite.engine.language_model import LanguageModelEngine, token_logprobs, token_outputs
from xrl_lite.engine.worker import EngineWorker
from xrl_lite.errors import ConfigError, RolloutError, WeightSyncError
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult
from xrl_lite.rollout.torch_engine import TorchReplica
from xrl_lite.weight_sync.senders import FolderSender

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


@settings(max_examples=40)
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


def test_the_warmup_counts_updates_not_steps(tiny_model_folder: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=8)
    config = EngineConfig(optimizer=optimizer, num_mini_batches=2, num_epochs=2)
    worker = EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=12, seed=0)
    flat = without_signal(make_batch())
    rates = [worker.train_batch(flat)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([(1 + 2 + 3 + 4) / 32, (5 + 6 + 7 + 8) / 32, 1.0]), "of two steps, four updates each"


def test_a_schedule_goes_on_where_it_was_with_another_number_of_updates_per_step(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    def worker(parts: int) -> EngineWorker:
        optimizer = OptimizerConfig(learning_rate=1.0, schedule="linear")
        config = EngineConfig(optimizer=optimizer, num_mini_batches=parts)
        return EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=4 * parts, seed=0)

    one, other, flat = worker(1), worker(3), without_signal(make_batch())
    one.train_batch(flat)
    one.save_checkpoint(tmp_path / "engine")
    other.load_checkpoint(tmp_path / "engine")
    assert one.train_batch(flat)["learning_rate"] == 0.75
    assert other.train_batch(flat)["learning_rate"] == pytest.approx((9 + 8 + 7) / 36)


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


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(tiny_model_folder: Path, tmp_path: Path) -> None:
    def engine(model: Path) -> EngineWorker:
        return EngineWorker(config=EngineConfig(), model_path=str(model), num_updates=8, seed=0)

    def wider(**changes: int) -> Path:
        folder = tmp_path / "-".join(changes)
        shutil.copytree(tiny_model_folder, folder)
        config = AutoConfig.from_pretrained(folder)
        for name, value in changes.items():
            setattr(config, name, value)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    engine(tiny_model_folder).save_checkpoint(tmp_path / "engine")
    size = AutoConfig.from_pretrained(tiny_model_folder)
    mlp = "model.layers.0.mlp.gate_proj.weight"
    shapes = rf"{mlp} is \({size.intermediate_size}, {size.hidden_size}\) in the checkpoint, \(24, {size.hidden_size}\)"
    with pytest.raises(ConfigError, match=rf"{shapes} in the model\. Go on with the model"):
        engine(wider(intermediate_size=24)).load_checkpoint(tmp_path / "engine")
    with pytest.raises(ConfigError, match=r"only the checkpoint has weights model\.layers\.1\."):
        engine(wider(num_hidden_layers=1)).load_checkpoint(tmp_path / "engine")


def endless(batch: TrainBatch) -> TrainBatch:
    """With a gradient that is not finite."""
    return replace(batch, advantages=[[math.inf] * len(row) for row in batch.advantages])


@pytest.mark.parametrize("first", [None, endless(make_batch())], ids=["before any update", "after a skipped update"])
def test_saving_before_the_first_update_changes_nothing_and_is_gone_on_from(
    first: TrainBatch | None, tiny_model_folder: Path, tmp_path: Path
) -> None:
    undisturbed, saved, restored = (make_worker(tiny_model_folder) for _ in range(3))
    for worker in (undisturbed, saved):
        if first is not None:
            worker.train_batch(first)
    saved.save_checkpoint(tmp_path / "engine")
    restored.train_batch(make_batch(3))  # what it has is forgotten
    restored.load_checkpoint(tmp_path / "engine")
    metrics = undisturbed.train_batch(make_batch())
    for worker in (saved, restored):
        assert worker.train_batch(make_batch()) == metrics
        assert weights_digest(worker.export_weights()) == weights_digest(undisturbed.export_weights())


def test_a_weight_without_a_gradient_so_far_has_no_state_in_a_checkpoint_either(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    def unused(engine: LanguageModelEngine) -> torch.nn.Parameter:
        return next(iter(engine._model.parameters()))

    one, other = make_engine(tiny_model_folder), make_engine(tiny_model_folder)
    for parameter in one._model.parameters():
        parameter.grad = None if parameter is unused(one) else torch.ones_like(parameter)
    one.optimizer_step()
    one.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert unused(other) not in other._optimizer.state
    assert len(other._optimizer.state) == len(one._optimizer.state)


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "optimizer": {"learning_rate": 1e-3}}, False),
        ({"dtype": "bfloat16", "lora": {}}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_updates_that_bfloat16_would_round_away_are_warned_of(
    settings: dict[str, Any], is_warned: bool, tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig.model_validate(settings)
    engine = LanguageModelEngine(model_path=str(tiny_model_folder), config=config, num_updates=1, seed=0)
    engine.initialize()
    told = re.search(r"(\d+) % of the weights will not move.*Set dtype to float32", caplog.text)
    assert (told is not None) is is_warned
    if told is None:
        return
    weights = [(weight, weight.detach().clone()) for weight in engine._model.parameters()]
    for weight, before in weights:
        weight.grad = torch.ones_like(before)
    engine.optimizer_step()
    moved = sum(int((weight != before).sum()) for weight, before in weights)
    share = moved / sum(before.numel() for _, before in weights)
    assert share <= 1 - int(told[1]) / 100


class MatricesApart(torch.optim.AdamW):
    """Vectors learn at a tenth of the rate and do not decay."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        matrices, vectors = ([p for p in params if (p.dim() > 1) is wanted] for wanted in (True, False))
        groups = [{"params": matrices}, {"params": vectors, "lr": lr / 10, "weight_decay": 0.0}]
        super().__init__(groups, lr=lr, weight_decay=weight_decay)


def test_groups_of_an_optimizer_keep_their_own_settings_and_are_clipped_together(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    def worker(**settings: Any) -> EngineWorker:
        optimizer = OptimizerConfig(
            type=f"{__name__}:MatricesApart", weight_decay=0.1, schedule="linear", max_grad_norm=1e-3, **settings
        )
        config = EngineConfig(optimizer=optimizer)
        return EngineWorker(config=config, model_path=str(tiny_model_folder), num_updates=4, seed=0)

    def groups_of(worker: EngineWorker) -> list[dict[str, Any]]:
        return worker._engine._optimizer.param_groups  # pyright: ignore[reportAttributeAccessIssue]

    one, faster = worker(learning_rate=0.4), worker(learning_rate=0.8)
    one.train_batch(make_batch())
    gradients = [parameter.grad for group in groups_of(one) for parameter in group["params"]]
    assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(1e-3, rel=1e-3)
    assert [group["lr"] for group in groups_of(one)] == pytest.approx([0.3, 0.03])
    one.save_checkpoint(tmp_path / "engine")
    faster.load_checkpoint(tmp_path / "engine")
    assert [group["lr"] for group in groups_of(faster)] == pytest.approx([0.6, 0.06])
    assert [group["weight_decay"] for group in groups_of(faster)] == [0.1, 0.0]


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


async def push(
    replica: TorchReplica, weights: dict[str, torch.Tensor], version: int, adapter: dict[str, Any] | None = None
) -> dict[str, str]:
    specs = tuple(spec_of(*item) for item in weights.items())
    manifest = WeightManifest(version=version, tensors=specs, adapter=adapter)
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
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    (result,) = await results_of(replica, [request])
    assert len(result.token_ids) == 110
    change = result.policy_versions.index(7)
    assert result.policy_versions == [0] * change + [7] * (110 - change)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.load_state_dict(weights, strict=False)
    # what was sampled after the change is of the new weights alone: no key or value of the old ones is left
    wanted = plain_logprobs(model, request.prompt_ids, result.token_ids)[change:]
    assert result.logprobs[change:] == pytest.approx(wanted, abs=1e-4)


LAYER = "model.layers.0.self_attn.q_proj"
ADAPTER = {"r": 4, "lora_alpha": 6.0}


def adapter_weights(shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    """As peft names them."""
    generator = torch.Generator().manual_seed(seed)
    sides = {"A": (4, shape[1]), "B": (shape[0], 4)}
    return {
        f"base_model.model.{LAYER}.lora_{side}.weight": torch.randn(size, generator=generator)
        for side, size in sides.items()
    }


async def test_weights_are_handed_over_in_the_type_of_the_replicas(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = EngineConfig(optimizer=OptimizerConfig(learning_rate=1e-6))
    worker = EngineWorker(
        config=config, model_path=str(tiny_model_folder), num_updates=9, seed=0, weights_dtype="bfloat16"
    )
    worker.train_batch(make_batch())
    trained = worker.export_weights()
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    worker.attach_weights(FolderSender(str(tmp_path), bucket_bytes=1 << 20))
    offer = worker.open_weights(1)
    assert offer is not None
    replica = TorchReplica(config=RolloutConfig(dtype="bfloat16"), model_path=str(tiny_model_folder), replica=0)
    await replica.prepare_weights(offer.manifest)
    assert await replica.load_weights(worker.send_weights(0, 1)) == offer.checksums
    assert await replica.finish_weights() == 1
    (result,) = await generate(replica, make_requests(1))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.bfloat16)
    model.load_state_dict(trained, strict=False)
    assert result.logprobs == pytest.approx(plain_logprobs(model, PROMPTS[0], result.token_ids), abs=0.05)


async def test_an_adapter_that_is_sent_alone_changes_its_layers_and_takes_the_place_of_the_last(
    replica: TorchReplica, tiny_model_folder: Path
) -> None:
    weights = dict(make_engine(tiny_model_folder).get_per_tensor_param())
    name = f"{LAYER}.weight"
    for version in (1, 2):
        adapter = adapter_weights(weights[name].shape, version)
        checksums = await push(replica, adapter, version, ADAPTER)
        assert checksums == {key: tensor_checksum(tensor) for key, tensor in adapter.items()}
        low, high = adapter.values()
        merged = {**weights, name: weights[name] + (high @ low) * 1.5}
        assert all(torch.equal(replica._own[key], merged[key]) for key in merged)
        (request,) = make_requests(1)
        (result,) = await generate(replica, [request])
        assert set(result.policy_versions) == {version}
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        model.load_state_dict(merged, strict=False)
        wanted = plain_logprobs(model, request.prompt_ids, result.token_ids)
        assert result.logprobs == pytest.approx(wanted, abs=1e-4)
    await push(replica, weights, 3)
    assert torch.equal(replica._own[name], weights[name])
    for key, value in (("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", torch.zeros(4, 8)), (name, None)):
        with pytest.raises(WeightSyncError, match=r"changes a layer that is not in the model|is no weight of a LoRA"):
            await push(replica, {key: weights[name] if value is None else value}, 4, ADAPTER)
    narrow = adapter_weights(torch.Size([5, 6]), 0)
    with pytest.raises(WeightSyncError, match=r"lora_A.weight' has shape \(4, 6\), the model's layer wants"):
        await push(replica, narrow, 4, ADAPTER)
    assert (await replica.health()).policy_version == 3


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


# --- the whole update, whatever it is split into


@EngineRegistry.register("language_model", "test_rank", "cpu")
class Rank(LanguageModelEngine):
    """One of two ranks that do not know of each other: gradients stay where they are, nothing is clipped."""

    rank, size = 0, 1

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_size(self) -> int:
        return self.size

    def optimizer_step(self) -> float:
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._model.parameters()]
        return 1.0


def gradient_of(
    folder: Path, algorithm: AlgorithmConfig, batch: TrainBatch, *, ranks: int = 1, row: int = 4096, limit: int = 16384
) -> tuple[list[torch.Tensor], float]:
    """Mean of the ranks' gradients, and the mean of their losses."""
    totals: list[torch.Tensor] = []
    loss = 0.0
    for rank in range(ranks):
        config = EngineConfig(backend="test_rank", max_tokens_per_row=row, max_tokens_per_micro_batch=limit)
        worker = EngineWorker(config=config, algorithm=algorithm, model_path=str(folder), num_updates=1, seed=0)
        engine: Any = worker._engine
        engine.rank, engine.size = rank, ranks
        loss += worker.train_batch(batch)["loss"]
        totals = [a + b for a, b in zip(totals, engine.gradients, strict=True)] if totals else engine.gradients
    return [gradient / ranks for gradient in totals], loss


def make_uneven_batch() -> TrainBatch:
    """Masked tool tokens, sessions of two trajectories, advantages per token, a policy that has moved on."""
    rng = random.Random(4)
    batch = make_batch(4)
    masks = [[rng.choice([1, 1, 0]) for _ in response] for response in batch.responses]
    masks[2] = [0] * len(masks[2])
    return replace(
        batch,
        response_masks=masks,
        sessions=[index // 2 for index in range(len(batch))],
        advantages=[[rng.uniform(-1, 1) * bit for bit in mask] for mask in masks],
        old_logprobs=[[-4.1 + rng.uniform(-0.3, 0.3)] * len(mask) for mask in masks],
        rollout_is_weights=[[rng.uniform(0.5, 1.5)] * len(mask) for mask in masks],
        ref_logprobs=[[-4.0] * len(mask) for mask in masks],
    )


OBJECTIVES = {
    "vanilla": {},
    "everything beside it": {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coeff": 0.1},
    "rows": {"policy_loss": "gspo"},
    "sessions": {"loss_agg_mode": "session-mean-token-mean"},
    "constant length": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 8.0},
    "two sides": {"policy_loss": "oreal"},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_do_not_depend_on_packing_micro_batches_or_ranks(name: str, tiny_model_folder: Path) -> None:
    algorithm, batch = AlgorithmConfig(**OBJECTIVES[name]), make_uneven_batch()
    one, loss = gradient_of(tiny_model_folder, algorithm, batch)
    scale = max(gradient.abs().max().item() for gradient in one)
    for split in ({"row": 8, "limit": 24}, {"ranks": 3, "row": 16, "limit": 32}):
        other, its_loss = gradient_of(tiny_model_folder, algorithm, batch, **split)
        assert its_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        gap = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
        assert gap <= 1e-6 * max(scale, 1.0), (split, gap, scale)


class Meeting:
    """Where the threads of a test meet, as ranks do in a collective."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


@EngineRegistry.register("language_model", "test_together", "cpu")
class Together(LanguageModelEngine):
    """A rank that knows the others: gradients are averaged over them, as FSDP does."""

    rank, size = 0, 1
    meeting: Meeting

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_size(self) -> int:
        return self.size

    def all_gather(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)

    def forward_backward_batch(self, *arguments: Any, **options: Any) -> Any:
        self.meeting.exchange(self.rank, None)  # every forward pass is one of all ranks
        return super().forward_backward_batch(*arguments, **options)

    def optimizer_step(self) -> float:
        for parameter in self._model.parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = torch.stack(self.all_gather(own)).mean(dim=0)
        return super().optimizer_step()


def train_together(folder: Path, algorithm: AlgorithmConfig, batch: TrainBatch, size: int) -> list[Any]:
    """Metrics and weights of each rank after a step of two updates."""
    meeting = Meeting(size)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    config = EngineConfig(
        backend="test_together",
        num_mini_batches=2,
        max_tokens_per_micro_batch=64,
        max_tokens_per_row=64,
        optimizer=optimizer,
    )
    workers: list[EngineWorker] = []
    for rank in range(size):
        worker = EngineWorker(config=config, algorithm=algorithm, model_path=str(folder), num_updates=9, seed=rank)
        engine: Any = worker._engine
        engine.rank, engine.size, engine.meeting = rank, size, meeting
        workers.append(worker)
    with ThreadPoolExecutor(size) as threads:
        metrics = list(threads.map(lambda worker: worker.train_batch(batch), workers))
    return [(found, worker.export_weights()) for found, worker in zip(metrics, workers, strict=True)]


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coeff": 0.1, "policy_loss": "gspo"},
        {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}},
        {"rollout_correction": {"preset": "bypass_pg_is", "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}},
    ],
)
def test_ranks_do_together_what_one_does_alone(algorithm: dict[str, Any], tiny_model_folder: Path) -> None:
    batch = replace(make_uneven_batch(), ref_logprobs=None)
    # a group that is much longer than the others, so that one rank has fewer micro-batches
    batch = batch.select([i for i in range(len(batch)) if batch.groups[i] != 1 or i % 4 == 0])
    settings = AlgorithmConfig(**algorithm)
    ((alone, weights),) = train_together(tiny_model_folder, settings, batch, 1)
    ranks = train_together(tiny_model_folder, settings, batch, 3)
    for found, its_weights in ranks:
        assert found == ranks[0][0]
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)
        for name, tensor in weights.items():
            assert torch.equal(its_weights[name], ranks[0][1][name])
            # Adam's first updates are the signs of the gradient: only where that is about 0 may rounding show
            assert (its_weights[name] - tensor).abs().median() < 1e-6, name


def test_untrained_tokens_are_not_computed_and_nan_in_them_does_not_matter(tiny_model_folder: Path) -> None:
    batch = make_uneven_batch()
    assert sum(len(part.targets) for part in pack(batch)) == batch.num_trained_tokens
    poisoned = replace(
        batch,
        old_logprobs=[
            [x if bit else math.nan for x, bit in zip(row, mask, strict=True)]
            for row, mask in zip(batch.old_logprobs or [], batch.response_masks, strict=True)
        ],
    )
    clean, dirty = (gradient_of(tiny_model_folder, AlgorithmConfig(), each) for each in (batch, poisoned))
    assert dirty[1] == clean[1]
    assert all(torch.equal(a, b) for a, b in zip(clean[0], dirty[0], strict=True))


def make_worker(folder: Path, *, rate: float = 1e-2, mini_batches: int = 1, **algorithm: Any) -> EngineWorker:
    config = EngineConfig(num_mini_batches=mini_batches, optimizer=OptimizerConfig(learning_rate=rate))
    return EngineWorker(
        config=config, algorithm=AlgorithmConfig(**algorithm), model_path=str(folder), num_updates=9, seed=0
    )


def test_the_parts_of_a_step_have_the_policy_that_it_began_with(tiny_model_folder: Path) -> None:
    worker, batch = make_worker(tiny_model_folder), make_uneven_batch()
    (before,) = worker.measure(batch, ["old_logprobs"]).values()
    worker.keep_policy()
    worker.train_batch(batch)
    trained = {name: tensor.clone() for name, tensor in worker.export_weights().items()}
    assert worker.measure(batch, ["old_logprobs"], kept_policy=True) == {"old_logprobs": before}
    for name, tensor in worker.export_weights().items():
        assert torch.equal(tensor, trained[name]), "the weights that are trained came back"
    (after,) = worker.measure(batch, ["old_logprobs"]).values()
    assert after != before, "who does not ask for the kept policy is told of the present one"
    worker.keep_policy()
    assert worker.measure(batch, ["old_logprobs"], kept_policy=True) == {"old_logprobs": after}


def test_k8_the_trainer_divides_logits_by_the_temperature() -> None:
    logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    empty = torch.zeros(1, 1, dtype=torch.int64)
    packed = replace(collate([]), targets=target, predicted_at=torch.tensor([0]), candidates=empty)
    request = OutputRequest(entropy=True, sum_pi_squared=True, top_k=2)
    outputs = token_outputs(logits / 0.5, packed, request)
    assert outputs.logprobs.item() == pytest.approx(-0.143, abs=1e-3)
    p = (logits / 0.5).softmax(1)[0]
    assert outputs.entropy is not None
    assert outputs.entropy.item() == pytest.approx(-(p * p.log()).sum().item())
    assert outputs.sum_pi_squared is not None
    assert outputs.sum_pi_squared.item() == pytest.approx(p.square().sum().item())
    assert outputs.top_ids is not None
    assert outputs.top_ids.tolist() == [[0, 1]]
    assert outputs.candidate_logprobs is not None
    assert outputs.candidate_logprobs.item() == pytest.approx(outputs.logprobs.item())


def test_what_is_measured_has_the_temperature_and_zeros_under_the_mask(tiny_model_folder: Path) -> None:
    worker = make_worker(tiny_model_folder, use_kl_in_reward=True)
    batch = replace(make_uneven_batch(), temperature=0.5)
    measured = worker.measure(batch, ["old_logprobs", "ref_logprobs", "sum_pi_squared"])
    assert measured["old_logprobs"] == measured["ref_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    for index in (0, 5):
        ids = torch.tensor([batch.prompts[index] + batch.responses[index]])
        with torch.no_grad():
            logp = (model(ids).logits[0, len(batch.prompts[index]) - 1 : -1] / 0.5).log_softmax(1)
        wanted = logp.gather(1, torch.tensor(batch.responses[index]).unsqueeze(1)).squeeze(1)
        mask = torch.tensor(batch.response_masks[index])
        assert measured["old_logprobs"][index] == pytest.approx((wanted * mask).tolist(), abs=1e-5)
        squared = logp.exp().square().sum(1) * mask
        assert measured["sum_pi_squared"][index] == pytest.approx(squared.tolist(), abs=1e-5)
    worker.train_batch(batch)
    again = worker.measure(batch, ["old_logprobs", "ref_logprobs"])
    assert again["ref_logprobs"] == measured["ref_logprobs"]
    assert again["old_logprobs"] != measured["old_logprobs"]


def test_the_gap_of_a_step_is_that_of_all_its_tokens(tiny_model_folder: Path) -> None:
    metrics: list[dict[str, float]] = []
    batch = make_batch()
    exact = make_worker(tiny_model_folder).measure(batch, ["old_logprobs"])["old_logprobs"]
    rng = random.Random(0)
    noisy = [[x + rng.uniform(-0.1, 0.1) for x in row] for row in exact]
    for mini_batches in (1, 3):
        worker = make_worker(tiny_model_folder, mini_batches=mini_batches)
        metrics.append(worker.train_batch(replace(batch, rollout_logprobs=noisy)))
    flat = [[x for row in rows for x in row] for rows in (exact, noisy)]
    gaps = [abs(a - b) for a, b in zip(*flat, strict=True)]
    wanted = {
        "logprob_gap/mean": statistics.fmean(gaps),
        "logprob_gap/max": max(gaps),
        "logprob_gap/std": statistics.pstdev(gaps),
        "logprob_gap/correlation": statistics.correlation(*flat),
    }
    for found in metrics:
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_the_gap_is_that_of_tokens_of_the_present_weights(mini_batches: int, tiny_model_folder: Path) -> None:
    batch = replace(make_batch(), step=5)
    exact = make_worker(tiny_model_folder).measure(batch, ["old_logprobs"])["old_logprobs"]
    versions = [[4 if (row + place) % 3 else 3 for place in range(len(values))] for row, values in enumerate(exact)]
    sampled = [
        [value if version == 4 else value - 2.0 for value, version in zip(*both, strict=True)]
        for both in zip(exact, versions, strict=True)
    ]
    aged = replace(batch, rollout_logprobs=sampled, policy_versions=versions)
    found = make_worker(tiny_model_folder, mini_batches=mini_batches).train_batch(aged)
    assert found["logprob_gap/max"] < 1e-4
    assert found["logprob_gap/older_mean"] == pytest.approx(2.0, abs=1e-4)
    all_old = replace(aged, policy_versions=[[-1] * len(row) for row in versions])
    found = make_worker(tiny_model_folder, mini_batches=mini_batches).train_batch(all_old)
    assert "logprob_gap/mean" not in found
    assert found["logprob_gap/older_max"] == pytest.approx(2.0, abs=1e-4)


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_rollout_logprobs_that_are_not_known_change_no_update_and_no_gap(
    mini_batches: int, tiny_model_folder: Path
) -> None:
    batch = make_batch()
    exact = make_worker(tiny_model_folder).measure(batch, ["old_logprobs"])["old_logprobs"]
    known = replace(batch, rollout_logprobs=[[value - 0.5 for value in row] for row in exact])
    some = replace(known, rollout_logprobs=[known.rollout_logprobs[0], *[[math.nan] * len(row) for row in exact[1:]]])
    none = replace(known, rollout_logprobs=[[math.nan] * len(row) for row in exact])
    workers = [make_worker(tiny_model_folder, mini_batches=mini_batches) for _ in range(3)]
    found = [worker.train_batch(each) for worker, each in zip(workers, (known, some, none), strict=True)]
    for worker in workers[1:]:
        for name, tensor in worker.export_weights().items():
            assert torch.equal(tensor, workers[0].export_weights()[name]), name
    assert found[1]["logprob_gap/mean"] == pytest.approx(0.5, abs=1e-4)
    assert not any(name.startswith("logprob_gap") for name in found[2])


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", {"loss_mode": "dro", "dro_beta": 0.1}])
def test_losses_that_look_at_the_whole_update_train(loss: Any, tiny_model_folder: Path) -> None:
    runs = [make_worker(tiny_model_folder, mini_batches=2, policy_loss=loss).train_batch(make_batch()) for _ in "ab"]
    assert runs[0] == runs[1]
    assert runs[0]["num_trained"] == len(make_batch())
    if isinstance(loss, str):
        assert runs[0]["cov_selected"] >= 0


def test_a_choice_over_the_update_does_not_depend_on_micro_batches(tiny_model_folder: Path) -> None:
    algorithm = AlgorithmConfig(policy_loss={"loss_mode": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0})  # type: ignore[arg-type]
    one, loss = gradient_of(tiny_model_folder, algorithm, make_uneven_batch())
    other, its_loss = gradient_of(tiny_model_folder, algorithm, make_uneven_batch(), row=8, limit=24)
    assert its_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert max((a - b).abs().max().item() for a, b in zip(one, other, strict=True)) <= 1e-6


def test_bypass_takes_the_rollout_as_the_old_policy(tiny_model_folder: Path) -> None:
    batch = make_batch()
    exact = make_worker(tiny_model_folder).measure(batch, ["old_logprobs"])["old_logprobs"]
    shifted = [[x - 0.5 for x in row] for row in exact]
    shifted[0] = [x - 3.0 for x in shifted[0]]
    far = replace(batch, rollout_logprobs=shifted)
    plain = make_worker(tiny_model_folder, rollout_correction="bypass_ppo_clip").train_batch(far)
    assert plain["logprob_gap/mean"] > 0.5
    assert plain["kl"] > 0.1
    correction = {"preset": "bypass_pg_is", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}
    metrics = make_worker(tiny_model_folder, rollout_correction=correction).train_batch(far)
    assert metrics["num_trained"] == len(batch) - 1
    assert metrics["rollout_corr/rollout_is_max"] > 1.0
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / len(batch))


@pytest.mark.parametrize("mode", ["forward_kl_topk", "k3+", "k1"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(mode: str, tiny_model_folder: Path) -> None:
    distillation = {"teacher": str(tiny_model_folder), "loss_mode": mode, "use_task_rewards": False, "top_k": 5}
    worker = make_worker(tiny_model_folder, distillation=distillation)
    metrics = worker.train_batch(without_signal(make_batch()))
    assert metrics["num_trained"] == len(make_batch())
    assert metrics["distillation"] == pytest.approx(0.0, abs=1e-6)


def test_a_student_comes_closer_to_its_teacher(tiny_model_folder: Path, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    teacher.save_pretrained(tmp_path / "teacher")
    for mode in ("forward_kl_topk", "k3"):
        distillation = {"teacher": str(tmp_path / "teacher"), "loss_mode": mode, "use_task_rewards": False}
        worker = make_worker(tiny_model_folder, rate=3e-3, distillation=distillation)
        losses = [worker.train_batch(make_batch())["distillation"] for _ in range(6)]
        assert losses[-1] < 0.8 * losses[0]


def test_an_update_whose_gradient_is_not_finite_is_skipped(
    tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, batch = make_worker(tiny_model_folder), make_batch()
    before = weights_digest(worker.export_weights())
    metrics = worker.train_batch(endless(batch))
    assert not math.isfinite(metrics["grad_norm"])
    assert "this update is skipped" in caplog.text
    assert weights_digest(worker.export_weights()) == before
    assert math.isfinite(worker.train_batch(batch)["grad_norm"])
    assert weights_digest(worker.export_weights()) != before


def test_entropy_in_the_loss_keeps_the_policy_broad(tiny_model_folder: Path) -> None:
    after: list[float] = []
    for coefficient in (0.0, 5.0):
        worker = make_worker(tiny_model_folder, entropy_coeff=coefficient)
        after.append([worker.train_batch(make_batch())["entropy"] for _ in range(5)][-1])
    assert after[1] > after[0]


def test_deltas_are_what_changed_since_the_last_look(tiny_model_folder: Path) -> None:
    engine = make_engine(tiny_model_folder)
    with pytest.raises(RuntimeError, match="prime_delta_snapshots"):
        next(engine.get_per_tensor_param_delta_shard())
    engine.prime_delta_snapshots()
    before = {shard.name: shard.values.clone() for shard in engine.get_per_tensor_param_shard()}
    name, parameter = next(engine.get_per_tensor_param())
    parameter.view(-1)[[3, 40]] += 1.0
    (delta,) = engine.get_per_tensor_param_delta_shard()
    assert (delta.name, delta.shape, delta.indices.tolist()) == (name, tuple(parameter.shape), [3, 40])
    before[name].view(-1)[delta.indices] = delta.values
    assert torch.equal(before[name], parameter)
    assert not list(engine.get_per_tensor_param_delta_shard())


@pytest.mark.parametrize(
    "options",
    [
        {"max_logits_tokens": 5},
        {"activation_checkpointing": True},
        {"param_offload": True, "optimizer_offload": True},
        {"activation_checkpointing": True, "max_logits_tokens": 7},
        pytest.param(
            {"compile": True},
            marks=[
                pytest.mark.slow,
                pytest.mark.timeout(300),
                # torch.compile looks at .grad of what is no leaf, and expects to be warned only
                pytest.mark.filterwarnings(r"ignore:The \.grad attribute"),
            ],
        ),
    ],
    ids=str,
)
def test_what_saves_memory_or_time_changes_nothing(options: dict[str, Any], tiny_model_folder: Path) -> None:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.2, entropy_coeff=0.1)
    batch = replace(make_uneven_batch(), ref_logprobs=None, old_logprobs=None)
    found: list[dict[str, float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for chosen in ({}, options):
        config = EngineConfig(num_mini_batches=2, optimizer=OptimizerConfig(learning_rate=1e-3), **chosen)
        worker = EngineWorker(
            config=config, algorithm=algorithm, model_path=str(tiny_model_folder), num_updates=9, seed=0
        )
        found.append(worker.train_batch(batch))
        weights.append(worker.export_weights())
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    # Adam's first updates are of the size of the learning rate, however small the gradient: rounding shows in them
    assert max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]) < 1e-5


@pytest.mark.parametrize(("limit", "is_bounded"), [(4096, False), (6, True)])
def test_logits_of_no_more_than_so_many_tokens_are_kept(limit: int, is_bounded: bool, tiny_model_folder: Path) -> None:
    config = EngineConfig(max_logits_tokens=limit)
    engine = LanguageModelEngine(model_path=str(tiny_model_folder), config=config, num_updates=1, seed=0)
    engine.initialize()
    (packed,) = pack(make_batch())
    vocabulary = engine._model.get_output_embeddings().weight.shape[0]
    kept: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.forward_backward_batch(packed, lambda outputs, _: outputs.logprobs.sum())
    # one set of rows of the vocabulary at a time; the weight of the head itself has rows of another length
    rows = max((shape[0] for shape in kept if len(shape) == 2 and shape[1] == vocabulary), default=0)
    assert rows == (0 if is_bounded else len(packed.targets))
    (alone,) = LanguageModelEngine.infer_batch(engine, [packed])
    assert len(alone.logprobs) == len(packed.targets)
