"""What is tried on this machine, and what is said where something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xrl_lite import doctor
from xrl_lite.cli import EXIT_ERROR, EXIT_OK, main

pytestmark = pytest.mark.process


def test_a_machine_that_runs_these_tests_has_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--output-dir", str(tmp_path / "runs")]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "pydantic" in shown
    assert "a killed process was noticed and replaced" in shown
    assert "problem" not in shown


def test_a_library_that_does_not_load_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "transformers.py"
    broken.write_text("import torchvision_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert main(["doctor", "--output-dir", str(tmp_path)]) == EXIT_ERROR
    shown = capsys.readouterr().out
    assert "transformers does not load: ModuleNotFoundError: No module named 'torchvision_is_not_here'" in shown
    assert "pip uninstall torchvision" in shown


def test_a_folder_that_cannot_be_written_to_is_a_problem() -> None:
    (finding,) = (finding for finding in doctor.examine(Path("/proc/runs")) if finding.what == "run folders")
    assert finding.verdict is doctor.Verdict.PROBLEM
    assert "output_dir=" in finding.advice
