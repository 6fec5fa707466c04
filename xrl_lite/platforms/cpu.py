"""Machines without accelerators."""

from __future__ import annotations

import importlib
from typing import Any

from xrl_lite.platforms.base import PlatformBase


class CpuPlatform(PlatformBase):
    """Trains and generates on CPUs: for tests, for CI, and for small models."""

    device_name = "cpu"
    vendor_name = "cpu"
    communication_backend_name = "gloo"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        if index != 0:
            raise ValueError(f"There is one device on this platform, number 0; got {index}.")

    def manual_seed(self, seed: int) -> None:
        torch: Any = importlib.import_module("torch")
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def empty_cache(self) -> None:
        return

    def synchronize(self) -> None:
        return
