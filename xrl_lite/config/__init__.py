"""Settings of a run: the tree, and reading it from files."""

from xrl_lite.config.load import dump_config, load_config, load_judger
from xrl_lite.config.run_config import ModelConfig, RunConfig
from xrl_lite.config.serve_config import ServeConfig, load_serve_config

__all__ = [
    "ModelConfig",
    "RunConfig",
    "ServeConfig",
    "dump_config",
    "load_config",
    "load_judger",
    "load_serve_config",
]
