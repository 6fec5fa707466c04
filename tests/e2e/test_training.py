"""Whole runs of a few steps on a random model: every part is the real one."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from tests.build import gsm8k_rows, run_config, without_times, write_rows
from xrl_lite import run
from xrl_lite.cli import main
from xrl_lite.config import load_config
from xrl_lite.errors import JudgerError
from xrl_lite.trainer.checkpoint import is_complete

USERS_LOSS = """
from xrl_lite.algorithms.aggregation import agg_loss

def half(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
         rollout_is_weights=None):
    losses = -0.5 * advantages * (log_prob - old_log_prob).exp()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {"my_share": 0.5}
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


class Silent:
    """A reporter that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, *, num_steps: int, first_step: int) -> None: ...
    def step(self, step: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, metrics: dict[str, float]) -> None: ...
    def completions(self, step: int, states: Any) -> None: ...
    def finish(self) -> None: ...
    def summary(self, records: Any, folder: Path) -> None: ...


async def train(folder: Path, model: Path, **changes: Any) -> list[dict[str, Any]]:
    config = run_config(folder, model, **changes)
    await run.train(config, reporter=Silent())
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


async def test_a_run_leaves_the_folder_that_is_promised(tmp_path: Path, tiny_model_folder: Path) -> None:
    records = await train(tmp_path, tiny_model_folder)

    folder = tmp_path / "runs" / "test"
    assert [record["step"] for record in records] == [0, 1, 2, 3, 3]
    assert {path.name for path in (folder / "rollouts").iterdir()} == {f"step_{n:06d}.jsonl" for n in (1, 2, 3)}
    assert is_complete(folder / "checkpoints" / "step_000003")
    assert {"driver.log", "engine", "rollout", "judger"} <= {path.name for path in (folder / "logs").iterdir()}
    with sqlite3.connect(folder / "buffer.sqlite") as database:
        kept = database.execute("SELECT step, count(*) FROM groups WHERE status = 'trained' GROUP BY step").fetchall()
    assert kept == [(1, 4), (2, 4), (3, 4)]
    trained = [record for record in records if "loss" in record]
    assert [record["judger/by_length/ok"] for record in records] == [8, 16, 16, 16, 8]
    assert all(record["logprob_gap/max"] < 1e-4 for record in trained)
    assert all(0 < record["grad_norm"] < 100 for record in trained)


async def test_same_seed_same_bits_with_one_or_four_judger_workers(tmp_path: Path, tiny_model_folder: Path) -> None:
    workers = "task.judger_config"
    judger = run_config(tmp_path, tiny_model_folder).model_dump(mode="json")["task"]["judger_config"]
    four = judger | {"cpu_resources": {"num_workers": 4, "num_cpus_per_worker": 0.1}}

    once = await train(tmp_path, tiny_model_folder, name="once")
    again = await train(tmp_path, tiny_model_folder, name="again", **{workers: four})
    other = await train(tmp_path, tiny_model_folder, name="other", seed=1)

    assert without_times(once) == without_times(again)
    assert without_times(once) != without_times(other)


@pytest.mark.slow
async def test_a_resumed_run_goes_on_exactly_and_its_order_can_be_repeated(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    whole = await train(tmp_path, tiny_model_folder, name="whole", **{"trainer.num_steps": 4})
    # the learning rate is constant, so a run of two steps is the first half of a run of four
    await train(tmp_path, tiny_model_folder, name="parts", **{"trainer.num_steps": 2})
    parts = await train(
        tmp_path, tiny_model_folder, name="parts", **{"trainer.num_steps": 4, "checkpoint": {"resume": "auto"}}
    )

    trained = [[r for r in without_times(records) if "loss" in r] for records in (whole, parts)]
    assert trained[0] == trained[1]
    for name in ("whole", "parts"):
        # a thread: a replay has an event loop of its own
        assert await anyio.to_thread.run_sync(main, ["replay", str(tmp_path / "runs" / name)]) == 0


async def test_a_reward_function_that_always_raises_stops_the_run_with_its_traceback(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    judger = {
        "judger_name": "broken",
        "reward_handler": f"{tmp_path / 'rewards.py'}:always_raises",
        "cpu_resources": {"num_workers": 1, "num_cpus_per_worker": 0.1},
        "max_initial_failures": 5,
    }
    with pytest.raises(JudgerError, match=r"(?s)always_raises.*no such key in the reward function"):
        await train(tmp_path, tiny_model_folder, **{"task.judger_config": judger, "evaluation": {}})


@pytest.mark.slow
async def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(tmp_path: Path, tiny_model_folder: Path) -> None:
    records = await train(tmp_path, tiny_model_folder)
    config = run_config(tmp_path, tiny_model_folder, **{"model.path": "/gone/model"})  # the checkpoint holds its own
    record = tmp_path / "eval.jsonl"
    metrics = await run.evaluate(
        config, config.folder / "checkpoints" / "step_000003", reporter=Silent(), record=record
    )
    assert len(record.read_text().splitlines()) == 1 + 8
    assert metrics["eval/sampled/score"] == records[-1]["eval/sampled/score"]
    assert metrics["eval/sampled/mean_length"] == records[-1]["eval/sampled/mean_length"]


async def test_auto_starts_a_run_over_that_never_came_to_a_checkpoint(tmp_path: Path, tiny_model_folder: Path) -> None:
    folder = run_config(tmp_path, tiny_model_folder).folder
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: test")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    changes = {"checkpoint": {"resume": "auto"}, "trainer.num_steps": 1, "evaluation": {}}
    records = await train(tmp_path, tiny_model_folder, **changes)
    assert [record["step"] for record in records] == [1]
    assert "loss" in records[0]
    repeated = load_config(folder / "config.yaml")
    assert (repeated.name, repeated.trainer.num_steps, repeated.checkpoint.resume) == ("test", 1, "never")


@pytest.mark.slow
async def test_gsm8k_rows_are_trained_on(tmp_path: Path, tiny_model_folder: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", gsm8k_rows(32))
    records = await train(
        tmp_path,
        tiny_model_folder,
        **{
            "task.sampler_config": {"data": {"path": str(rows)}, "prompt_repeat_k": 4},
            "task.judger_config": {"type": "gsm8k", "cpu_resources": {"num_workers": 1, "num_cpus_per_worker": 0.1}},
            "trainer.num_steps": 2,
            "trainer.max_steps_without_signal": 5,
            "evaluation": {},
        },
    )
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["judger/openai/gsm8k/ok"] == 16 for record in records)


@pytest.mark.slow
async def test_a_run_with_everything_an_algorithm_can_ask_of_the_engine(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    algorithm = {
        "advantage": "optimal_token_baseline",
        "policy_loss": {"loss_mode": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
        "use_kl_in_reward": True,
        "use_kl_loss": True,
        "kl_loss_type": "k3+",
        "entropy_coeff": 0.01,
        "rollout_correction": "decoupled_geo_rs_token_tis",
        "distillation": {"teacher": str(tiny_model_folder), "top_k": 4},
    }
    changes = {"algorithm": algorithm, "trainer.num_steps": 2, "evaluation": {}, "engine.num_mini_batches": 2}
    records = await train(tmp_path, tiny_model_folder, **changes)
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["num_updates"] == 2.0
        assert abs(record["rollout_corr/kl"]) < 1e-4
        assert record["advantages/max"] > 0 > record["advantages/min"]
        assert record["logprob_gap/correlation"] > 0.999
    assert records[0]["reward_kl_penalty"] == pytest.approx(0.0, abs=1e-5)
    assert records[1]["distillation"] > 0


@pytest.mark.slow
async def test_a_run_of_single_attempts_with_a_users_loss(tmp_path: Path, tiny_model_folder: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(USERS_LOSS, encoding="utf-8")
    changes = {
        "algorithm": {"advantage": "remax", "policy_loss": f"{code}:half"},
        "task.sampler_config": {"data": {"task": "addition", "num_rows": 64}, "prompt_repeat_k": 1},
        "trainer.num_steps": 2,
        "trainer.groups_per_step": 8,
        "evaluation": {},
    }
    records = await train(tmp_path, tiny_model_folder, **changes)
    assert [record["my_share"] for record in records] == [0.5, 0.5]
    assert all(record["judger/by_length/ok"] == 16 for record in records)  # an attempt and a greedy one for each prompt


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_gae_with_a_critic_and_an_adapter_goes_on_exactly(tmp_path: Path, tiny_model_folder: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"advantage": "gae", "lam": 0.95, "use_kl_loss": True},
        "engine.lora": {"rank": 4},
        "critic": {"num_threads": 1, "optimizer": {"learning_rate": 1e-2}},
        "trainer": {"num_steps": 4, "groups_per_step": 4, "critic_warmup": 2},
        "task.sampler_config": {"data": {"task": "addition", "num_rows": 64}, "prompt_repeat_k": 1},
        "evaluation": {},
        "checkpoint": {"every_steps": 3, "resume": "auto"},
    }
    whole = await train(tmp_path, tiny_model_folder, name="whole", **changes)
    assert ["loss" in record for record in whole] == [False, False, True, True]
    assert whole[1]["critic/vf_loss"] < whole[0]["critic/vf_loss"]
    assert all(record["logprob_gap/max"] < 1e-4 for record in whole[2:])
    assert whole[3]["kl_to_initial"] > whole[2]["kl_to_initial"] == pytest.approx(0.0, abs=1e-9)

    folder = tmp_path / "runs" / "whole"
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    again = await train(tmp_path, tiny_model_folder, name="whole", **changes)
    assert without_times(again) == without_times(whole)
    assert (folder / "checkpoints" / "step_000004" / "huggingface" / "adapter").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_on_two_ranks_has_the_losses_of_one(tmp_path: Path, tiny_model_folder: Path) -> None:
    runs: list[list[dict[str, Any]]] = []
    for size in (1, 2):
        engine = {"num_ranks": size, "num_cpus": 0.25, "num_threads": 1, "optimizer": {"learning_rate": 1e-3}}
        changes = {"engine": engine, "evaluation": {}, "algorithm": {"use_kl_loss": True}}
        runs.append(await train(tmp_path, tiny_model_folder, name=f"ranks{size}", **changes))
    for one, two in zip(*runs, strict=True):
        assert two["reward"] == one["reward"]
        for name in ("loss", "grad_norm", "entropy", "kl_to_initial"):
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5)
