"""Reward functions of other systems run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.judger.states import make_state
from xrl_lite.data import DataConfig, Status, make_group, parse_row
from xrl_lite.errors import ConfigError
from xrl_lite.judger import JudgerConfig, NativeJudger, OpenRlhfReward, TrlReward, VerlReward
from xrl_lite.judger.data_sources import check_rows

RIGHT, WRONG = "6 x 12 is 72\n#### 72", "#### 71"


def _gsm8k(text: str, gold: Any) -> float:
    found = re.findall(r"#### (\d+)", text)
    return float(bool(found) and found[-1] == str(gold))


def xtuner(response: str, label: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": _gsm8k(response, label)}


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert data_source == "openai/gsm8k"
    assert extra_info["split"] == "train"
    return _gsm8k(solution_str, ground_truth)


async def verl_async(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, Any]:
    return {"score": verl(data_source, solution_str, ground_truth, kwargs["extra_info"]), "acc": True}


def verl_batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
    return [_gsm8k(text, gold) for text, gold in zip(solution_strs, ground_truths, strict=True)]


def trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    assert kwargs["split"] == ["train"]
    return [_gsm8k(text, gold) for text, gold in zip(completions, answer, strict=True)]


def trl_without_kwargs(prompts: list[str], completions: list[str], solution: list[str]) -> list[float]:
    assert prompts == ["How many?"]
    return [_gsm8k(text, gold) for text, gold in zip(completions, solution, strict=True)]


def trl_by_kwargs(completions: list[str], **kwargs: Any) -> list[float]:
    return [_gsm8k(text, gold) for text, gold in zip(completions, kwargs["solution"], strict=True)]


def areal_by_kwargs(completions: str, **kwargs: Any) -> float:
    assert kwargs["split"] == "train"
    return _gsm8k(completions, kwargs["answer"])


async def trl_chat(completions: list[list[dict[str, str]]], ground_truth: list[str], **kwargs: Any) -> list[float]:
    return [_gsm8k(turns[0]["content"], gold) for turns, gold in zip(completions, ground_truth, strict=True)]


class TrlObject:
    async def __call__(self, prompts: Any, completions: list[str], completion_ids: Any, **columns: Any) -> list[float]:
        assert completion_ids == [[5, 6]]
        return [_gsm8k(text, gold) for text, gold in zip(completions, ["72"], strict=True)]


class Tensor(list[float]):
    """Stands for a tensor: only its `tolist` is used."""

    def tolist(self) -> list[float]:
        return list(self)


def openrlhf(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    scores = Tensor(
        _gsm8k(query.removeprefix(prompt), label) for query, prompt, label in zip(queries, prompts, labels, strict=True)
    )
    return {"rewards": scores, "scores": scores, "extra_logs": {"length": Tensor([3.0])}}


def areal(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any) -> float:
    assert (prompt_ids, completion_ids, data["split"]) == ([1, 2], [5, 6], "train")
    return _gsm8k(completions, answer)


FUNCTIONS: list[tuple[str, Any]] = [
    ("xtuner", xtuner),
    ("verl", verl),
    ("verl", verl_async),
    ("verl_batch", verl_batch),
    ("trl", trl),
    ("trl", trl_without_kwargs),
    ("trl", TrlObject()),
    ("trl", trl_by_kwargs),
    ("trl_chat", trl_chat),
    ("openrlhf", openrlhf),
    ("areal", areal),
    ("areal", areal_by_kwargs),
]


def sample(response: str) -> Any:
    return make_state(
        response,
        data_source={"openai/gsm8k": 1.0},
        extra_fields={"split": "train", "row": 3},
        prompt_ids=[1, 2],
        response_ids=[5, 6],
    )


@pytest.mark.parametrize(("signature", "function"), FUNCTIONS)
async def test_every_signature_scores_alike(signature: str, function: Any) -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=function, signature=signature).build()
    right, wrong = await judger.judge(sample(RIGHT)), await judger.judge(sample(WRONG))
    assert right.reward is not None, right.error_msg
    assert wrong.reward is not None, wrong.error_msg
    assert (right.reward["score"], wrong.reward["score"]) == (1.0, 0.0)


def test_an_adapter_object_is_a_handler() -> None:
    config = JudgerConfig(judger_name="x", reward_handler=VerlReward(verl))
    assert config.build_local().preprocess(sample(RIGHT)) == {
        "response": RIGHT,
        "label": "72",
        "data_source": "openai/gsm8k",
        "columns": {"split": "train"},
    }


async def test_reward_kwargs_win_over_what_the_sample_gives() -> None:
    def bonus(solution_str: str, ground_truth: str, bonus: float) -> float:
        return _gsm8k(solution_str, ground_truth) + bonus

    config = JudgerConfig(
        judger_name="x", reward_handler=bonus, signature="verl", reward_kwargs={"bonus": 0.5, "ground_truth": "71"}
    )
    state = await config.build().judge(sample(WRONG))
    assert state.reward == {"score": 1.5, "acc": 1.5}


async def test_reward_kwargs_reach_the_function_of_an_adapter() -> None:
    def bonus(solution_str: str, first: float, second: float = 0.0) -> float:
        return first + second

    adapter = VerlReward(bonus, reward_kwargs={"first": 1.0, "second": 1.0})
    config = JudgerConfig(judger_name="x", reward_handler=adapter, reward_kwargs={"second": 2.0})
    assert (await config.build().judge(sample(RIGHT))).reward == {"score": 3.0, "acc": 3.0}
    assert adapter.reward_kwargs == {"first": 1.0, "second": 1.0}


def test_weights_beside_an_adapter_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give weights to TrlReward\(..\), not reward_weights"):
        JudgerConfig(judger_name="x", reward_handler=TrlReward([right_answer]), reward_weights=[1.0])


@pytest.mark.parametrize("result", [[1.0, 0.0], []])
async def test_a5_a_wrong_number_of_rewards_is_an_error_that_names_the_function(result: Any) -> None:
    def sloppy(completions: Any, **kwargs: Any) -> Any:
        return result

    state = await JudgerConfig(judger_name="x", reward_handler=sloppy, signature="trl").build().judge(sample(RIGHT))
    assert state.status is Status.FAILED
    assert f"sloppy returned {len(result)} values, expected 1" in str(state.error_msg)


async def test_a_column_of_the_row_wins_over_the_label() -> None:
    seen: list[Any] = []

    def look(completions: Any, **kwargs: Any) -> list[float]:
        seen.append((kwargs["solution"], kwargs["answer"]))
        return [1.0]

    state = make_state(RIGHT, extra_fields={"solution": "because"})
    await JudgerConfig(judger_name="x", reward_handler=look, signature="trl").build().judge(state)
    assert seen == [(["because"], ["72"])]


@pytest.mark.parametrize("signature", ["trl", "areal"])
async def test_what_parses_gsm8k_answers_itself_gets_them_whole(signature: str) -> None:
    def by_trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [by_areal("", text, [], [], each) for text, each in zip(completions, answer, strict=True)]

    def by_areal(
        prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any
    ) -> float:
        return float(completions.partition("#### ")[2] == answer.partition("#### ")[2].replace(",", "") != "")

    row = parse_row({"question": "q", "answer": "so\n#### 1,203"}, 0, DataConfig(path=Path("rows.jsonl")))
    handler = by_trl if signature == "trl" else by_areal
    judger = JudgerConfig(judger_name="x", reward_handler=handler, signature=signature).build()
    state = await judger.judge(make_state("#### 1203", row.ground_truth, extra_fields=row.extra_info))
    assert state.reward == {"score": 1.0}, state.error_msg


async def test_columns_that_the_settings_name_come_by_their_own_names() -> None:
    def look(completions: list[str], problem: list[str], final: list[str], **kwargs: Any) -> list[float]:
        assert kwargs["ground_truth"] == final
        return [float(problem == ["2+2?"] and completions == final)]

    data = DataConfig(path=Path("rows.jsonl"), columns={"prompt": "problem", "ground_truth": "final"})
    row = parse_row({"problem": "2+2?", "final": "4"}, 0, data)
    (state,) = make_group(row, [1], 0, 1)
    state.response, state.response_ids, state.status = "4", [2], Status.COMPLETED
    config = JudgerConfig(judger_name="x", reward_handler=look, signature="trl")
    check_rows(config, [row])
    assert (await config.build().judge(state)).reward == {"score": 1.0}


async def test_none_skips_the_sample() -> None:
    config = JudgerConfig(judger_name="x", reward_handler=lambda completions, **_: [None], signature="trl")
    state = await config.build().judge(sample(RIGHT))
    assert (state.extra_fields["judgement"]["outcome"], state.reward) == ("skipped", None)


async def test_a_part_that_is_called_score_does_not_take_the_place_of_the_sum() -> None:
    def score(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0]

    def length(completions: Any, **kwargs: Any) -> list[float]:
        return [0.5]

    judger = NativeJudger("t", [score, length], signature="trl", reward_weights=[0.2, 2.0])
    assert (await judger.judge(sample(RIGHT))).reward == {"score": 1.2, "score/score": 1.0, "length": 0.5}


async def test_functions_of_one_name_are_told_apart() -> None:
    def make(reward: float) -> Any:
        def scored(completions: Any, **kwargs: Any) -> list[float]:
            return [reward]

        return scored

    judger = NativeJudger("t", [make(1.0), make(0.5)], signature="trl")
    assert (await judger.judge(sample(RIGHT))).reward == {"score": 1.5, "scored": 1.0, "scored_2": 0.5}


async def test_several_trl_functions_are_summed_with_weights_and_none_is_left_out() -> None:
    def right(completions: Any, **_: Any) -> list[float]:
        return [1.0]

    def unknown(completions: Any, **_: Any) -> list[None]:
        return [None]

    async def short(completions: Any, **_: Any) -> list[float]:
        return [0.5]

    reward = TrlReward([right, unknown, short], weights=[1.0, 5.0, 2.0])
    state = await JudgerConfig(judger_name="x", reward_handler=reward).build().judge(sample(RIGHT))
    assert state.reward == {"score": 2.0, "right": 1.0, "unknown": None, "short": 0.5}
    with pytest.raises(ConfigError, match="one weight per reward function"):
        TrlReward([right, short], weights=[1.0])


async def test_a_missing_column_is_named_with_those_there_are() -> None:
    def needy(completions: Any, splits: Any) -> list[float]:
        return [1.0]

    state = await JudgerConfig(judger_name="x", reward_handler=needy, signature="trl").build().judge(sample(RIGHT))
    assert "needy needs the column 'splits'" in str(state.error_msg)
    assert "Did you mean 'split'?" in str(state.error_msg)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        pytest.param({"rewards": [0.3], "scores": [0.0]}, {"score": 0.3, "scores": 0.0}, id="R14"),
        ({"rewards": [0.3], "scores": None}, {"score": 0.3, "scores": 0.3}),
        ({"rewards": 0.0}, {"score": 0.0, "scores": 0.0}),
        ([0.3], {"score": 0.3, "scores": 0.3}),
    ],
)
async def test_a_score_of_zero_is_a_score(result: Any, expected: dict[str, float]) -> None:
    reward = OpenRlhfReward(lambda queries, prompts, labels: result)
    state = await JudgerConfig(judger_name="x", reward_handler=reward).build().judge(sample(RIGHT))
    assert state.reward == expected


@pytest.mark.parametrize(
    ("signature", "function", "says"),
    [
        ("verl", xtuner, "needs the argument 'response'"),
        ("xtuner", verl, "It looks like signature: verl"),
        ("openrlhf", verl_batch, "It looks like signature: verl_batch"),
        ("verl", lambda solution_strr: 1.0, "Did you mean 'solution_str'?"),
    ],
)
def test_a_wrong_signature_is_refused_when_the_config_is_read(signature: str, function: Any, says: str) -> None:
    with pytest.raises(ValueError, match="judger 'x'") as caught:
        JudgerConfig(judger_name="x", reward_handler=function, signature=signature)
    assert says in str(caught.value)


def right_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [_gsm8k(text, gold) for text, gold in zip(completions, answer, strict=True)]


def short_answer(completions: list[str]) -> list[float]:
    return [1.0 if len(text) < 10 else 0.0 for text in completions]


async def test_several_functions_may_be_named_in_yaml() -> None:
    config = JudgerConfig.model_validate(
        {
            "judger_name": "x",
            "signature": "trl",
            "reward_handler": [f"{__name__}:right_answer", f"{__file__}:short_answer"],
            "reward_weights": [1.0, 0.5],
        }
    )
    assert JudgerConfig.model_validate(config.model_dump(mode="json")) == config
    state = await config.build().judge(sample(WRONG))
    assert state.reward == {"score": 0.5, "right_answer": 0.0, "short_answer": 1.0}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"signature": "trl", "reward_weights": [1.0]}, "one weight per reward function, got 2 and 1"),
        ({"signature": "verl"}, "several reward functions, and reward_weights, go with signature trl"),
        ({"signature": "trl", "reward_handler": [trl, "no_such.py:f"]}, "there is no such file"),
        ({"signature": "trl", "reward_handler": []}, "one weight per reward function, got 0"),
    ],
)
def test_lists_that_do_not_fit_are_refused(settings: dict[str, Any], says: str) -> None:
    complete = {"judger_name": "x", "reward_handler": [right_answer, short_answer], **settings}
    with pytest.raises(ValueError, match=says):
        JudgerConfig.model_validate(complete)


async def test_what_trl_functions_log_is_kept_with_the_reward() -> None:
    def logging(completions: Any, log_extra: Any, log_metric: Any, trainer_state: Any) -> list[float]:
        log_extra("length", [len(text) for text in completions])
        log_metric("calls", 1.0)
        return [0.5]

    state = await JudgerConfig(judger_name="x", reward_handler=logging, signature="trl").build().judge(sample("abc"))
    assert state.reward == {"score": 0.5, "length": 3, "calls": 1.0}
