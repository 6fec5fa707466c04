"""Bodies that nobody would write: never a 5xx, and always an answer in the vendor's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.unit.gateway.rig import QWEN3, answering
from xrl_lite.gateway import Gateway, GatewayConfig
from xrl_lite.gateway.openapi import openapi
from xrl_lite.gateway.server import GatewayApp

SCHEMA = schemathesis.openapi.from_dict(openapi(GatewayConfig()))
POSTED = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/sessions"]
FEW = settings(
    max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], derandomize=True
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
FUNCTION = {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "7"}]},
            {"role": "system", "content": "Hurry."},
            USER,
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "stream": False,
        "stop": ["x"],
        "logprobs": True,
        "max_tokens": 5,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "7"}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
    },
}


class Server:
    """The application without a socket."""

    def __init__(self, portal: BlockingPortal, gateway: Gateway) -> None:
        self._portal = portal
        transport = httpx.ASGITransport(GatewayApp(gateway).asgi, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {gateway.api_key}"}
        self._client = httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)

    def post(self, path: str, body: bytes) -> httpx.Response:
        async def post() -> httpx.Response:
            return await self._client.post(path, content=body)

        return self._portal.call(post)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_blocking_portal() as portal:
        gateway = portal.call(make_gateway)
        with portal.wrap_async_context_manager(gateway):
            yield Server(portal, gateway)


async def make_gateway() -> Gateway:
    return Gateway(answering(), tokenizer=QWEN3, config=GatewayConfig(model_aliases=["*"], max_trajectory_tokens=4096))


def check(path: str, response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"]
        assert response.json().get("type") == ("error" if path.startswith("/v1/messages") else None)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_bodies_after_the_description_and_against_it(server: Server, path: str, mode: GenerationMode) -> None:
    @FEW
    @given(SCHEMA[path]["POST"].as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        body = case.body if isinstance(case.body, bytes) else json.dumps(case.body, default=str).encode()
        check(path, server.post(path, body))

    run()


@pytest.mark.parametrize("path", list(VALID))
def test_valid_bodies_with_one_part_replaced(server: Server, path: str) -> None:
    places = list(places_in(VALID[path]))

    @FEW
    @given(st.sampled_from(places), JSON)
    def run(place: tuple[Any, ...], value: Any) -> None:
        body = json.loads(json.dumps(VALID[path]))
        inner = body
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        check(path, server.post(path, json.dumps(body).encode()))

    assert server.post(path, json.dumps(VALID[path]).encode()).status_code == 200
    run()


@FEW
@given(st.binary(max_size=64))
def test_bytes(server: Server, body: bytes) -> None:
    for path in POSTED:
        check(path, server.post(path, body))


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a body."""
    if place:
        yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places_in(inner, (*place, key))
