"""What is imported only when it is needed: names of our own packages, and libraries that may be missing."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def is_installed(module: str) -> bool:
    """Return whether a library can be imported, without importing it.

    A folder that merely has its name, such as the ``wandb/`` with which that library logs, is not the library.
    """
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # a folder without __init__.py has no origin


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562).

    What the package imports under ``if TYPE_CHECKING:`` is what they offer: type checkers read an ordinary package, and
    each name stands there once. No name may be that of a submodule: whoever imports the submodule would replace it.

    Args:
        package: The package's ``__name__``.
        file: The package's ``__file__``.
    """
    homes = {name: module for module, name in _imports_for_types(Path(file).read_text(encoding="utf-8"))}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})


def _imports_for_types(source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import under ``if TYPE_CHECKING:``."""
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom) and statement.module:
                    yield from ((statement.module, alias.name) for alias in statement.names)
