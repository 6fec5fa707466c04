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
from xrl_lite.judger.proof import summarize

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
    assert result.is_passed
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


async def test_it_is_left_out_where_nothing_is_known_and_says_so() -> None:
    service = JudgerConfig(judger_name="service", reward_handler="http://127.0.0.1:9/score").build()
    for judger, label, reason in (
        (service, "72", "nobody says how a right response looks"),
        (JudgerConfig(judger_name="x", reward_handler=exact).build(), {"tests": []}, "nobody says"),
        (ExactMatchJudgerConfig().build(), None, "there is no ground truth"),
        (BaseJudger("mine"), "72", "nobody says"),
    ):
        (result,) = await self_test(judger, make_state(label=label))
        assert not result.is_passed
        assert f"judger {judger.get_judger_name()!r} was not tested: {reason}" in result.explain()


async def test_a_function_of_which_nothing_is_known_is_tried_with_the_label() -> None:
    judger = JudgerConfig(judger_name="mine", reward_handler=exact).build()
    (result,) = await self_test(judger, make_state(label="72"))
    assert result.is_passed
    assert result.explain() == "judger 'mine' passed its self-test"
    assert judger.statistics()["mine"]["ok"] == 0


async def test_one_that_prefers_no_label_is_named_and_stops_nothing() -> None:
    (result,) = await self_test(JudgerConfig(judger_name="mine", reward_handler=broken).build(), make_state(label="72"))
    assert not result.is_passed
    assert "warning: judger 'mine' scores 0 for the label '72' and 0 for '73'" in result.explain()


async def test_one_that_cannot_read_the_label_alone_is_named_and_stops_nothing() -> None:
    (result,) = await self_test(JudgerConfig(judger_name="mine", reward_handler=raising).build(), make_state())
    assert "judger 'mine' was not tested: the label alone gets no score: ValueError" in result.explain()


async def test_a_line_says_the_best_that_is_known_of_a_judger() -> None:
    judger = JudgerConfig(judger_name="mine", reward_handler=exact).build()
    results = [result for label in (None, "72", {}) for result in await self_test(judger, make_state(label=label))]
    assert [result.is_passed for result in results] == [False, True, False]
    assert summarize(results) == ["judger 'mine' passed its self-test"]
    assert summarize(results[2:]) == [results[2].explain()]


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


async def exiting(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
    raise SystemExit(3)


async def test_code_that_would_end_the_program_fails_its_test_alone() -> None:
    config = JudgerConfig(judger_name="x", reward_handler=exiting, gold_template="{label}")
    with pytest.raises(JudgerError, match=r"raised SystemExit\(3\), which would end more than this judgement"):
        await self_test(config.build(), make_state())


def test_a_label_of_any_length_has_another_one() -> None:
    number = "9" * 5000
    assert other_label(number) not in ("", number)
    words = "1 " * 20_000 + "x" * 20_000
    assert other_label(words) == "1 " * 19_999 + "2 " + "x" * 20_000


def test_exact_is_what_the_tests_think_it_is() -> None:
    assert exact(" a ", "a", {}) == {"score": 1.0}
