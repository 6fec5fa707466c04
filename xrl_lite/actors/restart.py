"""When a child that died is started again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How often an actor may crash before it stays down. Children that we end ourselves (time limits) do not count."""

    max_restarts: int = 3
    """Crashes forgiven within `window_s`. 0 means that the first crash is the end."""

    window_s: float = 60.0
    """Seconds after which a crash is forgotten."""

    backoff_s: float = 0.1
    """Pause before the second restart in a row; doubled for each further one. The first follows at once."""

    max_backoff_s: float = 10.0
    """The longest pause."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, got {self.max_restarts}.")
        if self.window_s <= 0 or self.backoff_s < 0 or self.max_backoff_s < 0:
            raise ValueError("window_s must be positive, backoff_s and max_backoff_s must not be negative.")


NEVER = RestartPolicy(max_restarts=0)


class RestartBudget:
    """Counts crashes against a policy. Times come from outside."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._crashes: deque[float] = deque()

    def spend(self, now: float) -> float | None:
        """Note a crash at `now` (seconds). Return the pause before the restart, None if there is to be none."""
        while self._crashes and now - self._crashes[0] >= self.policy.window_s:
            self._crashes.popleft()
        if len(self._crashes) >= self.policy.max_restarts:
            return None
        self._crashes.append(now)
        earlier = len(self._crashes) - 1
        if earlier == 0:
            return 0.0
        return min(self.policy.backoff_s * 2.0 ** (earlier - 1), self.policy.max_backoff_s)
