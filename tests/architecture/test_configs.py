"""Every shipped config is read, dumps as what it was, and says what it would start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from xrl_lite.cli import main
from xrl_lite.config import RunConfig, dump_config, load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted([*(ROOT / "configs").iterdir(), *(ROOT / "examples").rglob("*.yaml")])
SYNTHETIC = [path for path in (ROOT / "configs").glob("*.yaml") if "gsm8k" not in path.name]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads_and_its_dump_is_the_same(path: Path) -> None:
    config = load_config(path)
    assert RunConfig.model_validate(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    "words",
    [
        shlex.split(line, comments=True)
        for path in CONFIGS
        for line in re.findall(r"^#   xrl-lite train (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ],
    ids=" ".join,
)
def test_commands_in_comments_are_understood(words: list[str]) -> None:
    config, *overrides = words
    shown, shipped = load_config(ROOT / config, overrides), load_config(ROOT / config)
    assert shown.task.sampler_config.data.question_suffix == shipped.task.sampler_config.data.question_suffix


def test_yaml_and_python_form_of_gsm8k_are_one_run() -> None:
    assert load_config(ROOT / "configs/gsm8k.yaml") == load_config(ROOT / "configs/gsm8k.py")


@pytest.mark.parametrize("path", SYNTHETIC, ids=lambda path: path.name)
def test_dry_run_starts_nothing_and_shows_the_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(path), "--dry-run", "seed=7", "num_cpus=2"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 7" in shown
    assert "rollout/0" in shown
    assert "held out" in shown
