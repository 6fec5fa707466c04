"""The inline backend: actors are objects in this process, and a seed decides whose turn it is.

Calls go through the same pickling as between processes, so what cannot be sent fails here too. Of all actors that have
a call and room for it, the seed picks the next one; calls to one actor start in the order in which they were sent. So
one seed gives one order, another seed another, and ``breakpoint()`` works.

What it cannot do is end a sync method: a time limit is noticed when the method returns, and then the object is replaced
as its process would have been.

Waiting:
    a call waits for    its turn
    and is woken by     the loop on which it was sent; without a running loop it runs before `remote` returns
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from xrl_lite.actors.actor import (
    ENDINGS,
    ActorSpec,
    Call,
    CallCounts,
    DeathCallback,
    died_error,
    timeout_error,
    unavailable_error,
)
from xrl_lite.actors.failure import describe, pack_failure, unpack_failure
from xrl_lite.actors.faults import FaultPlan
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.payload import unpack
from xrl_lite.actors.restart import RestartBudget
from xrl_lite.actors.wire import Kind
from xrl_lite.actors.worker import Outcome, pack_result
from xrl_lite.errors import ActorDiedError


class InlineScheduler:
    """Decides whose turn it is."""

    def __init__(self, seed: int, faults: FaultPlan) -> None:
        self.faults = faults
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
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if not self._in_turn:
                self._run_to_the_end()
            return
        if self._turn_due is not loop:
            self._turn_due = loop
            loop.call_soon(self._turn)

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


class InlineActor:
    """One actor of the inline backend."""

    def __init__(self, spec: ActorSpec, scheduler: InlineScheduler, *, on_down: Callable[[], None]) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._on_down = on_down
        self._budget = RestartBudget(spec.restart)
        self._target: Any = None
        self._up = False
        self._starts = 0
        self._num_begun = 0
        self._queue: deque[Call] = deque()
        self._tasks: dict[Call, asyncio.Task[Outcome]] = {}
        self._final_error: Callable[[], BaseException] | None = None
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
        return len(self._queue) + len(self._tasks)

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def is_down(self) -> bool:
        return self._final_error is not None

    @property
    def can_begin(self) -> bool:
        """Whether the next call could begin now."""
        while self._queue and self._queue[0].future.done():
            self._queue.popleft()
        return bool(self._queue) and len(self._tasks) < self._spec.max_concurrency

    def submit(self, call: Call) -> None:
        if self._final_error is not None:
            self._end(call, "unavailable", call.future.set_exception(self._final_error()))
            return
        self._queue.append(call)
        self._scheduler.kick()

    def cancel(self, call: Call) -> None:
        self._counts["cancelled"] += 1
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    def ready(self) -> CallFuture[None]:
        future: CallFuture[None] = CallFuture(f"ready() of actor {self._spec.name!r}")
        if self._final_error is not None:
            future.set_exception(self._final_error())
        else:
            future.set_result(None)
        return future

    def stop(self, grace_s: float) -> CallFuture[None]:
        self._go_down(lambda: unavailable_error(self._spec, "it was stopped"))
        future: CallFuture[None] = CallFuture(f"stop() of actor {self._spec.name!r}")
        future.set_result(None)
        return future

    def kill(self) -> None:
        self._go_down(lambda: unavailable_error(self._spec, "it was killed by its owner"))

    def on_death(self, callback: DeathCallback) -> None:
        self._death_callbacks.append(callback)

    def statistics(self) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "state": "down" if self.is_down else "up",
            "pid": None,
            "restarts": self.restarts,
            "pending": self.pending,
            "running": len(self._tasks),
            "last_death": "",
            **{f"num_{ending}": self._counts[ending] for ending in ENDINGS},
        }

    def reduce(self) -> tuple[Any, ...]:
        _actors[id(self)] = self
        return _same_actor, (id(self),)

    def begin_next(self) -> None:
        """Begin the next call."""
        call = self._queue.popleft()
        self._num_begun += 1
        if self._take_fault("kill"):
            self._die("its process was killed by a scripted fault", call)
            return
        try:
            name, args, kwargs = unpack(call.packed)
            method = getattr(self._target, name)
        except Exception as error:  # noqa: BLE001 arguments of a user's class may raise anything while they are rebuilt
            self._settle(call, (Kind.ERROR, pack_failure(describe(error, skip_frames=1))), 0.0)
            return
        if inspect.iscoroutinefunction(method):
            self._begin_async(call, functools.partial(method, *args, **kwargs))
        else:
            self._run_sync(call, functools.partial(method, *args, **kwargs))

    def _run_sync(self, call: Call, method: Callable[[], Any]) -> None:
        started = time.monotonic()
        try:
            result = method()
        except SystemExit as error:
            self._die(f"its process exited with code {error.code or 0}", call)
            return
        except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
            outcome = Kind.ERROR, pack_failure(describe(error, skip_frames=1))
        else:
            if inspect.isawaitable(result):
                self._begin_async(call, functools.partial(_identity, result))
                return
            outcome = pack_result(result, call.method)
        elapsed = time.monotonic() - started + self._delay_s()
        if call.timeout_s is not None and (elapsed > call.timeout_s or self._take_fault("drop_reply")):
            self._end(call, "timeout", call.future.set_exception(timeout_error(self._spec, call)))
            self._construct()
        elif self._take_fault("drop_reply"):
            self._die("its reply was lost by a scripted fault", call)
        else:
            self._settle(call, outcome, elapsed)

    def _begin_async(self, call: Call, method: Callable[[], Awaitable[Any]]) -> None:
        work = self._run_async(call, method)
        try:
            task = asyncio.get_running_loop().create_task(work, name=call.method)
        except RuntimeError:
            self._settle(call, asyncio.run(work), 0.0)
            return
        self._tasks[call] = task
        task.add_done_callback(functools.partial(self._end_async, call))

    async def _run_async(self, call: Call, method: Callable[[], Awaitable[Any]]) -> Outcome:
        deadline = asyncio.timeout(call.timeout_s)
        try:
            async with deadline:
                result = await method()
                delay_s = self._delay_s()
                if call.timeout_s is not None and delay_s > call.timeout_s:
                    deadline.reschedule(0)
                    await asyncio.sleep(1)
        except SystemExit as error:
            self._die(f"its process exited with code {error.code or 0}", call)
            return Kind.CANCELLED, call.packed
        except asyncio.CancelledError as error:
            if call.future.cancelled() or self._final_error is not None:
                raise
            return Kind.ERROR, pack_failure(describe(error, skip_frames=1))
        except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
            if deadline.expired():
                self._end(call, "timeout", call.future.set_exception(timeout_error(self._spec, call)))
            return Kind.ERROR, pack_failure(describe(error, skip_frames=1))
        return pack_result(result, call.method)

    def _end_async(self, call: Call, task: asyncio.Task[Outcome]) -> None:
        del self._tasks[call]
        if not task.cancelled():
            self._settle(call, task.result(), 0.0)
        self._scheduler.kick()

    def _settle(self, call: Call, outcome: Outcome, _elapsed_s: float) -> None:
        kind, packed = outcome
        if kind is Kind.RESULT:
            self._end(call, "ok", call.future.set_packed(packed))
        elif kind is Kind.ERROR:
            error = unpack_failure(packed).error(self._spec.name, call.method)
            self._end(call, "raised", call.future.set_exception(error))

    def _end(self, _call: Call, ending: str, ended: bool) -> None:
        if ended:
            self._counts[ending] += 1

    def _take_fault(self, action: Any) -> bool:
        return self._scheduler.faults.take(self._spec.name, action, self._num_begun) is not None

    def _delay_s(self) -> float:
        fault = self._scheduler.faults.take(self._spec.name, "delay", self._num_begun)
        return fault.delay_s if fault is not None else 0.0

    def _construct(self) -> None:
        self._starts += 1
        if self._scheduler.faults.take(self._spec.name, "fail_spawn", self._starts):
            self._die("its process was killed by a scripted fault while it was constructed", None)
            return
        try:
            cls, args, kwargs = unpack(self._spec.construction)
            self._target = cls(*args, **kwargs)
            self._up = True
        except SystemExit as error:
            self._die(f"its process exited with code {error.code or 0}", None)
        except BaseException as error:  # noqa: BLE001 whatever the constructor raises is the caller's to see
            failure = describe(error, skip_frames=1)
            self._go_down(lambda: failure.error(self._spec.name, "__init__"))

    def _die(self, how: str, culprit: Call | None) -> None:
        """Do what the death of the process would have done."""
        self._up = False
        begun = [*self._tasks, *([culprit] if culprit is not None else [])]
        methods = ", ".join(dict.fromkeys(f"{call.method}()" for call in begun))
        error = died_error(self._spec, how, running=f" while it ran {methods}" if methods else "")
        for call in reversed(begun):
            self._retry_or_fail(call, error)
        for callback in self._death_callbacks:
            callback(error)
        if self._budget.spend(time.monotonic()) is None:
            first = culprit is None and self._starts == 1
            self._go_down((lambda: error) if first else self._last_word(how))
        else:
            self._construct()
            self._scheduler.kick()

    def _retry_or_fail(self, call: Call, error: ActorDiedError) -> None:
        if (task := self._tasks.get(call)) is not None:
            task.cancel()
        if call.retries_left > 0 and not call.future.done():
            call.retries_left -= 1
            self._counts["retried"] += 1
            self._queue.appendleft(call)
        else:
            self._end(call, "died", call.future.set_exception(type(error)(*error.args)))

    def _last_word(self, how: str) -> Callable[[], BaseException]:
        policy = self._spec.restart
        allowed = f"{policy.max_restarts} in {policy.window_s:g} s" if policy.max_restarts else "none"
        return lambda: unavailable_error(self._spec, f"{how}, and its restarts ({allowed}) are used up")

    def _go_down(self, make_error: Callable[[], BaseException]) -> None:
        if self._final_error is not None:
            return
        self._final_error = make_error
        self._up = False
        self._scheduler.remove(self)
        for call, task in list(self._tasks.items()):
            self._end(call, "unavailable", call.future.set_exception(make_error()))
            task.cancel()
        while self._queue:
            call = self._queue.popleft()
            self._end(call, "unavailable", call.future.set_exception(make_error()))
        self._on_down()


_actors: weakref.WeakValueDictionary[int, InlineActor] = weakref.WeakValueDictionary()
"""Actors whose handles were pickled: they are unpickled in the same process."""


def _same_actor(number: int) -> InlineActor:
    return _actors[number]


async def _identity(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
