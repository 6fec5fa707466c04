"""Several training ranks: together they are one, and none of them waits for one that is lost."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from xrl_lite.actors import ActorSystem
from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import CriticConfig, EngineConfig, LoraConfig, OptimizerConfig
from xrl_lite.engine.controller import CriticController, TrainingController
from xrl_lite.errors import (
    ActorDiedError,
    ActorTimeoutError,
    ActorUnavailableError,
    RankError,
    WeightSyncError,
)
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.weight_sync import WeightSync, make_transport

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.05)


@pytest.fixture(scope="module", autouse=True)
def fork_server_with_models(system: ActorSystem, tiny_model_folder: Path) -> None:
    """Import transformers once for all ranks, before the first test counts processes."""
    import asyncio

    async def start() -> None:
        controller = make_controller(system, tiny_model_folder)
        await controller.ready()
        await controller.stop(0.0)

    asyncio.run(start())


def make_controller(
    system: ActorSystem, folder: Path, *, algorithm: AlgorithmConfig | None = None, **engine: Any
) -> TrainingController:
    settings: dict[str, Any] = {
        "num_threads": 1,
        "num_mini_batches": 2,
        "max_tokens_per_row": 24,
        "max_tokens_per_micro_batch": 48,
        "optimizer": OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5),
    }
    config = EngineConfig(**(settings | engine))
    algorithm = algorithm or AlgorithmConfig()
    return TrainingController(system, config=config, algorithm=algorithm, model_path=str(folder), num_updates=9, seed=0)


def make_batch(step: int) -> TrainBatch:
    rng = random.Random(step)
    responses = [[rng.randrange(5, 60) for _ in range(rng.randint(1, 9))] for _ in range(12)]
    return TrainBatch(
        prompts=[PROMPTS[i // 4] for i in range(12)],
        responses=responses,
        response_masks=[[1] * len(response) for response in responses],
        rollout_logprobs=[[-4.1] * len(response) for response in responses],
        advantages=[[rng.uniform(-1, 1)] * len(response) for response in responses],
        groups=[i // 4 for i in range(12)],
        sessions=list(range(12)),
        step=step,
    )


def largest_gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def assert_is_the_model(folder: Path, weights: dict[str, Any], origin: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert not largest_gap(dict(model.named_parameters()), weights)
    assert model.config.architectures == AutoModelForCausalLM.from_pretrained(origin).config.architectures
    AutoTokenizer.from_pretrained(folder)


async def test_two_ranks_do_what_one_does_and_their_checkpoint_fits_any_number(
    system: ActorSystem, tiny_model_folder: Path, tmp_path: Path
) -> None:
    metrics: dict[int, list[dict[str, float]]] = {}
    weights: dict[int, dict[str, Any]] = {}
    exported: list[tuple[dict[str, Any], Path]] = []
    for size in (1, 2):
        # buckets smaller than most weights, so that there are many
        controller = make_controller(system, tiny_model_folder, algorithm=KL, num_ranks=size, export_bucket_bytes=5000)
        metrics[size] = [await controller.train_batch(make_batch(0))]
        await controller.save_checkpoint(tmp_path / str(size) / "engine", hf_folder=tmp_path / str(size) / "hf")
        saved = await controller.export_weights()
        await controller.keep_policy()
        metrics[size].append(await controller.train_batch(make_batch(1)))
        measured = await controller.measure(make_batch(2), ["old_logprobs", "ref_logprobs"], kept_policy=True)
        metrics[size].append({name: sum(map(sum, rows)) for name, rows in measured.items()})
        weights[size] = await controller.export_weights()
        exported.append((saved, tmp_path / str(size) / "hf"))
        await controller.stop(0.0)
    for one, two in zip(metrics[1], metrics[2], strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)
    assert largest_gap(weights[1], weights[2]) < 5e-6
    for saved, folder in exported:
        assert_is_the_model(folder, saved, tiny_model_folder)
    for size in (1, 2):
        controller = make_controller(system, tiny_model_folder, algorithm=KL, num_ranks=size)
        await controller.load_checkpoint(tmp_path / str(3 - size) / "engine")
        again = await controller.train_batch(make_batch(1))
        assert again == pytest.approx(metrics[size][1], rel=1e-5, abs=1e-5)
        assert largest_gap(await controller.export_weights(), weights[size]) < 5e-6
        await controller.stop(0.0)


async def test_an_adapter_on_two_ranks_is_that_of_one(
    system: ActorSystem, tiny_model_folder: Path, tmp_path: Path
) -> None:
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    weights: list[dict[str, Any]] = []
    lora = LoraConfig(rank=6)  # one that two ranks share, three rows each
    for size in (1, 2):
        controller = make_controller(system, tiny_model_folder, algorithm=KL, num_ranks=size, lora=lora)
        if size == 2:
            await controller.load_checkpoint(tmp_path / "engine")
        else:
            await controller.train_batch(make_batch(0))
            await controller.save_checkpoint(tmp_path / "engine")
        metrics = await controller.train_batch(make_batch(1))
        measured = await controller.measure(make_batch(2), ["old_logprobs", "ref_logprobs"])
        found.append((metrics, {name: sum(map(sum, rows)) for name, rows in measured.items()}))
        weights.append(await controller.export_weights())
        await controller.save_checkpoint(tmp_path / f"{size}", hf_folder=tmp_path / f"hf{size}")
        await controller.stop(0.0)
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)
    assert largest_gap(*weights) < 5e-6
    assert_is_the_model(tmp_path / "hf2", weights[1], tiny_model_folder)
    assert (tmp_path / "hf2" / "adapter" / "adapter_model.safetensors").is_file()


async def test_a_critic_on_two_ranks_is_that_of_one(system: ActorSystem, tiny_model_folder: Path) -> None:
    found: list[Any] = []
    for size in (1, 2):
        config = CriticConfig(num_ranks=size, num_threads=1, max_tokens_per_row=24, max_tokens_per_micro_batch=48)
        critic = CriticController(system, config=config, model_path=str(tiny_model_folder), num_updates=9, seed=0)
        metrics: list[dict[str, float]] = []
        for step in range(3):
            batch = make_batch(step)
            batch = replace(batch, values=await critic.values(batch), returns=batch.advantages)
            metrics.append(await critic.train_batch(batch))
        found.append((metrics, await critic.values(make_batch(3))))
        await critic.stop(0.0)
    for one, two in zip(found[0][0], found[1][0], strict=True):
        assert two == pytest.approx(one, rel=1e-5, abs=1e-6)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert two == pytest.approx(one, abs=1e-5)
    assert any(map(any, found[0][1]))


async def test_same_bits_on_two_ranks_also_after_a_kill(
    system: ActorSystem, tiny_model_folder: Path, tmp_path: Path
) -> None:
    first = make_controller(system, tiny_model_folder, num_ranks=2)
    await first.train_batch(make_batch(0))
    await first.save_checkpoint(tmp_path / "engine")
    wanted = [await first.train_batch(make_batch(step)) for step in (1, 2)]
    going = first._ranks[0].train_batch.remote(make_batch(3))  # it waits for rank 1, which is not called
    first.kill()
    with pytest.raises(ActorUnavailableError):
        await going
    await first.stop(0.0)
    second = make_controller(system, tiny_model_folder, num_ranks=2)
    await second.load_checkpoint(tmp_path / "engine")
    assert [await second.train_batch(make_batch(step)) for step in (1, 2)] == wanted
    await second.stop(0.0)


async def test_mixed_precision_keeps_the_weights_in_full_precision_on_one_rank_as_on_two(
    system: ActorSystem, tiny_model_folder: Path
) -> None:
    losses: list[float] = []
    for size, dtype in ((1, None), (1, "bfloat16"), (2, "bfloat16")):
        controller = make_controller(system, tiny_model_folder, num_ranks=size, compute_dtype=dtype)
        losses.append((await controller.train_batch(make_batch(0)))["loss"])
        assert {str(tensor.dtype) for tensor in (await controller.export_weights()).values()} == {"torch.float32"}
        await controller.stop(0.0)
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert losses[2] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize(
    ("backend", "error", "match"),
    [
        ("raises", ZeroDivisionError, "rank 1 has had enough"),
        ("dies", ActorDiedError, "engine/1.*3"),
        ("hangs", RankError, "Rank 0 of 2 lost the others in train_batch"),
    ],
)
async def test_a_rank_that_is_lost_ends_the_step_of_all(
    system: ActorSystem,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    error: type[Exception],
    match: str,
) -> None:
    monkeypatch.setenv("XRL_LITE_USE_EXTERNAL_MODULES", "tests.processes.rank_bodies")
    # far beyond the limit of this test, where nobody may have to wait for it
    within = 3.0 if backend == "hangs" else 1000.0
    controller = make_controller(system, tiny_model_folder, num_ranks=2, backend=backend, collective_timeout_s=within)
    await controller.ready()
    with pytest.raises(error, match=match) as caught:
        await controller.train_batch(make_batch(0))
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    if backend == "raises":
        assert "forward_backward_batch" in notes
    assert f"rank {0 if backend == 'hangs' else 1} of 2 in train_batch" in notes
    with pytest.raises(ActorUnavailableError):
        await controller.export_weights()
    assert all(rank.is_down for rank in controller._ranks)
    await controller.stop(0.0)


async def test_a_rank_that_cannot_be_built_ends_the_others(system: ActorSystem, tiny_model_folder: Path) -> None:
    controller = make_controller(system, tiny_model_folder / "nowhere", num_ranks=2)
    with pytest.raises(OSError, match="nowhere"):
        await controller.ready()
    assert all(rank.is_down for rank in controller._ranks)


async def test_a_trainer_keeps_its_weights_where_every_replica_is_lost_in_the_transfer(
    system: ActorSystem, tiny_model_folder: Path
) -> None:
    controller = make_controller(system, tiny_model_folder)
    await controller.train_batch(make_batch(0))
    trained = await controller.export_weights()
    config = RolloutConfig(engine="fake", num_threads=1, max_restarts=0, engine_options={"exit_at_load": 0})
    async with RolloutController(system, config=config, model_path="none", decode=lambda ids, _: "", seed=0) as rollout:
        await rollout.ready()
        # far beyond the limit of this test: nobody waits for a replica that will never come
        transport = make_transport("process_group", folder=None, bucket_bytes=1 << 20, timeout_s=1000.0)
        sync = WeightSync(source=controller, targets=rollout.adapters, gate=rollout, transport=transport)
        with pytest.raises(WeightSyncError, match=r"(?s)phase transfer: all replicas.*rollout/0"):
            await sync.sync(1)
    assert not largest_gap(await controller.export_weights(), trained)
    await controller.stop(0.0)


@pytest.mark.parametrize(("step_timeout_s", "patience_s"), [(1000.0, 1.0), (1.0, 60.0)], ids=["cancelled", "too slow"])
async def test_a_first_rank_that_is_cut_off_ends_all_ranks(
    system: ActorSystem, tiny_model_folder: Path, step_timeout_s: float, patience_s: float
) -> None:
    controller = make_controller(system, tiny_model_folder, step_timeout_s=step_timeout_s)
    await controller.ready()
    transport = make_transport("process_group", folder=None, bucket_bytes=1 << 20, timeout_s=100.0)
    with suppress(ActorTimeoutError):
        await controller.attach_weights(transport.sender())
        await controller.open_weights(1)
        with anyio.move_on_after(patience_s):
            await controller.send_weights(0, 1)  # it waits for a receiver, and there is none
    with pytest.raises(ActorUnavailableError):
        await controller.export_weights()
    await controller.stop(0.0)
