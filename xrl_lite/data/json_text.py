"""JSON in texts that others wrote: models, programs, files. Whatever cannot be read is one kind of error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

MAX_DEPTH = 100
"""Objects and lists inside each other; more would meet the limit of recursion somewhere later."""

_DECODER = json.JSONDecoder()
_FIRST_LOOK = 512
_LONGEST_WORD = len("\\uD83D\\uDE00")


class JsonTextError(ValueError):
    """A text is not JSON, or has a number of thousands of digits or brackets too deep inside each other."""


def read_json(text: str | bytes) -> Any:
    """Return the value that a text stands for.

    Raises:
        JsonTextError: it stands for none, or for one deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _explained(error) from error
    return _not_too_deep(value)


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at a place of a text, and where it ends.

    Raises:
        JsonTextError: as in `read_json`.
    """
    size = _FIRST_LOOK
    while True:  # the decoder reads all of a text to tell where in it an error is
        part, is_rest = text[start : start + size], start + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(part)
        except json.JSONDecodeError as error:
            if is_rest or not _may_be_cut_off(error, part):
                raise JsonTextError(f"{error.msg} at character {start + error.pos}") from error
        except (ValueError, RecursionError) as error:
            raise _explained(error) from error
        else:
            if is_rest or end + _LONGEST_WORD < len(part):  # 1. and 1e+ are read as 1
                return _not_too_deep(value), start + end
        size *= 2


def _may_be_cut_off(error: json.JSONDecodeError, part: str) -> bool:
    """Whether an error may come of the end of a part: a text without its quote, or a word or escape without its end."""
    return error.msg.startswith("Unterminated") or error.pos + _LONGEST_WORD >= len(part)


def split_lines(text: str) -> list[str]:
    r"""Return the lines of a text, where ``\n`` alone ends a line.

    `str.splitlines` would also cut at characters that JSON allows inside a string, like U+2028.
    """
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _explained(error: ValueError | RecursionError) -> JsonTextError:
    if isinstance(error, json.JSONDecodeError):
        return JsonTextError(f"{error.msg} at character {error.pos}")
    if isinstance(error, UnicodeDecodeError):
        return JsonTextError(f"it is not UTF-8 text: {error}")
    return _too_deep() if isinstance(error, RecursionError) else JsonTextError("a number has too many digits")


def _not_too_deep(value: Any) -> Any:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise _too_deep()


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def _too_deep() -> JsonTextError:
    return JsonTextError(f"more than {MAX_DEPTH} brackets inside each other")
