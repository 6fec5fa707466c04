"""A vendor's plug-in: a kind of chip, and a training engine for it. Copy it to bring your own.

The chip, of a maker called acme, is fake: it computes on the CPU. Every process of a run loads this module, by name::

    PYTHONPATH=examples XRL_LITE_USE_EXTERNAL_MODULES=fake_vendor ACME_CHIPS=1 xrl-lite train configs/quickstart.yaml

or, once it is installed as a package, by an entry point::

    [project.entry-points."xrl_lite.plugins"]
    acme = "fake_vendor"
"""

from __future__ import annotations

import os
from typing import Any

from xrl_lite.engine.base import EngineRegistry
from xrl_lite.engine.language_model import LanguageModelEngine
from xrl_lite.platforms import PlatformRegistry
from xrl_lite.platforms.cpu import CpuPlatform


@PlatformRegistry.register
class AcmePlatform(CpuPlatform):
    """Chips of acme. A real one has a `device_name` of its own, by which torch knows its module and its tensors."""

    vendor_name = "acme"
    communication_backend_name = "gloo"

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # a real one sets `smi_command`, and asks that; no process is to hold a device only because it looked for one
        return bool(os.environ.get("ACME_CHIPS"))

    def apply_model_patches(self, model: Any) -> Any:
        print(f"acme: faster kernels for {type(model).__name__}")  # goes to logs/engine/N.log
        return model


@EngineRegistry.register("language_model", "fsdp2", device=AcmePlatform.device_name, vendor=AcmePlatform.vendor_name)
class AcmeEngine(LanguageModelEngine):
    """Takes the place of the built-in engine on chips of acme; on all others that one stays."""

    def initialize(self) -> None:
        super().initialize()
        print(f"acme: rank {self.get_data_parallel_rank()} of {self.get_data_parallel_size()} is ready")
