"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal, sys
from xrl_lite.trainer.stop import StopRequest, stop_on_signals

async def main():
    stop, number = StopRequest(), int(sys.argv[1])
    with stop_on_signals(stop, kill=lambda: print("killed", flush=True), note=print):
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), number)  # the loop never had a turn
        print("still here")

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_also_where_the_loop_is_blocked(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(number.value)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("killed\n", -number), ended.stderr
