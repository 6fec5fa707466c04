"""Finding the line of the user's code that an exception came from, here or in another process."""

from __future__ import annotations

import re
import site
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')

_NAMELESS = "<dynamic-code>"

Frame = tuple[str, int, str]
"""File, line and function."""


def describe(error: BaseException) -> str:
    """Return type and message of an exception, and the innermost line of the user's code it passed through."""
    frame = user_frame(error)
    text = str(error).strip()
    name = type(error).__name__
    said = f"{name}: {text}" if text else name
    return f"{said} (at {frame[0]}:{frame[1]} in {frame[2]})" if frame else said


def user_frame(error: BaseException) -> Frame | None:
    """Return the innermost frame outside the package and the installed libraries, if there is one.

    A remote traceback, which the actor layer keeps in ``__notes__``, is closer to the cause than the local one.
    """
    for frames in (list(_noted_frames(error)), list(_local_frames(error))):
        own = [frame for frame in frames if is_user_code(frame[0])]
        if own:
            return own[-1]
    return None


def name_dynamic_code(error: BaseException, file: str | None) -> None:
    """Put the file name back into a remote traceback: code that travelled by value has lost it."""
    notes = getattr(error, "__notes__", None)
    if file is not None and notes:
        notes[:] = [str(note).replace(_NAMELESS, file) for note in notes]


def full_traceback(error: BaseException) -> str:
    """Return the whole traceback with notes, as Python prints it."""
    return "".join(traceback.format_exception(error)).rstrip()


def _local_frames(error: BaseException) -> Iterator[Frame]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield frame.filename, frame.lineno or 0, frame.name


def _noted_frames(error: BaseException) -> Iterator[Frame]:
    for note in getattr(error, "__notes__", ()):
        for match in _FRAME.finditer(str(note)):
            yield match["file"], int(match["line"]), match["function"]


def is_user_code(file: str) -> bool:
    """Return whether a file belongs neither to the package nor to what is installed."""
    return not file.startswith(("<frozen", _PACKAGE, *_LIBRARIES))
