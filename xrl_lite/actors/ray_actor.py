"""The Ray backend: an actor is a shell of ours inside a Ray actor, on this machine or on another one of the cluster.

Ray starts processes and moves bytes. Restarts, retries, time limits and their errors stay on our side, so that they are
the same as with processes::

    handle ──> RayActor ──Parcel──> Ray ──> SyncShell | AsyncShell ──> the object
                  ^──────────── Reply ─────────'

A call is sent only when the shell has nothing else to do (sync methods), or fewer than `max_concurrency` (async ones):
so a call that was sent has begun, and its time limit counts from then on. This costs a round trip between two calls.

Waiting:
    a call waits for    its turn, then Ray's reply
    and is woken by     the reply, Ray's word that the shell is dead, the time limit, stop
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xrl_lite.actors.actor import (
    ENDINGS,
    ActorSpec,
    Call,
    CallCounts,
    DeathCallback,
    again,
    cut_off,
    died_error,
    restarts_used_up_error,
    timeout_error,
    unavailable_error,
)
from xrl_lite.actors.borrowed import BorrowedActor
from xrl_lite.actors.failure import unpack_failure
from xrl_lite.actors.forks import tell_forks
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.ledger import Claim, Resources
from xrl_lite.actors.logs import ActorLog
from xrl_lite.actors.machine import MILLI, milli_cpus
from xrl_lite.actors.ray_shell import (
    AsyncShell,
    Constructed,
    Parcel,
    Reply,
    ShellSettings,
    SyncShell,
    async_methods,
    host_name,
)
from xrl_lite.actors.restart import RestartBudget
from xrl_lite.actors.zygote import THREAD_VARIABLES
from xrl_lite.errors import ActorDiedError, ResourceError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

CONSTRUCTOR = "__init__"

_ASYNC_GRACE_S = 5.0
_EXIT_WITHIN_S = 2.0
_NAME_FREE_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.02
_TAKEN = "is already taken"
"""In what Ray says about a name; it has no type for this in older releases."""

_SPARE_CALLS = 8
"""Calls that an `AsyncShell` can take beside `max_concurrency`: a sync method, cancellations, the constructor."""


class RayCluster:
    """The Ray cluster that a system uses: the one that this process is connected to, or a new local one."""

    def __init__(self, num_cpus: float | None, memory_bytes: int | None) -> None:
        self.ray = load_ray()
        self.namespace = f"xrl-lite-{uuid.uuid4().hex[:12]}"
        self._remote_classes: dict[type[Any], Any] = {}
        self._is_ours = not self.ray.is_initialized()
        if self._is_ours:
            settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
            if num_cpus is not None:
                settings["num_cpus"] = max(1, int(num_cpus))
            self.ray.init(**settings)
        self.capacity = self._check(num_cpus, memory_bytes)

    def remote_class(self, cls: type[Any]) -> Any:
        """Return what Ray starts actors of a class with. Ray keeps each of them, so there is one for each class."""
        if cls not in self._remote_classes:
            self._remote_classes[cls] = self.ray.remote(cls)
        return self._remote_classes[cls]

    def close(self) -> None:
        """End the cluster, if it was started here."""
        if self._is_ours:
            self.ray.shutdown()

    def _check(self, num_cpus: float | None, memory_bytes: int | None) -> Claim:
        has: dict[str, float] = self.ray.cluster_resources()
        cpus = milli_cpus(has.get("CPU", 0.0))
        wanted = cpus if num_cpus is None else milli_cpus(num_cpus)
        if wanted > cpus:
            raise ResourceError(
                f"num_cpus is {num_cpus:g}, but the Ray cluster has {cpus / MILLI:g} CPUs, and Ray would let actors "
                f"that do not fit wait for ever. Ask for less, or connect to a larger cluster."
            )
        accelerators = tuple(map(str, range(int(has.get("GPU", 0)))))
        memory = int(has.get("memory", 0)) if memory_bytes is None else memory_bytes
        return Claim(wanted, memory, accelerators)


def load_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "backend='ray' needs the package ray: pip install 'xrl-lite[ray]'. On one machine backend='process' does "
            "without it.",
            name="ray",
        ) from None


def refuse_what_ray_cannot(spec: ActorSpec) -> None:
    """Check that an actor asks for nothing that this backend cannot give.

    Raises:
        ValueError: it does.
    """
    asked = {
        "memory_bytes": (
            spec.memory_bytes is not None,
            "Ray does not hold an actor to a memory ceiling. Leave memory_bytes out",
        ),
        "on_cancel='interrupt'": (
            spec.on_cancel == "interrupt",
            "Ray cannot interrupt a sync method. Use on_cancel='kill', which replaces the actor",
        ),
        "pin_cpus=True": (spec.resources.pin_cpus, "Ray does not say which cores of which machine an actor gets"),
    }
    for what, (is_asked, why) in asked.items():
        if is_asked:
            raise ValueError(f"Actor {spec.name!r}: {what} is not possible with backend='ray'. {why}.")


def refuse_bundles_ray_cannot(bundles: Sequence[Resources]) -> None:
    """Check that a placement group asks for nothing that this backend cannot give.

    Raises:
        ValueError: it does.
    """
    if any(bundle.num_accelerators or bundle.pin_cpus or bundle.memory_bytes for bundle in bundles):
        raise ValueError(
            "With backend='ray' a placement group holds CPUs only: Ray decides which accelerators an actor gets, lets "
            "no two share one, and holds none to a memory ceiling. Claim accelerators by spawn(num_accelerators=...)."
        )


@dataclass(eq=False, slots=True)
class _Sent:
    """A call that is with the shell."""

    call: Call
    is_async: bool
    shell: Any
    timer: asyncio.TimerHandle | None = None


class RayActor:
    """One actor. Public methods may be called from any thread; all others run in the hub."""

    def __init__(
        self,
        spec: ActorSpec,
        *,
        hub: Hub,
        cluster: RayCluster,
        log_dir: Path | None,
        seed: int,
        on_down: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._hub = hub
        self._cluster = cluster
        self._ray = cluster.ray
        self._log_dir = log_dir
        self._seed = seed
        self._on_down = on_down
        self._log: ActorLog | None = None
        self._budget = RestartBudget(spec.restart)
        self._async_methods = async_methods(spec.cls) if isinstance(spec.cls, type) else None
        """None for a class that is known only when the object is there."""

        self._shell: Any = None
        self._pid: int | None = None
        self._pidfds: dict[int, Any] = {}
        """Processes of this machine that have not ended, and their shells."""

        self._incarnation = 0
        self._up = False
        self._stopping = False
        self._constructed_once = False
        self._queue: deque[Call] = deque()
        self._sent: dict[Call, _Sent] = {}
        self._start_timer: asyncio.TimerHandle | None = None
        self._final_error: Callable[[], BaseException] | None = None
        self._last_death = ""
        self._ready_waiters: list[CallFuture[None]] = []
        self._idle = asyncio.Event()
        self._gone = asyncio.Event()
        self._death_callbacks: list[DeathCallback] = []
        self._counts = CallCounts()
        self._lock = threading.Lock()
        self._pending = 0
        tell_forks(self)
        hub.post(self._start_shell, time.monotonic() + _NAME_FREE_WITHIN_S)

    @property
    def spec(self) -> ActorSpec:
        return self._spec

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def restarts(self) -> int:
        return max(0, self._incarnation - 1)

    @property
    def pending(self) -> int:
        return self._pending

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def is_down(self) -> bool:
        return self._final_error is not None or self._stopping

    def submit(self, call: Call) -> None:
        if self._final_error is not None:
            call.set_exception(self._final_error())
            return
        with self._lock:
            self._pending += 1
        call.when_done(self._count_ended)
        self._hub.post(self._accept, call)

    def cancel(self, call: Call) -> None:
        self._hub.post(self._cancel, call)

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

    def after_fork(self) -> None:
        cut_off(self, self._spec.name)

    def on_death(self, callback: DeathCallback) -> None:
        self._death_callbacks.append(callback)

    def statistics(self) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "state": self._state(),
            "pid": self.pid,
            "restarts": self.restarts,
            "pending": self.pending,
            "running": len(self._sent),
            "last_death": self._last_death,
            **{f"num_{ending}": self._counts[ending] for ending in ENDINGS},
        }

    def reduce(self) -> tuple[Any, ...]:
        if self._final_error is not None:
            raise self._final_error()
        return visit, (self._spec.name, self._spec.max_pending, self._cluster.namespace)

    async def end(self, grace_s: float) -> None:
        """Stop, see `ActorHandle.stop` (hub thread)."""
        self._stopping = True
        if grace_s > 0:
            self._check_idle()
            await _within(grace_s, self._idle)
            if self._shell is not None and self._up and self._idle.is_set():
                self._shell.__ray_terminate__.remote()  # runs exit handlers
                await _within(_EXIT_WITHIN_S, self._gone)
        self._go_down(lambda: unavailable_error(self._spec, "it was stopped"))
        await _within(_EXIT_WITHIN_S, self._gone)

    # ------------------------------------------------------------------ shells

    def _start_shell(self, name_free_by: float) -> None:
        """Start a Ray actor. Its predecessor's name may be taken for some milliseconds."""
        self._start_timer = None
        if self._final_error is not None:
            return
        try:
            shell = self._make_shell()
        except Exception as error:
            if _TAKEN in str(error) and time.monotonic() < name_free_by:
                self._start_timer = self._hub.loop.call_later(_LOOK_EVERY_S, self._start_shell, name_free_by)
                return
            logger.exception("actor %s is down: Ray cannot start it", self._spec.name)
            why = f"Ray cannot start it: {_in_one_line(error)}"
            self._go_down(lambda: unavailable_error(self._spec, why))
            return
        self._incarnation += 1
        self._shell = shell
        limit_s = self._spec.start_timeout_s
        construction = Call(None, CONSTRUCTOR, self._spec.construction, limit_s)
        sent = self._sent[construction] = _Sent(construction, False, shell)
        self._watch(shell.construct.remote(Parcel(self._spec.construction)), sent)
        sent.timer = self._hub.loop.call_later(limit_s, self._expire, sent)

    def _make_shell(self) -> Any:
        spec = self._spec
        if self._log is None:
            self._log = ActorLog(self._log_dir, spec.name)
        self._log.begin()
        options: dict[str, Any] = {
            "name": spec.name,
            "namespace": self._cluster.namespace,
            "num_cpus": spec.num_cpus if spec.num_cpus < 1 else int(spec.num_cpus),  # Ray knows no 1.5
            "num_gpus": spec.resources.num_accelerators,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        cls: type[Any] = SyncShell
        if self._async_methods is None or self._async_methods:
            cls, options["max_concurrency"] = AsyncShell, spec.max_concurrency + _SPARE_CALLS
        threads = dict.fromkeys(THREAD_VARIABLES, str(spec.num_threads))
        settings = ShellSettings(
            environment={**threads, "OMP_WAIT_POLICY": "PASSIVE", **spec.env},
            log_path=str(self._log.path.absolute()) if self._log.path else f"/proc/{os.getpid()}/fd/{self._log.fd}",
            log_host=host_name(),
            seed=f"{self._seed}:{spec.name}:{self._incarnation + 1}",
        )
        return self._cluster.remote_class(cls).options(**options).remote(settings)

    def _constructed(self, constructed: Constructed) -> None:
        if constructed.reply.ending == "exit":
            self._end_shell(_exit(constructed.reply))
        elif constructed.reply.parcel is not None:
            failure = unpack_failure(constructed.reply.parcel.packed)
            self._constructor_failed(lambda: failure.error(self._spec.name, CONSTRUCTOR))
        else:
            self._async_methods = constructed.async_methods
            self._watch_process(constructed)
            self._up = self._constructed_once = True
            waiters, self._ready_waiters = self._ready_waiters, []
            for waiter in waiters:
                waiter.set_result(None)
            self._pump()

    def _constructor_failed(self, make_error: Callable[[], BaseException]) -> None:
        if self._constructed_once:
            self._end_shell(f"its constructor failed when it was restarted: {make_error()!r}")
        else:
            self._go_down(make_error)

    def _watch_process(self, constructed: Constructed) -> None:
        self._pid = constructed.pid
        if constructed.host == host_name():
            with contextlib.suppress(OSError):  # it has ended already
                pidfd = os.pidfd_open(constructed.pid)
                self._pidfds[pidfd] = self._shell
                self._hub.loop.add_reader(pidfd, self._process_ended, pidfd)

    def _process_ended(self, pidfd: int) -> None:
        self._hub.loop.remove_reader(pidfd)
        os.close(pidfd)
        shell = self._pidfds.pop(pidfd)
        # Ray knows more about how it ended; but it tells only those who have a call under way
        if not any(sent.shell is shell for sent in self._sent.values()):
            self._shell_died(shell, "its process ended")
        self._check_gone()

    def _end_shell(self, why: str, *, deliberate: bool = False) -> None:
        shell = self._shell
        if shell is not None:
            self._kill(shell)
            self._shell_died(shell, why, deliberate=deliberate)

    def _kill(self, shell: Any) -> None:
        try:
            self._ray.kill(shell, no_restart=True)
        except Exception:  # Ray's errors have no common base; it is dead already, or Ray is shut down
            logger.debug("actor %s could not be killed", self._spec.name, exc_info=True)

    def _shell_died(self, shell: Any, how: str, *, deliberate: bool = False) -> None:
        if self._shell is not shell:
            return
        self._shell, self._pid, self._up = None, None, False
        begun, self._sent = list(self._sent.values()), {}
        error = self._died_error(how, [sent.call.method for sent in begun])
        for sent in reversed(begun):
            if sent.timer is not None:
                sent.timer.cancel()
            if sent.call.method is not CONSTRUCTOR:
                self._retry_or_fail(sent.call, error)
        if self._final_error is not None or (self._stopping and not self._queue):
            self._go_down(lambda: unavailable_error(self._spec, "it was stopped"))
            return
        self._last_death = how
        self._restart_after(how, error, deliberate)
        for callback in self._death_callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("a callback for the death of actor %s failed", self._spec.name)

    def _restart_after(self, how: str, error: ActorDiedError, deliberate: bool) -> None:
        pause_s = 0.0 if deliberate else self._budget.spend(time.monotonic())
        if pause_s is None:
            logger.error("actor %s is down for good: %s", self._spec.name, how)
            self._go_down(self._last_word(how) if self._constructed_once else lambda: again(error))
            return
        logger.warning("actor %s is restarted: %s", self._spec.name, how)
        name_free_by = time.monotonic() + pause_s + _NAME_FREE_WITHIN_S
        self._start_timer = self._hub.loop.call_later(pause_s, self._start_shell, name_free_by)

    def _last_word(self, how: str) -> Callable[[], BaseException]:
        return lambda: restarts_used_up_error(self._spec, how)

    def _died_error(self, how: str, methods: Sequence[str]) -> ActorDiedError:
        running = f" while it ran {', '.join(f'{method}()' for method in dict.fromkeys(methods))}" if methods else ""
        log = self._log
        path = str(log.path) if log is not None and log.path is not None else ""
        return died_error(self._spec, how, running=running, log=path, tail=log.tail() if log is not None else "")

    # ------------------------------------------------------------------- calls

    def _accept(self, call: Call) -> None:
        if self._final_error is not None:
            self._end("unavailable", call.set_exception(self._final_error()))
        elif self._stopping:
            error = unavailable_error(self._spec, "it is being stopped")
            self._end("unavailable", call.set_exception(error))
        else:
            self._queue.append(call)
            self._pump()

    def _pump(self) -> None:
        while self._up and self._queue:
            call = self._queue[0]
            is_async = self._async_methods is not None and call.method in self._async_methods
            num_same = sum(sent.is_async is is_async for sent in self._sent.values())
            if not call.done() and num_same >= (self._spec.max_concurrency if is_async else 1):
                return
            self._queue.popleft()
            if not call.done():
                self._send(call, is_async)

    def _send(self, call: Call, is_async: bool) -> None:
        sent = self._sent[call] = _Sent(call, is_async, self._shell)
        self._watch(self._shell.call.remote(call.call_id, call.method, Parcel(call.packed)), sent)
        if call.timeout_s is not None:
            sent.timer = self._hub.loop.call_later(call.timeout_s, self._expire, sent)

    def _watch(self, ref: Any, sent: _Sent) -> None:
        ref.future().add_done_callback(functools.partial(self._hub.post, self._on_reply, sent))

    def _on_reply(self, sent: _Sent, done: Any) -> None:
        call = sent.call
        if self._sent.get(call) is not sent:
            return
        error: BaseException | None = done.exception()
        if error is not None:
            self._on_ray_error(sent, error)
            return
        del self._sent[call]
        if sent.timer is not None:
            sent.timer.cancel()
        answer: Reply | Constructed = done.result()
        if isinstance(answer, Constructed):
            self._constructed(answer)
        elif answer.ending == "exit":
            self._sent[call] = sent
            self._end_shell(_exit(answer))
        else:
            ending = ending_of(answer)
            self._counts[ending] += 1  # first: whoever waits for the call may look at once
            if not settle(call, answer, self._spec.name):
                self._counts[ending] -= 1
        self._pump()
        self._check_idle()

    def _on_ray_error(self, sent: _Sent, error: BaseException) -> None:
        if isinstance(error, self._ray.exceptions.RayActorError):
            self._shell_died(sent.shell, f"its process ended ({_in_one_line(error)})")
        else:  # Ray could not carry the call, or its answer
            self._end_shell(f"Ray could not serve it: {_in_one_line(error)}")

    def _expire(self, sent: _Sent) -> None:
        call = sent.call
        if self._sent.get(call) is not sent:
            return
        error = timeout_error(self._spec, call)
        if call.method is CONSTRUCTOR:
            self._constructor_failed(lambda: error)
            return
        self._end("timeout", call.set_exception(error))
        self._end_running(sent, f"{call.method}() ran longer than {call.timeout_s:g} s")

    def _cancel(self, call: Call) -> None:
        self._counts["cancelled"] += 1
        if (sent := self._sent.get(call)) is not None:
            self._end_running(sent, f"{call.method}() was cancelled")
        self._check_idle()

    def _end_running(self, sent: _Sent, why: str) -> None:
        if not sent.is_async:
            self._end_shell(why, deliberate=True)
            return
        sent.shell.cancel.remote(sent.call.call_id)
        if sent.timer is not None:
            sent.timer.cancel()
        sent.timer = self._hub.loop.call_later(_ASYNC_GRACE_S, self._enforce_end, sent, why)

    def _enforce_end(self, sent: _Sent, why: str) -> None:
        if self._sent.get(sent.call) is sent:
            self._end_shell(why, deliberate=True)

    def _retry_or_fail(self, call: Call, error: ActorDiedError) -> None:
        if call.retries_left > 0 and not call.done():
            call.retries_left -= 1
            self._counts["retried"] += 1
            self._queue.appendleft(call)
        else:
            self._end("died", call.set_exception(again(error)))

    def _end(self, ending: str, ended: bool) -> None:
        if ended:
            self._counts[ending] += 1

    def _count_ended(self, _call: object) -> None:
        with self._lock:
            self._pending -= 1

    # ----------------------------------------------------------------- the end

    def _state(self) -> str:
        if self._final_error is not None:
            return "down"
        return "stopping" if self._stopping else "up" if self._up else "starting"

    def _wait_ready(self, future: CallFuture[None]) -> None:
        if self._final_error is not None:
            future.set_exception(self._final_error())
        elif self._up:
            future.set_result(None)
        else:
            self._ready_waiters.append(future)

    def _check_idle(self) -> None:
        if self._stopping and not self._queue and not self._sent:
            self._idle.set()

    def _go_down(self, make_error: Callable[[], BaseException]) -> None:
        """Serve no more calls: fail all there are, and end the shell."""
        if self._final_error is not None:
            return
        self._final_error = make_error
        self._up = False
        if self._start_timer is not None:
            self._start_timer.cancel()
        waiters, self._ready_waiters = self._ready_waiters, []
        for waiter in waiters:
            waiter.set_exception(make_error())
        sent, self._sent = self._sent, {}
        for each in sent.values():
            if each.timer is not None:
                each.timer.cancel()
        for call in [*sent, *self._queue]:
            if call.method is not CONSTRUCTOR:
                self._end("unavailable", call.set_exception(make_error()))
        self._queue.clear()
        self._idle.set()
        shell, self._shell, self._pid = self._shell, None, None
        if shell is not None:
            self._kill(shell)
        self._check_gone()

    def _check_gone(self) -> None:
        """Look whether the processes are gone, as far as one can see, and there will be no other."""
        if self._final_error is None or self._pidfds or self._gone.is_set():
            return
        if self._log is not None:
            self._log.close()
        self._on_down()
        self._gone.set()  # last: whoever sees it, from whatever thread, may use the name again


class Visitor(BorrowedActor):
    """An actor as seen from inside another one, which got its handle. Calls its shell; does not own it.

    A time limit counts from when the call is sent.
    """

    def __init__(self, name: str, max_pending: int, namespace: str) -> None:
        self._ray = load_ray()
        self._namespace = namespace
        self._max_pending = max_pending
        super().__init__(name, max_pending)
        self._shell: Any = None
        self._sent: set[Call] = set()
        self._is_down = False

    @property
    def pending(self) -> int:
        return len(self._sent)

    @property
    def is_up(self) -> bool:
        return not self._is_down

    @property
    def is_down(self) -> bool:
        return self._is_down

    def submit(self, call: Call) -> None:
        self._sent.add(call)
        call.when_done(self._sent.discard)
        self._send(call, time.monotonic() + _NAME_FREE_WITHIN_S)

    def cancel(self, call: Call) -> None:
        if self._shell is not None and call in self._sent:
            self._end_running(self._shell, call)

    def statistics(self) -> dict[str, Any]:
        return {"name": self._spec.name, "state": "elsewhere", "pending": self.pending}

    def reduce(self) -> tuple[Any, ...]:
        return visit, (self._spec.name, self._max_pending, self._namespace)

    def _send(self, call: Call, found_by: float) -> None:
        """Send a call; while its shell is being replaced there is none for some milliseconds."""
        if call.done():
            return
        try:
            shell = self._find_shell()
        except ValueError:
            if time.monotonic() < found_by:
                _later(_LOOK_EVERY_S, self._send, call, found_by)
                return
            self._is_down = True
            call.set_exception(unavailable_error(self._spec, "it was stopped, or its system is gone"))
            return
        timer = _later(call.timeout_s, self._expire, call, shell) if call.timeout_s is not None else None
        ref = shell.call.remote(call.call_id, call.method, Parcel(call.packed))
        ref.future().add_done_callback(functools.partial(self._on_reply, call, timer))

    def _find_shell(self) -> Any:
        if self._shell is None:
            self._shell = self._ray.get_actor(self._spec.name, namespace=self._namespace)
        return self._shell

    def _expire(self, call: Call, shell: Any) -> None:
        if call.set_exception(timeout_error(self._spec, call)):
            self._end_running(shell, call)

    def _end_running(self, shell: Any, call: Call) -> None:
        try:
            shell.cancel.remote(call.call_id)
        except AttributeError:  # a shell with sync methods only; its owner replaces it
            self._shell = None
            self._ray.kill(shell, no_restart=True)

    def _on_reply(self, call: Call, timer: threading.Timer | None, done: Any) -> None:
        if timer is not None:
            timer.cancel()
        error: BaseException | None = done.exception()
        if error is None:
            self._on_answer(call, done.result())
            return
        self._shell = None
        if call.retries_left > 0 and not call.done():
            call.retries_left -= 1
            self._send(call, time.monotonic() + _NAME_FREE_WITHIN_S)
        else:
            call.set_exception(died_error(self._spec, _in_one_line(error), running=f" while it ran {call.method}()"))

    def _on_answer(self, call: Call, answer: Reply) -> None:
        if answer.ending == "exit":
            self._ray.kill(self._find_shell(), no_restart=True)
            self._shell = None
            call.set_exception(died_error(self._spec, _exit(answer), running=f" while it ran {call.method}()"))
        else:
            settle(call, answer, self._spec.name)


def _later(delay_s: float, function: Callable[..., None], *args: Any) -> threading.Timer:
    timer = threading.Timer(delay_s, function, args)
    timer.daemon = True
    timer.start()
    return timer


def visit(name: str, max_pending: int, namespace: str) -> Visitor:
    """Build the actor of a handle that arrived."""
    return Visitor(name, max_pending, namespace)


def ending_of(answer: Reply) -> str:
    """Return how a call has ended, as its shell says."""
    if answer.parcel is None:
        return "cancelled"
    return "ok" if answer.ending == "result" else "raised"


def settle(call: Call, answer: Reply, actor: str) -> bool:
    """End a call as its shell says; return whether it had not ended before."""
    if answer.parcel is None:  # cancelled by us, who had ended it then
        return False
    if answer.ending == "result":
        return call.set_packed(answer.parcel.packed)
    return call.set_exception(unpack_failure(answer.parcel.packed).error(actor, call.method))


def _exit(reply: Reply) -> str:
    return f"its process exited with code {reply.exit_code or 0}"


def _in_one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:500]


async def _within(limit_s: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
