"""Loading of user code by path."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from xrl_lite import registry
from xrl_lite.errors import PluginError
from xrl_lite.registry import EXTERNAL_MODULES_VARIABLE, PLUGIN_GROUP, load_object, load_plugins, make_importable

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
