from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xrl_lite.errors import UnknownNameError
from xrl_lite.platforms import PLATFORM_VARIABLE, PlatformBase, PlatformRegistry


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(PlatformRegistry, "_table", dict(PlatformRegistry._table))
    return


def make(name: str, *, present: bool) -> type[PlatformBase]:
    class Made(PlatformBase):
        device_name = "cpu"
        vendor_name = name
        communication_backend_name = "gloo"

        def is_available(self) -> bool:
            return present

    return Made


def test_a_machine_without_accelerators_is_a_cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    platform = PlatformRegistry.detect({})
    assert (platform.vendor_name, platform.device_name, platform.communication_backend_name) == ("cpu", "cpu", "gloo")
    assert (platform.device_count(), platform.current_device()) == (1, 0)
    with pytest.raises(ValueError, match="number 0; got 3"):
        platform.set_device(3)


def test_the_variable_names_the_platform() -> None:
    assert PlatformRegistry.detect({PLATFORM_VARIABLE: "nvidia"}).device_name == "cuda"
    with pytest.raises(UnknownNameError, match=r"XRL_LITE_PLATFORM: Unknown platform 'nvida'.*nvidia.*cpu, nvidia"):
        PlatformRegistry.detect({PLATFORM_VARIABLE: "nvida"})


def test_what_was_registered_last_is_asked_first_and_absent_ones_are_passed_over() -> None:
    for name, present in (("first", True), ("second", True), ("third", False)):
        PlatformRegistry.register(make(name, present=present))
    assert PlatformRegistry.detect({}).vendor_name == "second"


def test_a_platform_that_takes_anothers_place_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    mine = make("nvidia", present=True)
    assert PlatformRegistry.register(mine) is mine
    assert "takes the place of" in caplog.text
    assert isinstance(PlatformRegistry.get("nvidia"), mine)
    caplog.clear()
    PlatformRegistry.register(mine)
    assert not caplog.text


@pytest.mark.parametrize("wrong", [int, "cpu"])
def test_only_platforms_can_be_registered(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="PlatformBase"):
        PlatformRegistry.register(wrong)


def test_a_platform_must_say_its_names() -> None:
    class Nameless(PlatformBase):
        vendor_name = "nameless"

        def is_available(self) -> bool:
            return True

    with pytest.raises(AssertionError, match="Nameless must set device_name"):
        PlatformRegistry.register(Nameless)


@pytest.mark.parametrize(("script", "found"), [("exit 0", True), ("exit 3", False)])
def test_the_vendors_command_tells_whether_a_device_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: bool
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PlatformRegistry.get("nvidia").is_platform_available(use_smi_check=True) is found


def test_choosing_a_platform_loads_no_torch() -> None:
    program = (
        "import sys; from xrl_lite.platforms import current_platform; current_platform(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "PATH": ""}
    )
    assert done.stdout.strip() == "False"
