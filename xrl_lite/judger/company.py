"""Judging in company: where many wait, what each of them costs counts, so it is judged in few and short steps.

::

    Judger.judge(state) --> Company.join --> in line --> payload, run with those of others --> item --> judged state
      waits for    its future
      is woken by  whoever brings the items of many back, and settles their states one after the other; who has to go
                   alone gets something else, and goes on by itself
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from xrl_lite.data.rollout_state import RolloutState
    from xrl_lite.judger.base import Judger
    from xrl_lite.judger.stopwatch import Item

J = TypeVar("J", bound="Judger", contravariant=True)


@dataclass(eq=False, slots=True)
class Case:
    """A state that is to be judged."""

    judger: Judger
    state: RolloutState
    asked: float
    """When, on the clock of `time.perf_counter`."""

    def make(self) -> Any:
        """Return its payload."""
        return self.judger.preprocess(self.state)

    def read(self, item: Item) -> RolloutState:
        """Settle it by what came of its payload, and return it."""
        return self.judger.settle_item(self.state, self.asked, item)


class Company(Protocol[J]):
    """Who runs the payloads of a judger, of many at a time."""

    async def join(self, judger: J, state: RolloutState) -> RolloutState:
        """Judge and settle a state, and return it. Cancelling ends what runs for it.

        Raises:
            Exception: as `Judger.judge`.
        """
        ...


def hand_over(future: asyncio.Future[Any], item: Item, case: Case | None) -> None:
    """Give a future the item of a payload; or the settled state of a case, or what settling it raises."""
    if future.done() or future.get_loop().is_closed():  # nobody waits for it any more
        return
    try:
        found = item if case is None else case.read(item)
    except StopIteration as error:  # no future takes it
        _refuse(future, RuntimeError(f"judging raised {error!r}"))
    except BaseException as error:  # noqa: BLE001 - it is raised where the judgement was asked for
        _refuse(future, error)
    else:
        if not future.done():  # the user's code, which has run just now, may have cancelled it
            future.set_result(found)


def _refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
