# pyright: basic
"""A value model under training: a language model with a single number per token in place of its output layer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from xrl_lite.algorithms.packing import PackedBatch
from xrl_lite.engine.base import OutputRequest, ValueOutputs
from xrl_lite.engine.lora import Adapter
from xrl_lite.engine.packed_forward import model_inputs
from xrl_lite.engine.sharding import DTYPES
from xrl_lite.engine.transformers_engine import OutputsOf, TransformersEngine
from xrl_lite.errors import ConfigError


class ValueModelEngine(TransformersEngine):
    """Trains a critic.

    It starts from a language model, with values of 0, or from a token or sequence classifier with one label, such as a
    reward model, whose head gives the first values.
    """

    output_type = ValueOutputs

    @contextmanager
    def disable_adapter(self) -> Generator[None]:
        assert self._adapter is not None, "a value model has no reference to compute with"
        with self._adapter.disabled():
            yield

    def _load(self, path: str) -> nn.Module:
        kind = _class_of(AutoConfig.from_pretrained(path))
        model, report = kind.from_pretrained(
            path,
            num_labels=1,
            dtype=DTYPES[self._config.dtype],
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, in words
        )
        head = _head_of(model)
        if report["mismatched_keys"]:
            raise ConfigError(f"{path} has several labels, a value is one number: {report['mismatched_keys']}.")
        if report["missing_keys"]:
            if lacking := [name for name in report["missing_keys"] if not name.startswith(_HEADS)]:
                raise ConfigError(f"{path} is no language model or classifier: it lacks {', '.join(lacking[:3])}.")
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
        return model

    def _add_adapter(self, model: Any) -> Adapter | None:
        adapter = super()._add_adapter(model)
        _head_of(model).requires_grad_(True)  # it starts from nothing
        return adapter

    def _outputs_of(self, model: Any) -> OutputsOf:
        return _values

    def _without_weights(self, model: Any) -> Any:
        with torch.device("meta"):
            return _class_of(model.config).from_config(model.config)


def _values(model: Any, batch: PackedBatch, temperature: float, request: OutputRequest) -> dict[str, Tensor | None]:
    """Fields of `ValueOutputs`. A value has no temperature, and nothing else can be requested."""
    hidden = model.base_model(**model_inputs(model, batch)).last_hidden_state.flatten(0, 1)[batch.predicted_at]
    return {"values": _head_of(model)(hidden).squeeze(1).float()}


def _class_of(config: Any) -> Any:
    """The class that a model of these settings was saved as, or can be made into."""
    sequence = any("ForSequenceClassification" in name for name in config.architectures or ())
    return AutoModelForSequenceClassification if sequence else AutoModelForTokenClassification


_HEADS = ("score.", "classifier.")


def _head_of(model: Any) -> nn.Module:
    return model.score if hasattr(model, "score") else model.classifier
