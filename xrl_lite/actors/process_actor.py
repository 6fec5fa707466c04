"""Supervises one actor of the process backend: its child, the child's successor, the limits of its calls.

::

    STARTING ──constructed──> UP ──child died──> PAUSE ──(back-off over)──> STARTING
        └──constructor raised──> DOWN <──restarts used up, stopped──┘

Waiting:
    a call waits for    a slot with the child, then its reply
    and is woken by     the reply; the end of the child; its time limit; stop
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from xrl_lite.actors.actor import (
    ActorSpec,
    Call,
    DeathCallback,
    again,
    cut_off,
    died_error,
    restarts_used_up_error,
    timeout_error,
    unavailable_error,
    unborn_error,
)
from xrl_lite.actors.child import Child, Death
from xrl_lite.actors.desk import CONSTRUCTOR, Desk
from xrl_lite.actors.door import Door, reduce_through
from xrl_lite.actors.failure import unpack_failure
from xrl_lite.actors.forks import tell_forks
from xrl_lite.actors.forkserver import ForkServer
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.link import Link
from xrl_lite.actors.logs import ActorLog
from xrl_lite.actors.machine import tree_bytes
from xrl_lite.actors.restart import RestartBudget
from xrl_lite.actors.slots import HEARTBEAT_S, MethodKind
from xrl_lite.actors.wire import Frame, Kind
from xrl_lite.actors.zygote import DUMP_SIGNAL, INTERRUPT_SIGNAL, THREAD_VARIABLES, ForkRequest
from xrl_lite.errors import ActorDiedError
from xrl_lite.log import get_logger

logger = get_logger(__name__)
output = get_logger("xrl_lite.output")

PREFETCH = 512
"""Calls that are sent ahead of the running ones, so that a fast method never waits for the driver."""

_INTERRUPT_GRACE_S = 1.0
_ASYNC_GRACE_S = 5.0
_MEMORY_EVERY_S = 0.05
_EXIT_WITHIN_S = 2.0
_KILL_WITHIN_S = 5.0
_DUMP_POLL_S = 0.005
_DUMP_WITHIN_S = 1.0
_DUMP_ENDS = ("in become_actor\n", "\n  ...\n")
"""How what ``faulthandler`` writes ends: the main thread comes last, down to our own frame or as far as it shows."""
_BEATS_MISSED_S = 1.5 * HEARTBEAT_S
_RELAY_EVERY_S = 0.5
_BORN_WITHIN_S = 5.0
"""The least that a fork server gets to start and to fork, however little time the constructor has."""

_tokens = itertools.count(1)


class State(Enum):
    """What an actor is doing."""

    STARTING = "starting"
    UP = "up"
    PAUSE = "pause"
    DOWN = "down"


class ProcessActor:
    """One actor. Public methods may be called from any thread; all others run in the hub."""

    def __init__(
        self,
        spec: ActorSpec,
        *,
        hub: Hub,
        server: Callable[[], ForkServer],
        log_dir: Path | None,
        seed: int,
        heartbeat_timeout_s: float,
        on_down: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._hub = hub
        self._server = server
        self._log_dir = log_dir
        self._seed = seed
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_down = on_down
        self._log: ActorLog | None = None
        self._budget = RestartBudget(spec.restart)
        self._state = State.STARTING
        self._stopping = False
        self._child: Child | None = None
        self._incarnation = 0
        self._constructed_once = False
        self._desk = Desk(
            hub,
            spec.name,
            on_constructed=self._on_constructor_reply,
            on_limit=self._plan_limits,
            on_idle=self._now_idle,
            on_broken=self._on_broken_link,
        )
        self.submit = self._desk.submit
        self._limits_timer: asyncio.TimerHandle | None = None
        self._expiring: set[Call] = set()
        self._watchers: dict[str, asyncio.TimerHandle] = {}
        self._last_death = ""
        self._final_error: Callable[[], BaseException] | None = None
        self._ready_waiters: list[CallFuture[None]] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._gone = asyncio.Event()
        self._death_callbacks: list[DeathCallback] = []
        self._lock = threading.Lock()
        self._door: Door | None = None
        tell_forks(self)
        hub.post(self._start_child)

    @property
    def spec(self) -> ActorSpec:
        return self._spec

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.pid if child is not None and child.alive else None

    @property
    def restarts(self) -> int:
        return max(0, self._incarnation - 1)

    @property
    def pending(self) -> int:
        return self._desk.pending

    @property
    def is_up(self) -> bool:
        return self._state is State.UP

    @property
    def is_down(self) -> bool:
        return self._state is State.DOWN or self._stopping

    def cancel(self, call: Call) -> None:
        self._hub.post(self._cancel, call, self._desk.hold(call))

    def ready(self) -> CallFuture[None]:
        future: CallFuture[None] = CallFuture(f"ready() of actor {self._spec.name!r}")
        if self._final_error is not None:
            future.set_exception(self._final_error())
            return future
        self._hub.post(self._wait_ready, future)
        return future

    def stop(self, grace_s: float) -> CallFuture[None]:
        label = f"stop() of actor {self._spec.name!r}"
        if self._gone.is_set():
            done: CallFuture[None] = CallFuture(label)
            done.set_result(None)
            return done
        return self._hub.run(self.end(grace_s), label)

    def kill(self) -> None:
        self._hub.post(self._go_down, lambda: unavailable_error(self._spec, "it was killed by its owner"))

    def on_death(self, callback: DeathCallback) -> None:
        self._death_callbacks.append(callback)

    def statistics(self) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "state": "stopping" if self._stopping and self._state is not State.DOWN else self._state.value,
            "pid": self.pid,
            "restarts": self.restarts,
            "pending": self.pending,
            "running": self._desk.num_running,
            "last_death": self._last_death,
            **{f"num_{ending}": count for ending, count in self._desk.counts.items()},
        }

    def reduce(self) -> tuple[Any, ...]:
        with self._lock:
            if self._final_error is not None:
                raise self._final_error()
            if self._door is None:
                self._door = Door(self._hub, self)
            return reduce_through(self._door.segment, self._spec)

    def after_fork(self) -> None:
        cut_off(self, self._spec.name)

    async def dump(self, within_s: float) -> str:
        """Return what it is doing, and the stacks of all threads of its child (hub thread)."""
        lines = [self._headline()]
        child, log = self._child, self._log
        if child is None or child.pid is None or log is None:
            return lines[0]
        position = log.size_bytes
        child.signal(DUMP_SIGNAL)
        deadline = self._hub.loop.time() + within_s
        while child.alive and not _has_dump(log, position) and self._hub.loop.time() < deadline:  # noqa: ASYNC110 a file
            await asyncio.sleep(_DUMP_POLL_S)
        lines.append(log.tail(since=position) if log.fd >= 0 else "")
        return "\n".join(lines)

    def _headline(self) -> str:
        child = self._child
        where = f"pid {child.pid}" if child is not None and child.pid is not None else "no process"
        text = f"== {self._spec.name}: {self._state.value}, {where}, {self.pending} calls"
        now = time.monotonic_ns()
        for call in self._desk.running_calls():
            if child is not None and (started_ns := child.page.started_ns(call.slot)):
                text += f"; {call.method}() runs for {(now - started_ns) / 1e9:.1f} s"
        return text

    # ---------------------------------------------------------------- children

    def _start_child(self) -> None:
        if self._stopping or self._state is State.DOWN:
            return
        try:
            self._request_child()
        except OSError as error:  # no descriptors left, a log that cannot be written, no fork server
            why = f"its process cannot be started: {error}"
            logger.exception("actor %s is down: its process cannot be started", self._spec.name)
            self._go_down(lambda: unavailable_error(self._spec, why))

    def _request_child(self) -> None:
        self._state = State.STARTING
        if self._log is None:
            self._log = ActorLog(self._log_dir, self._spec.name)
        self._log.begin()
        self._incarnation += 1
        link = Link(
            self._hub,
            self._spec.max_concurrency + PREFETCH,
            on_readable=self._desk.receive,
            on_writable=self._desk.flush,
            on_broken=self._on_broken_link,
        )
        try:
            self._child = Child(
                self._hub, self._server(), self._fork_request(link), self._log.fd, link, on_death=self._on_death
            )
        except BaseException:
            link.close()
            link.page.close()
            raise
        limit = self._spec.start_timeout_s
        construction = Call(None, CONSTRUCTOR, self._spec.construction, timeout_s=limit)
        self._desk.construct(link, construction)
        self._watch(self._child)

    def _fork_request(self, link: Link) -> ForkRequest:
        spec = self._spec
        threads = dict.fromkeys(THREAD_VARIABLES, str(spec.num_threads))
        return ForkRequest(
            token=next(_tokens),
            name=spec.name,
            incarnation=self._incarnation,
            num_slots=link.page.num_slots,
            max_concurrency=spec.max_concurrency,
            num_threads=spec.num_threads,
            background=spec.background,
            environment={**spec.surroundings.environment, **threads, "OMP_WAIT_POLICY": "PASSIVE", **spec.env},
            working_directory=spec.surroundings.working_directory,
            module_path=list(spec.surroundings.module_path),
            seed=self._seed,
        )

    def _on_constructor_reply(self, link: Link, frame: Frame) -> None:
        child = self._child
        if child is None or child.link is not link or self._state is not State.STARTING:
            return
        if frame.kind is Kind.RESULT:
            self._constructed(link)
        else:
            failure = unpack_failure(frame.packed)
            self._constructor_failed(child, lambda: failure.error(self._spec.name, CONSTRUCTOR))

    def _constructed(self, link: Link) -> None:
        self._state = State.UP
        self._constructed_once = True
        self._desk.open(link)
        waiters, self._ready_waiters = self._ready_waiters, []
        for waiter in waiters:
            waiter.set_result(None)

    def _constructor_failed(self, child: Child, make_error: Callable[[], BaseException]) -> None:
        if self._constructed_once:
            child.kill(f"its constructor failed when it was restarted: {make_error()!r}")
        else:
            self._go_down(make_error)

    def _on_broken_link(self, link: Link, reason: str) -> None:
        if (child := self._child) is not None and child.link is link:
            child.hung_up(reason)

    def _on_death(self, child: Child, death: Death) -> None:
        try:
            self._bury(child, death)
        except Exception:  # no call may wait for ever, whatever it is
            logger.exception("internal error after the end of actor %s: %s", self._spec.name, death)
            self._child = None
            self._go_down(lambda: unavailable_error(self._spec, f"{death}, and it could not be restarted"))
            self._be_gone()

    def _bury(self, child: Child, death: Death) -> None:
        for watcher in self._watchers.values():
            watcher.cancel()
        self._watchers.clear()
        begun = self._desk.close(child.link)
        child.page.close()
        self._child = None
        self._relay_output(last=True)
        error = self._died_error(death, begun)
        for call in reversed(begun):
            self._retry_or_fail(call, error)
        if self._stopping or self._state is State.DOWN:
            self._go_down(lambda: unavailable_error(self._spec, "it was stopped"))
            self._be_gone()
            return
        self._last_death = str(death)
        self._restart_after(death, error)
        self._tell_of_death(error)

    def _restart_after(self, death: Death, error: ActorDiedError) -> None:
        # a child that we ended for the sake of one call says nothing about the actor's health
        pause = 0.0 if death.deliberate else self._budget.spend(time.monotonic())
        if pause is None:
            logger.error("actor %s is down for good: %s", self._spec.name, death)
            self._go_down(self._last_word(death, error))
            self._be_gone()
            return
        logger.warning("actor %s is restarted: %s", self._spec.name, death)
        self._state = State.PAUSE
        self._hub.loop.call_later(pause, self._start_child)

    def _last_word(self, death: Death, error: ActorDiedError) -> Callable[[], BaseException]:
        if not self._constructed_once:
            return lambda: again(error)
        return lambda: restarts_used_up_error(self._spec, str(death))

    def _tell_of_death(self, error: ActorDiedError) -> None:
        for callback in self._death_callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("a callback for the death of actor %s failed", self._spec.name)

    def _died_error(self, death: Death, begun: list[Call]) -> ActorDiedError:
        methods = ", ".join(dict.fromkeys(f"{call.method}()" for call in begun))
        log = self._log
        return died_error(
            self._spec,
            str(death),
            running=f" while it ran {methods}" if methods else "",
            log=str(log.path) if log is not None and log.path is not None else "",
            tail=log.tail() if log is not None else "",
        )

    def _retry_or_fail(self, call: Call, error: ActorDiedError) -> None:
        if call.method is CONSTRUCTOR:
            return
        if call.retries_left > 0 and not call.done():
            call.retries_left -= 1
            self._desk.again(call)
        else:
            self._desk.fail(call, "died", again(error))

    # ------------------------------------------------------------------ limits

    def _plan_limits(self, delay_s: float = 0.0) -> None:
        if self._limits_timer is not None:
            self._limits_timer.cancel()
        self._limits_timer = self._hub.loop.call_later(delay_s, self._check_limits)

    def _check_limits(self) -> None:
        """Expire the calls that are over their limits; look again at the earliest moment when one could be."""
        child = self._child
        if child is None:  # calls that wait for the next one are planned for when they are sent
            self._desk.overdue(lambda _call: math.inf)
            return
        self._desk.receive(child.link)  # what ended in time must not fail for having been read late
        overdue, soonest_s = self._desk.overdue(functools.partial(self._left_s, child))
        if soonest_s < math.inf:
            self._plan_limits(soonest_s)
        for call in overdue:
            self._expire_soon(child, call)

    def _left_s(self, child: Child, call: Call) -> float:
        """Seconds that a call may still run; its clock stands until it has begun."""
        if call.timeout_s is None or call in self._expiring or call.done():
            return math.inf
        started_ns = child.page.started_ns(call.slot)
        return call.timeout_s - (time.monotonic_ns() - started_ns) / 1e9 if started_ns else call.timeout_s

    def _expire_soon(self, child: Child, call: Call) -> None:
        if child.page.kind(call.slot) is not MethodKind.SYNC or self._log is None:
            self._expire(child, call, None)
            return
        position = self._log.size_bytes
        child.signal(DUMP_SIGNAL)  # the handler needs no interpreter, so it answers whatever the method does
        self._expiring.add(call)
        self._expire_when_dumped(child, call, position, self._hub.loop.time() + _DUMP_WITHIN_S)

    def _expire_when_dumped(self, child: Child, call: Call, position: int, deadline: float) -> None:
        loop, log = self._hub.loop, self._log
        if child.alive and log is not None and not _has_dump(log, position) and loop.time() < deadline:
            loop.call_later(_DUMP_POLL_S, self._expire_when_dumped, child, call, position, deadline)
        else:
            self._expire(child, call, position)

    def _expire(self, child: Child, call: Call, dumped_at: int | None) -> None:
        """End a call that is over its limit, telling what it was doing."""
        self._expiring.discard(call)
        if not child.alive or not self._desk.is_running(call):
            return
        stack = self._log.tail(since=dumped_at) if self._log is not None and dumped_at is not None else ""
        if call.method is CONSTRUCTOR:
            self._constructor_failed(child, lambda: timeout_error(self._spec, call, stack))
            return
        silent_s = self._silent_s(child)
        error = timeout_error(self._spec, call, stack, silent_s=silent_s if silent_s > _BEATS_MISSED_S else 0.0)
        self._desk.expire(call, error)
        self._end_running(child, call, f"{call.method}() ran longer than {call.timeout_s:g} s")

    def _cancel(self, call: Call, holds: bool) -> None:
        self._desk.was_cancelled()
        child = self._child
        if child is not None:
            self._end_running(child, call, f"{call.method}() was cancelled")
        if holds and (child is None or not child.is_ending):
            self._desk.release()

    def _end_running(self, child: Child, call: Call, why: str) -> None:
        """End a call whose future has ended, if it is with the child."""
        if self._desk.mark_cancelled(child.link, call):
            self._enforce_end(child, call, why)

    def _enforce_end(self, child: Child, call: Call, why: str, *, warned: bool = False) -> None:
        if not child.alive:
            return
        self._desk.receive(child.link)  # or else a call that begins now would die for one that has just ended
        enforce = functools.partial(self._take_measures, child, call, why, warned)
        self._desk.while_running(call, enforce)

    def _take_measures(self, child: Child, call: Call, why: str, warned: bool) -> None:
        begun = child.page.started_ns(call.slot) != 0
        is_async = child.page.kind(call.slot) is MethodKind.ASYNC
        if begun and (warned or (not is_async and self._spec.on_cancel == "kill")):
            child.kill(why, deliberate=True)
            return
        if begun and not is_async:
            child.signal(INTERRUPT_SIGNAL)
        grace_s = _ASYNC_GRACE_S if is_async else _INTERRUPT_GRACE_S
        again = functools.partial(self._enforce_end, child, call, why, warned=begun)
        self._hub.loop.call_later(grace_s, again)

    # ----------------------------------------------------------------- the end

    def _wait_ready(self, future: CallFuture[None]) -> None:
        if self._final_error is not None:
            future.set_exception(self._final_error())
        elif self._state is State.UP:
            future.set_result(None)
        else:
            self._ready_waiters.append(future)

    async def end(self, grace_s: float) -> None:
        """Stop, see `ActorHandle.stop` (hub thread)."""
        self._stopping = True
        self._desk.refuse(lambda: unavailable_error(self._spec, "it is being stopped"))
        if grace_s > 0 and await self._becomes_idle(grace_s) and self._child is not None:
            self._desk.send(self._child.link, Kind.STOP)
            await self._wait_gone(_EXIT_WITHIN_S)
        self._go_down(lambda: unavailable_error(self._spec, "it was stopped"))
        await self._wait_gone(_KILL_WITHIN_S)

    async def _becomes_idle(self, limit_s: float) -> bool:
        idle = self._hub.loop.create_future()
        self._idle_waiters.append(idle)
        self._desk.tell_idle()
        done, _ = await asyncio.wait([idle], timeout=limit_s)
        return bool(done)

    def _now_idle(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait_gone(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._gone.wait()

    def _go_down(self, make_error: Callable[[], BaseException]) -> None:
        """Serve no more calls: fail all there are, and end the child."""
        if self._state is State.DOWN:
            return
        self._state = State.DOWN
        self._final_error = make_error
        waiters, self._ready_waiters = self._ready_waiters, []
        for waiter in waiters:
            waiter.set_exception(make_error())
        self._desk.fail_all(make_error)
        if self._limits_timer is not None:
            self._limits_timer.cancel()
        if self._child is not None:
            self._child.kill("it was stopped")
        else:
            self._be_gone()

    def _be_gone(self) -> None:
        """The child is gone and there will be no other."""
        if self._gone.is_set():
            return
        if self._door is not None:
            self._door.close()
        if self._log is not None:
            self._log.close()
        self._on_down()
        self._gone.set()  # last: whoever sees it, from whatever thread, may use the name again

    # ---------------------------------------------------------------- watching

    def _watch(self, child: Child) -> None:
        """Look now and then at what no event tells: memory, and whether the child's loop still turns."""
        loop = self._hub.loop
        born_within_s = max(self._spec.start_timeout_s, _BORN_WITHIN_S)
        self._watchers["birth"] = loop.call_later(born_within_s, self._check_born, child, born_within_s)
        self._watchers["output"] = loop.call_later(_RELAY_EVERY_S, self._watch_output)
        if self._spec.memory_bytes is not None:
            self._watchers["memory"] = loop.call_later(
                _MEMORY_EVERY_S, self._watch_memory, child, self._spec.memory_bytes
            )
        self._watchers["heartbeat"] = loop.call_later(self._heartbeat_timeout_s / 4, self._watch_heartbeat, child)

    def _check_born(self, child: Child, waited_s: float) -> None:
        if child.pid is None:
            self._constructor_failed(child, lambda: unborn_error(self._spec, waited_s))

    def _watch_output(self) -> None:
        self._relay_output()
        if self._log is not None:
            self._log.forget_old()
        self._watchers["output"] = self._hub.loop.call_later(_RELAY_EVERY_S, self._watch_output)

    def _relay_output(self, *, last: bool = False) -> None:
        """Copy what the child has written to the log of the driver, under the actor's name."""
        if self._log is None or not output.isEnabledFor(logging.INFO):
            return
        for line in self._log.news(last=last):
            output.info("[%s] %s", self._spec.name, line)

    def _watch_memory(self, child: Child, limit: int) -> None:
        if child.pid is not None and (used := tree_bytes(child.pid, exact_above=limit)) > limit:
            what = f"it used {used >> 20} MB of memory, with what it started"
            child.kill(f"{what}, and its limit (memory_bytes) is {limit >> 20} MB")
            return
        self._watchers["memory"] = self._hub.loop.call_later(_MEMORY_EVERY_S, self._watch_memory, child, limit)

    def _watch_heartbeat(self, child: Child) -> None:
        limit_s, silent_s = self._heartbeat_timeout_s, self._silent_s(child)
        if silent_s > limit_s:
            child.kill(f"its event loop has not turned for {silent_s:.0f} s, so an async method blocks it")
            return
        self._watchers["heartbeat"] = self._hub.loop.call_later(limit_s / 4, self._watch_heartbeat, child)

    def _silent_s(self, child: Child) -> float:
        """Seconds for which the child's event loop has not turned; 0 where it has none, or may have been kept from it.

        A sync method may hold the interpreter lock for long (a regular expression): that is no blocked loop.
        """
        beat_ns = child.page.heartbeat_ns
        if not beat_ns or any(child.page.kind(call.slot) is MethodKind.SYNC for call in self._desk.running_calls()):
            return 0.0
        return (time.monotonic_ns() - beat_ns) / 1e9


def _has_dump(log: ActorLog, position: int) -> bool:
    """Whether the stacks that were asked for when the log was at `position` are in it."""
    written = log.tail(since=position) + "\n"
    return any(end in written for end in _DUMP_ENDS)
