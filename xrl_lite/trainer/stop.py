"""Ctrl-C and SIGTERM: once for an orderly end, twice for an immediate one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Asks the run to end: after the step that is running, or at once while nothing is trained yet."""

    requested: bool = False
    """Looked at between steps."""
    cancel: Callable[[], None] | None = None
    """Ends the start-up; None once steps are run."""


@contextmanager
def stop_on_signals(stop: StopRequest, *, kill: Callable[[], None], note: Callable[[str], None]) -> Generator[None]:
    """Turn SIGINT and SIGTERM into stop requests while inside. The second one acts also where the loop is blocked.

    Args:
        stop: What is asked.
        kill: Ends every process of ours at once; called on the second signal, before this process ends itself.
        note: Says what happens.
    """
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            try:
                kill()
            finally:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        stop.requested = True
        loop.call_soon_threadsafe(begin_to_stop, signal.Signals(number).name)

    def begin_to_stop(name: str) -> None:
        if stop.cancel is not None:
            note(f"{name}: stopping before the first step; once more to stop at once")
            stop.cancel()
        else:
            note(f"{name}: stopping after this step, with a checkpoint; once more to stop at once")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
