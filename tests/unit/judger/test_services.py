"""Scoring over HTTP: retries, errors, model judges. The network is replaced by httpx's own mock transport."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.unit.judger.states import make_state
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import ConfigError
from xrl_lite.judger import (
    ClassifyJudger,
    ClassifyJudgerConfig,
    CompassVerifierV2,
    CompassVerifierV2Config,
    HttpScorer,
    LlmJudger,
    LlmJudgerConfig,
    NativeJudger,
    self_test,
)
from xrl_lite.judger.hosts import Hosts

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


class TestHosts:
    def hosts(self, service: Service, clock: Clock | None = None, **options: Any) -> Hosts:
        addresses = ["one:1", "two:2", "https://three.test/v1"]
        return Hosts(
            addresses, judger="j", retry_wait_s=0.0, transport=service.transport, clock=clock or Clock(), **options
        )

    def test_addresses_may_be_urls(self) -> None:
        hosts = self.hosts(Service(good())).hosts
        assert [host.url for host in hosts] == ["http://one:1", "http://two:2", "https://three.test"]

    async def test_the_least_busy_host_that_is_well_is_asked(self) -> None:
        asked: list[str] = []
        waiting = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.host)
            if len(asked) == 3:
                waiting.set()
            await waiting.wait()
            return httpx.Response(200, json=1)

        hosts = Hosts(["one:1", "two:2", "three:3"], judger="j", transport=httpx.MockTransport(answer))
        await asyncio.gather(*(hosts.post("/x", {}, int) for _ in range(3)))
        assert sorted(asked) == ["one", "three", "two"]
        assert [host.in_flight for host in hosts.hosts] == [0, 0, 0]

    async def test_a_host_that_fails_rests_longer_each_time_and_is_well_after_an_answer(self) -> None:
        clock = Clock()
        hosts = self.hosts(Service(httpx.ConnectError("refused"), httpx.Response(200, json=1)), clock)
        assert await hosts.post("/x", {}, int) == 1
        first = hosts.hosts[0]
        assert (first.num_failures, first.rests_until) == (1, clock.now + 1.0)
        assert hosts.choose() is hosts.hosts[1]
        first.fail(clock.now)
        assert first.rests_until == clock.now + 2.0
        clock.now += 2.0
        assert hosts.choose() is first
        first.succeed()
        assert (first.num_failures, first.rests_until) == (0, 0.0)

    async def test_if_all_are_ill_the_one_that_rested_longest_is_asked(self) -> None:
        clock = Clock()
        hosts = self.hosts(Service(good()), clock)
        for host in hosts.hosts:
            host.fail(clock.now)
            clock.now += 0.1
        assert hosts.choose() is hosts.hosts[0]

    async def test_every_failure_is_told_with_what_the_server_said(self) -> None:
        hosts = self.hosts(Service(httpx.Response(401, text="wrong key")), max_retries=2)
        with pytest.raises(RuntimeError, match="for 2 times") as caught:
            await hosts.post("/x", {}, int)
        assert "wrong key" in str(caught.value)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def completion(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


class CountingServer:
    """A model server that says correct, and counts the requests that it has at the same time.

    Args:
        wanted_at_once: It answers nobody before so many are there.
        trickles: Whether it goes on sending white space instead.
    """

    def __init__(self, *, wanted_at_once: int = 1, trickles: bool = False) -> None:
        self.address = ""
        self.most_at_once = 0
        self._at_once = 0
        self._wanted_at_once = wanted_at_once
        self._enough = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._trickles = trickles
        self._body = completion("Verdict: correct").content

    async def __aenter__(self) -> CountingServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = re.findall(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length))
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                if self._at_once == self._wanted_at_once:
                    self._enough.set()
                await self._enough.wait()
                await asyncio.sleep(0.01)  # whoever comes as well comes now
                size = 1 << 30 if self._trickles else len(self._body)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
                while self._trickles:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.05)
                self._at_once -= 1
                writer.write(self._body)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


NUMBERS = [
    ("-1", "-1", -1.0),
    (".5", ".5", 0.5),
    ("**-0.5**", "-0.5", -0.5),
    ("$-.25$.", "-.25", -0.25),
    ("\N{MINUS SIGN}1", "\N{MINUS SIGN}1", -1.0),
    ("+2", "+2", 2.0),
    ("1e-3.", "1e-3", 0.001),
    ("... 0.7", "0.7", 0.7),
]
"""What a judge writes, what of it is the verdict, and the number that it is."""


class TestLlmJudge:
    async def judge(self, service: Service, config: LlmJudgerConfig | None = None, **fields: Any) -> RolloutState:
        config = config or LlmJudgerConfig(hosts=["one:1"], model="m", retry_wait_s=0.0)
        judger = config.build_local()
        assert isinstance(judger, LlmJudger)
        judger.hosts = Hosts(["one:1"], judger="j", retry_wait_s=0.0, transport=service.transport)
        return await judger.judge(make_state(**fields))

    @pytest.mark.parametrize(
        ("text", "settings", "reward"),
        [
            ("Same.\nVerdict: correct", {}, {"score": 1.0, "verdict": "correct"}),
            ("Verdict: correct? No.\n**Verdict: INCORRECT.**", {}, {"score": 0.0, "verdict": "INCORRECT"}),
            (
                "Score: 7/10",
                {"verdict_pattern": r"Score: (\d+)", "verdict_scores": None, "verdict_scale": 10},
                {"score": 0.7, "verdict": "7"},
            ),
            *(
                (f"Verdict: {written}", {"verdict_scores": None}, {"score": number, "verdict": verdict})
                for written, verdict, number in NUMBERS
            ),
            ("Verdict - correct.", {}, {"score": 1.0, "verdict": "correct"}),
            ("long", {"verdict_parser": len}, {"score": 4}),
            ("long", {"verdict_parser": lambda text: {"score": 1.0, "text": text}}, {"score": 1.0, "text": "long"}),
        ],
    )
    async def test_verdicts(self, text: str, settings: Any, reward: Any) -> None:
        config = LlmJudgerConfig(hosts=["one:1"], model="m", **settings)
        assert (await self.judge(Service(completion(text)), config)).reward == reward

    @pytest.mark.parametrize(("max_concurrency", "count"), [(4, 20), (150, 150)])
    async def test_as_many_are_asked_at_once_as_the_settings_say(self, max_concurrency: int, count: int) -> None:
        async with CountingServer(wanted_at_once=max_concurrency) as server:
            config = LlmJudgerConfig(hosts=[server.address], model="m", max_concurrency=max_concurrency)
            judger = config.build()
            states = await asyncio.gather(*(judger.judge(make_state(str(n))) for n in range(count)))
            await judger.aclose()
        assert [state.reward for state in states] == [{"score": 1.0, "verdict": "correct"}] * count
        assert server.most_at_once == max_concurrency

    async def test_an_answer_that_never_ends_is_given_up(self) -> None:
        async with CountingServer(trickles=True) as server, asyncio.timeout(20):
            config = LlmJudgerConfig(hosts=[server.address], model="m", request_timeout=0.3, max_retries=1)
            judger = config.build()
            state = await judger.judge(make_state("x"))
            await judger.aclose()
        assert "no whole answer" in str(state.error_msg)

    @pytest.mark.parametrize("text", ["I cannot say.", "Verdict: perhaps", ""])
    async def test_no_verdict_is_never_a_score(self, text: str) -> None:
        state = await self.judge(Service(completion(text)))
        assert (state.status, state.reward) == (Status.FAILED, None)
        assert "verdict" in str(state.error_msg)

    async def test_the_prompt_holds_what_its_template_names(self) -> None:
        service = Service(completion("Verdict: correct"))
        config = LlmJudgerConfig(
            hosts=["one:1"],
            model="m",
            prompt_template="{question}|{label}|{response}|{data_source}|{json: {}}",
            system_prompt="Be strict.",
            max_tokens=5,
            extra_body={"top_p": 1},
        )
        await self.judge(service, config, response="hm</think>{label}", label="72", data_source="s")
        body = json.loads(service.requests[0].content)
        assert body == {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "How many?|72|{label}|s|{json: {}}"},
            ],
            "max_tokens": 5,
            "temperature": 0.0,
            "top_p": 1,
        }

    async def test_the_model_is_asked_from_the_servers_once(self) -> None:
        service = Service(verdict("Verdict: correct"))
        config = LlmJudgerConfig(hosts=["one:1"])
        assert (await self.judge(service, config)).reward is not None
        assert [request.url.path for request in service.requests] == ["/v1/models", "/v1/chat/completions"]

    def test_the_key_comes_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = LlmJudgerConfig(hosts=["one:1"], api_key_env="JUDGE_KEY")
        with pytest.raises(ConfigError, match="variable JUDGE_KEY is not set"):
            config.build()
        monkeypatch.setenv("JUDGE_KEY", "secret")
        config.build()
        assert "secret" not in config.model_dump_json()

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"hosts": []}, "hosts"),
            ({"prompt_template": "{respnse}"}, r"must contain {response}. Did you mean 'respnse'"),
            ({"verdict_pattern": "("}, "not a regular expression"),
            ({"verdict_pattern": "Verdict"}, "needs a group around the verdict"),
            ({"verdict_parser": "no_such.py:f"}, "there is no such file"),
        ],
    )
    def test_bad_settings_are_refused(self, settings: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            LlmJudgerConfig.model_validate({"hosts": ["one:1"], **settings})

    async def test_it_proves_itself_if_told_how_a_right_response_looks(self) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            prompt = json.loads(request.content)["messages"][0]["content"]
            return completion(f"Verdict: {'correct' if '#### 72' in prompt else 'incorrect'}")

        judger = LlmJudgerConfig(hosts=["one:1"], model="m", gold_template="#### {label}").build()
        assert isinstance(judger, LlmJudger)
        judger.hosts = Hosts(["one:1"], judger="j", transport=Service(answer).transport)
        assert [result.is_passed for result in await self_test(judger, make_state())] == [True]


class TestClassify:
    async def judge(self, service: Service, **options: Any) -> RolloutState:
        hosts = Hosts(["one:1"], judger="rm", retry_wait_s=0.0, transport=service.transport)
        return await ClassifyJudger(hosts, model="rm", **options).judge(make_state("72"))

    async def test_the_probability_of_the_label_is_the_score(self) -> None:
        service = Service(httpx.Response(200, json={"data": [{"index": 0, "probs": [0.25, 0.75]}]}))
        assert (await self.judge(service)).reward == {"score": 0.75}
        assert (await self.judge(service, label_index=0)).reward == {"score": 0.25}
        assert service.requests[0].url.path == "/classify"
        assert json.loads(service.requests[0].content) == {"model": "rm", "input": "How many?\n72"}

    @pytest.mark.parametrize(
        "answer", [httpx.Response(200, json={"data": []}), httpx.Response(200, json=[1]), httpx.Response(404)]
    )
    async def test_another_answer_fails_the_sample(self, answer: httpx.Response) -> None:
        state = await self.judge(Service(answer))
        assert (state.status, state.reward) == (Status.FAILED, None)

    def test_settings(self) -> None:
        assert isinstance(ClassifyJudgerConfig(hosts=["one:1"]).build(), ClassifyJudger)
        with pytest.raises(ValueError, match=r"must contain {response}"):
            ClassifyJudgerConfig(hosts=["one:1"], input_template="{prompt}")
