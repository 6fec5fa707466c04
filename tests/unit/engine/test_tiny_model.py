"""The tiny model: a tokenizer that loses nothing, a warm-up that hits its target, a cache of whole folders only."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from xrl_lite.data.tasks import make_rows
from xrl_lite.engine.tiny_model import (
    build_tiny_model,
    encode_rows,
    make_model,
    make_tokenizer,
    sampled_accuracy,
    warm_up,
)
from xrl_lite.engine.tiny_model_config import (
    FINISHED_MARKER,
    TinyModelConfig,
    WarmUpConfig,
    cached_tiny_model,
    tiny_model_path,
)
from xrl_lite.errors import ConfigError, RunError

TOKENIZER = make_tokenizer(max_length=64)

SMALL = TinyModelConfig(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    warm_up=WarmUpConfig(
        options={"num_digits": 2},
        target_accuracy=0.05,
        batch_size=16,
        learning_rate=1e-2,
        num_probe_rows=32,
        max_steps=200,
    ),
)
UNTRAINED = SMALL.model_copy(update={"warm_up": None})


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text or "<|" in text


def test_the_chat_template_marks_roles_and_ends() -> None:
    messages = [{"role": "user", "content": "sort 21"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>sort 21<|end|><|assistant|>"
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(ids) == 10, "each mark and each byte is one token"


def test_a_conversation_grows_only_at_its_end() -> None:
    messages = [{"role": "user", "content": "1+1="}]
    asked = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    again = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert again.startswith(f"{asked}2{TOKENIZER.eos_token}")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_loads_with_the_auto_classes(architecture: Any, tied: bool, tmp_path: Path) -> None:
    config = UNTRAINED.model_copy(update={"architecture": architecture, "tie_word_embeddings": tied})
    folder = build_tiny_model(config, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    fresh = make_model(config, TOKENIZER)
    assert model.config.model_type == architecture
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()


def test_targets_are_the_answer_and_its_end() -> None:
    rows = make_rows("addition", split="train", num_rows=20, seed=0, options={"num_digits": 1})
    inputs, targets = encode_rows(rows, TOKENIZER, max_length=64)
    for row, target in zip(rows, targets, strict=True):
        answer = TOKENIZER.decode(target[target >= 0])
        assert answer == row["reward_model"]["ground_truth"] + TOKENIZER.eos_token
    assert inputs.shape == targets.shape


def test_sampled_accuracy_is_what_sampling_gives() -> None:
    config = SMALL.warm_up
    assert config is not None
    model = make_model(SMALL, TOKENIZER)
    accuracy = warm_up(model, TOKENIZER, config, seed=0, report=lambda _: None)
    rows = make_rows("sort_digits", split="train", num_rows=32, seed=0, options={"num_digits": 2})
    inputs, targets = encode_rows(rows, TOKENIZER, max_length=64)
    assert sampled_accuracy(model, inputs, targets) == pytest.approx(accuracy)

    repeats, num_answer_tokens = 200, 3
    tokens = inputs[:, : inputs.shape[1] - num_answer_tokens + 1].repeat(repeats, 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(num_answer_tokens):
            probabilities = model(input_ids=tokens).logits[:, -1].softmax(dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    is_right = (tokens[:, -num_answer_tokens:] == targets[:, -num_answer_tokens:].repeat(repeats, 1)).all(dim=1)
    assert is_right.double().mean().item() == pytest.approx(accuracy, abs=0.015)  # 4 standard errors


def test_the_same_settings_give_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    lines: list[str] = []
    one = build_tiny_model(SMALL, tmp_path / "one", report=lines.append)
    torch.rand(3)  # torch's own generator has no part in it
    assert weights(build_tiny_model(SMALL, tmp_path / "two")) == weights(one)
    other = SMALL.model_copy(update={"seed": 1})
    assert weights(build_tiny_model(other, tmp_path / "one")) != weights(one)
    assert "finished at step" in lines[-1]


def test_building_leaves_torch_as_it_was(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    build_tiny_model(SMALL, tmp_path)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_built_model_is_found_without_torch(tmp_path: Path) -> None:
    assert cached_tiny_model(UNTRAINED, tmp_path) is None
    folder = build_tiny_model(UNTRAINED, tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from xrl_lite.engine.tiny_model_config import TinyModelConfig, cached_tiny_model\n"
        f"config = TinyModelConfig.model_validate_json({UNTRAINED.model_dump_json()!r})\n"
        f"assert cached_tiny_model(config, Path({str(tmp_path)!r})) == Path({str(folder)!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("damage", ["no marker", "short file", "no file", "torn marker"])
def test_a_damaged_folder_is_built_anew(damage: str, tmp_path: Path) -> None:
    folder = build_tiny_model(UNTRAINED, tmp_path)
    before = weights(folder)
    match damage:
        case "no marker":
            (folder / FINISHED_MARKER).unlink()
        case "short file":
            (folder / "model.safetensors").write_bytes(before[:100])
        case "no file":
            (folder / "tokenizer.json").unlink()
        case _:
            (folder / FINISHED_MARKER).write_text('{"file_s')
    assert cached_tiny_model(UNTRAINED, tmp_path) is None
    assert weights(build_tiny_model(UNTRAINED, tmp_path)) == before
    assert cached_tiny_model(UNTRAINED, tmp_path) == folder


def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path) -> None:
    folder = tiny_model_path(UNTRAINED, tmp_path)
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors.index.json").write_text("{}")
    assert not (build_tiny_model(UNTRAINED, tmp_path) / "model.safetensors.index.json").exists()
    assert not partial.exists()


def test_builders_at_once_end_with_one_whole_folder(tmp_path: Path) -> None:
    # threads: the lock is one per open file, so it parts them as it parts processes
    with ThreadPoolExecutor() as threads:
        folders = set(threads.map(lambda _: build_tiny_model(UNTRAINED, tmp_path), range(3)))
    assert len(folders) == 1
    folder = cached_tiny_model(UNTRAINED, tmp_path)
    assert folder is not None
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_the_marker_holds_the_settings(tmp_path: Path) -> None:
    marker = json.loads((build_tiny_model(SMALL, tmp_path) / FINISHED_MARKER).read_text())
    assert TinyModelConfig.model_validate(marker["config"]) == SMALL


@pytest.mark.parametrize(
    "change",
    [{"seed": 3}, {"hidden_size": 48}, {"warm_up": WarmUpConfig(options={"num_digits": 3})}, {"warm_up": None}],
)
def test_every_setting_changes_the_hash(change: dict[str, Any]) -> None:
    assert SMALL.model_copy(update=change).content_hash != SMALL.content_hash


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"multiple of 2 \* num_heads .* got hidden_size=100, num_heads=4"):
        TinyModelConfig(hidden_size=100, num_heads=4)


def refused(**changes: Any) -> TinyModelConfig:
    assert SMALL.warm_up is not None
    return SMALL.model_copy(update={"warm_up": SMALL.warm_up.model_copy(update=changes)})


def test_a_target_out_of_reach_ends_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"ended after 2 steps with a sampled accuracy of 0.000 .* Raise max_steps"):
        build_tiny_model(refused(max_steps=2), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "a model that failed is not kept"


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 8 train rows, too few for num_probe_rows=32 and a batch of 16"):
        build_tiny_model(refused(options={"num_digits": 1}), tmp_path)


def test_rows_longer_than_the_model_reads_are_refused(tmp_path: Path) -> None:
    config = SMALL.model_copy(update={"max_position_embeddings": 8})
    with pytest.raises(ConfigError, match=r"has 13 tokens, .* reads 8\. Raise max_position_embeddings to 13"):
        build_tiny_model(config, tmp_path)
