"""Scripted faults for the inline backend, so that what happens after a fault can be tested without processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Action = Literal["kill", "delay", "drop_reply", "fail_spawn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    actor: str
    """Name of the actor."""

    action: Action
    """What goes wrong:

    - ``kill``: the process dies while it runs the call.
    - ``delay``: the call takes `delay_s` longer, on a clock that only its time limit sees.
    - ``drop_reply``: the call runs, its reply is lost.
    - ``fail_spawn``: the process dies before its constructor has ended.
    """

    at_call: int = 1
    """Which call of the actor, counted from 1 over all its incarnations. For ``fail_spawn``: which start."""

    delay_s: float = 0.0
    """For ``delay``."""


class FaultPlan:
    """Faults by actor and call. Each happens once."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = {(fault.actor, fault.action, fault.at_call): fault for fault in faults}

    def take(self, actor: str, action: Action, at_call: int) -> Fault | None:
        """Return the fault that is due, and forget it."""
        return self._faults.pop((actor, action, at_call), None)
