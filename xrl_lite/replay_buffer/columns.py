"""Rollout states as columns of a table row, and back: numbers packed as tightly as they allow, text compressed.

A packed column is one byte for the kind of its numbers, one for how they are stored, and the numbers, little-endian::

    1-....   kinds: 1 2 3 4 unsigned in so many bytes, all lowest bytes first, then all second ones, ...
                    q signed of 8 bytes, f d floats of 4 and 8
    2z....   stored as they are (-), compressed by zlib (z), or, if all are the same, once after their number (=)

so that a reader needs a few lines of Python::

    kind, how, body = blob[:1].decode(), blob[1:2], blob[2:]
    times = int.from_bytes(body[:4], "little") if how == b"=" else 1
    body = body[4:] if how == b"=" else zlib.decompress(body) if how == b"z" else body
    if kind in "1234":
        size = len(body) // int(kind)
        numbers = [sum(body[n + place * size] << 8 * place for place in range(int(kind))) for n in range(size)] * times
    else:
        numbers = list(array.array(kind, body)) * times

Text columns are UTF-8 compressed by zlib; half a surrogate pair stands in them as the three bytes that UTF-8 has no use
for, and in the readable columns (`error`, `finish_reason`) as an escape. What has no column of its own is JSON where
that gives back the same values, else a pickle, told apart by the first byte (``j`` or ``p``): in `shared` what the
attempts at a prompt have in common (its messages, for example), in `rest` the other fields (`extra_fields`, tool calls,
...).
"""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from xrl_lite.actors.culprit import locate
from xrl_lite.data import RolloutState, SampleParams, Status, version_range

try:
    fast_zlib: Any = import_module("isal.isal_zlib")  # the same format, several times as fast
except ImportError:
    fast_zlib = zlib

NUMBERS = ("prompt_ids", "response_ids", "logprobs", "response_mask", "response_model_steps")
"""Fields of a state that are packed columns."""

SHARED = (
    *("message", "data_source", "reward_model", "mm_info", "tools", "tool_choice", "sample_params"),
    *("task_name", "group_id", "num_tokens", "proxy_attn_flops"),
)
"""Fields that the attempts at a prompt have in common, as a rule."""

_PLAIN = ("status", "finish_reason", "response", "error_msg", "reward")
_REST = tuple(name for name in RolloutState.model_fields if name not in (*NUMBERS, *_PLAIN, *SHARED))
_DEFAULTS: dict[str, Callable[[], Any]] = {
    name: partial(RolloutState.model_fields[name].get_default, call_default_factory=True)
    for name in (*SHARED, *_REST)
    if name != "message"
}
_SURROGATES = "surrogatepass"
_TOO_SHORT = 128
"""Bytes that are not worth compressing."""
_FLOAT32_TOPS = bytes([*range(0x38, 0x48), *range(0xB8, 0xC8)])
"""Highest bytes of doubles whose size a float of 4 bytes can have; 0 has others."""
_LOW_5_BITS = bytes(byte & 0x1F for byte in range(256))

Row = dict[str, Any]
"""Column -> value, as SQLite takes it."""


def pack(numbers: Sequence[float] | None, *, level: int = 1) -> bytes | None:
    """Pack numbers; None stays None.

    Args:
        numbers: Whole numbers, or floats; they come back as the same numbers.
        level: Compression level, 1 to 3; 0 only packs.
    """
    if numbers is None:
        return None
    size = len(numbers)
    if size > 1 and _is_constant(numbers):
        kind, body = _narrowest(numbers[:1])
        return kind + b"=" + size.to_bytes(4, "little") + body
    kind, body = _narrowest(numbers)
    # log-probs are noise: trying to compress them costs more than all the rest
    return kind + (b"-" + body if kind in b"fd" else squeeze(body, level))


def unpack(blob: bytes | None) -> list[Any] | None:
    """Return packed numbers."""
    if blob is None:
        return None
    kind, how = blob[:1], blob[1:2]
    if how == b"=":
        return _numbers(kind, blob[6:]) * int.from_bytes(blob[2:6], "little")
    return _numbers(kind, unsqueeze(blob[1:]))


def squeeze(body: bytes, level: int) -> bytes:
    """Compress bytes, if that makes them smaller."""
    if level and len(body) > _TOO_SHORT:
        small = fast_zlib.compress(body, level)
        if len(small) < len(body):
            return b"z" + small
    return b"-" + body


def unsqueeze(blob: bytes) -> bytes:
    """Return what `squeeze` was given."""
    return zlib.decompress(blob[1:]) if blob[:1] == b"z" else blob[1:]


class NotStorableError(ValueError):
    """A state holds something that no column can hold. The message names the sample and the field."""


def encode_states(states: Sequence[RolloutState], *, level: int = 1) -> Iterator[Row]:
    """Yield the columns of each state; what all attempts at a prompt share is encoded once.

    Raises:
        NotStorableError: a state cannot be encoded.
    """
    prompt_ids: list[int] | None = None
    shared: dict[str, Any] = {}
    packed: Row = {"prompt_ids": None, "shared": _encode(shared, level)}
    for state in states:
        try:
            if state.prompt_ids != prompt_ids:
                prompt_ids = state.prompt_ids
                packed["prompt_ids"] = pack(prompt_ids, level=level)
            if (fields := _fields(state, SHARED)) != shared:
                shared = fields
                packed["shared"] = _encode(_plain(shared), level)
            row = {**packed, **_encode_own(state, level)}
        except Exception as error:
            raise NotStorableError(
                f"sample {state.rollout_id}: {_culprit(state)} cannot be kept on the disk ({error}). Leave it out, or "
                f"put plain values in its place."
            ) from error
        yield row


def _encode_own(state: RolloutState, level: int) -> Row:
    """Columns of what each attempt has for itself."""
    reward = state.reward
    score = reward.get("score") if reward else None
    versions = version_range(state)
    return {
        "rollout_id": readable(state.rollout_id),
        "status": state.status.value,
        "finish_reason": readable(state.finish_reason),
        "error": readable(state.error_msg),
        "score": float(score) if isinstance(score, int | float) else None,
        "num_prompt_tokens": len(state.prompt_ids or ()),
        "num_response_tokens": len(state.response_ids or ()),
        "min_version": versions[0] if versions else None,
        "max_version": versions[1] if versions else None,
        "response_ids": pack(state.response_ids, level=level),
        "logprobs": pack(state.logprobs, level=level),
        "response_mask": pack(state.response_mask, level=level),
        "response_model_steps": pack(state.response_model_steps, level=level),
        "response": None if state.response is None else _deflate(state.response.encode("utf-8", _SURROGATES), level),
        "reward": None if reward is None else _encode(reward, level),
        "rest": _encode(_fields(state, _REST), level),
    }


def readable(value: object) -> str | None:
    """Return a value as text that SQLite takes, whatever is in it; None stays None."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode()


def decode_state(row: Row) -> RolloutState:
    """Return the state of a row of table ``trajectories``."""
    fields: dict[str, Any] = {name: make() for name, make in _DEFAULTS.items()}
    fields |= _decode(row["shared"])
    fields |= _decode(row["rest"])
    if isinstance(fields["sample_params"], dict):
        fields["sample_params"] = SampleParams.model_validate(fields["sample_params"])
    fields |= {name: unpack(row[name]) for name in NUMBERS}
    fields |= {
        "status": Status(row["status"]),
        "finish_reason": row["finish_reason"],
        "error_msg": row["error"],
        "response": None if row["response"] is None else zlib.decompress(row["response"]).decode("utf-8", _SURROGATES),
        "reward": None if row["reward"] is None else _decode(row["reward"]),
    }
    # what was a state is one: nothing is validated again
    return RolloutState.model_construct(None, **fields)


def _culprit(state: RolloutState) -> str:
    """Name the part of a state that cannot be encoded."""
    for name, value in state.__dict__.items():
        if name in NUMBERS:
            if not _succeeds(pack, value):
                return name
        elif not _succeeds(_encode, value):
            path, _ = locate(value, name, partial(_succeeds, _encode))
            return path
    response: object = state.__dict__["response"]
    return "one of its fields" if isinstance(response, str | None) else "response"


def _succeeds(encode: Callable[..., object], value: object) -> bool:
    try:
        encode(value, level=0)
    except Exception:  # noqa: BLE001 whatever a user's __reduce__ raises means no
        return False
    return True


def _fields(state: RolloutState, names: Sequence[str]) -> dict[str, Any]:
    values = state.__dict__
    return {name: value for name in names if (value := values[name]) is not None}


def _plain(shared: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.model_dump(exclude_defaults=True) if isinstance(value, SampleParams) else value
        for name, value in shared.items()
    }


def _is_constant(numbers: Sequence[float]) -> bool:
    first, last = numbers[0], numbers[-1]
    return first == last and type(first) is type(last) and numbers.count(first) == len(numbers)


def _narrowest(numbers: Sequence[float]) -> tuple[bytes, bytes]:
    """Return kind and bytes."""
    size = len(numbers)
    if not size or not isinstance(numbers[0], float):
        try:
            wide = struct.pack(f"<{size}I", *numbers)
        except struct.error:  # negative ones, floats among them, or larger than 32 bits
            if not any(isinstance(number, float) for number in numbers):
                return b"q", struct.pack(f"<{size}q", *numbers)
        else:
            planes = [wide[place::4] for place in range(4)]
            while len(planes) > 1 and planes[-1].count(0) == size:
                planes.pop()
            return b"%d" % len(planes), b"".join(planes)
    return _floats(numbers)


def _floats(numbers: Sequence[float]) -> tuple[bytes, bytes]:
    """Pack floats in 4 bytes if that loses nothing: the lower 29 bits are 0, and the size fits."""
    size = len(numbers)
    double = struct.pack(f"<{size}d", *numbers)
    if (
        all(double[place::8].count(0) == size for place in range(3))
        and double[3::8].translate(_LOW_5_BITS).count(0) == size
    ):
        small = double[7::8].translate(None, delete=_FLOAT32_TOPS)
        if not small or numbers.count(0.0) == len(small):
            return b"f", struct.pack(f"<{size}f", *numbers)
    return b"d", double


def _numbers(kind: bytes, body: bytes) -> list[Any]:
    if not kind.isdigit():
        return array(kind.decode(), body).tolist()
    num_planes = int(kind)
    size = len(body) // num_planes
    wide = bytearray(4 * size)
    for place in range(num_planes):
        wide[place::4] = body[place * size : (place + 1) * size]
    return array("I", wide).tolist()


def _deflate(body: bytes, level: int) -> bytes:
    return fast_zlib.compress(body, level) if level else zlib.compress(body, 0)


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
