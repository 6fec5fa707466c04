"""Trainer and replica on the only accelerator of a machine, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.build import run_settings

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.mark.parametrize("mode", ["sync", pytest.param("colocate_async", marks=pytest.mark.slow)])
def test_trainer_and_replica_take_turns_on_one_accelerator(mode: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    changes: dict[str, Any] = {
        "rollout.engine": "noting",
        "rollout.num_accelerators": 1,
        "trainer.mode": mode,
        "trainer.num_steps": 1,
        "evaluation": {},
        "checkpoint": {"every_steps": 0},
    }
    if mode != "sync":
        changes["task.produce_strategy_config"] = {"type": "async", "max_staleness": 1}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    config, notes = tmp_path / "config.yaml", tmp_path / "notes"
    config.write_text(yaml.safe_dump(run_settings(tmp_path, tiny_model_folder, **changes)), encoding="utf-8")
    environment = {
        "PYTHONPATH": str(ROOT),
        "XRL_LITE_USE_EXTERNAL_MODULES": "tests.processes.device_bodies",
        "XRL_LITE_PLATFORM": "noting",
        "CUDA_VISIBLE_DEVICES": "0",
        "NOTES_FILE": str(notes),
    }
    subprocess.run(
        [sys.executable, "-m", "tests.processes.one_device_program", str(tmp_path), str(config)],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        timeout=170,
    )
    assert notes.read_text().splitlines() == [
        "trainer: sees 0",
        "replica: sees 0",
        "replica: has weights 0",
        "replica: sleeps, level 1",
        "trainer: begins",
        "trainer: ends",
        "trainer: cache emptied",
        "replica: wakes weights",
        "replica: has weights 1",
        "replica: wakes kv_cache",
    ]
