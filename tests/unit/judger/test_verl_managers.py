"""verl's reward managers, and what limits the rate of judgements."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.judger.states import make_state
from xrl_lite.data import Status
from xrl_lite.judger import JUDGERS, JudgerConfig, RateLimit, VerlJudgerConfig, default_compute_score
from xrl_lite.judger.rate_limit import RateLimiter

OVERLONG = {"len": 20, "penalty_factor": 1.0}
DAPO = {"reward_manager": "dapo", "overlong_buffer_cfg": OVERLONG, "max_resp_len": 100}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    if solution_str == "raise":
        raise ValueError("no such unit")
    return float(solution_str == ground_truth)


def trl(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


async def compute_score_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    return {"score": compute_score(data_source, solution_str, ground_truth, extra_info), "turns": extra_info["turns"]}


async def score(config: JudgerConfig, response: str = "72", **fields: Any) -> Any:
    return (await config.build().judge(make_state(response, data_source="openai/gsm8k", **fields))).reward


async def test_naive_gives_the_score_and_passes_what_the_agent_loop_left() -> None:
    assert await score(VerlJudgerConfig(reward_handler=compute_score)) == {"score": 1.0, "acc": 1.0}
    config = VerlJudgerConfig(reward_handler=compute_score_async)
    assert await score(config, extra_fields={"turns": 3}) == {"score": 1.0, "turns": 3}


async def test_a_column_called_reward_score_is_a_column_like_others() -> None:
    def look(extra_info: dict[str, Any]) -> float:
        return 1.0 - extra_info["reward_score"]

    config = VerlJudgerConfig(reward_handler=look)
    assert await score(config, extra_fields={"reward_score": 0.25}) == {"score": 0.75, "acc": 0.75}


def compute_scores(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
    return list(map(compute_score, data_sources, solution_strs, ground_truths, extra_infos))


async def test_dapo_needs_to_know_the_length() -> None:
    config = VerlJudgerConfig.model_validate({"reward_handler": compute_score, **DAPO})
    state = await config.build().judge(make_state(data_source="x"))
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert "needs the response_ids" in str(state.error_msg)


@pytest.mark.parametrize("function", [compute_score, compute_score_async, compute_scores])
@pytest.mark.parametrize(("num_tokens", "penalty"), [(80, 0.0), (90, -0.5), (100, -1.0), (120, -2.0)])
async def test_dapo_punishes_long_responses(function: Any, num_tokens: int, penalty: float) -> None:
    config = VerlJudgerConfig.model_validate(
        {
            "reward_handler": function,
            "signature": "verl_batch" if function is compute_scores else "verl",
            "reward_manager": "dapo",
            "max_resp_len": 100,
            "overlong_buffer_cfg": {**OVERLONG, "log": True},
        }
    )
    reward = await score(config, response_ids=[5] * num_tokens, extra_fields={"turns": 1})
    assert (reward["score"], reward["overlong_reward"], reward["overlong"]) == (1.0 + penalty, penalty, penalty < 0)


async def test_an_error_is_no_zero() -> None:
    state = await VerlJudgerConfig(reward_handler=compute_score).build().judge(make_state("raise", data_source="x"))
    assert (state.status, state.reward) == (Status.FAILED, None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward_manager": "dapo", "overlong_buffer_cfg": OVERLONG}, "needs max_resp_len of at least its len=20"),
        ({"reward_manager": "dapo", "overlong_buffer_cfg": OVERLONG, "max_resp_len": 10}, "got 10"),
        ({"reward_manager": "dapo", "overlong_buffer_cfg": {"len": 0}, "max_resp_len": 10}, "len"),
        ({"overlong_buffer_cfg": OVERLONG, "max_resp_len": 100}, "with reward_manager: dapo only"),
        ({**DAPO, "reward_handler": "http://judge.test"}, "goes with a function of signature verl or verl_batch"),
        ({**DAPO, "signature": "trl", "reward_handler": trl}, "called as trl"),
        ({"reward_manager": "rate_limited"}, "rate_limited needs rate_limit"),
        ({"reward_manager": "prime"}, "reward_manager"),
        ({"rate_limit": {}}, "give max_rpm or max_tpm"),
    ],
)
def test_incomplete_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VerlJudgerConfig.model_validate({"reward_handler": compute_score, **settings})


@pytest.mark.parametrize(
    ("source", "response", "label", "expected"),
    [
        ("openai/gsm8k", "#### 72", "72", 1.0),
        ("lighteval/MATH", r"\boxed{x+1}", "1+x", 1.0),
        ("aime_2025", "Answer: 72", "72", 1.0),
        ("math_dapo", "Answer: 71", "72", -1.0),
        ("searchR1_nq", "<answer>The Hague.</answer>", {"target": ["Amsterdam", "hague"]}, 1.0),
        ("searchR1_nq", "<answer>Rome</answer>", {"target": "Paris"}, 0.0),
        ("codeforces", "```python\nprint(input())\n```", {"inputs": ["1"], "outputs": ["1"]}, 1.0),
        ("apps", "```python\nprint(sqrt(4))\n```", {"inputs": [""], "outputs": ["2.0"]}, 1.0),
    ],
)
async def test_the_default_scorer_goes_by_the_data_source(
    source: str, response: str, label: Any, expected: float
) -> None:
    assert default_compute_score(source, response, label)["score"] == expected
    judger = JUDGERS.resolve("verl").model_validate({})
    assert isinstance(judger, VerlJudgerConfig)
    state = await judger.build().judge(make_state(response, label, data_source=source))
    assert state.reward is not None, state.error_msg
    assert state.reward["score"] == expected


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_turns_come_as_often_as_the_limits_allow() -> None:
    clock = Clock()
    limiter = RateLimiter(RateLimit(max_rpm=60), clock)
    assert [limiter.reserve() for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]
    clock.now += 3.5
    assert limiter.reserve() == 0.5
    clock.now += 100.0
    assert [limiter.reserve() for _ in range(2)] == [0.0, 1.0]  # what was not used does not add up


def test_the_narrower_of_two_limits_holds() -> None:
    limiter = RateLimiter(RateLimit(max_rpm=6000, max_tpm=60_000, estimated_tokens_per_request=3000), Clock())
    assert [limiter.reserve() for _ in range(3)] == pytest.approx([2.0, 5.0, 8.0])


async def test_a_cancelled_judgement_gives_its_turn_back() -> None:
    clock = Clock()
    limiter = RateLimiter(RateLimit(max_rpm=1), clock)
    first = asyncio.create_task(limiter.wait())
    await asyncio.sleep(0)
    before = limiter.reserve()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert limiter.reserve() == pytest.approx(before)


async def test_a_rate_limit_holds_judgements_back_and_counts_as_waiting() -> None:
    config = VerlJudgerConfig(
        reward_handler=compute_score, reward_manager="rate_limited", rate_limit=RateLimit(max_rpm=60 * 20)
    )
    judger = config.build()
    states = await asyncio.gather(*(judger.judge(make_state("72", data_source="x")) for _ in range(25)))
    assert [state.reward["score"] for state in states if state.reward] == [1.0] * 25
    waited = [state.extra_fields["judgement"]["queue_s"] for state in states]
    assert max(waited) > 0.2
    assert judger.statistics()["verl"]["queue_p99"] == max(waited)
