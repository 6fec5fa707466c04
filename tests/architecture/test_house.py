"""The rules of the house: layers, light imports, types, style, honest names."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

import xrl_lite
from xrl_lite import errors
from xrl_lite.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "vllm", "datasets", "matplotlib", "ray")
LIGHT = (
    "xrl_lite",
    "xrl_lite.config",
    "xrl_lite.actors",
    "xrl_lite.data",
    "xrl_lite.judger",
    "xrl_lite.replay_buffer",
    "xrl_lite.tools",
    "xrl_lite.agent_loop",
)


def run_tool(*command: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def modules() -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(xrl_lite.__path__, "xrl_lite."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def test_imports_go_down_only() -> None:
    # in a process of its own: it configures logging, and turns off the loggers that exist
    result = run_tool(
        "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", LIGHT)
def test_import_loads_nothing_heavy(name: str) -> None:
    code = f"import sys, {name}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_tool("-c", code).stdout.strip() == "[]"


def test_reading_a_config_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from xrl_lite.config import load_config; "
        "load_config(Path('configs/quickstart.yaml')); "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = run_tool("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def test_every_error_pickles() -> None:
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, Exception):
            copy = pickle.loads(pickle.dumps(error("what failed")))
            assert type(copy) is error
            assert copy.args == ("what failed",)


def test_every_setting_has_a_description() -> None:
    missing = [
        f"{model.__name__}.{name}"
        for module in modules()
        for model in vars(module).values()
        if isinstance(model, type) and issubclass(model, Settings) and model.__module__ == module.__name__
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert missing == []


def test_every_name_in_all_exists() -> None:
    for module in modules():
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{module.__name__}.__all__ names {name!r}"


def test_core_dependencies_stay_light() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9_-]", line)[0] for line in project["dependencies"]]
    assert len(names) <= 10
    assert not set(names) & {*HEAVY, "numpy"}


def test_top_level_holds_what_was_promised() -> None:
    listed = run_tool("-c", "import subprocess; print(subprocess.check_output(['git', 'ls-files'], text=True))").stdout
    tops = {line.split("/")[0] for line in listed.split() if not line.startswith(".")}
    assert tops == {"LICENSE", "README.md", "configs", "examples", "pyproject.toml", "tests", "xrl_lite"}


def test_no_module_is_called_after_nothing() -> None:
    bad = {"utils", "helpers", "common", "misc"}
    assert not [path for path in (ROOT / "xrl_lite").rglob("*.py") if path.stem in bad]


def test_models_of_the_settings_refuse_unknown_keys() -> None:
    for module in modules():
        for model in vars(module).values():
            if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == module.__name__:
                assert model.model_config.get("extra") == "forbid", f"{module.__name__}.{model.__name__}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("-m", "ruff", "check", "."), id="ruff-check"),
        pytest.param(("-m", "ruff", "format", "--check", "."), id="ruff-format"),
        pytest.param(("-m", "pyright", "--pythonpath", sys.executable), id="pyright"),
    ],
)
def test_style_and_types(command: tuple[str, ...]) -> None:
    result = run_tool(*command)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
