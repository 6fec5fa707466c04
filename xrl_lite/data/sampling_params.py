"""Sampling parameters as verl's agent loops and vLLM's users write them, turned into `SampleParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrl_lite.data.rollout_state import SampleParams
from xrl_lite.errors import ConfigError, did_you_mean

_ALIASES = {"max_new_tokens": "max_tokens", "stop": "stops", "seed": "sampling_seed"}
_WITHOUT_EFFECT = {"logprobs", "detokenize", "output_kind", "include_stop_str_in_output"}


def merge_sampling_params(base: SampleParams, params: Mapping[str, Any]) -> SampleParams:
    """Return sample parameters with those of a request in their place, under the names of verl and vLLM too.

    Raises:
        ConfigError: one is unknown or out of range.
    """
    fields = base.model_dump()
    for name, value in params.items():
        own = _ALIASES.get(name, name)
        if own in SampleParams.model_fields:
            fields[own] = [value] if own == "stops" and isinstance(value, str) else value
        elif name not in _WITHOUT_EFFECT:
            known = [*SampleParams.model_fields, *_ALIASES]
            raise ConfigError(f"Unknown sampling parameter {name!r}.{did_you_mean(name, known)}")
    try:
        return SampleParams(**fields)
    except ValueError as error:
        raise ConfigError(f"The sampling parameters {dict(params)!r} cannot be used: {error}") from error
