"""Scripted faults for the inline backend, so that what happens after a fault can be tested without processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from xrl_lite.errors import did_you_mean

Action = Literal["kill", "kill_after", "delay", "drop_reply", "fail_spawn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    actor: str
    """Name of the actor."""

    action: Action
    """What goes wrong:

    - ``kill``: the process dies while it runs the call.
    - ``kill_after``: the process dies when it has answered the call.
    - ``delay``: the call takes `delay_s` longer; without a `VirtualClock`, on a clock that only its time limit sees.
    - ``drop_reply``: the call runs, its reply is lost: it ends by its time limit, or by the death of the process.
    - ``fail_spawn``: the process dies before its constructor has ended.
    """

    at_call: int = 1
    """Which call of the actor, counted from 1 over all its incarnations. For ``fail_spawn``: which start."""

    delay_s: float = 0.0
    """For ``delay``."""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"Unknown action {self.action!r}.{did_you_mean(self.action, get_args(Action))}")
        if self.at_call < 1:
            raise ValueError(f"at_call is counted from 1, got {self.at_call}.")
        if (self.action == "delay") != (self.delay_s > 0):
            raise ValueError(f"delay_s must be positive for a delay and is for nothing else; got {self}.")


class FaultPlan:
    """Faults by actor and call. Each happens once. A plan belongs to one system.

    Raises:
        ValueError: two of them are the same.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults: dict[tuple[str, str, int], Fault] = {}
        for fault in faults:
            if (key := (fault.actor, fault.action, fault.at_call)) in self._faults:
                raise ValueError(f"The plan has this fault twice: {fault}.")
            self._faults[key] = fault

    @property
    def left(self) -> list[Fault]:
        """Faults that have not happened: a test whose plan did not come to pass has tested something else."""
        return list(self._faults.values())

    def take(self, actor: str, action: Action, at_call: int) -> Fault | None:
        """Return the fault that is due, and forget it."""
        return self._faults.pop((actor, action, at_call), None)
