"""Where an actor is started from: the environment, folder and module path of whoever spawns it, at that moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every incarnation of an actor finds, whatever has become of it meanwhile."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    working_directory: str = ""
    """Empty where the folder had been deleted: then children stay where the fork server is."""

    module_path: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Self:
        """Return those of this process, now."""
        return cls(dict(os.environ), working_directory(), tuple(module_path()))


def working_directory() -> str:
    """Return the current folder; nothing if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def module_path() -> list[str]:
    """Return ``sys.path`` such that it means the same in another folder."""
    folder = working_directory()
    return [os.path.normpath(os.path.join(folder, entry)) for entry in sys.path]
