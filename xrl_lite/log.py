"""Logging: one logger tree under ``xrl_lite``, silent until somebody configures it."""

from __future__ import annotations

import logging
from pathlib import Path

ROOT = "xrl_lite"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

logging.getLogger(ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; `name` is its ``__name__``."""
    return logging.getLogger(name)


def add_file(path: Path, *, level: int = logging.INFO) -> logging.Handler:
    """Write the log to a file as well, and return the handler so that it can be removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    return _add(handler, level)


def add_handler(handler: logging.Handler, *, level: int = logging.INFO) -> logging.Handler:
    """Send the log to `handler` as well, and return it so that it can be removed."""
    return _add(handler, level)


def remove_handler(handler: logging.Handler) -> None:
    """Stop writing to a handler and close it."""
    logging.getLogger(ROOT).removeHandler(handler)
    handler.close()


def _add(handler: logging.Handler, level: int) -> logging.Handler:
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger(ROOT)
    root.addHandler(handler)
    root.setLevel(min(level, root.level or level))
    return handler
