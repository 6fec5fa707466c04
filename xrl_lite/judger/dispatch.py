"""Sending payloads to workers: in turn, one by one while the work is long, many at a time while it is short.

::

    run(payload)  --> place at a worker --> send, or lead a journey of many --> output
    join(state)   --> line              --> carried along by a leader       --> settled by the leader, for all on board
      waits for    a place, or for a leader; in the order of asking
      is woken by  the end of any journey

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
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError
from xrl_lite.judger.company import Alone
from xrl_lite.judger.outcome import no_worker_left
from xrl_lite.judger.quarantine import MAX_ENDED, Quarantine
from xrl_lite.judger.slots import Lead, Slots, Ticket
from xrl_lite.judger.stopwatch import Item, Stopwatch, running_stopwatch, unwrap
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

    @property
    def can_take_many(self) -> bool:
        """Whether `send_many` works."""
        ...

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
        judger: Whose payloads.
        workers: At least one.
    """

    def __init__(self, judger: Judger, workers: Sequence[Worker]) -> None:
        self._judger = judger
        self._name = judger.get_judger_name()
        self._workers = list(workers)
        self.quarantine = Quarantine(self._name)
        """Payloads that are not run any more."""
        self._slots = Slots([worker.max_concurrency for worker in workers])
        self._expected_s: float | None = None
        self._is_quick = False
        self._num_aboard = 0

    @property
    def loads(self) -> list[int]:
        """What is in flight at each worker."""
        return self._slots.loads

    async def join(self, state: RolloutState) -> RolloutState | Alone:
        """Have a state judged along with others, if there is no place for it alone. Cancelling leaves it as it was.

        Returns:
            The judged state, or how to run its payload alone.

        Raises:
            JudgerError: no worker is left, or the first judgements all failed.
            Exception: as `Judger.judge`.
        """
        ticket = self._slots.line_up(state, perf_counter()) if self._is_quick else None
        if ticket is None:
            return Alone(self._judger.judge_payload)
        try:
            place = await ticket.future
        except asyncio.CancelledError:
            self._slots.withdraw(ticket)
            raise
        if not isinstance(place, Lead):
            return place
        try:
            return await self._lead(self._workers[place.index], ticket)
        finally:
            self._slots.release(place.index)

    async def run(self, payload: Any, *, num_deaths: int | None = None) -> Any:
        """Return what a worker says about the payload. Waits for a place; cancelling frees it, and the worker.

        Args:
            payload: One, or a list that is one batch for the judger.
            num_deaths: For what was on board of a journey that failed: how many workers died on it.

        Raises:
            JudgerError: no worker is left.
            ActorTimeoutError, ActorDiedError: it ended its worker now, or two of them before.
            Exception: what the worker raised.
        """
        self.quarantine.check(payload)
        watch = running_stopwatch()
        is_suspect = False
        while True:
            ticket = self._ask(payload, num_deaths, whole=is_suspect)
            try:
                place = await ticket.future
            except asyncio.CancelledError:
                self._slots.withdraw(ticket)
                raise
            if not isinstance(place, Lead):
                return unwrap(place, watch)
            watch.start()
            try:
                return await self._use(place, payload, watch)
            except (ActorDiedError, ActorTimeoutError) as error:
                if is_suspect or not (self._workers[place.index].runs_many and _is_end_of_all(error)):
                    # one that died has been sent until it had ended as many as it may
                    num_ended = 1 if isinstance(error, ActorTimeoutError) else MAX_ENDED
                    self.quarantine.note(payload, error, num_ended=num_ended)
                    raise
                is_suspect = True
                logger.info("judger %r: a payload gets a worker for itself after %r", self._name, error)
            except ActorUnavailableError as error:
                logger.error("judger %r: worker %d is not used any more: %s", self._name, place.index, error)  # noqa: TRY400 - the message holds the cause
                self._slots.retire(place.index, no_worker_left(self._name, error))
            finally:
                self._slots.release(place.index)

    def _ask(self, payload: Any, num_deaths: int | None, *, whole: bool) -> Ticket:
        if num_deaths is not None and not whole:
            return self._slots.ask_again(num_deaths=num_deaths)
        return self._slots.ask(None if isinstance(payload, list) else payload, whole=whole)

    async def _use(self, place: Lead, payload: Any, watch: Stopwatch) -> Any:
        worker = self._workers[place.index]
        num_deaths = MAX_ENDED - 1 if worker.runs_many else place.num_deaths
        if not (place.travels_alone or isinstance(payload, list)):
            passengers = self._board(worker)
            if passengers:
                item = await self._travel(worker, payload, passengers)
                if isinstance(item, tuple):
                    return unwrap(item, watch)
                num_deaths += isinstance(item, ActorDiedError)
        began = perf_counter()
        output = await worker.send(payload, num_deaths=num_deaths)
        self._learn(perf_counter() - began)
        return output

    async def _lead(self, worker: Worker, ticket: Ticket) -> RolloutState | Alone:
        """Take others along; return what became of the leader's own state, or that it has to go alone."""
        passengers = self._board(worker)
        if not passengers:
            return Alone(self._judger.judge_payload)
        if not self._pack(ticket):
            self._send_alone(passengers, 0, self._judger.judge_payload)
            return Alone(self._judger.judge_payload)
        item = await self._travel(worker, ticket.payload, passengers)
        if isinstance(item, tuple):
            return self._conclude(ticket, item, perf_counter())
        return Alone(partial(self.run, num_deaths=int(isinstance(item, ActorDiedError))))

    def _board(self, worker: Worker) -> list[Ticket]:
        if not (worker.can_take_many and self._slots.num_in_line and self._expected_s is not None):
            return []
        boarded = self._slots.board(min(MAX_TOGETHER, int(_JOURNEY_S / self._expected_s), self._share()) - 1)
        try:
            return [ticket for ticket in boarded if ticket.payload is not None or self._pack(ticket)]
        except BaseException:  # of a kind that ends more than a judgement
            self._send_alone(boarded, 0, self._judger.judge_payload)
            raise

    def _share(self) -> int:
        """Return how many go into one journey so that all workers have one, and another before them."""
        return -(-(self._slots.num_in_line + 1 + self._num_aboard) // (2 * len(self._workers)))

    def _pack(self, ticket: Ticket) -> bool:
        """Make the payload of a state. If that fails, or it is in quarantine, it finds out alone."""
        try:
            payload = self._judger.preprocess(ticket.state)
            self.quarantine.check(payload)
        except Exception:  # noqa: BLE001 - user code may raise anything
            self._slots.carry(ticket, Alone(self._judger.judge_payload))
            return False
        ticket.payload = payload
        return True

    async def _travel(self, worker: Worker, payload: Any, passengers: list[Ticket]) -> Item | Exception:
        """Return what came of the leader's own payload, or why the journey failed."""
        count = 1 + len(passengers)
        self._num_aboard += count
        limit_s = max(_SHORTEST_LIMIT_S, _PATIENCE * count * (self._expected_s or 0.0))
        try:
            items = await worker.send_many([payload, *(ticket.payload for ticket in passengers)], limit_s=limit_s)
        except Exception as error:  # noqa: BLE001 - whatever it was, each payload finds out alone
            logger.info("judger %r: %d payloads travel alone after %r", self._name, count, error)
            self._forget()
            num_deaths = int(isinstance(error, ActorDiedError))
            self._send_alone(passengers, num_deaths, partial(self.run, num_deaths=num_deaths))
            return error
        except BaseException:
            self._send_alone(passengers, 0, self._judger.judge_payload)
            raise
        finally:
            self._num_aboard -= count
        self._learn(sum(run_s for _, _, run_s in items) / count)
        now = perf_counter()
        for ticket, item in zip(passengers, items[1:], strict=True):
            if ticket.state is None:
                self._slots.carry(ticket, item)
            elif not ticket.future.done():
                self._settle(ticket, item, now)
        return items[0]

    def _send_alone(self, passengers: Sequence[Ticket], num_deaths: int, run: Callable[[Any], Any]) -> None:
        for ticket in passengers:
            if ticket.state is not None:
                self._slots.carry(ticket, Alone(run))
        self._slots.put_back([ticket for ticket in passengers if ticket.state is None], num_deaths=num_deaths)

    def _settle(self, ticket: Ticket, item: Item, now: float) -> None:
        try:
            ticket.future.set_result(self._conclude(ticket, item, now))
        except StopIteration as error:  # no future takes it
            ticket.future.set_exception(RuntimeError(f"judging raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - it is raised where the judgement was asked for
            ticket.future.set_exception(error)

    def _conclude(self, ticket: Ticket, item: Item, now: float) -> RolloutState:
        return self._judger.conclude(ticket.state, item, max(now - item[2] - ticket.asked, 0.0))

    def _learn(self, run_s: float) -> None:
        known = self._expected_s
        self._expected_s = max(run_s if known is None else known + _SMOOTHING * (run_s - known), 1e-6)
        self._is_quick = self._expected_s * MAX_TOGETHER < _JOURNEY_S and all(
            worker.can_take_many for worker in self._workers
        )
        self._slots.extra = int(self._is_quick)

    def _forget(self) -> None:
        self._expected_s = None
        self._is_quick = False
        self._slots.extra = 0


def _is_end_of_all(error: Exception) -> bool:
    """Whether whoever else was with the worker met the same end."""
    return not isinstance(error, ActorTimeoutError) or error.is_loop_blocked
