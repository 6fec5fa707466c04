"""A training run on another machine, as far as accelerators go. Given: its root folder, and the file of settings."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from xrl_lite import run
from xrl_lite.actors.machine import visible_accelerators
from xrl_lite.config import load_config
from xrl_lite.registry import load_plugins

if __name__ == "__main__":
    load_plugins()
    visible_accelerators.__defaults__ = (Path(sys.argv[1]),)
    run.run_until_done(partial(run.train, load_config(Path(sys.argv[2]))))
