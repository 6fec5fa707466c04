"""The table of platforms, and which of them this machine is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TypeVar, cast

from xrl_lite.errors import UnknownNameError, did_you_mean
from xrl_lite.log import get_logger
from xrl_lite.platforms.base import PlatformBase

P = TypeVar("P", bound=type[PlatformBase])
logger = get_logger(__name__)

PLATFORM_VARIABLE = "XRL_LITE_PLATFORM"

_FALLBACK = "cpu"


class PlatformRegistry:
    """Platforms by the name of their vendor. Those that were registered last are asked first."""

    _table: dict[str, str | type[PlatformBase]] = {  # noqa: RUF012 - the registry itself
        "cpu": "xrl_lite.platforms.cpu:CpuPlatform",
        "nvidia": "xrl_lite.platforms.nvidia:NvidiaPlatform",
    }

    @classmethod
    def register(cls, platform: P) -> P:
        """Add a platform; usable as a decorator. One that has the name already is replaced, which is logged.

        Raises:
            AssertionError: it is no subclass of `PlatformBase`, or a name is missing.
        """
        given = cast("object", platform)  # whoever registers may not check types
        is_platform = isinstance(given, type) and issubclass(given, PlatformBase)
        assert is_platform, f"{platform!r} must be a subclass of PlatformBase"
        for required in ("device_name", "vendor_name", "communication_backend_name"):
            assert hasattr(platform, required), f"{platform.__name__} must set {required}"
        known = cls._table.get(platform.vendor_name)
        if known is not None and known is not platform:
            logger.warning("platform %r: %r takes the place of %r", platform.vendor_name, platform, known)
        cls._table[platform.vendor_name] = platform
        return platform

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all platforms."""
        return sorted(cls._table)

    @classmethod
    def get(cls, name: str) -> PlatformBase:
        """Return a platform by the name of its vendor.

        Raises:
            UnknownNameError: there is none; lists those that there are.
        """
        if name not in cls._table:
            raise UnknownNameError(
                f"Unknown platform {name!r}.{did_you_mean(name, cls._table)} Known: {', '.join(cls.names())}. "
                f"A plug-in adds one with PlatformRegistry.register, in a module that "
                f"XRL_LITE_USE_EXTERNAL_MODULES names."
            )
        found = cls._table[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = getattr(importlib.import_module(module), attribute)
        return found()

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> PlatformBase:
        """Return the platform that ``XRL_LITE_PLATFORM`` names, else the first that is present, else ``cpu``.

        The vendors' commands are asked, not their drivers, so the process stays without a device.

        Raises:
            UnknownNameError: the variable names a platform that there is not.
        """
        if name := environment.get(PLATFORM_VARIABLE, "").strip():
            try:
                return cls.get(name)
            except UnknownNameError as error:
                raise UnknownNameError(f"{PLATFORM_VARIABLE}: {error}") from error
        for name in reversed(cls._table):
            if name != _FALLBACK and (platform := cls.get(name)).is_platform_available(use_smi_check=True):
                return platform
        return cls.get(_FALLBACK)


_current: list[PlatformBase] = []


def current_platform() -> PlatformBase:
    """Return the platform of this machine. It is looked for once in each process, after plug-ins were loaded."""
    if not _current:
        _current.append(PlatformRegistry.detect())
    return _current[0]
