"""LoRA: an adapter is trained, the model around it stays, and both leave the engine in forms that others read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.numerics.test_model import make_batch, plain_logprobs
from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.algorithms.digest import weights_digest
from xrl_lite.engine.config import EngineConfig, LoraConfig, OptimizerConfig
from xrl_lite.engine.worker import EngineWorker
from xrl_lite.errors import ConfigError

KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_worker(folder: Path, algorithm: AlgorithmConfig = KL, *, dtype: Any = "float32", **lora: Any) -> EngineWorker:
    config = EngineConfig(lora=LoraConfig(**lora), dtype=dtype, optimizer=OptimizerConfig(learning_rate=1e-2))
    return EngineWorker(config=config, algorithm=algorithm, model_path=str(folder), num_updates=9, seed=0)


def logprobs_of(model: Any) -> list[list[float]]:
    batch = make_batch()
    return [plain_logprobs(model, *row) for row in zip(batch.prompts, batch.responses, strict=True)]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_the_adapter_begins_at_nothing_and_is_all_that_is_trained(tiny_model_folder: Path) -> None:
    origin = dict(AutoModelForCausalLM.from_pretrained(tiny_model_folder).named_parameters())
    worker = make_worker(tiny_model_folder)
    assert weights_digest(worker.export_weights()) == weights_digest(origin)
    metrics = [worker.train_batch(make_batch(step)) for step in range(2)]
    assert metrics[0]["kl_to_initial"] == pytest.approx(0.0, abs=1e-9)
    assert metrics[1]["kl_to_initial"] > 0
    changed = {name for name, tensor in worker.export_weights().items() if not torch.equal(tensor, origin[name])}
    assert changed == {name for name in origin if "_proj" in name}
    assert worker._engine._policy.lm_head.weight.grad is None  # type: ignore[attr-defined]


def test_the_reference_policy_is_the_model_without_the_adapter(tiny_model_folder: Path) -> None:
    worker = make_worker(tiny_model_folder)
    worker.train_batch(make_batch())
    measured = worker.measure(make_batch(), ["ref_logprobs", "old_logprobs"])
    initial = flat(logprobs_of(AutoModelForCausalLM.from_pretrained(tiny_model_folder)))
    assert flat(measured["ref_logprobs"]) == pytest.approx(initial, abs=1e-5)
    assert flat(measured["old_logprobs"]) != pytest.approx(initial, abs=1e-2)
    assert not worker._engine._frozen  # type: ignore[attr-defined]  # no second copy of the weights


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}])
def test_merged_and_apart_it_is_the_policy_that_was_trained(
    changes: dict[str, Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    worker = make_worker(tiny_model_folder, **changes)
    worker.train_batch(make_batch())
    worker.save_checkpoint(tmp_path / "engine", hf_folder=tmp_path / "hf")
    trained = flat(worker.measure(make_batch(), ["old_logprobs"])["old_logprobs"])

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert flat(logprobs_of(merged)) == pytest.approx(trained, abs=1e-5)
    assert weights_digest(dict(merged.named_parameters())) == weights_digest(worker.export_weights())
    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    apart = PeftModel.from_pretrained(base, str(tmp_path / "hf" / "adapter"))
    assert flat(logprobs_of(apart)) == pytest.approx(trained, abs=1e-5)

    again = make_worker(tiny_model_folder, path=str(tmp_path / "hf" / "adapter"))
    assert flat(again.measure(make_batch(), ["old_logprobs"])["old_logprobs"]) == pytest.approx(trained, abs=1e-5)


def test_the_merged_model_ends_where_the_model_did(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(folder)
    make_worker(folder).save_checkpoint(tmp_path / "engine", hf_folder=tmp_path / "hf")
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [1, 7]


def test_the_adapter_alone_is_handed_over_as_peft_names_it(tiny_model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    worker = make_worker(tiny_model_folder, rank=4, alpha=8)
    worker.train_batch(make_batch())
    worker.save_checkpoint(tmp_path / "engine", hf_folder=tmp_path / "hf")
    engine = worker._engine
    alone = dict(engine.get_per_tensor_param(adapters_only=True))
    written = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    assert weights_digest(alone) == weights_digest(written)
    config = worker.peft_config()
    assert config is not None
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert json.loads(json.dumps(config))["target_modules"]
    assert {shard.name for shard in engine.get_per_tensor_param_shard()} == set(alone)
    engine.prime_delta_snapshots()
    worker.train_batch(make_batch(1))
    assert {delta.name for delta in engine.get_per_tensor_param_delta_shard()} == set(alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_adapter_goes_on_bit_for_bit(dtype: str, tiny_model_folder: Path, tmp_path: Path) -> None:
    one, other = make_worker(tiny_model_folder, dtype=dtype), make_worker(tiny_model_folder, dtype=dtype)
    one.train_batch(make_batch(1))
    one.save_checkpoint(tmp_path / "engine")
    other.load_checkpoint(tmp_path / "engine")
    assert one.train_batch(make_batch(2)) == other.train_batch(make_batch(2))
    assert weights_digest(one.export_weights()) == weights_digest(other.export_weights())
    adapter = dict(one._engine.get_per_tensor_param(adapters_only=True))
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert {tensor.dtype for tensor in one.export_weights().values()} == {getattr(torch, dtype)}
    keys = torch.distributed.checkpoint.FileSystemReader(tmp_path / "engine").read_metadata().state_dict_metadata
    assert {key.split(".")[-3] for key in keys if key.startswith("model.")} == {"lora_A", "lora_B"}


@pytest.mark.parametrize(
    ("lora", "match"),
    [
        ({"target_modules": ["qkv"]}, r"engine.lora does not fit .*qkv"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is a Embedding, only linear layers"),
        ({"path": "/nowhere"}, "engine.lora.path=/nowhere is no adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(lora: dict[str, Any], match: str, tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        make_worker(tiny_model_folder, **lora)


def test_without_an_adapter_there_is_none_to_hand_over(tiny_model_folder: Path) -> None:
    worker = EngineWorker(config=EngineConfig(), model_path=str(tiny_model_folder), num_updates=1, seed=0)
    assert worker.peft_config() is None
    with pytest.raises(ConfigError, match=r"set engine\.lora"):
        list(worker._engine.get_per_tensor_param(adapters_only=True))
