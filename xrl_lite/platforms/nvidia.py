"""Machines with NVIDIA GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from xrl_lite.platforms.base import PlatformBase


class NvidiaPlatform(PlatformBase):
    """Trains and generates with CUDA."""

    device_name = "cuda"
    vendor_name = "nvidia"
    communication_backend_name = "nccl"
    visible_devices_envvar = "CUDA_VISIBLE_DEVICES"
    smi_command = ("nvidia-smi", "-L")

    def is_available(self) -> bool:
        return bool(self.device_module.is_available())

    def set_allocator_settings(self, settings: str) -> None:
        torch: Any = importlib.import_module("torch")
        torch.cuda.memory._set_allocator_settings(settings)

    def free_memory_bytes(self) -> int | None:
        free, _total = self.device_module.mem_get_info()
        return int(free)

    def get_device_capability(self) -> tuple[int, int]:
        major, minor = self.device_module.get_device_capability()
        return int(major), int(minor)

    def get_device_uuid(self, index: int) -> str:
        return f"GPU-{self.device_module.get_device_properties(index).uuid}"

    def is_ipc_supported(self) -> bool:
        return True

    @contextmanager
    def nvtx_range(self, name: str) -> Generator[None, None, None]:
        nvtx = self.device_module.nvtx
        nvtx.range_push(name)
        try:
            yield
        finally:
            nvtx.range_pop()

    def profiler_start(self) -> None:
        self.device_module.cudart().cudaProfilerStart()

    def profiler_stop(self) -> None:
        self.device_module.cudart().cudaProfilerStop()
