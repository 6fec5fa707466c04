"""Builders of what tests need, with only what matters given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xrl_lite.actors import ActorSystem
from xrl_lite.config import RunConfig
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.judger.build import PRELOAD

REWARDS = """
def by_length(response, label, extra_info):
    return {"score": float(len(response) % 2)}

def always_raises(response, label, extra_info):
    raise KeyError("no such key in the reward function")
"""


def make_state(**fields: Any) -> RolloutState:
    """A completed, scored attempt."""
    defaults: dict[str, Any] = {
        "message": [{"role": "user", "content": "1+1"}],
        "group_id": 0,
        "rollout_id": 0,
        "prompt_ids": [5, 6],
        "response": "2",
        "response_ids": [7, 8],
        "logprobs": [-0.1, -0.2],
        "response_mask": [1, 1],
        "reward_model": {"ground_truth": "2"},
        "reward": {"score": 1.0},
        "finish_reason": "stop",
        "status": Status.COMPLETED,
        "sample_params": SampleParams(max_tokens=8),
    }
    return RolloutState(**(defaults | fields))


def build_random_model(folder: Path, **changes: Any) -> Path:
    from xrl_lite.engine.tiny_model import build_tiny_model
    from xrl_lite.engine.tiny_model_config import TinyModelConfig

    settings = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "warm_up": None}
    config = TinyModelConfig.model_validate(settings | changes)
    return build_tiny_model(config, folder)


@contextmanager
def judger_system(num_cpus: float = 4) -> Iterator[ActorSystem]:
    """An actor system for a whole module of tests: its fork server has to be there before a test counts processes."""
    system = ActorSystem(num_cpus=num_cpus)
    first = system.spawn(dict, preload=PRELOAD)
    first.ready().result(30.0)
    first.stop().result(30.0)
    try:
        yield system
    finally:
        system.shutdown_now()


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows in the raw GSM8K form, made up."""
    return [
        {
            "question": f"Ann has {n} pens and buys {n + 1} more. How many pens does she have?",
            "answer": f"She has {n} + {n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} pens.\n#### {2 * n + 1}",
        }
        for n in range(num_rows)
    ]


def run_settings(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of a few steps on a random model; rewards differ within groups. `changes` have dotted keys."""
    rewards = folder / "rewards.py"
    if not rewards.exists():
        rewards.write_text(REWARDS, encoding="utf-8")
    settings: dict[str, Any] = {
        "name": "test",
        "num_cpus": 2,
        "output_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "task": {
            "task_name": "addition",
            "sampler_config": {"data": {"task": "addition", "num_rows": 64}, "prompt_repeat_k": 4},
            "agent_loop_config": {"sample_params": {"max_tokens": 6}},
            "judger_config": {
                "judger_name": "by_length",
                "reward_handler": f"{rewards}:by_length",
                "cpu_resources": {"num_workers": 1, "num_cpus_per_worker": 0.1},
            },
        },
        "rollout": {"num_threads": 1},
        "engine": {"num_threads": 1, "optimizer": {"learning_rate": 1e-3}},
        "trainer": {"num_steps": 3, "groups_per_step": 4},
        "evaluation": {
            "data": {"task": "addition", "split": "eval", "num_rows": 8},
            "every_steps": 0,
            "sample_params": {"sampled": {"max_tokens": 6}},
        },
        "report": {"completions_every": 0},
    }
    for key, value in changes.items():
        *outer, last = key.split(".")
        inner = settings
        for name in outer:
            inner = inner[name]
        inner[last] = value
    return settings


def run_config(folder: Path, model: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate(run_settings(folder, model, **changes))


def without_times(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    changing = ("time/", "actor/", "loop_lag")
    return [{name: value for name, value in record.items() if not name.startswith(changing)} for record in records]


class ByText:
    """A judger that scores 1.0 for "A", else 0.0."""

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        rollout_state.reward = {"score": float(rollout_state.response == "A")}
        return rollout_state

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        return [await self.judge(state) for state in rollout_states]
