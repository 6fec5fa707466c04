"""Sending payloads to workers: in turn, one by one while the work is long, many at a time while it is short.

Sending one payload costs about as much as scoring a few hundred short answers. So whoever gets a place while others
wait takes some of them along, as many as are expected to take a fiftieth of a second together. Such a journey has a
short limit of its own; when it fails in any way, everybody on board travels again, alone and with the full limit. So
each judgement ends as it would have without company. While journeys are that short, a worker is sent the next one
before it is back from the last.

A worker that runs many judgements at a time takes them all along when it dies, or when one of them blocks its event
loop until all are over their limit. Whoever was there when it happened is sent once more, with a worker for itself. So
what ends a worker then is the culprit, and nobody else pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError
from xrl_lite.judger.company import Case, hand_over
from xrl_lite.judger.outcome import no_worker_left
from xrl_lite.judger.quarantine import MAX_ENDED, Quarantine
from xrl_lite.judger.slots import Lead, Slots, Ticket
from xrl_lite.judger.stopwatch import Item, running_stopwatch, unwrap
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from xrl_lite.data.rollout_state import RolloutState
    from xrl_lite.judger.base import Judger

logger = get_logger(__name__)

MAX_TOGETHER = 128
"""Most payloads in one journey."""

_JOURNEY_S = 0.02
_SHORTEST_LIMIT_S = 1.0
_PATIENCE = 20
_SMOOTHING = 0.2


class Worker(Protocol):
    """Where payloads can be sent."""

    max_concurrency: int | None
    """Calls under way at the same time; None for no limit."""

    can_take_many: bool
    """Whether `send_many` works."""

    runs_many: bool
    """Whether judgements run in it side by side, so that one may be the end of others."""

    async def send(self, payload: Any, *, num_deaths: int = 0) -> Any:
        """Score one payload, or a list that is one batch for the judger; `num_deaths` workers died of it before."""
        ...

    async def send_many(self, payloads: Sequence[Any], *, limit_s: float) -> list[Item]:
        """Score several payloads one after the other, within `limit_s` together."""
        ...


class Dispatcher:
    """Spreads payloads over workers.

    Args:
        judger: Name of the judger, for messages.
        workers: At least one.
    """

    def __init__(self, judger: str, workers: Sequence[Worker]) -> None:
        self._judger = judger
        self._workers = list(workers)
        self.quarantine = Quarantine(judger)
        """Payloads that are not run any more."""
        self._slots = Slots([worker.max_concurrency for worker in workers])
        self._expected_s: float | None = None
        self._num_aboard = 0
        self._can_prefetch = all(worker.can_take_many for worker in workers)

    @property
    def loads(self) -> list[int]:
        """What is in flight at each worker."""
        return self._slots.loads

    async def run(self, payload: Any) -> Any:
        """Return what a worker says about the payload. Waits for a place; cancelling frees it, and the worker.

        Raises:
            JudgerError: no worker is left.
            ActorTimeoutError, ActorDiedError: it ended its worker now, or two of them before.
            Exception: what the worker raised.
        """
        watch = running_stopwatch()
        self.quarantine.check(payload)
        ticket = self._slots.ask(None if isinstance(payload, list) else payload)
        return unwrap(await self._follow(payload, await self._called(ticket)), watch)

    async def join(self, judger: Judger, state: RolloutState) -> RolloutState:
        """Judge and settle a state, and return it; see `Company`.

        Raises:
            JudgerError: no worker is left.
            Exception: as `Judger.judge`.
        """
        case = Case(judger, state, perf_counter())
        ticket = self._slots.ask(case=case)
        try:
            found = await ticket.future
        except asyncio.CancelledError:
            self._slots.withdraw(ticket)
            raise
        if type(found) is not Lead:
            return found
        try:
            if ticket.payload is None:
                ticket.payload = case.make()
            self.quarantine.check(ticket.payload)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; here it turns into data
            self._slots.release(found.index)
            return case.read((error, False, 0.0))
        try:
            item = await self._follow(ticket.payload, found)
        except BaseException as error:  # noqa: BLE001 - as above
            return case.read((error, False, 0.0))
        return case.read(item)

    async def _follow(self, payload: Any, place: Lead | Item) -> Item:
        """Return the item of a payload, for which others have brought it, or a place was found."""
        is_suspect = False
        while isinstance(place, Lead):
            began = perf_counter()
            try:
                return await self._use(place, payload)
            except (ActorDiedError, ActorTimeoutError) as error:
                if is_suspect or not (self._workers[place.index].runs_many and _is_end_of_all(error)):
                    # one that died has been sent until it had ended as many as it may
                    num_ended = 1 if isinstance(error, ActorTimeoutError) else MAX_ENDED
                    self.quarantine.note(payload, error, num_ended=num_ended)
                    return error, False, perf_counter() - began
                is_suspect = True
                logger.info("judger %r: a payload gets a worker for itself after %r", self._judger, error)
            except ActorUnavailableError as error:
                logger.error("judger %r: worker %d is not used any more: %s", self._judger, place.index, error)  # noqa: TRY400 - the message holds the cause
                self._slots.retire(place.index, no_worker_left(self._judger, error))
            except Exception as error:  # noqa: BLE001 - user code may raise anything
                return error, False, perf_counter() - began
            finally:
                self._slots.release(place.index)
            place = await self._called(
                self._slots.ask(None if isinstance(payload, list) else payload, whole=is_suspect)
            )
        return place

    async def _called(self, ticket: Ticket) -> Lead | Item:
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._slots.withdraw(ticket)
            raise

    async def _use(self, place: Lead, payload: Any) -> Item:
        worker = self._workers[place.index]
        num_deaths = MAX_ENDED - 1 if worker.runs_many else place.num_deaths
        passengers = self._board(worker, place, payload)
        if passengers:
            item = await self._travel(worker, payload, passengers)
            if isinstance(item, tuple):
                return item
            num_deaths += isinstance(item, ActorDiedError)
        began = perf_counter()
        output = await worker.send(payload, num_deaths=num_deaths)
        run_s = perf_counter() - began
        self._learn(run_s)
        return output, True, run_s

    def _board(self, worker: Worker, place: Lead, payload: Any) -> list[Ticket]:
        if not (worker.can_take_many and self._slots.num_in_line and self._expected_s is not None):
            return []
        if place.travels_alone or isinstance(payload, list):
            return []
        boarded = self._slots.board(min(MAX_TOGETHER, int(_JOURNEY_S / self._expected_s), self._share()) - 1)
        return [ticket for ticket in boarded if ticket.payload is not None or self._pack(ticket)]

    def _pack(self, ticket: Ticket) -> bool:
        assert ticket.case is not None, "others are not boarded without a payload"
        try:
            ticket.payload = ticket.case.make()
            self.quarantine.check(ticket.payload)
        except BaseException as error:  # noqa: BLE001 - as above; it is raised where the judgement was asked for
            hand_over(ticket.future, (error, False, 0.0), ticket.case)
            return False
        return True

    def _share(self) -> int:
        """Return how many go into one journey so that each worker has one, and another before it."""
        return -(-(self._slots.num_in_line + 1 + self._num_aboard) // (2 * self._slots.num_workers))

    async def _travel(self, worker: Worker, payload: Any, passengers: list[Ticket]) -> Item | Exception:
        """Return what came of the leader's own payload, or why the journey failed."""
        count = 1 + len(passengers)
        self._num_aboard += count
        limit_s = max(_SHORTEST_LIMIT_S, _PATIENCE * count * (self._expected_s or 0.0))
        try:
            items = await worker.send_many([payload, *(ticket.payload for ticket in passengers)], limit_s=limit_s)
        except Exception as error:  # noqa: BLE001 - whatever it was, each payload finds out alone
            logger.info("judger %r: %d payloads travel alone after %r", self._judger, count, error)
            self._forget()
            self._slots.put_back(passengers, died=isinstance(error, ActorDiedError))
            return error
        except BaseException:
            self._slots.put_back(passengers, died=False)
            raise
        finally:
            self._num_aboard -= count
        self._slots.carry(passengers, items[1:])
        self._learn(sum(run_s for _, _, run_s in items) / count)
        return items[0]

    def _learn(self, run_s: float) -> None:
        known = self._expected_s
        self._expected_s = max(run_s if known is None else known + _SMOOTHING * (run_s - known), 1e-6)
        self._slots.extra = int(self._can_prefetch and self._expected_s * MAX_TOGETHER < _JOURNEY_S)

    def _forget(self) -> None:
        self._expected_s = None
        self._slots.extra = 0


def _is_end_of_all(error: Exception) -> bool:
    """Whether whoever else was with the worker met the same end."""
    return not isinstance(error, ActorTimeoutError) or error.is_loop_blocked
