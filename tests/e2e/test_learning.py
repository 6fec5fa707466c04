"""Whole learning runs, as a new user starts them. Minutes each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)]


def accuracies(config: str, folder: Path, *overrides: str) -> dict[str, tuple[float, float]]:
    """Run a shipped config, warm-up included; return accuracy before and after, by way of sampling."""
    settings = [f"output_dir={folder / 'runs'}", f"model.cache_dir={folder / 'models'}", *overrides]
    command = [sys.executable, "-m", "xrl_lite.cli", "train", f"configs/{config}", *settings]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [record for record in records if "eval/sampled/accuracy" in record]
    return {
        name: (found[0][f"eval/{name}/accuracy"], found[-1][f"eval/{name}/accuracy"]) for name in ("sampled", "greedy")
    }


def test_quickstart_learns_to_sort(tmp_path: Path) -> None:
    measured = accuracies("quickstart.yaml", tmp_path)
    assert measured["sampled"][0] < 0.5
    assert measured["sampled"][1] >= 0.9, measured
    assert measured["greedy"][1] >= 0.9, measured


def test_addition_is_learned(tmp_path: Path) -> None:
    measured = accuracies("addition.yaml", tmp_path)
    assert measured["greedy"][1] >= 0.85, measured
