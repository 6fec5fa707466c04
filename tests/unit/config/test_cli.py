"""The command line: what people type wrong, and what they are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import xrl_lite
from tests.build import run_settings, write_rows
from xrl_lite.cli import EXIT_ERROR, EXIT_USAGE, main
from xrl_lite.config.check import check_installed
from xrl_lite.errors import ConfigError


def make_model_folder(folder: Path, *, tokenizer: bool = True, template: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
    return folder


def write(folder: Path, **changes: object) -> str:
    model = make_model_folder(folder / "model")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(run_settings(folder, model, **changes)), encoding="utf-8")
    return str(path)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = EXIT_USAGE) -> str:
    assert main(arguments) == code
    return " ".join(capsys.readouterr().err.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert xrl_lite.__version__ in capsys.readouterr().out


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "engine.optimizer.learning_rate" in shown
    assert "Peak learning rate." in shown


def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", write(tmp_path), "seed=3", "--dry-run", "name=other"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 3" in shown
    assert "name: other" in shown


def test_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", write(tmp_path), "--dry-rum"])


def test_missing_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no config file" in complaint(capsys, "train", str(tmp_path / "none.yaml"))


def test_missing_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, **{"task.sampler_config": {"data": {"path": str(tmp_path / "rows.jsonl")}}})
    assert "There is no file" in complaint(capsys, "train", config)


def test_empty_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [])
    config = write(tmp_path, **{"task.sampler_config": {"data": {"path": str(rows)}}})
    assert "has no rows" in complaint(capsys, "train", config)


def test_row_without_ground_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1"}, {"prompt": "q"}])
    config = write(tmp_path, **{"task.sampler_config": {"data": {"path": str(rows)}}})
    assert "row 1: there is no ground truth" in complaint(capsys, "train", config)


def test_unknown_data_source_names_the_closest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1", "data_source": "openai/gsm9k"}])
    changes = {"task.sampler_config": {"data": {"path": str(rows)}}, "task.judger_config": None, "evaluation": {}}
    text = complaint(capsys, "train", write(tmp_path, **changes))
    assert "No judger is known for data source 'openai/gsm9k'. Did you mean 'openai/gsm8k'?" in text


def test_data_source_that_is_no_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1", "data_source": "maths"}])
    judger = {"type": "composed", "branches": {"math": {"type": "exact_match"}}}
    changes = {"task.sampler_config": {"data": {"path": str(rows)}}, "task.judger_config": judger, "evaluation": {}}
    text = complaint(capsys, "train", write(tmp_path, **changes))
    assert "Row 0 has data source 'maths', which is no branch of the judger. Did you mean 'math'?" in text


@pytest.mark.parametrize("option", [(), ("--dry-run",)])
def test_more_workers_than_cpu_slots(
    option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = "task.judger_config.cpu_resources={num_workers: 64, num_cpus_per_worker: 1}"
    text = complaint(capsys, "train", write(tmp_path), workers, "num_cpus=2", *option, code=EXIT_ERROR)
    assert "The actors of the run ask for 65 CPU slots, there are 2: engine/0 0.5 rollout/0 0.5" in text


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [({"tokenizer": False}, "has no tokenizer"), ({"template": False}, "has no chat template")],
)
def test_model_folder_that_lacks_something(
    parts: dict[str, bool], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_folder(tmp_path / "lacking", **parts)
    assert wanted in complaint(capsys, "train", write(tmp_path), f"model.path={model}")


def test_model_folder_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no config.json" in complaint(capsys, "train", write(tmp_path), f"model.path={tmp_path}")


@pytest.mark.parametrize("path", ["/no/model", "./no_model", "../no_model", "~nobody/model", "~/no_model", "a/b/c"])
@pytest.mark.parametrize("command", ["train", "eval", "dry run"])
def test_a_model_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, command: str
) -> None:
    arguments = ["train", "--dry-run"] if command == "dry run" else [command]
    text = complaint(capsys, *arguments, write(tmp_path), f"model.path={path}")
    assert text.startswith("ConfigError: model.path ")
    assert "there is no such folder (looked for /" in text


def test_a_folder_of_the_critics_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("algorithm.advantage=gae", "critic.path=/no/model")
    assert "critic.path /no/model: there is no such folder" in complaint(capsys, "train", write(tmp_path), *overrides)


def test_what_is_not_installed_is_named_with_its_cure() -> None:
    with pytest.raises(ConfigError, match=r"A run needs no_such_module\. .*pip install 'xrl-lite\[train\]'"):
        check_installed(("json", "no_such_module"))


def test_torn_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = tmp_path / "runs" / "test" / "checkpoints" / "step_000004"
    torn.mkdir(parents=True)
    config = write(tmp_path)
    text = complaint(capsys, "train", config, f"checkpoint.resume={torn}", code=EXIT_ERROR)
    assert "has no COMPLETE marker" in text
    text = complaint(capsys, "train", config, "checkpoint.resume=auto", code=EXIT_ERROR)
    assert "No checkpoint in" in text


def test_evaluating_a_checkpoint_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = complaint(capsys, "eval", write(tmp_path), f"checkpoint={tmp_path / 'none'}")
    assert "There is no checkpoint folder" in text


def test_dry_run_loads_no_model_library(tmp_path: Path) -> None:
    code = (
        "import sys; from xrl_lite.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "train", write(tmp_path), "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
