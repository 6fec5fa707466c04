"""Rollout states as columns of a table row, and back: numbers packed as tightly as they allow, text compressed.

A packed column is one byte for the type of its numbers, one for how they are stored, and the numbers, little-endian::

    H-....   types: B H I unsigned of 1, 2, 4 bytes; q signed of 8; f d floats of 4 and 8
    fz....   stored as they are (-) or compressed by zlib (z)

so that a reader needs three lines of Python::

    kind, how, body = blob[:1].decode(), blob[1:2], blob[2:]
    numbers = array.array(kind, zlib.decompress(body) if how == b"z" else body)

Text columns are UTF-8 compressed by zlib. What has no column of its own (`extra_fields`, tool calls, ...) is in `rest`:
JSON where that gives back the same values, else a pickle, told apart by the first byte (``j`` or ``p``).
"""

from __future__ import annotations

import json
import pickle
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from xrl_lite.data import RolloutState, SampleParams, Status

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
    packed = _narrowest(numbers)
    return packed.typecode.encode() + squeeze(packed.tobytes(), level)


def unpack(blob: bytes | None) -> list[Any] | None:
    """Return packed numbers."""
    if blob is None:
        return None
    numbers: array[Any] = array(blob[:1].decode())
    numbers.frombytes(unsqueeze(blob[1:]))
    return numbers.tolist()


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


def encode_state(state: RolloutState, *, level: int = 1) -> Row:
    """Return a state as the columns of table ``trajectories`` that hold its content."""
    reward = state.reward
    score = reward.get("score") if reward else None
    versions = state.response_model_steps
    return {
        "rollout_id": None if state.rollout_id is None else str(state.rollout_id),
        "status": state.status.value,
        "finish_reason": state.finish_reason,
        "error": state.error_msg,
        "score": float(score) if isinstance(score, int | float) else None,
        "num_prompt_tokens": len(state.prompt_ids or ()),
        "num_response_tokens": len(state.response_ids or ()),
        "min_version": min(versions) if versions else None,
        "max_version": max(versions) if versions else None,
        **{name: pack(getattr(state, name), level=level) for name in NUMBERS},
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
    try:
        largest = max(numbers)
        kind = "q" if min(numbers) < 0 else "B" if largest < 1 << 8 else "H" if largest < 1 << 16 else "I"
        return array(kind, cast("Sequence[int]", numbers))
    except (TypeError, OverflowError):  # whole numbers and floats mixed, or larger than 32 bits
        return _floats(numbers) if any(isinstance(number, float) for number in numbers) else array("q", numbers)  # type: ignore[arg-type]


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
