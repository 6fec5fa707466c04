"""The code samples of the XTuner judger guide, with only the imports changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.judger.states import FakeActor, make_state
from xrl_lite.data import RolloutState
from xrl_lite.judger import (
    BaseJudger,
    ComposedJudger,
    ComposedJudgerConfig,
    Judger,
    JudgerConfig,
    JudgerOutput,
    JudgerPayload,
    JudgerPayloadBatch,
    NativeJudger,
    RemoteJudger,
)


def exact_match_reward(response, label, extra_info):
    pred = response.strip()
    gt = str(label).strip()
    score = 1.0 if pred == gt else 0.0
    return {
        "score": score,
        "acc": score > 0,
    }


class ToolJudger(Judger):
    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        return {
            "response": rollout_state.response,
            "label": rollout_state.reward_model["ground_truth"],
            "tool_ok": rollout_state.extra_fields.get("tool_ok", False),
        }

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutput:
        assert not isinstance(payload, list)
        tool_ok = payload["tool_ok"]
        answer = (payload["response"] or "").strip()
        label = payload["label"]
        return {
            "score": 1.0 if tool_ok and answer == label else 0.0,
            "tool_ok": tool_ok,
        }

    def postprocess(self, rollout_state: RolloutState, output: JudgerOutput) -> RolloutState:
        rollout_state.reward = {
            "score": output["score"],
            "tool_ok": output["tool_ok"],
        }
        return rollout_state


class ToolJudgerConfig(JudgerConfig):
    judger_name: str = "tool_judger"

    def build_local(self) -> ToolJudger:
        return ToolJudger()


def weight_fn(branch_name: str) -> float:
    return {
        "correctness": 0.9,
        "format": 0.1,
    }[branch_name]


def merge_rewards(original, judged):
    branch_scores = {name: output["score"] for name, output in judged.items()}
    original.reward = {
        "score": sum(weight_fn(name) * score for name, score in branch_scores.items()),
        **branch_scores,
    }
    return original


async def test_reward_handler_sample() -> None:
    judger_config = JudgerConfig(judger_name="exact_match", reward_handler=exact_match_reward, extra_info={})
    state = make_state(" 72 ")
    assert await judger_config.build().judge(state) is state
    assert state.reward == {"score": 1.0, "acc": True}


def test_http_sample_builds_a_native_judger() -> None:
    judger_config = JudgerConfig(
        judger_name="remote_reward",
        reward_handler="http://127.0.0.1:8000/reward",
        request_timeout=30.0,
    )
    assert isinstance(judger_config.build(), NativeJudger)


@pytest.mark.parametrize(("tool_ok", "score"), [(True, 1.0), (False, 0.0)])
async def test_tool_judger_sample(tool_ok: bool, score: float) -> None:
    judger = ToolJudgerConfig().build()
    state = await judger.judge(make_state("72", extra_fields={"tool_ok": tool_ok}))
    assert state.reward == {"score": score, "tool_ok": tool_ok}


async def test_tool_judger_behind_a_worker_sends_only_its_payload() -> None:
    actor = FakeActor(lambda payload: {"score": 1.0, "tool_ok": payload["tool_ok"]})
    judger = RemoteJudger(actor=actor, judger_name="tool_judger", preprocess_judger=ToolJudger())
    state = await judger.judge(make_state("72", extra_fields={"tool_ok": True}))
    assert actor.payloads == [{"response": "72", "label": "72", "tool_ok": True}]
    assert state.reward == {"score": 1.0, "tool_ok": True}


async def test_composed_sample_with_weights_in_the_merge_function() -> None:
    judger_config = ComposedJudgerConfig(
        branches={
            "correctness": JudgerConfig(judger_name="correctness", reward_handler=exact_match_reward),
            "format": JudgerConfig(
                judger_name="format", reward_handler=lambda response, label, extra_info: {"score": 0.5}
            ),
        },
        merge_fn=merge_rewards,
    )
    state = await judger_config.build().judge(make_state("72", data_source={"correctness": 1.0, "format": 1.0}))
    assert state.reward == {"score": pytest.approx(0.95), "correctness": 1.0, "format": 0.5}


async def test_a_judger_that_owns_the_whole_flow() -> None:
    class Whole(BaseJudger):
        async def judge(self, rollout_state: RolloutState) -> RolloutState:
            rollout_state.reward = {"score": 1.0}
            return rollout_state

    state = await Whole().judge(make_state())
    assert state.reward == {"score": 1.0}
    with pytest.raises(TypeError, match="must inherit Judger, not only BaseJudger"):
        ComposedJudger({"whole": Whole()})  # pyright: ignore[reportArgumentType]


async def test_handler_sees_response_label_and_extra_info_only() -> None:
    seen: list[dict[str, Any]] = []

    def handler(**arguments: Any) -> dict[str, Any]:
        seen.append(arguments)
        return {"score": 1.0}

    await JudgerConfig(judger_name="spy", reward_handler=handler, extra_info={"k": 1}).build().judge(make_state())
    assert seen == [{"response": "72", "label": "72", "extra_info": {"k": 1}}]
