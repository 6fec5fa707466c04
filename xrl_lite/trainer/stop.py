"""Ctrl-C and SIGTERM: once for an orderly end, twice for an immediate one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial


@dataclass
class StopRequest:
    """Asks the run to end: after the step that is running, or at once while nothing is trained yet."""

    requested: bool = False
    """Looked at between steps."""
    cancel: Callable[[], None] | None = None
    """Ends the start-up; None once steps are run."""


@contextmanager
def stop_on_signals(stop: StopRequest, *, kill: Callable[[], None], note: Callable[[str], None]) -> Generator[None]:
    """Turn SIGINT and SIGTERM into stop requests while inside.

    Args:
        stop: What is asked.
        kill: Ends every process of ours at once; called on the second signal, before this process ends itself.
        note: Says what happens.
    """
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal(number: signal.Signals) -> None:
        if stop.requested:
            kill()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.requested = True
        if stop.cancel is not None:
            note(f"{number.name}: stopping before the first step")
            stop.cancel()
        else:
            note(f"{number.name}: stopping after this step, with a checkpoint; once more to stop at once")

    for number in signals:
        loop.add_signal_handler(number, partial(on_signal, number))
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
