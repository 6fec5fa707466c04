"""A judger proves itself on a right and a wrong answer before a run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.judger.states import exact, make_state
from xrl_lite.errors import JudgerError
from xrl_lite.judger import (
    BaseJudger,
    ComposedJudgerConfig,
    DapoMathJudgerConfig,
    ExactMatchJudgerConfig,
    GEO3KJudgerConfig,
    GSM8KJudgerConfig,
    JudgerConfig,
    MathJudgerConfig,
    self_test,
)
from xrl_lite.judger.base import other_label

PRESETS: list[JudgerConfig] = [
    ExactMatchJudgerConfig(),
    GSM8KJudgerConfig(),
    GSM8KJudgerConfig(extra_info={"score": 1, "format_score": 0.1}),
    MathJudgerConfig(),
    GEO3KJudgerConfig(),
    DapoMathJudgerConfig(eos_token="</s>", enable_overlong_buffer=False),
    DapoMathJudgerConfig(
        eos_token="</s>",
        enable_overlong_buffer=True,
        max_response_len=10,
        overlong_buffer_len=5,
        overlong_penalty_factor=1.0,
    ),
]


@pytest.mark.parametrize("config", PRESETS)
@pytest.mark.parametrize("label", ["72", "1,234", "-3"])
async def test_presets_prove_themselves_without_a_trace(config: JudgerConfig, label: str) -> None:
    judger, state = config.build(), make_state("what the policy said", label)
    before = state.model_copy(deep=True)
    (result,) = await self_test(judger, state)
    assert result.right_score > result.wrong_score
    assert state == before
    assert judger.statistics()[config.judger_name]["ok"] == 0


def broken(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
    return {"score": 0.0}


def raising(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
    raise ValueError("signal only works in main thread")


async def test_a_judger_that_cannot_tell_right_from_wrong_stops_the_run_with_both_shown() -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=broken, gold_template="#### {label}").build()
    with pytest.raises(JudgerError, match="self-test of judger 'x' failed") as caught:
        await self_test(judger, make_state(label="72"))
    assert "'#### 72' -> score 0.0" in str(caught.value)
    assert "'#### 73' -> score 0.0" in str(caught.value)


async def test_a_judger_that_raises_stops_the_run_with_its_traceback() -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=raising, gold_template="{label}").build()
    with pytest.raises(JudgerError, match="the right answer got no score") as caught:
        await self_test(judger, make_state(label="72"))
    assert "ValueError: signal only works in main thread" in str(caught.value)
    assert "in raising" in str(caught.value)


async def test_it_is_left_out_where_nothing_is_known() -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=broken).build()
    assert await self_test(judger, make_state()) == []
    assert await self_test(ExactMatchJudgerConfig().build(), make_state(label=None)) == []
    assert await self_test(BaseJudger(), make_state()) == []


async def test_a_composed_judger_tests_every_branch_a_state_selects() -> None:
    branches: dict[str, Any] = {
        "good": ExactMatchJudgerConfig(),
        "deep": {"branches": {"inner": ExactMatchJudgerConfig(judger_name="inner")}},
        "bad": JudgerConfig(judger_name="bad", reward_handler=broken, gold_template="{label}"),
    }
    judger = ComposedJudgerConfig(branches=branches, weights={"good": 1, "bad": 1}).build()
    results = await self_test(judger, make_state(data_source={"good": 1, "deep": 1}))
    assert [result.judger for result in results] == ["exact_match", "inner"]
    for source in ("bad", {"good": 1, "bad": 1}):
        with pytest.raises(JudgerError, match="self-test of judger 'bad'"):
            await self_test(judger, make_state(data_source=source))


@pytest.mark.parametrize(
    ("label", "wrong"), [("72", "73"), ("a 1 b 9 c", "a 1 b 10 c"), ("yes", "not yes"), (5, "6"), ("007", "008")]
)
def test_the_other_label_is_another_one(label: Any, wrong: str) -> None:
    assert other_label(label) == wrong


def test_a_label_of_any_length_has_another_one() -> None:
    number = "9" * 5000
    assert other_label(number) not in ("", number)
    words = "1 " * 20_000 + "x" * 20_000
    assert other_label(words) == "1 " * 19_999 + "2 " + "x" * 20_000


def test_exact_is_what_the_tests_think_it_is() -> None:
    assert exact(" a ", "a", {}) == {"score": 1.0}
