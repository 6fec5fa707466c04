"""The judger cases of XTuner's own suite that need no external data."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.judger.states import FakeActor, make_state
from xrl_lite.data import RolloutState
from xrl_lite.judger import (
    BaseJudger,
    ComposedJudger,
    ComposedJudgerConfig,
    GSM8KJudgerConfig,
    Judger,
    JudgerConfig,
    JudgerPool,
    RemoteJudger,
)
from xrl_lite.judger.presets.gsm8k import compute_reward

RESPONSE = "<think>\nHalf of 48 is 24, so 48 + 24 = 72.\n</think>\n\nAdding both: 48 + 24 = 72.  \n\n#### 72<|im_end|>"


def sample(**fields: Any) -> RolloutState:
    return make_state(RESPONSE, reward_model={"ground_truth": "72", "style": "rule"}, **fields)


def handler_a(response: str, label: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": 1.0, "source": "a"}


def handler_b(response: str, label: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": 0.25, "source": "b"}


def branches() -> dict[str, JudgerConfig]:
    return {
        "correctness": JudgerConfig(judger_name="correctness", reward_handler=handler_a),
        "format": JudgerConfig(judger_name="format", reward_handler=handler_b),
    }


class BatchJudger(Judger):
    async def judge_payload(self, payload: Any) -> Any:
        output = {"score": 1.0, "source": "a"}
        return [dict(output) for _ in payload] if isinstance(payload, list) else output


class Custom(Judger):
    def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
        return {"custom_value": rollout_state.extra_fields["custom_value"]}

    def postprocess(self, rollout_state: RolloutState, output: dict[str, Any]) -> RolloutState:
        rollout_state.reward = {"score": output["raw_score"], "postprocessed": True}
        return rollout_state


class WholePayload(Judger):
    def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
        return {
            "response": rollout_state.response,
            "reward_model": rollout_state.reward_model,
            "finish_reason": rollout_state.finish_reason,
            "extra_fields": rollout_state.extra_fields,
        }

    def postprocess(self, rollout_state: RolloutState, output: dict[str, Any]) -> RolloutState:
        rollout_state.reward = {"score": output["raw_score"], "postprocessed": True}
        return rollout_state


async def test_1_single_branch() -> None:
    judged = await ComposedJudgerConfig(branches=branches()).build().judge(sample(data_source="correctness"))
    assert judged.reward == {"score": 1.0, "source": "a"}


async def test_2_batch_single_branch() -> None:
    judger = ComposedJudger(branches={"correctness": BatchJudger()})
    states = [sample(data_source="correctness"), sample(data_source="correctness")]
    judged = await judger.batch_judge(states)
    assert [state.reward for state in judged] == [{"score": 1.0, "source": "a"}] * 2
    assert all(given is got for given, got in zip(states, judged, strict=True))


def test_3_rejects_base_judger_only() -> None:
    with pytest.raises(TypeError, match="must inherit Judger, not only BaseJudger"):
        ComposedJudger(branches={"bad": BaseJudger()})  # pyright: ignore[reportArgumentType]


async def test_4_native_has_no_batch() -> None:
    judger = JudgerConfig(judger_name="x", reward_handler=lambda **_: {"score": 1.0}).build_local()
    with pytest.raises(NotImplementedError, match="does not support batch_judge"):
        await judger.batch_judge([sample()])


async def test_5_remote_contract_on_the_driver() -> None:
    actor = FakeActor(lambda payload: {"raw_score": payload["custom_value"]})
    judger = RemoteJudger(actor=actor, judger_name="remote", preprocess_judger=Custom())
    judged = await judger.judge(sample(extra_fields={"custom_value": 7}))
    assert actor.payloads == [{"custom_value": 7}]
    assert judged.reward == {"score": 7, "postprocessed": True}


async def test_6_pool_contract_and_routing() -> None:
    actors = [FakeActor(lambda payload: {"raw_score": payload["extra_fields"]["expected_score"]}) for _ in range(2)]
    pool = JudgerPool([RemoteJudger(actor, "biology", WholePayload()) for actor in actors], "biology")
    judger = ComposedJudger(branches={"biology": pool})
    for expected in (1, 2):
        state = sample(data_source="biology", finish_reason="stop", extra_fields={"expected_score": expected})
        judged = await judger.judge(state)
        assert judged.reward == {"score": expected, "postprocessed": True}
    for actor, expected in zip(actors, (1, 2), strict=True):
        assert actor.payloads == [
            {
                "response": RESPONSE,
                "reward_model": {"ground_truth": "72", "style": "rule"},
                "finish_reason": "stop",
                "extra_fields": {"expected_score": expected},
            }
        ]


async def test_7_config_with_merge() -> None:
    def merge(original: Any, judged: Any) -> Any:
        original.reward = {name: output["score"] for name, output in judged.items()}
        return original

    judger = ComposedJudgerConfig(branches=branches(), merge_fn=merge).build()
    judged = await judger.judge(sample(data_source={"correctness": 1.0, "format": 1.0}))
    assert judged.reward == {"correctness": 1.0, "format": 0.25}


async def test_8_merge_required() -> None:
    judger = ComposedJudgerConfig(branches=branches()).build()
    with pytest.raises(ValueError, match="merge_fn is not provided"):
        await judger.judge(sample(data_source={"correctness": 1.0, "format": 1.0}))


@pytest.mark.parametrize(
    ("data_source", "error", "message"),
    [
        (None, ValueError, "requires rollout_state.data_source"),
        ("unknown", KeyError, "Unknown judger branch"),
        ({}, ValueError, "must contain at least one judger branch"),
        ({"unknown": 1.0}, KeyError, "Unknown judger branch"),
    ],
)
async def test_9_data_source_validation(data_source: Any, error: type[Exception], message: str) -> None:
    judger = ComposedJudgerConfig(branches=branches()).build()
    with pytest.raises(error, match=message):
        await judger.judge(sample(data_source=data_source))


async def test_10_gsm8k_local() -> None:
    judged = await GSM8KJudgerConfig(judger_name="openai/gsm8k").build().judge(sample())
    assert judged.reward == {"score": 1.0}


class _JudgeService(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert set(body) == {"response", "label", "extra_info"}
        answer = json.dumps(compute_reward(**body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _JudgeService) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/judge"
        server.shutdown()
        thread.join()


def test_13_http_judger_over_several_loops_without_closing(judge_url: str) -> None:
    judger = JudgerConfig(
        judger_name="openai/gsm8k", reward_handler=judge_url, extra_info={"score": 1, "format_score": 0}
    ).build()
    for _ in range(2):
        judged = asyncio.run(judger.judge(sample()))
        assert judged.reward == {"score": 1.0}
