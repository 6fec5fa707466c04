"""Processes that have lost their fork server."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

FAMILY_VARIABLE = "XRL_LITE_FAMILY"
"""Names the fork server below which a process was started, whoever its parent is by now."""


def family_mark() -> dict[str, str]:
    """Return what belongs into the environment of a program that is started with one of its own."""
    mark = os.environ.get(FAMILY_VARIABLE)
    return {} if mark is None else {FAMILY_VARIABLE: mark}


def end_family(family: str) -> None:
    """End every process that was started below a fork server that is gone, also those in sessions of their own."""
    mark = f"{FAMILY_VARIABLE}={family}".encode()
    ended: set[int] = set()
    while found := {pid for pid in _all_processes() if mark in _environment(pid)} - ended:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= found


def _all_processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """The variables with which the program of a process was started; nothing if it is gone, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
