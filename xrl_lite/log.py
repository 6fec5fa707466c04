"""Logging: one logger tree under ``xrl_lite``, silent until somebody sends it somewhere."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = "xrl_lite"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

logging.getLogger(ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; `name` is its ``__name__``."""
    return logging.getLogger(name)


def log_to_stderr(*, level: int = logging.INFO) -> None:
    """Write the log to stderr from now on: what a child process does, whose stderr is its log file."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger(ROOT)
    root.addHandler(handler)
    root.setLevel(level)


@contextmanager
def logged_to(path: Path, *, level: int = logging.INFO) -> Generator[None]:
    """Write the log to a file while inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger(ROOT)
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
        handler.close()
