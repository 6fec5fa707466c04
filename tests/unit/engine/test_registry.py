"""Which engine a machine gets, and what may be registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from xrl_lite.engine.base import BaseEngine, EngineRegistry
from xrl_lite.errors import ConfigError, UnknownNameError


class Engine(BaseEngine):
    """Abstract still: the registry makes none."""


class Other(BaseEngine):
    pass


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(EngineRegistry, "_table", {})
    return


def find(device: str, vendor: str | None, environment: dict[str, str] | None = None) -> Any:
    return EngineRegistry.find("language_model", "b", device=device, vendor=vendor, environment=environment or {})


def test_the_vendors_engine_goes_before_that_of_the_device() -> None:
    EngineRegistry.register("language_model", "b", device="cuda")(Engine)
    EngineRegistry.register("language_model", "b", device="cuda", vendor="acme")(Other)
    assert find("cuda", "acme") is Other
    assert find("cuda", "nvidia") is Engine


def test_chips_that_speak_cuda_get_what_nvidia_has() -> None:
    EngineRegistry.register("language_model", "b", device="cuda", vendor="nvidia")(Engine)
    assert find("cuda", "metax") is Engine
    with pytest.raises(ConfigError, match=r"'xpu'.*'intel'.*b on cuda of nvidia"):
        find("xpu", "intel")


def test_lists_are_all_their_combinations() -> None:
    EngineRegistry.register("language_model", ["a", "b"], ["cpu", "xpu"], ["x", "y"])(Engine)
    EngineRegistry.register("value_model", "b", "cpu")(Other)
    assert find("xpu", "y") is find("cpu", "x") is EngineRegistry.get("language_model", "a", "cpu", "y") is Engine
    assert EngineRegistry.get("value_model", "b", "cpu", "x") is Other


def test_the_environment_goes_before_what_was_detected() -> None:
    EngineRegistry.register("language_model", "b", "xpu", "acme")(Engine)
    assert find("cpu", "cpu", {"XRL_LITE_ENGINE_DEVICE": "xpu", "XRL_LITE_ENGINE_VENDOR": " acme "}) is Engine
    with pytest.raises(ConfigError, match="'cpu'"):
        find("cpu", "cpu", {"XRL_LITE_ENGINE_DEVICE": "", "XRL_LITE_ENGINE_VENDOR": "acme"})


def test_no_engine_takes_anothers_place_and_none_of_a_list_is_registered_then() -> None:
    EngineRegistry.register("language_model", "b", "cpu")(Engine)
    EngineRegistry.register("language_model", "b", "cpu")(Engine)  # a module that is imported twice
    with pytest.raises(AssertionError, match="taken"):
        EngineRegistry.register("language_model", "b", ["xpu", "cpu"])(Other)
    with pytest.raises(ConfigError):
        find("xpu", None)
    with pytest.raises(AssertionError, match="BaseEngine"):
        EngineRegistry.register("language_model", "c")(dict)  # type: ignore[arg-type]


def test_unknown_names_are_told_with_what_there_is() -> None:
    EngineRegistry.register("language_model", "fsdp2", "cpu")(Engine)
    with pytest.raises(UnknownNameError, match="'fsdp2'"):
        EngineRegistry.get("language_model", "fsdp", "cpu")
    with pytest.raises(UnknownNameError, match="language_model"):
        EngineRegistry.get("languagemodel", "fsdp2", "cpu")


def test_an_engine_that_lacks_a_method_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="get_per_tensor_param_shard"):
        Engine(model_path="", config=None, num_updates=1, seed=0)  # type: ignore[abstract, arg-type]
