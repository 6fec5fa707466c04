"""Settings of a run: the tree, and reading it from files."""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.config.load import change_judger, dump_config, load_config, load_judger
    from xrl_lite.config.run_config import ModelConfig, RunConfig

__all__ = ["ModelConfig", "RunConfig", "change_judger", "dump_config", "load_config", "load_judger"]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
