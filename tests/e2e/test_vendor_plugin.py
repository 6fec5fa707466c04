"""A vendor's plug-in, as a user would bring it: named in the environment, known in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.build import run_settings

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.mark.slow
def test_a_vendors_platform_and_engine_train_in_place_of_the_built_in_ones(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    changes = {"engine.num_ranks": 2, "engine.num_cpus": 0.25, "trainer.num_steps": 1, "evaluation": {}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(run_settings(tmp_path, tiny_model_folder, **changes)), encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "xrl_lite.cli", "train", str(config)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "XRL_LITE_USE_EXTERNAL_MODULES": "fake_vendor", "ACME_CHIPS": "1"},
        check=True,
        capture_output=True,
    )
    logs = {file.name: file.read_text() for file in (tmp_path / "runs" / "test" / "logs" / "engine").iterdir()}
    for rank in (0, 1):
        assert f"acme: rank {rank} of 2 is ready" in logs[f"{rank}.log"]
        assert "acme: faster kernels for LlamaForCausalLM" in logs[f"{rank}.log"]
