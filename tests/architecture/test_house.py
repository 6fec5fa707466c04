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
from xrl_lite.judger.build import PRELOAD
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
    "xrl_lite.algorithms",
    "xrl_lite.metrics",
)
LAZY = LIGHT[1:]
NOT_FOR_SETTINGS = (
    *("numpy", "httpx", "rich", "starlette", "asyncio", "uvloop", "cloudpickle", "sqlite3", "isal"),
    *("xrl_lite.actors.system", "xrl_lite.judger.native", "xrl_lite.replay_buffer.buffer", "xrl_lite.tools.toolbox"),
    *("xrl_lite.agent_loop.manager", "xrl_lite.trainer.base", "xrl_lite.rollout.controller"),
)


def run_tool(*command: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
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


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of the modules a fresh interpreter has loaded after some code."""
    result = run_tool("-c", f"{code}\nimport sys; print(*(name for name in {names!r} if name in sys.modules))")
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("name", LIGHT)
def test_no_public_name_loads_anything_heavy(name: str) -> None:
    code = f"import {name} as package\nfor name in getattr(package, '__all__', ()): getattr(package, name)"
    assert loaded_by(code, HEAVY) == []


def test_importing_actors_loads_only_what_is_used() -> None:
    assert loaded_by("import xrl_lite.actors", (*HEAVY, *NOT_FOR_SETTINGS)) == []
    unused = ("pydantic", "anyio", "importlib.metadata")
    assert loaded_by("from xrl_lite.actors import ActorSystem", (*HEAVY, "numpy", "httpx", "rich", *unused)) == []


def test_reading_a_config_loads_settings_only() -> None:
    code = (
        "from pathlib import Path; from xrl_lite.config import load_config; "
        "load_config(Path('configs/quickstart.yaml'))"
    )
    assert loaded_by(code, (*HEAVY, *NOT_FOR_SETTINGS)) == []


def test_a_fresh_judger_worker_finds_everything_preloaded() -> None:
    code = f"""
import sys, importlib
for name in {PRELOAD!r}:
    importlib.import_module(name)
preloaded = set(sys.modules)
from xrl_lite.judger import JudgerActor, JudgerConfig
config = JudgerConfig(judger_name="j", reward_handler=lambda response, label, extra_info: {{"score": 1.0}})
assert JudgerActor(config).judge_payload({{"response": "a", "label": "a"}}) == {{"score": 1.0}}
print(*(name for name in set(sys.modules) - preloaded if name.startswith("xrl_lite")))
"""
    result = run_tool("-c", code)
    assert (result.stdout.split(), result.returncode) == ([], 0), result.stderr


@pytest.mark.parametrize("package", LAZY)
def test_lazy_package_offers_what_it_says_it_does(package: str) -> None:
    module = importlib.import_module(package)
    names = {name for name in dir(module) if not name.startswith("_")}
    assert set(module.__all__) <= names
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    assert not submodules & set(module.__all__), "a submodule would replace the name as soon as it is imported"
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_names_of_a_lazy_package_are_those_of_their_modules() -> None:
    from xrl_lite import judger
    from xrl_lite.judger.config import JudgerConfig

    assert judger.JudgerConfig is JudgerConfig
    assert pickle.loads(pickle.dumps(judger.JudgerConfig)) is JudgerConfig


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


def test_models_refuse_unknown_keys_or_say_that_servers_may_send_more() -> None:
    for module in modules():
        for model in vars(module).values():
            if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == module.__name__:
                known = ("ignore",) if module.__name__ == "xrl_lite.rollout.openai_engine" else ("forbid",)
                assert model.model_config.get("extra") in known, f"{module.__name__}.{model.__name__}"


@pytest.mark.timeout(900)
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
