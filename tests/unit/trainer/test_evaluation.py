"""Evaluation: all rows, k attempts, failed ones counted, and going on where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.build import run_settings
from xrl_lite.agent_loop import AgentLoop, AgentLoopManager
from xrl_lite.config import RunConfig
from xrl_lite.data import RolloutState, Row, SampleParams, Status
from xrl_lite.errors import RolloutError, RunError
from xrl_lite.replay_buffer import ReplayBuffer
from xrl_lite.run import what_is_evaluated
from xrl_lite.trainer.evaluation import EvaluationRecord, Evaluator

ABOUT = {"model": "m"}


class ByPlace(AgentLoop):
    """Answers from a table: row -> the answer of each attempt; None fails, "hang" never ends."""

    def __init__(self, answers: list[list[str | None]], *, with_pred: bool = True) -> None:
        super().__init__(None, None, sample_params=SampleParams())  # type: ignore[arg-type]
        self.answers, self.with_pred = answers, with_pred
        self.asked: list[int] = []

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        state, row = rollout_state, rollout_state.extra_fields["row"]
        answers = self.answers[row]
        answer = answers[int(state.rollout_id or 0) % len(answers)]
        self.asked.append(row)
        if answer == "hang":
            await anyio.sleep_forever()
        if answer is None:
            raise RolloutError("scripted")
        state.response_ids, state.status = [1, 2], Status.COMPLETED
        state.reward = {"score": float(answer == "right")} | ({"pred": answer} if self.with_pred else {})
        return state


def make_evaluator(loop: ByPlace, k: int, *, sources: tuple[str, ...] = ("a",)) -> Evaluator:
    rows = [
        Row(index=n, prompt=[{"role": "user", "content": "x"}], ground_truth="1", data_source=sources[n % len(sources)])
        for n in range(len(loop.answers))
    ]
    return Evaluator(
        AgentLoopManager({"t": loop}, replay_buffer=ReplayBuffer()),
        rows=rows,
        encode=lambda _: [1],
        sample_params={"sampled": SampleParams()},
        success_score=0.5,
        num_samples={"sampled": k},
    )


async def test_mean_pass_and_majority_at_k() -> None:
    answers: list[list[str | None]] = [
        ["right", "wrong", "wrong", "other"],
        ["right", "right", "wrong", None],
        [None, None, None, None],
    ]
    metrics = await make_evaluator(ByPlace(answers), 4).evaluate()
    got = {name.removeprefix("eval/sampled/"): value for name, value in metrics.items()}
    assert got["accuracy"] == got["mean@4"] == pytest.approx(3 / 12)
    assert got["failed"] == 5.0
    assert got["pass@1"] == pytest.approx(3 / 12)
    assert got["pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert got["pass@4"] == pytest.approx(2 / 3)
    assert got["maj@4"] == pytest.approx(1 / 3)
    assert got["pass@4/low"] <= got["pass@4"] <= got["pass@4/high"]
    assert got["mean_length"] == pytest.approx(2 * 7 / 12)


async def test_without_pred_there_is_no_majority_and_with_one_sample_only_the_mean() -> None:
    metrics = await make_evaluator(ByPlace([["right", "wrong"]], with_pred=False), 2).evaluate()
    assert "eval/sampled/pass@2" in metrics
    assert not any("maj@" in name for name in metrics)
    metrics = await make_evaluator(ByPlace([["right"], ["wrong"]]), 1).evaluate()
    assert {name.split("/")[2] for name in metrics if "@" in name} == {"mean@1"}


async def test_each_data_source_has_its_own_numbers() -> None:
    loop = ByPlace([["right"], ["wrong"], ["right"], ["right"]])
    metrics = await make_evaluator(loop, 1, sources=("a", "b")).evaluate()
    assert metrics["eval/sampled/accuracy"] == 0.75
    assert metrics["eval/sampled/a/accuracy"] == 1.0
    assert metrics["eval/sampled/b/mean@1"] == 0.5


async def test_a_stopped_evaluation_goes_on_with_the_rows_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    answers: list[list[str | None]] = [["right"], ["wrong"], ["hang"]]
    first = ByPlace(answers)
    with anyio.move_on_after(0.2):
        await make_evaluator(first, 1).evaluate(EvaluationRecord(path, ABOUT))
    with path.open("a") as file:
        file.write('{"way": "sam')  # torn by the kill
    second = ByPlace([["right"], ["right"], ["right"]])
    metrics = await make_evaluator(second, 1).evaluate(EvaluationRecord(path, ABOUT))
    assert second.asked == [2]
    assert metrics["eval/sampled/accuracy"] == pytest.approx(2 / 3)
    third = ByPlace(answers)
    assert await make_evaluator(third, 1).evaluate(EvaluationRecord(path, ABOUT)) == metrics
    assert third.asked == []


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    EvaluationRecord(tmp_path / "eval.jsonl", ABOUT)
    with pytest.raises(RunError, match=r"holds an evaluation of something else: model was 'm' and is 'other'\. Name"):
        EvaluationRecord(tmp_path / "eval.jsonl", {"model": "other"})


def evaluated(folder: Path, *, num_rows: int = 1, **changes: Any) -> dict[str, Any]:
    rows = [Row(index=n, prompt=[{"role": "user", "content": "x"}], ground_truth="1") for n in range(num_rows)]
    config = RunConfig.model_validate(run_settings(folder, folder / "model", **changes))
    return what_is_evaluated(config, "model", rows)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"task.judger_config.request_timeout": 1.5}, "task.judger_config.request_timeout was 30.0 and is 1.5"),
        (
            {"task.agent_loop_config.sample_params": {"max_tokens": 7}},
            "task.agent_loop_config.sample_params.max_tokens",
        ),
        ({"rollout.dtype": "bfloat16", "engine.dtype": "bfloat16"}, "dtype was 'float32' and is 'bfloat16'"),
        ({"num_rows": 2}, "rows was"),
    ],
)
def test_a_record_is_only_of_what_was_judged_in_the_same_way(
    changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    path = tmp_path / "eval.jsonl"
    EvaluationRecord(path, evaluated(tmp_path))
    EvaluationRecord(path, evaluated(tmp_path, **{"trainer.num_steps": 9}))
    with pytest.raises(RunError, match=difference):
        EvaluationRecord(path, evaluated(tmp_path, **changes))


def test_scores_of_a_judger_that_was_mended_since_do_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    EvaluationRecord(path, evaluated(tmp_path))
    with (tmp_path / "rewards.py").open("a") as file:
        file.write("# mended\n")
    with pytest.raises(RunError, match=r"something else: code\..*/rewards.py was '\w+' and is '\w+'\."):
        EvaluationRecord(path, evaluated(tmp_path))


def test_samples_of_an_unknown_way_or_at_temperature_zero_are_refused() -> None:
    from xrl_lite.trainer import EvaluationConfig

    params: dict[str, Any] = {"greedy": SampleParams(temperature=0.0), "sampled": SampleParams()}
    with pytest.raises(ValueError, match="names 'x', which is not in sample_params: greedy, sampled"):
        EvaluationConfig(sample_params=params, num_samples={"x": 2})
    with pytest.raises(ValueError, match="1 at temperature 0"):
        EvaluationConfig(sample_params=params, num_samples={"greedy": 2})


async def test_an_attempt_with_several_trajectories_counts_once() -> None:
    class Splits(ByPlace):
        async def generate_sample(self, rollout_state: RolloutState) -> Any:
            state = await super().generate_sample(rollout_state)
            state.session_id = f"0/{state.rollout_id}"
            return [state.model_copy(update={"reward": {"score": 0.0}}), state]

    metrics = await make_evaluator(Splits([["right"], ["wrong"]]), k=1).evaluate()
    assert metrics["eval/sampled/accuracy"] == 0.5
    assert metrics["eval/sampled/mean_length"] == 4.0
