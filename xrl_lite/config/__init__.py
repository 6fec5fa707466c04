"""Settings of a run: the tree, and reading it from files."""

from xrl_lite.config.load import dump_config, load_config, load_judger
from xrl_lite.config.run_config import ModelConfig, RunConfig

__all__ = ["ModelConfig", "RunConfig", "dump_config", "load_config", "load_judger"]
