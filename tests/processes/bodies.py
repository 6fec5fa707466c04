"""Actors that end badly."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar

from xrl_lite.actors import share


class Victim:
    def ping(self) -> str:
        return "pong"

    def echo(self, value: Any) -> Any:
        return value

    def take(self, _value: Any) -> int:
        return 1

    def process_id(self) -> int:
        return os.getpid()

    def end_hard(self, code: int) -> None:
        sys.stderr.write("last words\n")
        os._exit(code)

    def segfault(self) -> None:
        ctypes.string_at(0)

    def kill_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def close_descriptors(self) -> None:
        os.closerange(3, 200)
        time.sleep(60)

    def hang_in_python(self) -> None:
        while True:
            pass

    def hang_in_regex(self) -> None:
        re.match(r"(a+)+$", "a" * 40 + "b")

    def hang_and_swallow(self) -> None:
        while True:
            try:
                time.sleep(60)
            except BaseException:  # noqa: BLE001
                continue

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def mark_and_sleep(self, path: str, seconds: float) -> None:
        with open(path, "w") as file:
            file.write("begun")
        time.sleep(seconds)

    def wait_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.005)

    def large_result(self, size: int) -> bytes:
        return b"r" * size

    def print_much(self, size: int) -> int:
        line = "x" * 999
        for _ in range(size // 1000):
            print(line)  # noqa: T201
        return size

    def say(self, text: str) -> None:
        print(text)  # noqa: T201
        sys.stderr.write(f"err {text}\n")

    def use_memory(self, size: int) -> int:
        self.hog = bytearray(os.urandom(1)) * size
        time.sleep(60)
        return len(self.hog)

    def use_memory_below(self, size: int) -> None:
        """Let a grandchild use memory."""
        hog = f"hog = bytearray(b'x') * {size}; import time; time.sleep(60)"
        below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hog!r}])"
        subprocess.run([sys.executable, "-c", below], check=True)

    def signal_limit(self) -> str:
        """What user code does to limit its own time: works only in the main thread."""

        def on_alarm(*_: Any) -> None:
            raise TimeoutError("alarm")

        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(60)
        except TimeoutError:
            return "alarm"
        return "never"

    def start_grandchildren(self) -> list[int]:
        plain = subprocess.Popen(["sleep", "600"])
        own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
        daemon = subprocess.run(
            ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
        )
        self.kept = (plain, own_session)
        return [plain.pid, own_session.pid, int(daemon.stdout)]

    def interrupt_a_program(self) -> int:
        with subprocess.Popen(["sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            program.stdout.readline()
            program.send_signal(signal.SIGINT)
            return program.wait(30.0)

    def use_up_descriptors(self) -> None:
        _use_up_descriptors()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def evaluate(self, expression: str) -> Any:
        return eval(expression)

    def open_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


def _use_up_descriptors() -> None:
    """Be like a process that has leaked files up to its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))


class Keeper(Victim):
    """An actor whose state is worth keeping."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


def _blocking(function: Callable[..., Coroutine[Any, Any, str]]) -> Callable[..., str]:
    @functools.wraps(function)
    def call(*args: Any) -> str:
        return asyncio.run(function(*args))

    return call


class SlowToRebuild:
    """Takes a while to be unpickled, as what needs a large module to be imported."""

    rebuilt: ClassVar[list[str]] = []

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        with open(state["path"], "w"):
            self.rebuilt.append("begun")
        time.sleep(0.2)
        self.rebuilt.append("done")


class Shares(Victim):
    """Returns what travels as a descriptor, with what travels beside it."""

    def value_and_text(self, size: int) -> Any:
        return share(b"v" * 100_000), "t" * size


class Mixed:
    """Sync and async methods."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    async def ping(self) -> str:
        return "pong"

    def sleep_then_wait(self, asleep: float, waiting: float) -> Any:
        time.sleep(asleep)
        return asyncio.sleep(waiting)

    async def block_the_loop(self) -> None:
        time.sleep(60)  # noqa: ASYNC251 the point of it

    async def end_hard(self, code: int) -> None:
        os._exit(code)

    async def use_up_descriptors(self) -> None:
        _use_up_descriptors()

    async def echo(self, value: Any) -> Any:
        return value

    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def sleep_sync(self, seconds: float) -> float:
        self.begun.set()
        time.sleep(seconds)
        return seconds

    @_blocking
    async def ping_in_a_loop_of_its_own(self) -> str:
        await asyncio.sleep(0)
        return "pong"

    def ping_by_sync(self) -> Awaitable[str]:
        return self.ping()

    async def sync_has_begun(self) -> bool:
        return self.begun.is_set()


class Stubborn:
    """A constructor that takes its time, fails, or ends the process."""

    def __init__(self, how: str) -> None:
        if how == "hang":
            time.sleep(600)
        elif how == "die":
            os._exit(7)
        elif how == "exit":
            sys.exit(8)
        elif how == "base":
            raise KeyboardInterrupt

    def ping(self) -> str:
        return "pong"
