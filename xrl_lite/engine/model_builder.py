"""Building of the tiny model as an actor: its computation is killable and stays out of the driver."""

from __future__ import annotations

from pathlib import Path

from xrl_lite.engine.tiny_model import build_tiny_model
from xrl_lite.engine.tiny_model_config import TinyModelConfig
from xrl_lite.log import get_logger

logger = get_logger(__name__)


class TinyModelBuilder:
    """Builds tiny models."""

    def build(self, config: TinyModelConfig, cache_dir: Path) -> Path:
        """Return the model's folder; builds it if the cache has none."""
        return build_tiny_model(config, cache_dir, report=logger.info)
