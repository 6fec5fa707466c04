"""Rollout states as columns of a table row, and back: numbers packed as tightly as they allow, text compressed.

A packed column is one byte for the type of its numbers, one for how they are stored, and the numbers, little-endian::

    H-....   types: B H I unsigned of 1, 2, 4 bytes; q signed of 8; f d floats of 4 and 8
    Iz....   stored as they are (-), compressed by zlib (z), or, if all are the same, once after their number (=)

so that a reader needs four lines of Python::

    kind, how, body = blob[:1].decode(), blob[1:2], blob[2:]
    if how == b"=":  # 4 bytes: how many
        numbers = array.array(kind, body[4:]) * int.from_bytes(body[:4], "little")
    else:
        numbers = array.array(kind, zlib.decompress(body) if how == b"z" else body)

Text columns are UTF-8 compressed by zlib. What has no column of its own (`extra_fields`, tool calls, ...) is in `rest`:
JSON where that gives back the same values, else a pickle, told apart by the first byte (``j`` or ``p``).
"""

from __future__ import annotations

import json
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from xrl_lite.data import RolloutState, SampleParams, Status, version_range

NUMBERS = ("prompt_ids", "response_ids", "logprobs", "response_mask", "response_model_steps")
"""Fields of a state that are packed columns."""

_PLAIN = ("status", "finish_reason", "response", "error_msg", "reward")
_REST = tuple(name for name in RolloutState.model_fields if name not in (*NUMBERS, *_PLAIN))
_DEFAULTS: dict[str, Callable[[], Any]] = {
    name: partial(RolloutState.model_fields[name].get_default, call_default_factory=True)
    for name in _REST
    if name != "message"
}
_PROBE_BYTES = 512
_WORTH_IT = 0.8

Row = dict[str, Any]
"""Column -> value, as SQLite takes it."""


def pack(numbers: Sequence[float] | None, *, level: int = 1) -> bytes | None:
    """Pack numbers; None stays None.

    Args:
        numbers: Whole numbers, or floats; they come back as the same numbers.
        level: Compression level of zlib, 1 to 9; 0 only packs.
    """
    if numbers is None:
        return None
    if len(numbers) > 1 and numbers.count(numbers[0]) == len(numbers) and type(numbers[0]) is type(numbers[-1]):
        one = _narrowest(numbers[:1])
        return one.typecode.encode() + b"=" + len(numbers).to_bytes(4, "little") + one.tobytes()
    packed = _narrowest(numbers)
    kind = packed.typecode
    # log-probs are noise: trying to compress them costs more than all the rest
    return kind.encode() + (squeeze(packed.tobytes(), level) if kind not in "fd" else b"-" + packed.tobytes())


def unpack(blob: bytes | None) -> list[Any] | None:
    """Return packed numbers."""
    if blob is None:
        return None
    kind, how = blob[:1].decode(), blob[1:2]
    if how == b"=":
        return array(kind, blob[6:]).tolist() * int.from_bytes(blob[2:6], "little")
    return array(kind, unsqueeze(blob[1:])).tolist()


def squeeze(body: bytes, level: int) -> bytes:
    """Compress bytes where their beginning shows that it is worth it: log-probs, for example, are noise."""
    if level and len(body) > 64:
        probe = zlib.compress(body[:_PROBE_BYTES], level)
        if len(probe) < _WORTH_IT * min(len(body), _PROBE_BYTES):
            return b"z" + zlib.compress(body, level)
    return b"-" + body


def unsqueeze(blob: bytes) -> bytes:
    """Return what `squeeze` was given."""
    return zlib.decompress(blob[1:]) if blob[:1] == b"z" else blob[1:]


def encode_states(states: Sequence[RolloutState], *, level: int = 1) -> Iterator[Row]:
    """Yield the columns of each state; what all attempts at a prompt share is packed once."""
    before: tuple[list[int] | None, bytes | None] = None, None
    for state in states:
        if state.prompt_ids != before[0]:
            before = state.prompt_ids, pack(state.prompt_ids, level=level)
        yield {**encode_state(state, level=level, skip="prompt_ids"), "prompt_ids": before[1]}


def encode_state(state: RolloutState, *, level: int = 1, skip: str = "") -> Row:
    """Return a state as the columns of table ``trajectories`` that hold its content, but for one to skip."""
    reward = state.reward
    score = reward.get("score") if reward else None
    versions = version_range(state)
    return {
        "rollout_id": None if state.rollout_id is None else str(state.rollout_id),
        "status": state.status.value,
        "finish_reason": state.finish_reason,
        "error": state.error_msg,
        "score": float(score) if isinstance(score, int | float) else None,
        "num_prompt_tokens": len(state.prompt_ids or ()),
        "num_response_tokens": len(state.response_ids or ()),
        "min_version": versions[0] if versions else None,
        "max_version": versions[1] if versions else None,
        **{name: pack(getattr(state, name), level=level) for name in NUMBERS if name != skip},
        "response": None if state.response is None else zlib.compress(state.response.encode(), level),
        "reward": None if reward is None else _encode(reward, level),
        "rest": _encode(_rest_of(state), level),
    }


def decode_state(row: Row) -> RolloutState:
    """Return the state of a row of table ``trajectories``."""
    fields: dict[str, Any] = {name: make() for name, make in _DEFAULTS.items()}
    fields |= _decode(row["rest"])
    if isinstance(fields["sample_params"], dict):
        fields["sample_params"] = SampleParams.model_validate(fields["sample_params"])
    fields |= {name: unpack(row[name]) for name in NUMBERS}
    fields |= {
        "status": Status(row["status"]),
        "finish_reason": row["finish_reason"],
        "error_msg": row["error"],
        "response": None if row["response"] is None else zlib.decompress(row["response"]).decode(),
        "reward": None if row["reward"] is None else _decode(row["reward"]),
    }
    # what was a state is one: nothing is validated again
    return RolloutState.model_construct(None, **fields)


def _rest_of(state: RolloutState) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for name in _REST:
        value = getattr(state, name)
        if isinstance(value, SampleParams):
            rest[name] = value.model_dump(exclude_defaults=True)
        elif value is not None:
            rest[name] = value
    return rest


def _narrowest(numbers: Sequence[float]) -> array[Any]:
    if not numbers:
        return array("B")
    if isinstance(numbers[0], float):
        return _floats(numbers)
    whole = cast("Sequence[int]", numbers)
    try:
        return array("B", bytes(whole))
    except (TypeError, ValueError):
        pass  # not all of them are bytes
    try:
        wide = array("I", whole)
        high = wide.tobytes()[2::4], wide.tobytes()[3::4]
        return array("H", whole) if all(part.count(0) == len(whole) for part in high) else wide
    except (TypeError, OverflowError):  # negative ones, floats among them, or larger than 32 bits
        return _floats(numbers) if any(isinstance(number, float) for number in numbers) else array("q", whole)


def _floats(numbers: Sequence[float]) -> array[float]:
    single = array("f", numbers)
    return single if single.tolist() == numbers else array("d", numbers)


def _encode(value: Any, level: int) -> bytes:
    try:
        text = json.dumps(value)
        if json.loads(text) == value:
            return b"j" + squeeze(text.encode(), level)
    except (TypeError, ValueError):
        pass  # a tensor, an object, a tuple as a key: only a pickle can hold it
    return b"p" + squeeze(pickle.dumps(value, protocol=5), level)


def _decode(blob: bytes) -> Any:
    body = unsqueeze(blob[1:])
    return json.loads(body) if blob[:1] == b"j" else pickle.loads(body)
