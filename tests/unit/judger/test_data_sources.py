"""What rows ask of a judger, checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.judger.states import exact
from xrl_lite.data import Row
from xrl_lite.errors import ConfigError, DataError
from xrl_lite.judger import ComposedJudgerConfig, ExactMatchJudgerConfig, JudgerConfig, VerlJudgerConfig
from xrl_lite.judger.data_sources import JUDGER_OF_DATA_SOURCE, check_rows, judger_for, kind_for
from xrl_lite.judger.presets.verl import default_compute_score


def row(data_source: Any = "a", *, index: int = 0, **columns: Any) -> Row:
    prompt = [{"role": "user", "content": "q"}]
    return Row(index=index, prompt=prompt, ground_truth="1", data_source=data_source, extra_info=columns)


def trl(completions: Any, difficulty: Any, answer: Any, hint: Any = None, **kwargs: Any) -> list[float]:
    return [1.0]


def areal(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, unit: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo", "dapo_math"),
        ("aime_2024", "dapo_math"),
        ("numina_olympiads", "math"),
        ("taco", "code"),
        ("hiyouga/geometry3k", "geo3k"),
        ("searchR1_nq", "search_qa"),
    ],
)
def test_a_data_source_has_its_judger(source: str, kind: str) -> None:
    assert kind_for(source) == kind


def test_every_kind_in_the_table_can_be_set_up_and_several_make_a_composed_judger() -> None:
    sources = [name.replace("*", "x") for name in JUDGER_OF_DATA_SOURCE]
    config = judger_for(sources)
    assert isinstance(config, ComposedJudgerConfig)
    assert sorted(config.branches) == sorted(sources)
    math = judger_for(["lighteval/MATH"])
    assert isinstance(math, JudgerConfig)
    assert math.cpu_resources is not None  # where its limits hold


def test_an_unknown_data_source_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'codeforces'"):
        kind_for("codeforce")


@pytest.mark.parametrize(
    ("signature", "function", "says"),
    [
        ("trl", trl, "trl takes the column 'difficulty', which row 7 does not have. Did you mean 'dificulty'"),
        ("areal", areal, "areal takes the column 'unit', which row 7 does not have. It has dificulty, split."),
    ],
)
def test_a_missing_column_is_an_error_before_the_run(signature: str, function: Any, says: str) -> None:
    config = JudgerConfig(judger_name="x", reward_handler=function, signature=signature)
    complete = {"difficulty": 1, "unit": "cm"}
    check_rows(config, [row(**complete)])
    with pytest.raises(DataError, match="judger 'x'") as caught:
        check_rows(config, [row(**complete), row(index=7, dificulty=1, split="train")])
    assert says in str(caught.value)


def test_what_the_config_gives_is_not_missing() -> None:
    for given in ({"reward_kwargs": {"difficulty": [1]}}, {"extra_info": {"difficulty": 1}}):
        check_rows(JudgerConfig(judger_name="x", reward_handler=trl, signature="trl", **given), [row()])  # pyright: ignore[reportArgumentType]


def test_a_scorer_chosen_by_data_source_needs_one() -> None:
    with pytest.raises(DataError, match="takes the column 'data_source', which row 3"):
        check_rows(VerlJudgerConfig(), [row("openai/gsm8k"), row(None, index=3)])
    check_rows(VerlJudgerConfig(reward_kwargs={"data_source": "openai/gsm8k"}), [row(None)])
    check_rows(VerlJudgerConfig(reward_handler=exact, signature="xtuner"), [row(None)])
    with pytest.raises(DataError, match="no data source"):
        default_compute_score(None, "#### 1", "1")


def test_only_the_rows_of_a_branch_need_its_columns() -> None:
    inner = JudgerConfig(judger_name="x", reward_handler=trl, signature="trl")
    branches: dict[str, Any] = {"a": ExactMatchJudgerConfig(), "deep": {"branches": {"deep": inner}}}
    config = ComposedJudgerConfig(branches=branches)
    check_rows(config, [row("a"), row("deep", difficulty=1)])
    with pytest.raises(DataError, match="column 'difficulty', which row 3"):
        check_rows(config, [row("a"), row("deep", index=3)])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("aa", "Row 2 has data source 'aa', which is no branch of the judger. Did you mean 'a'? Branches: a, b."),
        ({"a": 1, "c": 1}, "Row 2 has data source 'c', which is no branch"),
        ({"a": 1, "b": 1}, "selects the branches a, b of judger 'composed', which has neither merge_fn nor weights"),
        ({}, "must contain at least one judger branch"),
    ],
)
def test_bad_routes_are_found_before_the_run(source: Any, says: str) -> None:
    branches: dict[str, Any] = {name: JudgerConfig(judger_name=name, reward_handler=exact) for name in "ab"}
    with pytest.raises(DataError, match="Row 2") as caught:
        check_rows(ComposedJudgerConfig(branches=branches), [row("a"), row(source, index=2)])
    assert says in str(caught.value)
