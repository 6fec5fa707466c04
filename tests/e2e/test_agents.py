"""Agents of the user's own, trained for two steps on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.build import run_config
from xrl_lite.errors import RunError
from xrl_lite.run import train

AGENTS = '''
from xrl_lite.agent_loop import AgentLoopBase, AgentLoopOutput

class AsksTwice(AgentLoopBase):
    """Asks whether it is sure, and takes the second answer."""

    async def run(self, sampling_params, **row):
        tokens = self.start(row["raw_prompt"])
        for turn in range(2):
            output = await self.server_manager.generate(
                row["session_id"], prompt_ids=tokens.context_ids, sampling_params={**sampling_params, "max_tokens": 4}
            )
            tokens.add_sampled(
                output.token_ids, output.log_probs, policy_versions=output.extra_fields["policy_versions"]
            )
            if turn == 0:
                tokens.add_messages([{"role": "user", "content": "Sure?"}])
        return [AgentLoopOutput.of_row(each, num_turns=4) for each in tokens.rows()]
'''


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
async def test_an_agent_of_ones_own_is_trained(tmp_path: Path, tiny_model_folder: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "agents.yaml").write_text(f"[{{name: asks_twice, _target_: '{tmp_path}/agents.py:AsksTwice'}}]")
    agents = {
        "type": "agents",
        "agent_loop_config_path": str(tmp_path / "agents.yaml"),
        "default_agent_loop": "asks_twice",
        "sample_params": {"max_tokens": 12},
    }
    changes = {"task.agent_loop_config": agents, "trainer.num_steps": 2}
    config = run_config(tmp_path, tiny_model_folder, **changes)
    summary = await train(config)
    assert summary is not None
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert len(steps) == 2
    # two turns, at most 4 sampled tokens each, and the question between them
    assert all(record["completions/max_length"] > 8 for record in steps)
    assert all(record["logprob_gap/max"] < 1e-4 for record in steps)


TELLS_NO_LOGPROBS = """
from xrl_lite.agent_loop import AgentLoopBase, AgentLoopOutput

class TellsNoLogprobs(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = self.start(row["raw_prompt"]).context_ids
        output = await self.server_manager.generate(
            row["session_id"], prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 4}
        )
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids)
        )
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
async def test_an_agent_that_tells_no_log_probs_is_trained_where_they_are_not_needed(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    (tmp_path / "agents.py").write_text(TELLS_NO_LOGPROBS)
    (tmp_path / "agents.yaml").write_text(f"[{{name: quiet, _target_: '{tmp_path}/agents.py:TellsNoLogprobs'}}]")
    agents = {
        "type": "agents",
        "agent_loop_config_path": str(tmp_path / "agents.yaml"),
        "default_agent_loop": "quiet",
        "sample_params": {"max_tokens": 4},
    }
    changes = {"task.agent_loop_config": agents, "trainer.num_steps": 2}
    config = run_config(tmp_path, tiny_model_folder, **changes)
    await train(config)
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert len([step for step in steps if "loss" in step]) == 2
    assert not any("logprob_gap/mean" in step for step in steps)

    changes |= {
        "algorithm": {"rollout_correction": "decoupled_token_is"},
        "trainer.max_failed_groups": 2,
        "name": "needed",
    }
    with pytest.raises(RunError, match="returned a trajectory without log-probs"):
        await train(run_config(tmp_path, tiny_model_folder, **changes))
