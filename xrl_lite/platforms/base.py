"""What every kind of chip must be able to tell and do.

Methods have the names of ``torch.cuda``, and act on the process that calls them. Nothing here imports torch until a
device is really used, so that a platform can be chosen while a config is read.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

from xrl_lite.log import get_logger

logger = get_logger(__name__)

_SMI_WITHIN_S = 10.0


class PlatformBase(ABC):
    """One kind of chip. Subclass it, set the class variables, and register it with `PlatformRegistry.register`."""

    device_name: ClassVar[str]
    """Type of its devices in torch: ``cpu``, ``cuda``, ``xpu``, ..."""

    vendor_name: ClassVar[str]
    """Who makes it. Two vendors may share a device name; `EngineRegistry` tells them apart by this."""

    communication_backend_name: ClassVar[str]
    """Backend of torch.distributed: ``gloo``, ``nccl``, ..."""

    visible_devices_envvar: ClassVar[str] = ""
    """Variable that says which devices a process may see; empty where there are none to choose from."""

    smi_command: ClassVar[tuple[str, ...]] = ()
    """Command that succeeds where such a device and its driver are present, for example ``("nvidia-smi", "-L")``."""

    @property
    def device_module(self) -> Any:
        """The module of torch for this device: ``torch.cuda``, ``torch.cpu``, ..."""
        return getattr(importlib.import_module("torch"), self.device_name)

    @abstractmethod
    def is_available(self) -> bool:
        """Whether torch can use such a device in this process. May load the driver."""

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether this machine is of this kind.

        Args:
            use_smi_check: Ask the vendor's command instead of torch, which leaves the driver of this process unloaded:
                the driver process must not hold a device, and a child is forked from it.
        """
        return self.check_smi_command() if use_smi_check and self.smi_command else self.is_available()

    def check_smi_command(self) -> bool:
        """Whether the vendor's command is there and succeeds within 10 s; one that hangs is a warning."""
        if not self.smi_command or shutil.which(self.smi_command[0]) is None:
            return False
        try:
            done = subprocess.run(self.smi_command, capture_output=True, timeout=_SMI_WITHIN_S, check=False)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not answer within %g s", " ".join(self.smi_command), _SMI_WITHIN_S)
            return False
        except OSError:
            return False
        return done.returncode == 0

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        return int(self.device_module.device_count())

    def current_device(self) -> int:
        """Return the index of the device that is used where none is named."""
        return int(self.device_module.current_device())

    def set_device(self, index: int) -> None:
        """Use this device where none is named."""
        self.device_module.set_device(index)

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        self.device_module.synchronize()

    def manual_seed(self, seed: int) -> None:
        """Seed the random numbers of the current device."""
        self.device_module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random numbers of all devices."""
        self.device_module.manual_seed_all(seed)

    def empty_cache(self) -> None:
        """Give memory that is cached and not in use back to the device."""
        self.device_module.empty_cache()

    def set_allocator_settings(self, settings: str) -> None:
        """Configure the allocator, in the vendor's own words; ignored where there is nothing to configure."""

    def free_memory_bytes(self) -> int | None:
        """Return how much memory the current device has left; None where that is unknown."""
        return None

    def get_device_capability(self) -> tuple[int, int]:
        """Return the generation of the current device, as CUDA counts it; (0, 0) where there is no such thing."""
        return (0, 0)

    def get_device_uuid(self, index: int) -> str:
        """Return a name of the device that is the same in every process."""
        return f"{self.device_name}:{index}"

    def is_ipc_supported(self) -> bool:
        """Whether processes can share memory of a device by handle."""
        return False

    def apply_model_patches(self, model: Any) -> Any:
        """Change a model so that it runs well on this device, and return it."""
        return model

    def rollout_env_vars(self) -> dict[str, str]:
        """Return environment variables that rollout engines need on this platform."""
        return {}

    def get_collective_module(self) -> Any:
        """Return the module with the collectives; ``torch.distributed`` unless the vendor brings its own."""
        return importlib.import_module("torch.distributed")

    @contextmanager
    def nvtx_range(self, _name: str) -> Generator[None, None, None]:
        """Mark what happens inside in the vendor's profiler."""
        yield

    def profiler_start(self) -> None:
        """Start the vendor's profiler."""

    def profiler_stop(self) -> None:
        """Stop it."""
