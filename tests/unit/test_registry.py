"""Loading of user code by path."""

from __future__ import annotations

import pickle
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import cloudpickle
import pytest

from xrl_lite import registry
from xrl_lite.errors import PluginError
from xrl_lite.lazy import is_installed
from xrl_lite.registry import (
    EXTERNAL_MODULES_VARIABLE,
    PLUGIN_GROUP,
    load_object,
    load_plugins,
    make_importable,
    path_of,
)

ADVICE = r"called sys\.exit\({}\); guard it with `if __name__ == '__main__':`"


@pytest.mark.parametrize("code", ["0", "3", "None", "'usage'"])
def test_a_file_that_exits_is_an_error_that_says_what_to_write(tmp_path: Path, code: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"import sys\ndef score(): ...\nsys.exit({code})\n", encoding="utf-8")
    with pytest.raises(PluginError, match=ADVICE.format(code)):
        load_object(f"{file}:score")


def test_a_module_and_a_plugin_that_exit_are_errors_that_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    make_importable(tmp_path)
    with pytest.raises(PluginError, match=f"'module_that_exits' {ADVICE.format(0)}"):
        load_object("module_that_exits:score")
    with pytest.raises(PluginError, match=f"{EXTERNAL_MODULES_VARIABLE}=module_that_exits.* {ADVICE.format(0)}"):
        load_plugins({EXTERNAL_MODULES_VARIABLE: "module_that_exits"})

    plugin = EntryPoint("mine", "module_that_exits", PLUGIN_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([plugin]).select(group=group))
    with pytest.raises(PluginError, match=f"plug-in 'mine'.* {ADVICE.format(0)}"):
        load_plugins({})


def test_a_file_may_import_what_lies_beside_it_also_later(tmp_path: Path) -> None:
    (tmp_path / "beside_first.py").write_text("V = 1\n", encoding="utf-8")
    (tmp_path / "beside_later.py").write_text("V = 2\n", encoding="utf-8")
    file = tmp_path / "rewards.py"
    code = "import beside_first\ndef score():\n    import beside_later\n    return beside_first.V, beside_later.V"
    file.write_text(code, encoding="utf-8")
    assert load_object(f"{file}:score")() == (1, 2)


def test_a_file_beside_user_code_hides_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the wrong one')\n", encoding="utf-8")
    file = tmp_path / "rewards.py"
    file.write_text("import colorsys\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_object(f"{file}:colorsys").rgb_to_hsv


def write_rewards(folder: Path, code: str, **helpers: str) -> Path:
    folder.mkdir()
    for name, text in {"rewards": code, **helpers}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder / "rewards.py"


def test_what_lies_beside_a_file_comes_before_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = write_rewards(tmp_path / "current", "", hidden_helper="V = 'wrong'").parent
    monkeypatch.setattr(sys, "path", [str(current), *sys.path])
    file = write_rewards(tmp_path / "rewards", "from hidden_helper import V\n", hidden_helper="V = 'right'")
    path, finders = list(sys.path), list(sys.meta_path)
    assert load_object(f"{file}:V") == "right"
    assert (sys.path, sys.meta_path) == ([*path, str(file.parent)], finders)


def test_code_beside_a_file_that_the_current_folder_hides_travels_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = write_rewards(tmp_path / "current", "", hidden_code="def score(): return 'wrong'").parent
    monkeypatch.setattr(sys, "path", [str(current), *sys.path])
    file = write_rewards(
        tmp_path / "rewards", "from hidden_code import score\n", hidden_code="def score(): return 'right'"
    )
    score = load_object(f"{file}:score")
    data: bytes = cloudpickle.dumps(score)  # pyright: ignore[reportUnknownMemberType]
    path = f"{file.parent}/hidden_code.py:score"
    assert path_of(score) == path
    monkeypatch.delitem(sys.modules, "hidden_code")
    assert (pickle.loads(data)(), load_object(path)()) == ("right", "right")


@pytest.mark.parametrize(
    ("code", "helpers"),
    [
        ("from twin_a import V", {"twin_a": "V = {}"}),
        ("from twin_b import only_{}", {"twin_b": "only_{} = 1"}),
        ("import twin_outer", {"twin_outer{}": "", "twin_outer": "import twin_inner", "twin_inner": "V = {}"}),
    ],
    ids=["same names", "other names", "through another"],
)
def test_two_files_with_helpers_of_one_name_are_refused(tmp_path: Path, code: str, helpers: dict[str, str]) -> None:
    first, second = (
        write_rewards(
            tmp_path / f"of_{number}",
            code.format(number),
            **{name.format(number): text.format(number) for name, text in helpers.items()},
        )
        for number in range(2)
    )
    load_object(f"{first}:__name__")
    with pytest.raises(PluginError, match=r"would get .*of_0/twin_\w+\.py\. .* rename twin_\w+\.py") as refused:
        load_object(f"{second}:__name__")
    assert f"Cannot load {second}" in str(refused.value)
    assert not any(getattr(module, "__file__", None) == str(second) for module in sys.modules.values())


def test_a_helper_that_is_imported_later_and_hidden_by_then_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiding = write_rewards(tmp_path / "current", "", later_helper="V = 'wrong'").parent
    monkeypatch.setattr(sys, "path", [str(hiding), *sys.path])
    file = write_rewards(tmp_path / "rewards", "def score():\n    import later_helper\n", later_helper="V = 'right'")
    with pytest.raises(PluginError, match=f"would get {hiding}/later_helper.py"):
        load_object(f"{file}:score")


def test_a_folder_with_the_name_of_a_library_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_library").mkdir()
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    names = ("no_library", "a_package", "no_such_thing", "pydantic", "sys")
    assert [name for name in names if is_installed(name)] == ["a_package", "pydantic", "sys"]
    import_module("no_library")
    assert not is_installed("no_library")
