# pyright: basic
"""Packed rows through a model of transformers, so that each attempt gets what it would get in a row of its own.

Attention keeps attempts apart by its mask. What else a model carries from token to token does not know of it, so
`check_packing` tries, before anything is trained, whether there is such a thing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xrl_lite.algorithms.packing import PackedBatch, collate, pack_groups
from xrl_lite.errors import ConfigError

_GROWING = ("longrope", "dynamic")
"""Position encodings that change, for all tokens of a pass, where one is beyond the positions of pre-training."""
_PROBE_WINDOW = 4
_PROBE_PROMPT, _PROBE_RESPONSES = [1, 2, 3, 4, 5, 6], [[7, 8, 9, 10, 11, 12], [12, 10, 8, 9, 7, 11]]


def model_inputs(model: Any, batch: PackedBatch) -> dict[str, Any]:
    """Return the arguments of a model's forward for packed rows.

    Raises:
        ConfigError: the rows are too long for a position encoding that depends on the longest of a pass.
    """
    config = model.config.get_text_config()
    _check_positions(config, batch.position_ids)
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": _masks(config, batch),
        "use_cache": False,
    }


def _masks(config: Any, batch: PackedBatch) -> Tensor | dict[str, Tensor]:
    """Return the mask of all layers, or one by kind of layer where some see a window of the last tokens only."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ()
    if not window or (layer_types and "sliding_attention" not in layer_types):
        return batch.attention_mask
    visible = batch.attention_mask
    windowed = visible
    if window < batch.input_ids.shape[1]:
        distance = batch.position_ids.unsqueeze(2) - batch.position_ids.unsqueeze(1)
        windowed = visible & (distance < window).unsqueeze(1)
    return {"full_attention": visible, "sliding_attention": windowed} if layer_types else windowed


def _check_positions(config: Any, position_ids: Tensor) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") not in _GROWING:
        return
    limit = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    longest = int(position_ids.max()) + 1
    if longest > limit:
        raise ConfigError(
            f"A trajectory has {longest} tokens, and beyond {limit} the position encoding of this model "
            f"({parameters['rope_type']}) is another one for all that is computed with it, so that log-probs would "
            f"depend on what a row is packed with. Keep prompt and response within {limit} tokens together."
        )


def turn_off_dropout(model: nn.Module) -> None:
    """Have a model compute the same in training as in evaluation: ratios of log-probs would be noise otherwise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)


def check_packing(model: Any, model_path: str) -> None:
    """Compare attempts in one row with the same attempts in rows of their own.

    Raises:
        ConfigError: they differ.
    """
    vocabulary = model.config.get_text_config().vocab_size
    prompt = [token % vocabulary for token in _PROBE_PROMPT]
    responses = [[token % vocabulary for token in response] for response in _PROBE_RESPONSES]
    packed = collate([pack_groups([prompt, prompt], responses, max_tokens_per_row=1 << 20)])
    with torch.no_grad(), _short_window(model.config.get_text_config()):
        together = model.base_model(**model_inputs(model, packed)).last_hidden_state[0]
        alone = [
            model.base_model(input_ids=torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
            for response in responses
        ]
    expected = torch.cat([alone[0], *(hidden[len(prompt) :] for hidden in alone[1:])])
    gap, scale = (together - expected).abs().max().item(), expected.abs().max().item()
    if not gap <= (1e-3 if together.dtype is torch.float32 else 0.1) * scale:
        raise ConfigError(
            f"{model_path}: a model of type {model.config.model_type} computes something else for attempts that stand "
            f"in one row than for each by itself (hidden states of up to {scale:.3g} differ by {gap:.3g}). It seems to "
            f"carry state from token to token beside attention, as convolutions and linear attention do. Such a model "
            f"cannot be trained here: use one with attention only."
        )


@contextmanager
def _short_window(config: Any) -> Generator[None]:
    """Shorten the window of a model, if it has one, so that a short probe goes beyond it."""
    window = getattr(config, "sliding_window", None)
    if not window:
        yield
        return
    config.sliding_window = _PROBE_WINDOW
    try:
        yield
    finally:
        config.sliding_window = window
