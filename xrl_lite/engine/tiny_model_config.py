"""Settings of the tiny model, and where a finished one is kept.

Imports no torch: a cached model is found in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from xrl_lite.settings import Settings

FORMAT_VERSION = 1
"""Raise it whenever the same settings give another model or tokenizer, so that no older folder is taken for it."""

FINISHED_MARKER = "tiny_model.json"
"""Written last into a model's folder: the settings it was built from, and the size of each of its files."""


class WarmUpConfig(Settings):
    """Supervised training on a task's train rows, until the policy is right often enough for RL to begin."""

    task: str = "sort_digits"
    """Task to learn: a name in `xrl_lite.data.tasks.TASKS`."""

    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options of the task."""

    target_accuracy: float = Field(default=0.35, gt=0, lt=1)
    """Stop once a response sampled at temperature 1 is right this often. Never judged by greedy decoding: a policy can
    be right in half of its greedy answers and next to never in sampled ones, and then RL destroys it."""

    batch_size: int = Field(default=128, gt=0)
    """Rows per optimizer step."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of AdamW, reached over the first `ramp_steps`, then constant."""

    ramp_steps: int = Field(default=10, ge=0)
    """Steps over which the learning rate rises from 0."""

    max_steps: int = Field(default=1000, gt=0)
    """Give up after so many steps: settings that need more do not suit the task."""

    num_probe_rows: int = Field(default=512, gt=0)
    """Train rows that are left out of the warm-up; the accuracy is measured on them."""


class TinyModelConfig(Settings):
    """A transformer small enough to be built, warmed up and trained on two CPU cores, with a tokenizer of its own."""

    architecture: Literal["llama", "qwen3"] = "llama"
    """Which model class of transformers: LlamaForCausalLM or Qwen3ForCausalLM."""

    hidden_size: int = Field(default=64, gt=0)
    """Width of the residual stream."""

    num_layers: int = Field(default=2, gt=0)
    """Transformer blocks."""

    num_heads: int = Field(default=4, gt=0)
    """Attention heads; each has a key and value head of its own."""

    intermediate_size: int = Field(default=256, gt=0)
    """Width inside each feed-forward block."""

    max_position_embeddings: int = Field(default=128, gt=0)
    """Longest sequence, prompt and response together, in tokens."""

    tie_word_embeddings: bool = False
    """Use the embedding matrix as the output matrix too."""

    initializer_range: float = Field(default=0.06, gt=0)
    """Standard deviation of the initial weights."""

    seed: int = 0
    """Seed of the initial weights and of the order of the warm-up rows."""

    warm_up: WarmUpConfig | None = Field(default_factory=WarmUpConfig)
    """Supervised training before the model is handed out; null gives the model with random weights."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads (rotary embeddings turn pairs of channels in each "
                f"head), got hidden_size={self.hidden_size}, num_heads={self.num_heads}."
            )
        return self

    @property
    def content_hash(self) -> str:
        """16 hex digits that change with any setting and with `FORMAT_VERSION`."""
        content = json.dumps({"format": FORMAT_VERSION, "config": self.model_dump(mode="json")}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def tiny_model_path(config: TinyModelConfig, cache_dir: Path) -> Path:
    """Return the folder that the model of these settings has, or will have."""
    return cache_dir / config.content_hash


def cached_tiny_model(config: TinyModelConfig, cache_dir: Path) -> Path | None:
    """Return the folder of the model if it was built before and is complete, else None. Loads no torch."""
    folder = tiny_model_path(config, cache_dir)
    try:
        marker = cast("dict[str, Any]", json.loads((folder / FINISHED_MARKER).read_text(encoding="utf-8")))
        sizes = cast("dict[str, int]", marker["file_sizes"])
        complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return None
    return folder if complete else None
