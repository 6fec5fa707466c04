"""The README's commands are the ones that are run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from xrl_lite.agent_loop import AGENT_LOOPS, AgentsConfig
from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.algorithms.estimators import ADVANTAGE_ESTIMATORS
from xrl_lite.algorithms.policy_losses import POLICY_LOSSES
from xrl_lite.config import RunConfig, load_config
from xrl_lite.config.describe import describe
from xrl_lite.judger import JudgerConfig
from xrl_lite.tools import read_tools

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_opens_with_two_commands_and_ci_runs_the_second() -> None:
    train, test = (block.strip() for block in blocks("bash")[:2])
    assert train.endswith("xrl-lite train configs/quickstart.yaml")
    assert test in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", re.findall(r"^xrl-lite train (configs/\S+) (\S+=\S+)", README, re.MULTILINE))
def test_shown_overrides_are_understood(line: tuple[str, str]) -> None:
    config, override = line
    load_config(ROOT / config, [override])


def test_settings_named_in_the_text_exist() -> None:
    known = {setting.key for setting in describe(RunConfig)}
    ours = "\n".join(line for line in README.splitlines() if not line.startswith("| verl"))
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: |=|`)", ours)
    settings = [key for key in named if key.partition(".")[0] in RunConfig.model_fields]
    assert settings
    assert [key for key in settings if not any(one == key or one.startswith(f"{key}.") for one in known)] == []


def test_the_shown_judger_is_one(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("yaml") if "judger_config" in block)
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def score(response, label, extra_info):\n    return {'score': 1.0}\n")
    settings = yaml.safe_load(block)["judger_config"]
    settings["reward_handler"] = settings["reward_handler"].replace("my_rewards.py", str(rewards))
    assert JudgerConfig.model_validate(settings).request_timeout == 30


def test_the_shown_algorithm_is_one() -> None:
    (block,) = (block for block in blocks("yaml") if "algorithm" in block)
    config = AlgorithmConfig.model_validate(yaml.safe_load(block)["algorithm"])
    assert (config.advantage, config.aggregation) == ("rloo", "seq-mean-token-mean")


@pytest.mark.parametrize(("setting", "known"), [("advantage", ADVANTAGE_ESTIMATORS), ("policy_loss", POLICY_LOSSES)])
def test_the_table_of_algorithms_is_complete(setting: str, known: Iterable[str]) -> None:
    (row,) = re.findall(rf"^\| `{setting}` \| (.*) \|$", README, re.MULTILINE)
    shown = {part.split()[0] for part in row.split(", ")}
    assert shown == {name for name in known if not name.endswith("_vectorized") and not name.startswith("test_")}


def test_the_shown_tool_and_settings_are_understood(tmp_path: Path) -> None:
    (tool,), (settings,) = blocks("python"), blocks("json")
    (tmp_path / "my_tools.py").write_text(tool)
    shown = json.loads(settings)["agent_loop_config"]
    shown["tools"]["function_tool_path"] = str(tmp_path / "my_tools.py")
    config = AgentsConfig.model_validate({key: value for key, value in shown.items() if key != "type"})
    assert [source.name for source in read_tools(config.tools)] == ["population", "calculator"]


def test_the_shown_agent_that_is_not_ours_is_understood() -> None:
    (block,) = (block for block in blocks("yaml") if "black_box" in block)
    config = AGENT_LOOPS.resolve("black_box").model_validate(
        {key: value for key, value in yaml.safe_load(block)["agent_loop_config"].items() if key != "type"}
    )
    assert config.max_row_tokens(None) == 8192
