"""Settings of `xrl-lite serve`: a model behind the gateway, without training.

Imported by whoever serves: reading the config of a run does not load the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError

from xrl_lite.config.load import parse_override, read_yaml, set_value
from xrl_lite.config.run_config import ModelConfig
from xrl_lite.data import SampleParams
from xrl_lite.gateway.config import GatewayConfig
from xrl_lite.registry import load_plugins
from xrl_lite.rollout import RolloutConfig
from xrl_lite.settings import Settings, explain


class ServeConfig(Settings):
    """A model, the engine that runs it, and the endpoint."""

    model: ModelConfig
    """The model."""

    rollout: RolloutConfig = RolloutConfig()
    """Generation."""

    gateway: GatewayConfig = GatewayConfig(port=8000)
    """The endpoint."""

    sample_params: SampleParams = SampleParams()
    """How is sampled where neither session nor request say."""

    seed: int = 0
    """Seed of what is sampled."""

    num_cpus: float | None = Field(default=None, gt=0)
    """CPU slots that may be handed out; what the machine has when not given."""


_OF_RUNS = ("model", "rollout", "seed", "num_cpus")
"""What is taken from the settings of a run."""


def load_serve_config(source: str, overrides: Sequence[str] = ()) -> ServeConfig:
    """Read what is to be served.

    Args:
        source: Folder or hub id of a model; or a .yaml file with these settings, or with those of a run, of which the
            model and its engine are taken.
        overrides: ``a.b=value`` each; the value is read as YAML.

    Raises:
        ConfigError: the file is missing or broken, or settings cannot be used; all of them are listed.
    """
    load_plugins()
    settings: dict[str, Any] = {"model": {"path": source}}
    if source.endswith((".yaml", ".yml")):
        settings = read_yaml(Path(source))
        if "task" in settings:
            settings = {name: settings[name] for name in _OF_RUNS if name in settings}
    gateway = settings.setdefault("gateway", {})
    if isinstance(gateway, dict):
        cast("dict[str, Any]", gateway).setdefault("port", 8000)
    for override in overrides:
        set_value(settings, *parse_override(override))
    try:
        return ServeConfig.model_validate(settings)
    except ValidationError as error:
        raise explain(error, ServeConfig, where=source) from error
