"""What happens in a run, in the order in which it happens: ``events.jsonl``, a line per event.

::

    began                 a trainer goes on after a step          step, state
    restored              groups that were found after a restart  step, groups, notes
    admitted              a group has its place in the order      group, partition, task, step, row
    started               somebody works on it                    group, worker, step
    ended                 its attempts are made and judged        group, status, reason, attempts
    failed                its worker died, or was too late        group, reason
    given_back            its worker gave it up                   group, attempts
    stored                it is on the disk: now it counts        group, status, reason (it could not be kept)
    expired               some attempts were too old              group
    dropped               groups leave untrained                  groups, reason
    sampled               a step takes groups                     step, groups
    baselines             greedy answers were judged (remax)      step, part, scores
    trained               the weights were updated                step, part
    synced                replicas have weights of a version      version
    evaluated             held-out rows were answered             step, metrics
    saved                 there is a checkpoint                   step
    stopped               the run was asked to end                step
    over                  no step will follow

Every line has ``n`` (counts from 1) and ``t`` (seconds), both since the log was opened. What comes from outside (an
answer, a death, a training step that took so long) and what the run decided upon it (whom to admit, drop, sample) stand
side by side, so a run can be repeated from its log alone: `xrl_lite.trainer.replay`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from xrl_lite.data import RolloutState, version_range

Event = dict[str, Any]
"""A line: n, t, event, and what belongs to it."""


class Events:
    """Is told what happens; this one lets it pass."""

    listens = False
    """Whether what is told is used."""

    def record(self, event: str, **fields: Any) -> None:
        """Note an event that is happening now."""

    async def turn(self, *events: str, **fields: Any) -> None:
        """Wait until one of these events, with these fields, may come next. Only a replay lets anybody wait."""

    def close(self) -> None:
        """Note no more."""


class EventLog(Events):
    """Writes events to a file, behind those that are in it. A line is written at once, so a kill loses none.

    What comes after "over" is not written: groups that are cancelled then are so in no order.

    Args:
        path: The file; None keeps the events in memory only, in `events`.
        clock: Seconds.
    """

    listens = True

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.events: list[Event] = []
        self._clock = clock
        self._opened = clock()
        self._number = 0
        self._is_over = False
        self._file = None if path is None else _opened(path)

    def record(self, event: str, **fields: Any) -> None:
        if self._is_over:
            return
        self._is_over = event == "over"
        self._number += 1
        line = {"n": self._number, "t": round(self._clock() - self._opened, 6), "event": event, **fields}
        if self._file is None:
            self.events.append(line)
        else:
            self._file.write(json.dumps(line, default=str) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _opened(path: Path) -> TextIO:
    """Open a file behind its last whole line: what a kill tore off is in nobody's way."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8", buffering=1)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file; a torn last line is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def attempts_of(states: Sequence[RolloutState]) -> list[dict[str, Any]]:
    """Return what decides about attempts: status, numbers of the reward, tokens, policy versions."""
    return [
        {
            "status": state.status.value,
            "reward": {
                name: value for name, value in (state.reward or {}).items() if isinstance(value, int | float | bool)
            },
            "tokens": len(state.response_ids or ()),
            "versions": version_range(state),
        }
        for state in states
    ]
