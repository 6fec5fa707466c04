r"""Which conversation a request goes on with: hashes of its prefixes.

::

    h(0) = seed        h(i) = sha256(h(i-1) + canonical form of message i)

Equal hashes mean: as far as the model is concerned, the same messages. What clients change when they send a turn back
does not count: ids of tool calls, white space and order of keys in their arguments, an empty content instead of none,
white space around a turn, its reasoning.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.data.tokenizer import Message

_SEED = hashlib.sha256(b"xrl-lite-prefix-v1").digest()


def canonical(message: Message) -> bytes:
    """Return what counts of a message."""
    content = message.get("content") or ""
    calls = cast("list[Message]", message.get("tool_calls") or [])
    if message["role"] == "assistant":
        content = content.strip()
    parts: list[Any] = [message["role"], content]
    if calls:
        parts.append([[call["function"]["name"], _arguments(call["function"].get("arguments"))] for call in calls])
    return json.dumps(parts, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")


def extend(digest: bytes, message: Message) -> bytes:
    """Return the hash of a prefix with one more message."""
    return hashlib.sha256(digest + canonical(message)).digest()


def tools_digest(tools: Sequence[Message] | None) -> bytes:
    """Return what stands for a list of tools; empty without tools."""
    if not tools:
        return b""
    text = json.dumps(tools, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class PrefixHasher:
    """Hashes the prefixes of the requests of one session, and each message once.

    A request repeats what came before it. What is equal to an earlier request is compared, which costs next to nothing,
    and only the rest is put into its canonical form and hashed.

    Args:
        num_remembered: Requests to compare with; agents may hold several conversations at once.
    """

    def __init__(self, num_remembered: int = 8) -> None:
        self._remembered: deque[tuple[Sequence[Message], list[bytes]]] = deque(maxlen=num_remembered)

    def hashes(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the hashes of all prefixes: entry i is that of the first i messages."""
        known = self._longest_known(messages)
        hashes = list(known)
        for message in messages[len(known) - 1 :]:
            hashes.append(extend(hashes[-1], message))
        self._remembered.append((messages, hashes))
        return hashes

    def _longest_known(self, messages: Sequence[Message]) -> list[bytes]:
        best = [_SEED]
        for place in range(len(self._remembered) - 1, -1, -1):
            earlier, hashes = self._remembered[place]
            common = len(earlier)
            if common > len(messages) or messages[:common] != earlier:
                common = _common_length(messages, earlier)
            if common + 1 > len(best):
                best = hashes[: common + 1]
            if common == len(earlier):
                if common + 1 == len(best):
                    del self._remembered[place]  # the longer one takes its place
                break
        return best


def _common_length(one: Sequence[Message], other: Sequence[Message]) -> int:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        parsed: object = read_json(arguments) if arguments.strip() else {}
    except JsonTextError:
        return arguments.strip()
    return cast("Mapping[str, Any]", parsed) if isinstance(parsed, Mapping) else arguments.strip()
