"""Processes whose parent is gone: those that came to an actor are reaped, those that lost a fork server are ended."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from xrl_lite.actors.machine import children_of

FAMILY_VARIABLE = "XRL_LITE_FAMILY"
"""Names the fork server below which a process was started, whoever its parent is by now."""

_LOOK_EVERY_S = 1.0
_MAX_ZOMBIES = 32


class Reaper:
    """Waits for ended processes that came to this one, a subreaper, when their own parents ended.

    A program that daemonizes leaves one with every run. The kernel does not tell them from children that somebody here
    will ask for; so it leaves alone what ``subprocess`` and ``multiprocessing`` know, what ended just now, and a few.
    """

    def __init__(self) -> None:
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        self._seen: set[int] = set()

    def look(self) -> None:
        """Reap if it is time to."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        zombies = _zombies() if _has_zombie() else set[int]()
        old = zombies & self._seen
        self._seen = zombies
        if len(old) > _MAX_ZOMBIES:
            for pid in old - _known_children():
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _has_zombie() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _zombies() -> set[int]:
    return {pid for pid in children_of(os.getpid()) if _is_zombie(pid)}


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"Z"
    except OSError:
        return False


def _known_children() -> set[int]:
    """Return the processes that somebody in this one may still ask for."""
    known = {popen.pid for popen in gc.get_objects() if isinstance(popen, subprocess.Popen)}
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        known |= {process.pid for process in list(multiprocessing._children)}
    return known


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
