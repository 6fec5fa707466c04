"""Scoring over HTTP: retries, errors, model judges. The network is replaced by httpx's own mock transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.unit.judger.states import make_state
from xrl_lite.data import RolloutState, Status
from xrl_lite.judger import CompassVerifierV2, CompassVerifierV2Config, HttpScorer, NativeJudger

URL = "http://judge.test/score"


class Service:
    """Answers requests from a list, and goes on with the last answer."""

    def __init__(self, *answers: httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
        return answer(request)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)


def good(score: float = 1.0) -> httpx.Response:
    return httpx.Response(200, json={"score": score})


async def judge(service: Service, **options: Any) -> RolloutState:
    scorer = HttpScorer(URL, backoff_s=0.0, transport=service.transport, **options)
    return await NativeJudger("http", scorer, {"k": 1}).judge(make_state("a", "b"))


async def test_body_and_reply() -> None:
    service = Service(good(0.5))
    state = await judge(service)
    assert state.reward == {"score": 0.5}
    assert json.loads(service.requests[0].content) == {"response": "a", "label": "b", "extra_info": {"k": 1}}


@pytest.mark.parametrize(
    "trouble", [408, 429, 500, 502, 503, 504, 529, httpx.ConnectError("refused"), httpx.ReadError("cut")]
)
async def test_passing_trouble_is_retried(trouble: Any) -> None:
    first = httpx.Response(trouble) if isinstance(trouble, int) else trouble
    service = Service(first, first, good())
    assert (await judge(service)).reward == {"score": 1.0}
    assert len(service.requests) == 3


async def test_a_server_may_say_when_to_come_back() -> None:
    service = Service(httpx.Response(429, headers={"retry-after": "0"}), good())
    assert (await judge(service)).reward == {"score": 1.0}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_other_errors_are_not_retried(status: int) -> None:
    service = Service(httpx.Response(status))
    state = await judge(service)
    assert (state.status, len(service.requests)) == (Status.FAILED, 1)
    assert str(status) in str(state.error_msg)


@pytest.mark.parametrize(
    ("answer", "outcome", "says", "requests"),
    [
        (httpx.ConnectError("connection refused"), "raised", "connection refused", 4),
        (httpx.Response(500), "raised", "500 Internal Server Error", 4),
        (httpx.ReadTimeout("slow"), "timeout", "did not answer within", 1),
        (httpx.Response(200, html="<h1>Sorry</h1>"), "raised", "instead of JSON: '<h1>Sorry</h1>'", 1),
        (httpx.Response(200, json=[1.0]), "raised", "must return a dict, but got <class 'list'>", 1),
        (httpx.Response(200, json={"acc": 1.0}), "raised", "must have the key 'score'", 1),
        (httpx.Response(200, content=b'{"score": NaN}'), "raised", "finite number", 1),
    ],
)
async def test_what_is_wrong_with_a_service_is_said(answer: Any, outcome: str, says: str, requests: int) -> None:
    service = Service(answer)
    state = await judge(service)
    assert state.extra_fields["judgement"]["outcome"] == outcome
    assert says in str(state.error_msg)
    assert len(service.requests) == requests


async def test_what_json_cannot_hold_is_the_senders_error() -> None:
    scorer = HttpScorer(URL, transport=Service(good()).transport)
    state = await NativeJudger("http", scorer).judge(make_state("a", {1, 2}))
    assert "not JSON serializable" in str(state.error_msg)


def verdict(letter: str) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "verifier"}]})
        return httpx.Response(200, json={"choices": [{"message": {"content": letter}}]})

    return answer


def verifier(service: Service, **options: Any) -> CompassVerifierV2:
    return CompassVerifierV2(["one:1", "two:2"], retry_wait_s=0.0, transport=service.transport, **options)


class TestCompassVerifier:
    @pytest.mark.parametrize(("letter", "score"), [("A", 1), (" A\n", 1), ("B", -1), ("C", -1), ("maybe", -1)])
    async def test_verdicts(self, letter: str, score: int) -> None:
        state = await verifier(Service(verdict(letter))).judge(make_state("72", "72"))
        assert state.reward == {"score": score, "verdict": letter.strip()}

    async def test_only_the_end_of_the_response_is_judged(self) -> None:
        service = Service(verdict("A"))
        response = "secret</think>" + "\n".join(f"line {index}" for index in range(20)) + "<|im_end|>"
        await verifier(service, model="m").judge(make_state(response, "72"))
        prompt = json.loads(service.requests[0].content)["messages"][0]["content"]
        assert "secret" not in prompt
        assert "line 9\n" not in prompt
        assert "line 10\n" in prompt
        assert "How many?" in prompt

    async def test_text_parts_of_a_multimodal_question_are_used(self) -> None:
        service = Service(verdict("A"))
        content = [{"type": "image", "image": "x"}, {"type": "text", "text": "What is shown?"}]
        await verifier(service, model="m").judge(make_state("72", message=[{"role": "user", "content": content}]))
        assert (
            "<question>\nWhat is shown?\n</question>"
            in json.loads(service.requests[0].content)["messages"][0]["content"]
        )

    async def test_a_host_that_fails_is_left_for_the_next(self) -> None:
        service = Service(httpx.ConnectError("refused"), verdict("A"))
        state = await verifier(service, model="m").judge(make_state())
        assert state.reward == {"score": 1, "verdict": "A"}
        assert [request.url.host for request in service.requests] == ["one", "two"]

    @pytest.mark.parametrize(
        "answer", [httpx.ConnectError("refused"), httpx.Response(500), httpx.Response(200, json={})]
    )
    async def test_no_host_that_judges_fails_the_sample(self, answer: Any) -> None:
        state = await verifier(Service(answer), model="m").judge(make_state())
        assert state.status is Status.FAILED
        assert "Cannot connect to judger service for 3 times." in str(state.error_msg)

    async def test_a_response_that_is_not_complete_is_wrong_without_asking(self) -> None:
        state = await verifier(Service(httpx.ConnectError("refused"))).judge(make_state(status=Status.ABORTED))
        assert state.reward == {"score": -1}

    async def test_misuse(self) -> None:
        judger = verifier(Service(verdict("A")))
        with pytest.raises(AssertionError, match="must contain label"):
            await judger.judge(make_state(label=None))
        with pytest.raises(NotImplementedError):
            await judger.batch_judge([make_state()])
        with pytest.raises(ValueError, match="requires at least one host"):
            CompassVerifierV2([])

    def test_settings(self) -> None:
        judger = CompassVerifierV2Config(hosts=["one:1"]).build()
        assert isinstance(judger, CompassVerifierV2)
        assert judger.thinking_finish_words == ["<conclude>", "**Final Answer**", "</think>"]
        with pytest.raises(ValueError, match="prompt_template"):
            CompassVerifierV2Config(hosts=["one:1"], prompt_template="{answer}")
