"""Hashes of prefixes: what counts as the same conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrl_lite.gateway import prefix
from xrl_lite.gateway.prefix import PrefixHasher, canonical


def call(arguments: Any, call_id: str = "a") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def turn(content: Any, *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(turn("", call("{}")), turn(None, call("{}")), id="W1"),
        pytest.param(turn("x"), {"role": "assistant", "content": "x"}, id="T7"),
        pytest.param(turn("", call('{"a": 1, "b": 2}')), turn("", call({"b": 2, "a": 1})), id="arguments-as-object"),
        pytest.param(turn("", call('{"a":1}', "x")), turn("", call('{ "a": 1 }', "y")), id="ids-and-white-space"),
        pytest.param(turn("x\n"), turn("x"), id="white-space-around-a-turn"),
        pytest.param(turn("x", reasoning_content="hm"), turn("x"), id="reasoning"),
        pytest.param(turn("", call("")), turn("", call("{}")), id="no-arguments"),
    ],
)
def test_what_clients_change_does_not_count(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (turn("x"), turn("y")),
        (turn("", call('{"a": 1}')), turn("", call('{"a": 2}'))),
        (turn("", call("{}"), call("{}")), turn("", call("{}"))),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x "}),
        ({"role": "user", "content": "x"}, {"role": "system", "content": "x"}),
        (turn("", call("not json")), turn("", call("not  json"))),
    ],
)
def test_what_the_model_sees_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(one) != canonical(other)


MESSAGES = st.lists(st.sampled_from([{"role": "user", "content": text} for text in "abc"]), max_size=6)


@settings(max_examples=50)
@given(st.lists(MESSAGES, min_size=1, max_size=12))
def test_hashes_do_not_depend_on_what_was_hashed_before(requests: list[list[dict[str, Any]]]) -> None:
    hasher = PrefixHasher(num_remembered=3)
    for messages in requests:
        hashes = hasher.hashes(messages)
        assert hashes == PrefixHasher().hashes(messages)
        assert len(hashes) == len(messages) + 1


def test_each_message_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    original = prefix.extend

    def counting(digest: bytes, message: Any) -> bytes:
        counted.append(message["content"])
        return original(digest, message)

    monkeypatch.setattr(prefix, "extend", counting)
    hasher = PrefixHasher()
    messages = [{"role": "user", "content": str(number)} for number in range(50)]
    for length in range(1, 51):
        hasher.hashes([dict(message) for message in messages[:length]])
    assert counted == [str(number) for number in range(50)]
