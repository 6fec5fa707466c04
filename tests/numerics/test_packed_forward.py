"""Packed rows in models of several kinds: each attempt gets what it gets by itself, or the model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from xrl_lite.algorithms.packing import PackedBatch, collate, pack_groups
from xrl_lite.engine.config import EngineConfig
from xrl_lite.engine.language_model import LanguageModelEngine
from xrl_lite.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
    "factor": 8.0,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def engine_of(model: PreTrainedModel, folder: Path) -> LanguageModelEngine:
    model.eval().save_pretrained(folder)
    engine = LanguageModelEngine(model_path=str(folder), config=EngineConfig(), num_updates=1, seed=0)
    engine.initialize()
    return engine


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def packed(prompt: list[int], *responses: list[int]) -> PackedBatch:
    return collate([pack_groups([prompt] * len(responses), list(responses), max_tokens_per_row=4096)])


def by_itself(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(dim=-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(
    "model",
    [
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=None, eos_token_id=1)),
    ],
    ids=["every layer has a window", "some layers have one", "the later ones have one", "none has one"],
)
def test_attempts_behind_one_prompt_have_the_logprobs_that_they_have_alone(model: Any, tmp_path: Path) -> None:
    model = model()
    prompt, responses = tokens(6, 0), (tokens(30, 1), tokens(25, 2))
    engine = engine_of(model, tmp_path)
    found = engine.infer_batch([packed(prompt, *responses)])[0].logprobs
    expected = torch.cat([by_itself(model, prompt, response) for response in responses])
    assert (found - expected).abs().max() < 1e-5


def test_dropout_of_a_model_is_off_while_it_trains(tmp_path: Path) -> None:
    engine = engine_of(GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=None, eos_token_id=1)), tmp_path)
    batch = packed(tokens(6, 0), tokens(30, 1))
    measured = engine.infer_batch([batch])[0].logprobs
    with engine.train_mode(), torch.no_grad():
        assert torch.equal(engine.forward_backward_batch(batch, None).logprobs, measured)


def test_a_model_that_carries_state_beside_attention_is_refused(tmp_path: Path) -> None:
    model = Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]))
    with pytest.raises(ConfigError, match="type lfm2 computes something else for attempts that stand in one row"):
        engine_of(model, tmp_path)


def test_rows_that_would_change_the_position_encoding_of_others_are_refused(tmp_path: Path) -> None:
    engine = engine_of(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LONGROPE)), tmp_path)
    assert len(engine.infer_batch([packed(tokens(6, 0), tokens(10, 1))])[0].logprobs) == 10
    with pytest.raises(ConfigError, match="has 17 tokens, and beyond 16 the position encoding"):
        engine.infer_batch([packed(tokens(6, 0), tokens(11, 1))])
