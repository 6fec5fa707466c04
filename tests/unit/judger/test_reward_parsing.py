"""Answers as models write them. Ids R1 to R15 are cases that other systems got wrong."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.unit.judger.states import make_state
from xrl_lite.data import Status
from xrl_lite.judger import (
    DapoMathJudgerConfig,
    GEO3KJudgerConfig,
    GSM8KJudgerConfig,
    JudgerConfig,
    MathJudgerConfig,
)
from xrl_lite.judger.math_answers import final_answer, last_boxed, same_answer
from xrl_lite.judger.presets import dapo_math, gsm8k, math
from xrl_lite.judger.presets.dapo_math import overlong_penalty

REMARK = "\n" + "And that is all there is to say about it. " * 9
FLEXIBLE = {"score": 1, "format_score": 0, "method": "flexible"}
DAPO = DapoMathJudgerConfig(eos_token="<|im_end|>", enable_overlong_buffer=False)


async def score(config: JudgerConfig, response: str, label: Any, **fields: Any) -> float:
    state = await config.build().judge(make_state(response, label, **fields))
    assert state.reward is not None, state.error_msg
    return float(state.reward["score"])


@pytest.mark.parametrize(
    ("config", "response", "label"),
    [
        pytest.param(GSM8KJudgerConfig(), "2+40=42\n#### 42" + REMARK, "42", id="R1"),
        pytest.param(DAPO, "So it is.\nAnswer: 42" + REMARK, "42", id="R1-dapo"),
        pytest.param(GSM8KJudgerConfig(), "so\n#### 42.", "42", id="R2"),
        pytest.param(GSM8KJudgerConfig(), "so\n#### 42.0", "42", id="R3"),
        pytest.param(GSM8KJudgerConfig(), "so\n#### $42.00", "42", id="R3-currency"),
        pytest.param(GSM8KJudgerConfig(extra_info=FLEXIBLE), "The total is 1,234", "1234", id="R4"),
        pytest.param(MathJudgerConfig(), "[8.124,12.852]", "8.124, 12.852", id="R6"),
        pytest.param(MathJudgerConfig(), r"\boxed{8.124,12.852}", "8.124, 12.852", id="R6-boxed"),
        pytest.param(MathJudgerConfig(), r"therefore \boxed{840}. So: Final Answer \boxed{840}", "840", id="R8"),
        pytest.param(MathJudgerConfig(), "It was 234 before.\nFinal Answer: **73**", "73", id="R11"),
        pytest.param(DAPO, "It was 234 before.\n**Answer: 73**<|im_end|>", "73", id="R11-dapo"),
        pytest.param(MathJudgerConfig(), r"\boxed{0.5}", r"\frac{1}{2}", id="R12"),
    ],
)
async def test_right_answers_score_one(config: JudgerConfig, response: str, label: str) -> None:
    assert await score(config, response, label) == 1.0


def test_r12_the_thread_that_judges_makes_no_difference() -> None:
    scores: list[float] = []

    def judge() -> None:
        responses = (r"\boxed{0.5}", r"\boxed{\frac{2}{4} + 0}")
        scores.extend(math.compute_reward(response, r"\frac{1}{2}", {})["score"] for response in responses)

    async def judge_in_loop() -> None:
        judge()

    judge()
    for target in (judge, lambda: asyncio.run(judge_in_loop())):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert scores == [1.0] * 6


@pytest.mark.parametrize(
    ("response", "label", "is_right"),
    [
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{\frac{1}{\sqrt 2}}", r"\sqrt{2}/2", True),
        ("so $x\\in[0,1)$", "[0,1)", True),
        (r"\boxed{5}", r"5 \text{ cm}", True),
        ("#### 14 dollars", "14", True),
        ("that makes 14 in all", "14", True),
        (r"\boxed{x^2+2x+2}", "(x+1)^2", False),
        (r"\boxed{[0,1]}", "(0,1)", False),
        (r"\boxed{\{1,2\}}", "(1,2)", False),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", True),
        (r"\boxed{[2,3] \cup (0,1)}", r"(0,1) \cup [2,3]", True),
        (r"\boxed{[0,1] \cup [2,3]}", r"(0,1) \cup (2,3)", False),
        (r"\boxed{12}\boxed{13}", "12", False),
        (r"\boxed{0.333}", "1/3", False),
        (r"\boxed{", "2", False),
        ("I do not know", "7", False),
        (r"The answer is: \sqrt{2}", r"\sqrt{2}", True),
        ("The answer is: yes", "yes", True),
        ("The answer is: B.", "B", True),
        ("The answer is: (1,2)", "(1,2)", True),
        ("The answer is: x+1", "x+1", True),
        (r"The answer is: Evelyn", r"\text{Evelyn}", True),
        ("The answer is: x+2", "x+1", False),
    ],
)
async def test_the_math_judger_knows_what_is_equivalent(response: str, label: str, is_right: bool) -> None:
    assert await score(MathJudgerConfig(), response, label) == float(is_right)


@pytest.mark.parametrize("kind", [MathJudgerConfig, GEO3KJudgerConfig])
def test_without_the_library_the_judger_says_what_to_install(
    kind: type[JudgerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math, "is_installed", lambda name: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(ValueError, match=r"pip install 'xrl-lite\[math\]'"):
        kind()


@pytest.mark.parametrize(
    "rendering",
    [
        "#### {}",
        "####{}",
        "#### {}.",
        "#### ${}",
        "#### **{}**",
        "#### {}<|im_end|>",
        "#### {} clips",
        "#### {}%",
        "#### $\\boxed{{{}}}$",
        "####\t{}\n\nI hope this helps!",
        "#### 7\nNo, wait.\n#### {}",
        "#### \\({}\\)",
        "#### Answer: {}",
    ],
)
async def test_gsm8k_gold_answers_score_one_in_every_usual_rendering(rendering: str) -> None:
    for gold in ("42", "0", "-5", "1,234", "1234567", "0.5", "5600000"):
        response = "Let us see.\n" + rendering.format(gold)
        assert await score(GSM8KJudgerConfig(), response, gold) == (0.0 if "Answer:" in rendering else 1.0)
        assert await score(GSM8KJudgerConfig(extra_info=FLEXIBLE), response, gold) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("#### 43", "42"),
        ("#### 421", "42"),
        ("#### 42.5", "42"),
        ("#### -42", "42"),
        ("#### 4 2", "42"),
        ("42", "42"),
        ("####", "42"),
        ("", "42"),
        ("#### 42\n#### 43", "42"),
        ("#### 1,23", "123"),
    ],
)
async def test_gsm8k_wrong_answers_score_zero(response: str, label: str) -> None:
    assert await score(GSM8KJudgerConfig(), response, label) == 0.0


async def test_gsm8k_scores_come_from_extra_info() -> None:
    config = GSM8KJudgerConfig(extra_info={"score": 2, "format_score": 0.1})
    assert [await score(config, text, "42") for text in ("#### 42", "#### 41", "42")] == [2.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("given", "right", "is_same"),
    [
        ("42", "42.0", True),
        ("1e3", "1000", True),
        ("1/2", "0.5", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        (r"-\frac{1}{2}", "-0.5", True),
        (r"\frac{-1}{2}", "-1/2", True),
        (r"\text{(B)}", "(B)", True),
        (r"10\sqrt{3}", r"10 \sqrt{3}", True),
        ("50\\%", "50", True),
        ("(1, 2)", "(1,2)", True),
        ("(1, 2)", "(2, 1)", False),
        ("(0, 1)", "[0, 1]", False),
        ("(0, 1)", "(0, 1]", False),
        ("(1, 2), (3, 4)", "[1, 2], [3, 4]", False),
        (r"\{1, 2\}", "(1, 2)", False),
        (r"\{1, 2\}", r"\{1.0,2\}", True),
        (r"\left\{1, 2\right\}", "1,2", True),
        ("(1.0,2]", "1,2", True),
        ("3 1/2", "3.5", True),
        (r"-1\frac{1}{2}", "-1.5", True),
        ("1 1/2", "11/2", False),
        (r"\frac1{2}", "0.5", True),
        (r"\sqrt3", r"\sqrt{3}", True),
        ("54\N{DEGREE SIGN}", r"54^\circ", True),
        ("1,234", "1234", True),
        ("1/0", "0", False),
        ("0.333", "1/3", False),
        ("nan", "inf", False),
        ("x=5", "5", True),
        ("", "0", False),
        ("a" * 500 + "b", "a" * 500 + "c", False),
        ("a " * 500, "a" * 500, True),
        ("1, " * 300 + "2", "1.0," * 300 + "2", True),
        ("1, " * 300 + "2", "1.0," * 300 + "3", False),
    ],
)
def test_answers_are_compared_as_what_they_mean(given: str, right: str, is_same: bool) -> None:
    assert same_answer(given, right) is is_same


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\fbox{7}", "7"),
        (r"no box", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_closed_box_is_read(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5.", "5."),
        ("#### 5", "5"),
        (r"Answer: 4, no: \boxed{5}", "5"),
        ("Final answer: *5*", "5"),
        ("The answer is: 5", "5"),
        ("the answer is =5", "5"),
        ("The answer is:\n5", "5"),
        ("The answer is 4. No, the answer is:", "4. No, the answer is:"),
        ("The answer is: ", None),
        ("The answer isn't 5", None),
        ("5", None),
    ],
)
def test_final_answers_are_found(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_long_texts_take_no_long_time() -> None:
    for text in (
        "#### " + "$" * 20_000,
        "####" + " " * 20_000 + "x",
        r"\boxed{" * 5_000,
        "1," * 10_000,
        "*" * 20_000,
        "The answer is:" + " " * 20_000,
        "answer " * 5_000,
        "The answer is " + "1" * 20_000 + "x",
    ):
        final_answer(text)
        math.compute_reward(text, "1", {})
        gsm8k.compute_reward(text, "1", FLEXIBLE)
        dapo_math.compute_reward("Answer: " + text, "1", {})


class TestDapo:
    @pytest.mark.parametrize(
        ("response", "expected"),
        [
            ("Answer: 42", 1.0),
            ("answer: $42$", 1.0),
            ("Answer: x = 42 units", 1.0),
            ("Answer:\n42", 1.0),
            ("**Answer:**\n\n$42$", 1.0),
            ("**Answer**: 42", 1.0),
            ("Answer: The answer is $42$.", 1.0),
            ("Answer: $42$ (mod 1000)", 1.0),
            ("Answer: $x = 42$ square units, a circle", 1.0),
            (r"Answer: \$42", 1.0),
            ('Answer: "42"', 1.0),
            ("Answer: 41", -1.0),
            ("42", -1.0),
            ("Answer:\n", -1.0),
        ],
    )
    async def test_last_answer_line(self, response: str, expected: float) -> None:
        assert await score(DAPO, response, "42") == expected

    @pytest.mark.parametrize(
        ("response", "label", "expected"),
        [
            (r"Answer: \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
            (r"Answer: $\sqrt3$", r"\sqrt{3}", 1.0),
            ("Answer: 1", "a+1", -1.0),
            ("Answer: $a+1$", "a + 1", 1.0),
            ("Answer: an integer", "integer", 1.0),
            ("Answer: (0,1)", "[0,1]", -1.0),
        ],
    )
    async def test_answers_are_read_as_they_are_written(self, response: str, label: str, expected: float) -> None:
        assert await score(DAPO, response, label) == expected

    @pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (110, -1.5)])
    async def test_overlong_penalty_counts_sampled_tokens(self, num_tokens: int, penalty: float) -> None:
        config = DapoMathJudgerConfig(
            eos_token=["</s>"],
            enable_overlong_buffer=True,
            max_response_len=100,
            overlong_buffer_len=20,
            overlong_penalty_factor=1.0,
        )
        assert await score(config, "Answer: 42", "42", response_ids=[5] * num_tokens) == pytest.approx(1.0 + penalty)
        assert overlong_penalty(num_tokens, max_response_len=100, buffer_len=20, factor=1.0) == penalty

    async def test_a_tokenizer_counts_where_there_are_no_ids(self) -> None:
        def tokenizer(text: str) -> dict[str, list[str]]:
            return {"input_ids": text.split()}

        config = DapoMathJudgerConfig(
            eos_token="</s>",
            enable_overlong_buffer=True,
            max_response_len=4,
            overlong_buffer_len=2,
            overlong_penalty_factor=1.0,
            tokenizer=tokenizer,
        )
        assert await score(config, "so so Answer: 42", "42") == 0.0

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            pytest.param({"overlong_buffer_len": 0}, "overlong_buffer_len must be between 1 and", id="R15"),
            ({"overlong_buffer_len": 200}, "overlong_buffer_len must be between 1 and"),
            ({"overlong_buffer_len": None}, "overlong_buffer_len is required"),
            ({"max_response_len": None}, "max_response_len is required"),
            ({"overlong_penalty_factor": None}, "overlong_penalty_factor is required"),
            ({"eos_token": " "}, "eos_token must not be an empty string"),
            ({"eos_token": []}, "eos_token list must not be empty"),
        ],
    )
    def test_incomplete_settings_are_refused(self, settings: dict[str, Any], says: str) -> None:
        complete: dict[str, Any] = {
            "eos_token": "</s>",
            "enable_overlong_buffer": True,
            "max_response_len": 100,
            "overlong_buffer_len": 20,
            "overlong_penalty_factor": 1.0,
        }
        with pytest.raises(ValueError, match=says):
            DapoMathJudgerConfig.model_validate({**complete, **settings})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>so</think>It is \boxed{2\sqrt{3}}", 1.0),
        (r"It is \boxed{2\sqrt{3}}", 0.9),
        (r"<think>so</think>It is \boxed{4}", 0.1),
        (r"It is 4", 0.0),
    ],
)
async def test_geo3k_scores_answer_and_form(response: str, expected: float) -> None:
    assert await score(GEO3KJudgerConfig(), response, r"2 \sqrt{3}") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    [
        (r"\sqrt{50}", r"5\sqrt{2}", True),
        (r"5\sqrt2", r"5 \sqrt { 2 }", True),
        (r"\frac{10}{\sqrt{3}}", r"\frac { 10 \sqrt { 3 } } { 3 }", True),
        (r"5\text{ cm}", "5", True),
        ("5 cm", "5", True),
        ("y = 5", "5", True),
        ("3 1/2", "3.5", True),
        ("54\N{DEGREE SIGN}", "54", True),
        ("2.83", r"2\sqrt{2}", False),
        ("(0,1)", "[0,1]", False),
    ],
)
async def test_geo3k_knows_what_is_equivalent(answer: str, label: str, is_right: bool) -> None:
    assert await score(GEO3KJudgerConfig(), f"<think></think>\\boxed{{{answer}}}", label) == (1.0 if is_right else 0.1)


@pytest.mark.parametrize(("label", "expected"), [("25", 0.9), ("5", 0.0)])
async def test_geo3k_without_a_box_reads_the_end_of_a_long_response(label: str, expected: float) -> None:
    config = GEO3KJudgerConfig(extra_info={"use_boxed": False, "format_score": 0.1})
    response = "Let AB = 5. " + "We reason on and on. " * 60 + "The area is 25."
    assert await score(config, response, label) == pytest.approx(expected)


async def test_a_scorer_that_breaks_is_reported_and_never_zero() -> None:
    config = GSM8KJudgerConfig(extra_info={"method": "strict", "score": None})
    state = await config.build().judge(make_state("#### 42", "42"))
    assert (state.status, state.reward) == (Status.FAILED, None)
