"""Reward functions that do everything that reward functions do in the wild."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = __import__("threading").Lock()


def wild(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Behave as the response says."""
    match response:
        case "endless":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "memory":
            hoard = [bytearray(64 * MIB) for _ in range(64)]
            return {"score": float(len(hoard))}
        case "_exit":
            os._exit(3)
        case "exit":
            sys.exit(5)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise ValueError("no such unit")
        case "raise what does not pickle":
            raise UnpicklableError
        case "return what does not pickle":
            return {"score": 1.0, "lock": __import__("threading").Lock()}
        case "print":
            sys.stdout.write("x" * (10 * MIB) + "\n")
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            Path(extra_info["pid_file"]).write_text(str(child.pid))
            time.sleep(3600)
        case "slow":
            time.sleep(0.01)
        case _:
            pass
    return {"score": 1.0 if response == label else 0.5}


def wild_with_pid(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Do the same, and say which process scored."""
    return {**wild(response, label, extra_info), "pid": os.getpid()}


def alarm(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Use a signal, as reward code with time limits of its own does; works in the main thread only."""
    import signal

    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 5.0)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return {"score": 1.0}


def identity(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Say which process scored."""
    return {"score": 1.0, "pid": os.getpid()}


def die_once(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Die the first time; a file remembers."""
    if response == "once" and not Path(extra_info["file"]).exists():
        Path(extra_info["file"]).touch()
        os._exit(9)
    return {"score": 1.0}


@functools.wraps(wild)
def wrapped(**arguments: Any) -> Any:
    """Return what is to be awaited."""
    return wild_and_waiting(**arguments)


_four = asyncio.Barrier(4)


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an async function as code that logs or counts does: what is called is sync and returns a coroutine."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def to_the_end(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an async function a sync one, with a loop of its own for each call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return call


@passing_on
async def meeting(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Wait until four calls are under way in this process."""
    await _four.wait()
    return {"score": 1.0}


@to_the_end
async def alone(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Give way once."""
    await asyncio.sleep(0)
    return {"score": 1.0}


async def wild_and_waiting(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Wait, as for a service, and then behave as the response says, on the event loop."""
    await asyncio.sleep(0.1)
    return wild(response, label, extra_info)
