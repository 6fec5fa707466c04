"""Nothing outlives the driver, however it ends: no child, no fork server, no process that user code started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xrl_lite.actors.zygote import parent_of

LIMIT_S = 30.0
NONE_LEFT_WITHIN_S = 30.0
ROOT = Path(__file__).parents[2]


@contextmanager
def driver(how: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a driver with three actors and three grandchildren; give it and the ids of all processes below it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.processes.driver_program", how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            below = [int(pid) for pid in process.stdout.readline().split()]
            assert len(below) >= 7
            yield process, below
        finally:
            process.kill()  # where the test failed: a driver that lives keeps its actors


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_none_left(pids: list[int]) -> None:
    deadline = time.monotonic() + NONE_LEFT_WITHIN_S
    while (left := living(pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_driver_leaves_nothing(number: signal.Signals) -> None:
    with driver("wait") as (process, below):
        process.send_signal(number)
        process.wait(LIMIT_S)
        assert_none_left(below)


@pytest.mark.parametrize("how", ["raise", "leave_open"])
def test_a_driver_that_ends_by_itself_leaves_nothing(how: str) -> None:
    with driver(how) as (process, below):
        process.wait(LIMIT_S)
        assert_none_left(below)


def test_a_second_interrupt_overtakes_an_orderly_stop() -> None:
    with driver("interrupted_twice") as (process, below):
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        assert process.returncode == 0
        assert_none_left(below)


def test_the_end_of_the_fork_server_ends_its_children() -> None:
    with driver("wait") as (process, below):
        server = next(pid for pid in below if parent_of(pid) == process.pid)
        os.kill(server, signal.SIGTERM)
        process.wait(LIMIT_S)  # its calls fail, so it ends
        assert_none_left(below)
