"""The inline backend: actors are objects in this process, and a seed decides whose turn it is.

Calls go through the same pickling as between processes, so what cannot be sent fails here too. Of all actors that have
a call and room for it, the seed picks the next one; calls to one actor start in the order in which they were sent. So
one seed gives one order, another seed another, and ``breakpoint()`` works.

On the wall's clock a sync method cannot be ended: a time limit is noticed when the method returns, and then the object
is replaced as its process would have been. Under a `VirtualClock` it ends where it sleeps, and actors that sleep do so
side by side, as processes would; see `clock`.

Waiting:
    a call waits for    its turn
    and is woken by     the loop on which it was sent; without a running loop it runs before `remote` returns
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from xrl_lite.actors.actor import (
    ENDINGS,
    ActorSpec,
    Call,
    CallCounts,
    DeathCallback,
    again,
    died_error,
    restarts_used_up_error,
    timeout_error,
    unavailable_error,
)
from xrl_lite.actors.clock import Clock, OutOfTimeError, VirtualClock
from xrl_lite.actors.failure import describe, pack_failure, unpack_failure
from xrl_lite.actors.faults import Action, FaultPlan
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.payload import unpack
from xrl_lite.actors.restart import RestartBudget
from xrl_lite.actors.wire import EMPTY, Kind
from xrl_lite.actors.worker import Outcome, pack_result
from xrl_lite.errors import ActorDiedError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

CONSTRUCTOR = "__init__"


class InlineScheduler:
    """Decides whose turn it is."""

    def __init__(self, seed: int, faults: FaultPlan, clock: Clock) -> None:
        self.faults = faults
        self.clock = clock
        self._random = random.Random(seed)
        self._actors: list[InlineActor] = []
        self._turn_due: asyncio.AbstractEventLoop | None = None
        self._in_turn = False

    def add(self, actor: InlineActor) -> None:
        """Take part from now on."""
        self._actors.append(actor)

    def remove(self, actor: InlineActor) -> None:
        """Take part no more."""
        if actor in self._actors:
            self._actors.remove(actor)

    def kick(self) -> None:
        """There may be something to do."""
        loop = running_loop()
        if loop is None:
            if not self._in_turn:
                self._run_to_the_end()
            return
        if self._turn_due is not loop:
            self._turn_due = loop
            loop.call_soon(self._turn)

    def check_loop(self) -> None:
        """Check that this thread's event loop, if one runs, has the time of the system."""
        loop = running_loop()
        if loop is not None and isinstance(self.clock, VirtualClock) and not self.clock.drives(loop):
            raise RuntimeError(
                "This actor system has a virtual clock, but the running event loop has the wall's. Run the program by "
                "clock.run(main()), or make its loop by clock.new_event_loop()."
            )

    def later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle | None:
        """Do something when `delay_s` have passed on a virtual clock; on the wall's, nobody waits for it.

        Without a running loop it is done at once, and the clock moves.
        """
        if isinstance(self.clock, VirtualClock) and delay_s > 0:
            if (loop := running_loop()) is not None:
                return loop.call_later(delay_s, action)
            self.clock.advance(delay_s)
        action()
        return None

    def _turn(self) -> None:
        self._turn_due = None
        if self._take_turn():
            self.kick()

    def _run_to_the_end(self) -> None:
        while self._take_turn():
            pass

    def _take_turn(self) -> bool:
        able = [actor for actor in self._actors if actor.can_begin]
        if not able:
            return False
        self._in_turn = True
        try:
            self._random.choice(able).begin_next()
        finally:
            self._in_turn = False
        return True


@dataclass(eq=False, slots=True)
class _Run:
    """A call that has begun."""

    number: int
    """Counted from 1 over all incarnations of the actor."""

    is_async: bool
    task: asyncio.Task[Outcome] | None = None
    timer: asyncio.TimerHandle | None = None
    """Ends a sync call that takes virtual time."""

    def abandon(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.timer is not None:
            self.timer.cancel()


class InlineActor:
    """One actor of the inline backend."""

    def __init__(self, spec: ActorSpec, scheduler: InlineScheduler, *, on_down: Callable[[], None]) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self._on_down = on_down
        self._budget = RestartBudget(spec.restart)
        self._target: Any = None
        self._up = False
        self._stopping = False
        self._constructed_once = False
        self._starts = 0
        self._num_begun = 0
        self._queue: deque[Call] = deque()
        self._running: dict[Call, _Run] = {}
        self._ready_waiters: list[CallFuture[None]] = []
        self._stop_waiters: list[CallFuture[None]] = []
        self._pause_timer: asyncio.TimerHandle | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._final_error: Callable[[], BaseException] | None = None
        self._last_death = ""
        self._death_callbacks: list[DeathCallback] = []
        self._counts = CallCounts()
        scheduler.add(self)
        self._construct()

    @property
    def spec(self) -> ActorSpec:
        return self._spec

    @property
    def pid(self) -> int | None:
        return None

    @property
    def restarts(self) -> int:
        return max(0, self._starts - 1)

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def is_down(self) -> bool:
        return self._final_error is not None or self._stopping

    @property
    def can_begin(self) -> bool:
        """Whether the next call could begin now."""
        return self._up and self._next_call() is not None

    def submit(self, call: Call) -> None:
        self._scheduler.check_loop()
        if self._final_error is not None:
            self._end(call, "unavailable", call.set_exception(self._final_error()))
        elif self._stopping:
            error = unavailable_error(self._spec, "it is being stopped")
            self._end(call, "unavailable", call.set_exception(error))
        else:
            self._queue.append(call)
            self._scheduler.kick()

    def cancel(self, call: Call) -> None:
        self._counts["cancelled"] += 1
        run = self._running.get(call)
        if run is not None and run.is_async:
            run.abandon()
        elif run is not None:
            self._interrupt(call, f"{call.method}() was cancelled")
        elif call in self._queue:
            self._queue.remove(call)
        self._check_idle()

    def ready(self) -> CallFuture[None]:
        future: CallFuture[None] = CallFuture(f"ready() of actor {self._spec.name!r}")
        if self._final_error is not None:
            future.set_exception(self._final_error())
        elif self._up:
            future.set_result(None)
        else:
            self._ready_waiters.append(future)
        return future

    def stop(self, grace_s: float) -> CallFuture[None]:
        future: CallFuture[None] = CallFuture(f"stop() of actor {self._spec.name!r}")
        if self._final_error is not None:
            future.set_result(None)
            return future
        self._stop_waiters.append(future)
        self._stopping = True
        loop = running_loop()
        if not self.pending or grace_s <= 0 or loop is None:
            self._be_stopped()
        else:
            self._grace_timer = loop.call_later(grace_s, self._be_stopped)
        return future

    def kill(self) -> None:
        self._go_down(lambda: unavailable_error(self._spec, "it was killed by its owner"))

    def on_death(self, callback: DeathCallback) -> None:
        self._death_callbacks.append(callback)

    def statistics(self) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "state": self._state(),
            "pid": None,
            "restarts": self.restarts,
            "pending": self.pending,
            "running": len(self._running),
            "last_death": self._last_death,
            **{f"num_{ending}": self._counts[ending] for ending in ENDINGS},
        }

    def reduce(self) -> tuple[Any, ...]:
        _actors[id(self)] = self
        return _same_actor, (id(self),)

    def begin_next(self) -> None:
        """Begin the next call."""
        call = self._next_call()
        assert call is not None
        self._queue.remove(call)
        self._num_begun += 1
        run = self._running[call] = _Run(self._num_begun, is_async=False)
        if self._take_fault("kill", run):
            self._die("its process was killed by a scripted fault")
            return
        try:
            name, args, kwargs = unpack(call.packed)
            method = getattr(self._target, name)
        except Exception as error:  # noqa: BLE001 arguments of a user's class may raise anything while they are rebuilt
            self._finish(call, run, _failed(error))
            return
        if inspect.iscoroutinefunction(method):
            self._begin_async(call, run, functools.partial(method, *args, **kwargs))
        else:
            self._run_sync(call, run, functools.partial(method, *args, **kwargs))

    def _next_call(self) -> Call | None:
        """Return the call whose turn it is, if it can begin: async calls without room hold up no sync ones."""
        num_async = sum(run.is_async for run in self._running.values())
        for call in self._queue:
            if call.done():
                continue
            if not inspect.iscoroutinefunction(getattr(self._target, call.method, None)):
                return call if num_async == len(self._running) else None
            if num_async < self._spec.max_concurrency:
                return call
        return None

    # ------------------------------------------------------------- sync methods

    def _run_sync(self, call: Call, run: _Run, method: Callable[[], Any]) -> None:
        outcome: Outcome | None = None
        death = ""
        with self._clock.measure(call.timeout_s) as watch:
            try:
                result = method()
            except OutOfTimeError:
                result = None
            except SystemExit as error:
                result, death = None, _exit(error)
            except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
                result, outcome = None, _failed(error)
            else:
                outcome = None if inspect.isawaitable(result) else pack_result(result, call.method)
        if inspect.isawaitable(result):
            self._begin_async(call, run, functools.partial(_identity, result))
            return
        elapsed_s = watch.elapsed_s + self._delay_s(run)
        lost = self._take_fault("drop_reply", run)
        if death:
            self._after(call, run, elapsed_s, functools.partial(self._die, death))
        elif call.timeout_s is not None and (lost or outcome is None or elapsed_s > call.timeout_s):
            self._after(call, run, call.timeout_s, functools.partial(self._expire, call))
        elif lost or outcome is None:
            self._after(call, run, elapsed_s, functools.partial(self._die, "its reply was lost by a scripted fault"))
        else:
            self._after(call, run, elapsed_s, functools.partial(self._finish, call, run, outcome))

    def _after(self, call: Call, run: _Run, seconds: float, end: Callable[[], None]) -> None:
        """End a sync call when the time that it takes has passed."""

        def when_due() -> None:
            if self._running.get(call) is run:
                end()
                self._scheduler.kick()

        run.timer = self._scheduler.later(seconds, when_due)

    def _expire(self, call: Call) -> None:
        self._end(call, "timeout", call.set_exception(timeout_error(self._spec, call)))
        self._interrupt(call, f"{call.method}() ran longer than {call.timeout_s:g} s")

    def _interrupt(self, call: Call, why: str) -> None:
        """End a running sync call whose future has ended."""
        if self._spec.on_cancel == "kill":
            self._die(why, deliberate=True)
        else:
            self._running.pop(call).abandon()
            self._scheduler.kick()

    # ------------------------------------------------------------ async methods

    def _begin_async(self, call: Call, run: _Run, method: Callable[[], Awaitable[Any]]) -> None:
        work = self._run_async(call, run, method)
        run.is_async = True
        loop = running_loop()
        if loop is None:
            outcome = self._clock.run(work) if isinstance(self._clock, VirtualClock) else asyncio.run(work)
            self._finish(call, run, outcome)
            return
        run.task = loop.create_task(work, name=call.method)
        run.task.add_done_callback(functools.partial(self._end_async, call, run))

    async def _run_async(self, call: Call, run: _Run, method: Callable[[], Awaitable[Any]]) -> Outcome:
        deadline = asyncio.timeout(call.timeout_s)
        try:
            async with deadline:
                result = await method()
                await self._be_late(call, run, deadline)
                if self._take_fault("drop_reply", run):
                    await self._lose_reply(call, deadline)
        except SystemExit as error:
            self._die(_exit(error))
            return Kind.CANCELLED, EMPTY
        except asyncio.CancelledError as error:
            if call.cancelled() or self._running.get(call) is not run:
                raise
            return _failed(error)
        except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
            if deadline.expired():
                self._end(call, "timeout", call.set_exception(timeout_error(self._spec, call)))
            return _failed(error)
        return pack_result(result, call.method)

    async def _be_late(self, call: Call, run: _Run, deadline: asyncio.Timeout) -> None:
        delay_s = self._delay_s(run)
        if isinstance(self._clock, VirtualClock) and delay_s > 0:
            await asyncio.sleep(delay_s)
        elif call.timeout_s is not None and delay_s > call.timeout_s:
            await _reach(deadline)

    async def _lose_reply(self, call: Call, deadline: asyncio.Timeout) -> None:
        if call.timeout_s is None:
            self._die("its reply was lost by a scripted fault")
        elif isinstance(self._clock, VirtualClock):
            await asyncio.sleep(call.timeout_s)
        else:
            await _reach(deadline)

    def _end_async(self, call: Call, run: _Run, task: asyncio.Task[Outcome]) -> None:
        if self._running.get(call) is not run:  # its process has died meanwhile
            return
        if task.cancelled():
            del self._running[call]
        else:
            self._finish(call, run, task.result())
        self._check_idle()
        self._scheduler.kick()

    # -------------------------------------------------------------------- ends

    def _finish(self, call: Call, run: _Run, outcome: Outcome) -> None:
        if self._running.get(call) is not run:
            return
        del self._running[call]
        kind, packed = outcome
        if kind is Kind.RESULT:
            self._end(call, "ok", call.set_packed(packed))
        elif kind is Kind.ERROR:
            error = unpack_failure(packed).error(self._spec.name, call.method)
            self._end(call, "raised", call.set_exception(error))
        if self._take_fault("kill_after", run):
            self._die("its process was killed by a scripted fault")
        self._check_idle()

    def _end(self, _call: Call, ending: str, ended: bool) -> None:
        if ended:
            self._counts[ending] += 1

    def _take_fault(self, action: Action, run: _Run) -> bool:
        return self._scheduler.faults.take(self._spec.name, action, run.number) is not None

    def _delay_s(self, run: _Run) -> float:
        fault = self._scheduler.faults.take(self._spec.name, "delay", run.number)
        return fault.delay_s if fault is not None else 0.0

    def _state(self) -> str:
        if self._final_error is not None:
            return "down"
        return "stopping" if self._stopping else "up" if self._up else "pause"

    # ------------------------------------------------------------- incarnations

    def _construct(self) -> None:
        if self._final_error is not None:
            return
        self._starts += 1
        if self._scheduler.faults.take(self._spec.name, "fail_spawn", self._starts):
            self._die("its process was killed by a scripted fault while it was constructed")
            return
        limit_s = self._spec.start_timeout_s
        construction = Call(None, CONSTRUCTOR, self._spec.construction, limit_s)
        with self._clock.measure(limit_s) as watch:
            try:
                cls, args, kwargs = unpack(self._spec.construction)
                self._target = cls(*args, **kwargs)
            except OutOfTimeError:
                end = functools.partial(self._constructor_failed, lambda: timeout_error(self._spec, construction))
            except SystemExit as error:
                end = functools.partial(self._die, _exit(error))
            except BaseException as error:  # noqa: BLE001 whatever the constructor raises is the caller's to see
                failure = describe(error, skip_frames=1)
                end = functools.partial(self._constructor_failed, lambda: failure.error(self._spec.name, CONSTRUCTOR))
            else:
                end = self._be_up
        self._pause(watch.elapsed_s, end)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        self._pause_timer = self._scheduler.later(seconds, then)

    def _be_up(self) -> None:
        if self._final_error is not None:
            return
        self._up = self._constructed_once = True
        waiters, self._ready_waiters = self._ready_waiters, []
        for waiter in waiters:
            waiter.set_result(None)
        if self._queue:
            self._scheduler.kick()

    def _constructor_failed(self, make_error: Callable[[], BaseException]) -> None:
        if self._constructed_once:
            self._die(f"its constructor failed when it was restarted: {make_error()!r}")
        else:
            self._go_down(make_error)

    def _die(self, how: str, *, deliberate: bool = False) -> None:
        """Do what the death of the process would have done."""
        self._up, self._target, self._last_death = False, None, how
        begun, self._running = self._running, {}
        methods = ", ".join(dict.fromkeys(f"{call.method}()" for call in begun))
        error = died_error(self._spec, how, running=f" while it ran {methods}" if methods else "")
        for call, run in reversed(begun.items()):
            run.abandon()
            self._retry_or_fail(call, error)
        self._tell_of_death(error)
        if self._final_error is not None:
            return
        pause_s = 0.0 if deliberate else self._budget.spend(self._clock.time())
        if pause_s is None:
            self._go_down(self._last_word(how) if self._constructed_once else lambda: error)
        elif self._stopping and not self._queue:
            self._be_stopped()
        else:
            self._pause(pause_s, self._construct)

    def _tell_of_death(self, error: ActorDiedError) -> None:
        for callback in self._death_callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("a callback for the death of actor %s failed", self._spec.name)

    def _retry_or_fail(self, call: Call, error: ActorDiedError) -> None:
        if call.retries_left > 0 and not call.done():
            call.retries_left -= 1
            self._counts["retried"] += 1
            self._queue.appendleft(call)
        else:
            self._end(call, "died", call.set_exception(again(error)))

    def _last_word(self, how: str) -> Callable[[], BaseException]:
        return lambda: restarts_used_up_error(self._spec, how)

    def _check_idle(self) -> None:
        if self._stopping and not self.pending:
            self._be_stopped()

    def _be_stopped(self) -> None:
        self._go_down(lambda: unavailable_error(self._spec, "it was stopped"))

    def _go_down(self, make_error: Callable[[], BaseException]) -> None:
        if self._final_error is not None:
            return
        self._final_error = make_error
        self._up = False
        self._scheduler.remove(self)
        running, self._running = self._running, {}
        queue, self._queue = self._queue, deque()
        for call in [*running, *queue]:
            self._end(call, "unavailable", call.set_exception(make_error()))
        for run in running.values():
            run.abandon()
        for timer in (self._pause_timer, self._grace_timer):
            if timer is not None:
                timer.cancel()
        for ready in self._ready_waiters:
            ready.set_exception(make_error())
        self._on_down()
        for stopped in self._stop_waiters:
            stopped.set_result(None)


_actors: weakref.WeakValueDictionary[int, InlineActor] = weakref.WeakValueDictionary()
"""Actors whose handles were pickled: they are unpickled in the same process."""


def _same_actor(number: int) -> InlineActor:
    return _actors[number]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _identity(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _reach(deadline: asyncio.Timeout) -> None:
    """Let a deadline pass at once."""
    deadline.reschedule(0)
    await asyncio.sleep(1)


def _failed(error: BaseException) -> Outcome:
    return Kind.ERROR, pack_failure(describe(error, skip_frames=1))


def _exit(error: SystemExit) -> str:
    return f"its process exited with code {error.code or 0}"
