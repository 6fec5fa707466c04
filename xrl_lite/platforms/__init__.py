"""Kinds of machines: what a training or rollout engine must know of the chips it runs on. Start at `current_platform`.

Built in are ``cpu`` and ``nvidia``. A vendor's package adds its own with `PlatformRegistry.register`, in a module that
``XRL_LITE_USE_EXTERNAL_MODULES`` or the entry point group ``xrl_lite.plugins`` names, so that every process knows it.
"""

from __future__ import annotations

from xrl_lite.platforms.base import PlatformBase
from xrl_lite.platforms.registry import PLATFORM_VARIABLE, PlatformRegistry, current_platform

__all__ = ["PLATFORM_VARIABLE", "PlatformBase", "PlatformRegistry", "current_platform"]
