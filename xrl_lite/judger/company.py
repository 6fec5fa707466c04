"""Judging in company: what many judgements share costs each of them little."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from xrl_lite.data.rollout_state import RolloutState


@dataclass(frozen=True, slots=True)
class Alone:
    """Stands for a state that finds no company, or lost it."""

    run: Callable[[Any], Coroutine[Any, Any, Any]]
    """Runs its payload, as `Judger.judge_payload` does."""


class Company(Protocol):
    """Who judges states together."""

    async def join(self, state: RolloutState) -> RolloutState | Alone:
        """Have a state judged and settled along with others; `Alone` if that cannot be. Cancelling leaves it as it was.

        Raises:
            Exception: as `Judger.judge`.
        """
        ...
