"""The gateway over a socket, spoken to by the official clients of both vendors, and by rude ones."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anthropic
import anyio
import httpx
import openai
import pytest

from tests.unit.gateway.rig import CALL, END, QWEN3, TOOL, HaltingRolloutCtl, answering, held, trained, until
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.errors import RolloutError
from xrl_lite.gateway import Gateway, GatewayConfig, SessionHandle, SessionResult

FUNCTION = TOOL["function"]


class Client(Protocol):
    """A vendor's client, as far as both do the same."""

    errors: Any

    async def ask(self, text: str, **options: Any) -> tuple[str, list[Any]]:
        """Say something; return what the model says, and arguments of its calls."""
        ...

    async def answer(self, text: str, **options: Any) -> tuple[str, list[Any]]:
        """Answer the model's last call."""
        ...


class OpenAIClient:
    errors = openai

    def __init__(self, handle: SessionHandle, **options: Any) -> None:
        options = {"max_retries": 0, "api_key": handle.api_key, "base_url": handle.base_url} | options
        # without certificates, whose loading takes longer than a test
        self.sdk = openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(verify=False), **options)
        self.messages: list[Any] = []

    async def ask(self, text: str, **options: Any) -> tuple[str, list[Any]]:
        return await self._say({"role": "user", "content": text}, **options)

    async def answer(self, text: str, **options: Any) -> tuple[str, list[Any]]:
        call_id = self.messages[-1]["tool_calls"][0]["id"]
        return await self._say({"role": "tool", "tool_call_id": call_id, "content": text}, **options)

    async def _say(self, message: Any, *, stream: bool = False, **options: Any) -> tuple[str, list[Any]]:
        self.messages.append(message)
        given = {"model": "policy", "messages": self.messages, "tools": [TOOL]} | options
        if stream:
            async with self.sdk.chat.completions.stream(**given) as events:
                answer = (await events.get_final_completion()).choices[0].message
        else:
            answer = (await self.sdk.chat.completions.create(**given)).choices[0].message
        self.messages.append(answer.model_dump(exclude_none=True))
        return answer.content or "", [json.loads(call.function.arguments) for call in answer.tool_calls or []]


class AnthropicClient:
    errors = anthropic

    def __init__(self, handle: SessionHandle, **options: Any) -> None:
        options = {"max_retries": 0, "api_key": handle.api_key, "base_url": handle.anthropic_base_url} | options
        self.sdk = anthropic.AsyncAnthropic(http_client=anthropic.DefaultAsyncHttpxClient(verify=False), **options)
        self.messages: list[Any] = []

    async def ask(self, text: str, **options: Any) -> tuple[str, list[Any]]:
        return await self._say(text, **options)

    async def answer(self, text: str, **options: Any) -> tuple[str, list[Any]]:
        (call_id,) = (block.id for block in self.messages[-1]["content"] if block.type == "tool_use")
        return await self._say([{"type": "tool_result", "tool_use_id": call_id, "content": text}], **options)

    async def _say(self, content: Any, *, stream: bool = False, **options: Any) -> tuple[str, list[Any]]:
        self.messages.append({"role": "user", "content": content})
        tool = {"name": FUNCTION["name"], "description": "Adds.", "input_schema": FUNCTION["parameters"]}
        given = {"model": "policy", "max_tokens": 99, "messages": self.messages, "tools": [tool]} | options
        if stream:
            async with self.sdk.messages.stream(**given) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.sdk.messages.create(**given)
        self.messages.append({"role": "assistant", "content": answer.content})
        texts = [block.text for block in answer.content if block.type == "text"]
        return "".join(texts), [block.input for block in answer.content if block.type == "tool_use"]


CLIENTS = {"openai": OpenAIClient, "anthropic": AnthropicClient}
both = pytest.mark.parametrize("vendor", list(CLIENTS))


@asynccontextmanager
async def gateway_with(rollout: Any, **settings: Any) -> AsyncIterator[Gateway]:
    async with Gateway(rollout, tokenizer=QWEN3, config=GatewayConfig(**settings)) as gateway:
        yield gateway


@asynccontextmanager
async def client_of(
    gateway: Gateway, vendor: str, handle: SessionHandle | None = None, **options: Any
) -> AsyncIterator[Any]:
    client = CLIENTS[vendor](handle or gateway.create_session(), **options)
    async with client.sdk:
        yield client


async def only_result(gateway: Gateway, handle: SessionHandle) -> SessionResult:
    return await gateway.finalize_session(handle.session_id)


# --- conversations


@both
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_with_a_tool_is_one_trajectory(vendor: str, stream: bool) -> None:
    rollout = answering(CALL, f"It is 7.{END}", f"<think>\nhm\n</think>\n\nYes.{END}")
    async with gateway_with(rollout) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, vendor, handle) as client:
            assert await client.ask("3+4?", stream=stream) == ("", [{"expression": "3+4"}])
            assert await client.answer("7", stream=stream) == ("It is 7.", [])
            assert await client.ask("Sure?", stream=stream) == ("Yes.", [])
        (trajectory,) = (await only_result(gateway, handle)).trajectories
    assert trained(trajectory) == f"{CALL}It is 7.{END}<think>\nhm\n</think>\n\nYes.{END}"
    assert trajectory.num_turns == 3


async def test_both_vendors_see_the_same_prompt() -> None:
    rollout = answering(CALL, f"a{END}", CALL, f"a{END}")
    async with gateway_with(rollout) as gateway:
        for vendor in CLIENTS:
            async with client_of(gateway, vendor) as client:
                await client.ask("3+4?")
                await client.answer("7")
    first, second, third, fourth = (request.prompt_ids for request in rollout.requests)
    assert (first, second) == (third, fourth)


@both
async def test_a_key_is_enough_to_find_the_session(vendor: str) -> None:
    async with gateway_with(answering()) as gateway:
        handle = gateway.create_session()
        root = gateway.url if vendor == "anthropic" else f"{gateway.url}/v1"
        async with client_of(gateway, vendor, handle, base_url=root) as client:
            assert await client.ask("hi") == ("1", [])
        assert (await only_result(gateway, handle)).num_turns == 1


async def test_log_probs_and_tokens_are_told_to_who_asks() -> None:
    async with gateway_with(answering(f"Yes.{END}")) as gateway, client_of(gateway, "openai") as client:
        answer = await client.sdk.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
    (choice,) = answer.choices
    told = choice.logprobs.content
    assert "".join(each.token for each in told) == f"Yes.{END}"
    assert [each.logprob for each in told] == [-float(place + 1) for place in range(len(told))]
    assert choice.token_ids == QWEN3.encode_text(f"Yes.{END}")
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)


async def test_completions_take_text_and_stream() -> None:
    async with gateway_with(answering("b", "d")) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, "openai", handle) as client:
            first = await client.sdk.completions.create(model="policy", prompt="a", logprobs=0)
            second = await client.sdk.completions.create(
                model="policy", prompt="abc", stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in second]
        (trajectory,) = (await only_result(gateway, handle)).trajectories
    assert first.choices[0].text == "b"
    assert first.choices[0].logprobs.tokens == ["b"]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "d"
    assert chunks[-1].usage.completion_tokens == 1
    assert trained(trajectory) == "bd"


async def test_models_and_tokens_are_told_in_each_vendors_way() -> None:
    async with gateway_with(answering()) as gateway:
        async with client_of(gateway, "openai") as client:
            assert [model.id async for model in client.sdk.models.list()] == ["policy"]
            assert (await client.sdk.models.retrieve("policy")).object == "model"
        async with client_of(gateway, "anthropic") as client:
            assert [model.id async for model in client.sdk.models.list()] == ["policy"]
            assert (await client.sdk.models.retrieve("policy")).type == "model"
            messages = [{"role": "user", "content": "hi"}]
            counted = await client.sdk.messages.count_tokens(model="policy", messages=messages)
            await client.ask("hi", tools=anthropic.NOT_GIVEN)
            answer = await client.sdk.messages.create(model="policy", max_tokens=9, messages=messages)
            assert counted.input_tokens == answer.usage.input_tokens


async def test_a_stop_text_is_named() -> None:
    async with gateway_with(answering("one STOP")) as gateway, client_of(gateway, "anthropic") as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.sdk.messages.create(
            model="policy", max_tokens=9, messages=messages, stop_sequences=["STOP"]
        )
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "STOP", "one ")


async def test_an_alias_is_answered_to_by_its_name() -> None:
    rollout = answering()
    async with gateway_with(rollout, model_aliases=["claude-*"]) as gateway, client_of(gateway, "anthropic") as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.sdk.messages.create(model="claude-sonnet-9", max_tokens=9, messages=messages)
    assert answer.model == "claude-sonnet-9"


# --- errors, as the clients raise them


@both
async def test_what_is_wrong_is_raised_as_the_vendors_error(vendor: str) -> None:
    async with gateway_with(answering()) as gateway:
        handle = gateway.create_session()
        errors = CLIENTS[vendor].errors
        async with client_of(gateway, vendor, handle) as client:
            with pytest.raises(errors.NotFoundError, match="'gpt-9' does not exist: 'policy' is served here"):
                await client.ask("hi", model="gpt-9")
            with pytest.raises(errors.BadRequestError, match="only auto and none"):
                await client.ask("hi", tool_choice={"type": "any"})
        async with client_of(gateway, vendor, handle, api_key="sk-wrong") as client:
            with pytest.raises(errors.AuthenticationError, match="Incorrect API key"):
                await client.ask("hi")
        other = gateway.create_session()
        async with client_of(gateway, vendor, handle, api_key=other.api_key) as client:
            with pytest.raises(errors.AuthenticationError, match="belongs to no session here, or to another"):
                await client.ask("hi")
        url = f"{gateway.url}/sessions/none"
        async with client_of(gateway, vendor, handle, base_url=url + ("/v1" if vendor == "openai" else "")) as client:
            with pytest.raises(errors.NotFoundError, match="There is no session 'none'"):
                await client.ask("hi")


@both
async def test_a_closed_session_is_a_conflict_that_is_not_retried(vendor: str) -> None:
    async with gateway_with(answering()) as gateway:
        finalized, aborted = gateway.create_session(), gateway.create_session()
        await gateway.finalize_session(finalized.session_id)
        await gateway.abort_session(aborted.session_id)
        for handle, state in ((finalized, "finalized"), (aborted, "aborted")):
            async with client_of(gateway, vendor, handle, max_retries=2) as client:
                with pytest.raises(CLIENTS[vendor].errors.ConflictError, match=f"is {state}") as caught:
                    await client.ask("hi")
                assert caught.value.response.headers["x-should-retry"] == "false"


@both
async def test_a_prompt_that_is_too_long_is_the_clients_error(vendor: str) -> None:
    async with (
        gateway_with(answering(), max_trajectory_tokens=5) as gateway,
        client_of(gateway, vendor, max_retries=2) as client,
    ):
        with pytest.raises(CLIENTS[vendor].errors.BadRequestError, match="maximum context length") as caught:
            await client.ask("hi")
    if vendor == "openai":
        assert caught.value.code == "context_length_exceeded"


@both
async def test_a_client_retries_what_the_engine_failed_at(vendor: str) -> None:
    answers: list[Any] = [RolloutError("engine broke"), QWEN3.encode_text(f"a{END}")]
    rollout = ScriptedRolloutCtl(lambda _: answers.pop(0))
    async with gateway_with(rollout) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, vendor, handle, max_retries=1) as client:
            assert await client.ask("hi") == ("a", [])
        result = await only_result(gateway, handle)
    assert (result.num_turns, result.num_failed_turns, len(result.trajectories)) == (1, 1, 1)


@both
async def test_one_engine_error_does_not_touch_the_others(vendor: str) -> None:
    def script(state: Any) -> Any:
        prompt = QWEN3.decode(state.prompt_ids, False)
        return RolloutError("engine broke") if "number 3" in prompt else QWEN3.encode_text(f"a{END}")

    ended: dict[int, Any] = {}
    async with gateway_with(ScriptedRolloutCtl(script)) as gateway:

        async def run(number: int) -> None:
            async with client_of(gateway, vendor) as client:
                try:
                    ended[number] = await client.ask(f"number {number}")
                except CLIENTS[vendor].errors.InternalServerError as error:
                    ended[number] = error

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(run, number)
    assert "engine broke" in str(ended.pop(3))
    assert set(map(str, ended.values())) == {"('a', [])"}


# --- streams and clients that go away


@both
async def test_a_slow_stream_shows_signs_of_life_and_then_the_answer(vendor: str) -> None:
    rollout = held(f"a{END}")
    said: list[Any] = []
    async with gateway_with(rollout, keep_alive_s=0.01) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, vendor, handle) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                said.append(await client.ask("hi", stream=True))

            tasks.start_soon(ask)
            await rollout.begun(1)
            async with raw_stream(handle, vendor) as lines:
                assert await anext(lines) in (": keep-alive", "event: ping")
            rollout.let_go.set()
    assert said == [("a", [])]


@asynccontextmanager
async def spoken(client: Any, vendor: str, **options: Any) -> AsyncIterator[AsyncIterator[str]]:
    """Yield the text of an answer as the vendor's client gets it."""
    given = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]} | options
    if vendor == "anthropic":
        async with client.sdk.messages.stream(max_tokens=99, **given) as events:
            yield aiter(events.text_stream)
    else:
        async with client.sdk.chat.completions.stream(**given) as events:
            yield (event.delta async for event in events if event.type == "content.delta" and event.delta)


@both
async def test_text_comes_while_the_rest_is_still_sampled(vendor: str) -> None:
    rollout = HaltingRolloutCtl("It is", f" seven. {CALL}")
    async with gateway_with(rollout) as gateway:
        handle = gateway.create_session()
        tool = {"name": FUNCTION["name"], "description": "Adds.", "input_schema": FUNCTION["parameters"]}
        async with (
            client_of(gateway, vendor, handle) as client,
            spoken(client, vendor, tools=[tool if vendor == "anthropic" else TOOL]) as texts,
        ):
            said = await anext(texts)
            assert "It is".startswith(said)
            rollout.let_go.set()
            said += "".join([text async for text in texts])
        (trajectory,) = (await only_result(gateway, handle)).trajectories
    assert said == "It is seven."
    assert trained(trajectory) == f"It is seven. {CALL}"
    assert trajectory.response_logprobs == [-float(place + 1) for place in range(len(trajectory.response_ids))]


async def test_log_probs_come_with_the_text_of_their_tokens() -> None:
    rollout = HaltingRolloutCtl("<think>\nhm\n</think>\n\nIt is", f" seven. {CALL}")
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "logprobs": True}
    async with gateway_with(rollout) as gateway:
        handle = gateway.create_session()
        async with (
            client_of(gateway, "openai", handle) as client,
            client.sdk.chat.completions.stream(**asked) as events,
        ):
            told: list[Any] = []
            async for event in events:
                if event.type == "chunk":
                    told += [event.chunk.choices[0].logprobs] if event.chunk.choices else []
                    if any(told):
                        rollout.let_go.set()
            (choice,) = (await events.get_final_completion()).choices
        (trajectory,) = (await only_result(gateway, handle)).trajectories
    assert len([logprobs for logprobs in told if logprobs]) > 1
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(each.token for each in content) == trained(trajectory)
    assert [each.logprob for each in content] == trajectory.response_logprobs


async def test_log_probs_of_completions_go_on_where_they_were() -> None:
    rollout = HaltingRolloutCtl("It is", " seven.")
    async with gateway_with(rollout) as gateway, client_of(gateway, "openai") as client:
        stream = await client.sdk.completions.create(model="policy", prompt="a", stream=True, logprobs=1)
        chunks = [(await anext(stream)).choices[0]]
        assert chunks[0].logprobs is not None
        rollout.let_go.set()
        chunks += [chunk.choices[0] async for chunk in stream]
    told = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    tokens = [token for each in told for token in each.tokens]
    offsets = [offset for each in told for offset in each.text_offset]
    assert "".join(tokens) == "It is seven." == "".join(chunk.text for chunk in chunks)
    assert offsets == [len("".join(tokens[:number])) for number in range(len(tokens))]
    assert [value for each in told for value in each.token_logprobs] == [-float(n + 1) for n in range(len(tokens))]


async def test_completions_come_while_the_rest_is_still_sampled() -> None:
    rollout = HaltingRolloutCtl("It is", " seven. STOP")
    async with gateway_with(rollout) as gateway, client_of(gateway, "openai") as client:
        stream = await client.sdk.completions.create(model="policy", prompt="a", stream=True, stop="STOP")
        said = (await anext(stream)).choices[0].text
        rollout.let_go.set()
        said += "".join([chunk.choices[0].text async for chunk in stream])
    assert said == "It is seven. "


@both
async def test_an_error_behind_a_part_of_the_text_is_raised_and_nothing_is_kept(vendor: str) -> None:
    async with gateway_with(HaltingRolloutCtl("It is", " seven.")) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, vendor, handle) as client, spoken(client, vendor) as texts:
            await anext(texts)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gateway.abort_session, handle.session_id)
                with pytest.raises(CLIENTS[vendor].errors.APIError, match="ended before the answer came"):
                    async for _ in texts:
                        pass


@both
async def test_who_goes_away_behind_a_part_of_the_text_ends_the_request(vendor: str) -> None:
    rollout = HaltingRolloutCtl("It is", " seven.")
    async with gateway_with(rollout, retry_grace_s=0) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, vendor, handle) as client, spoken(client, vendor) as texts:
            await anext(texts)
        with anyio.fail_after(10):
            await rollout.was_left.wait()
        assert (await only_result(gateway, handle)).trajectories == []


async def test_a_retry_of_a_stream_gets_the_whole_text_of_the_first_try() -> None:
    rollout = HaltingRolloutCtl("It is", " seven.")
    async with gateway_with(rollout) as gateway:
        handle = gateway.create_session()
        async with client_of(gateway, "openai", handle) as client:
            async with spoken(client, "openai") as texts:
                await anext(texts)
            retry = {"x-stainless-retry-count": "1"}
            async with spoken(client, "openai", extra_headers=retry) as texts:
                said = await anext(texts)
                rollout.let_go.set()
                said += "".join([text async for text in texts])
        (trajectory,) = (await only_result(gateway, handle)).trajectories
    assert (said, trained(trajectory), len(rollout.requests)) == ("It is seven.", "It is seven.", 1)


async def test_streams_may_be_whole() -> None:
    rollout = held(f"a{END}")
    rollout.let_go.set()
    async with gateway_with(rollout, stream_interval_s=None) as gateway, client_of(gateway, "openai") as client:
        assert await client.ask("hi", stream=True) == ("a", [])


@both
async def test_an_error_in_mid_stream_is_raised(vendor: str) -> None:
    rollout = held()
    async with gateway_with(rollout, keep_alive_s=0.01) as gateway:
        handle = gateway.create_session()

        async def abort_in_mid_stream() -> None:
            await rollout.begun(1)
            async with raw_stream(handle, vendor) as lines:
                await anext(lines)  # so that the other has had its head, too
                await gateway.abort_session(handle.session_id)

        async with client_of(gateway, vendor, handle) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(abort_in_mid_stream)
            with pytest.raises(CLIENTS[vendor].errors.APIError, match="ended before the answer came"):
                await client.ask("hi", stream=True)


@asynccontextmanager
async def raw_stream(handle: SessionHandle, vendor: str) -> AsyncIterator[AsyncIterator[str]]:
    path = "chat/completions" if vendor == "openai" else "messages"
    body = {"model": "policy", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "raw"}]}
    async with (
        httpx.AsyncClient(headers={"authorization": f"Bearer {handle.api_key}"}, verify=False) as client,
        client.stream("POST", f"{handle.base_url}/{path}", json=body) as response,
    ):
        yield aiter(response.aiter_lines())


@both
async def test_a_client_that_goes_away_in_mid_stream_leaves_nothing(vendor: str) -> None:
    rollout = held()
    async with gateway_with(rollout, keep_alive_s=0.01, retry_grace_s=0) as gateway:
        handle = gateway.create_session()
        async with raw_stream(handle, vendor) as lines:
            await anext(lines)
            await rollout.begun(1)
        await rollout.ended(1)
        assert (await only_result(gateway, handle)).trajectories == []


@both
async def test_a_client_that_ran_out_of_patience_gets_the_answer_of_its_first_try(vendor: str) -> None:
    rollout = held(f"a{END}", f"b{END}")
    async with gateway_with(rollout) as gateway:
        handle = gateway.create_session()
        session = gateway.session(handle.session_id)
        said: list[Any] = []
        async with (
            client_of(gateway, vendor, handle, max_retries=20, timeout=0.2) as client,
            anyio.create_task_group() as tasks,
        ):

            async def ask() -> None:
                said.append(await client.ask("hi"))

            tasks.start_soon(ask)
            await rollout.begun(1)
            with anyio.fail_after(10):
                await until(lambda: not session.num_waiting)
            rollout.let_go.set()
        (trajectory,) = (await only_result(gateway, handle)).trajectories
    assert said == [("a", [])]
    assert trained(trajectory) == f"a{END}"
    assert rollout.num_begun == 1


# --- without a client of good manners


@asynccontextmanager
async def plain(gateway: Gateway, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {gateway.api_key if key is None else key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, verify=False) as client:
        yield client


async def test_bodies_have_a_limit_whether_they_say_how_long_they_are_or_not() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    async with gateway_with(answering(), max_body_bytes=1000) as gateway, plain(gateway) as client:
        told = await client.post("/v1/messages", content=b"x" * 1001)
        untold = await client.post("/v1/chat/completions", content=endless())
    assert (told.status_code, told.json()["error"]["type"]) == (413, "request_too_large")
    assert (untold.status_code, untold.json()["error"]["code"]) == (413, "request_too_large")
    assert "1000 bytes (gateway.max_body_bytes)" in told.text


async def test_broken_json_and_unknown_paths_are_told_in_the_vendors_shape() -> None:
    async with gateway_with(answering()) as gateway, plain(gateway) as client:
        broken = await client.post("/v1/chat/completions", content=b'{"model": ')
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "not valid JSON" in broken.text
        unknown = await client.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert (await client.get("/v1/chat/completions")).status_code == 405


async def test_sessions_are_made_and_ended_over_http_by_the_holder_of_the_key() -> None:
    async with gateway_with(answering()) as gateway, plain(gateway) as owner:
        made = (await owner.post("/sessions", json={"session_id": "s1", "sample_params": {"max_tokens": 3}})).json()
        assert made["base_url"] == f"{gateway.url}/sessions/s1/v1"
        again = await owner.post("/sessions", json={"session_id": "s1"})
        assert (again.status_code, "There is a session 's1' already" in again.text) == (409, True)
        wrong = await owner.post("/sessions", json={"sample_params": {"max_tokenz": 3}})
        assert "Did you mean 'max_tokens'?" in wrong.text
        async with plain(gateway, made["api_key"]) as agent:
            for path in ("/sessions", "/sessions/s1/finalize", "/sessions/s1/abort"):
                assert (await agent.post(path, json={})).status_code == 401
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            assert (await agent.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
            posted = await agent.post(made["reward_info_url"], json={"reward_info": {"reward": 1.0}})
            assert posted.json()["reward_info"] == {"reward": 1.0}
            assert (await agent.post(made["reward_info_url"], json={"reward": 1.0})).status_code == 400
        assert (await owner.get("/sessions/s1")).json()["num_turns"] == 1
        ended = (await owner.post("/sessions/s1/finalize")).json()
        assert ended["reward_info"] == {"reward": 1.0}
        assert len(ended["trajectories"]) == 1
        assert (await owner.post("/sessions/s1/abort")).status_code == 409
        assert (await owner.get("/health")).json() == {"status": "ok", "num_sessions": 0}


async def test_the_holder_of_the_key_may_ask_without_a_session() -> None:
    async with gateway_with(answering()) as gateway, plain(gateway) as owner:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        answer = await owner.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "1"
        assert gateway.num_sessions == 0


async def test_a_session_without_requests_is_aborted_after_a_while() -> None:
    async with gateway_with(answering(), idle_timeout_s=0.05) as gateway:
        handle = gateway.create_session()
        session = gateway.session(handle.session_id)
        with anyio.fail_after(10):
            await session.ended.wait()
        assert gateway.num_sessions == 0


async def test_leaving_the_gateway_ends_what_is_in_flight_and_closes_the_port() -> None:
    rollout = held()
    failed: list[Exception] = []
    async with anyio.create_task_group() as tasks:
        async with gateway_with(rollout) as gateway:
            handle = gateway.create_session()

            async def ask() -> None:
                async with client_of(gateway, "openai", handle) as client:
                    try:
                        await client.ask("hi")
                    except openai.ConflictError as error:
                        failed.append(error)

            tasks.start_soon(ask)
            await rollout.begun(1)
        assert rollout.num_ended == 1
    assert "ended before the answer came" in str(failed[0])
    with pytest.raises(OSError, match="onnect"):
        await anyio.connect_tcp("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def test_a_port_that_is_taken_is_named() -> None:
    async with gateway_with(answering()) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with gateway_with(answering(), port=port):
                pass
