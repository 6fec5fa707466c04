"""What the processes are doing: memory and restarts of actors, and how late the event loop is.

::

    tick() every INTERVAL_S on the loop --> lag = how late it came
    watcher thread: no tick for BLOCKED_S --> the stack that blocks the loop goes to the log

Waits for    the time of the next tick
Is woken by  the event loop; the watcher by its own clock, because the loop is what it doubts
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from xrl_lite.errors import errors_as_themselves
from xrl_lite.log import get_logger

logger = get_logger(__name__)

INTERVAL_S = 0.5
BLOCKED_S = 5.0
_PAGE = 4096


class LoopLag:
    """Measures how late the event loop is, and names what blocks it.

    Args:
        interval_s: Time between two looks.
        blocked_s: Lag at which the blocking stack is logged.
    """

    def __init__(self, *, interval_s: float = INTERVAL_S, blocked_s: float = BLOCKED_S) -> None:
        self._interval_s = interval_s
        self._blocked_s = blocked_s
        self._worst_s = 0.0
        self._ticked = time.monotonic()
        self._ended = threading.Event()
        self.num_blocked = 0

    @asynccontextmanager
    async def measured(self) -> AsyncGenerator[None]:
        """Measure while inside."""
        self._ticked = time.monotonic()
        watcher = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="loop-watcher", daemon=True)
        watcher.start()
        try:
            with errors_as_themselves():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._tick)
                    yield
                    tasks.cancel_scope.cancel()
        finally:
            self._ended.set()
            watcher.join()

    def metrics(self) -> dict[str, float]:
        """Return the worst lag since the last call, in ms."""
        worst, self._worst_s = self._worst_s, 0.0
        return {"loop_lag_ms": worst * 1e3}

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + self._interval_s
            await anyio.sleep(self._interval_s)
            self._ticked = time.monotonic()
            self._worst_s = max(self._worst_s, self._ticked - due)

    def _watch(self, loop_thread: int) -> None:
        told_of = 0.0
        while not self._ended.wait(self._blocked_s / 5):
            late = time.monotonic() - self._ticked - self._interval_s
            if late >= self._blocked_s and told_of != self._ticked:
                told_of = self._ticked
                self.num_blocked += 1
                frame = sys._current_frames().get(loop_thread)  # pyright: ignore[reportPrivateUsage]
                stack = "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"
                logger.warning("the event loop has been blocked for %.1f s by:\n%s", late, stack)


def actor_metrics(statistics: Mapping[str, Any]) -> dict[str, float]:
    """Return memory and restarts of every actor.

    Args:
        statistics: `ActorSystem.statistics()`.
    """
    metrics = {"actor/driver/rss_mb": _rss_mb("self")}
    for name, actor in statistics.get("actors", {}).items():
        pid = actor.get("pid")
        if pid:
            metrics[f"actor/{name}/rss_mb"] = _rss_mb(str(pid))
        if "restarts" in actor:
            metrics[f"actor/{name}/restarts"] = float(actor["restarts"])
    return metrics


def _rss_mb(pid: str) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0  # it has just ended
