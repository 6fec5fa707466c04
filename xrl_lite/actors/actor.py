"""What every backend's actor has in common: its specification, its calls, and what a handle asks of it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from xrl_lite.actors.forks import refuse
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.ledger import Resources
from xrl_lite.actors.payload import Packed
from xrl_lite.actors.restart import RestartPolicy
from xrl_lite.actors.surroundings import Surroundings
from xrl_lite.errors import ActorDiedError, ActorError, ActorTimeoutError, ActorUnavailableError

OnCancel = Literal["kill", "interrupt"]
DeathCallback = Callable[[ActorDiedError], None]

Ended = TypeVar("Ended", bound=ActorError)

_OUR_FRAME = "xrl_lite/actors/worker.py"

_NOTHING = Packed(b"")
_call_ids = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSpec:
    """How one actor is to be made and kept."""

    name: str
    cls: Callable[..., Any]
    construction: Packed
    """Class, arguments and keyword arguments."""

    num_cpus: float
    memory_bytes: int | None
    num_threads: int
    max_concurrency: int
    max_pending: int
    restart: RestartPolicy
    on_cancel: OnCancel
    env: Mapping[str, str]
    preload: tuple[str, ...]
    start_timeout_s: float
    background: bool = False
    resources: Resources = field(default_factory=Resources)
    """What was asked for."""

    bundle: str = ""
    """Name of the bundle out of which it is taken; empty for none."""

    surroundings: Surroundings = field(default_factory=Surroundings)
    """Of whoever spawned it."""


class Call(CallFuture[Any]):
    """One call on its way; also the future that whoever made it holds."""

    __slots__ = ("_actor", "_leave", "call_id", "is_counted", "method", "packed", "retries_left", "slot", "timeout_s")

    def __init__(
        self,
        actor: Actor | None,
        method: str,
        packed: Packed,
        timeout_s: float | None = None,
        retries: int = 0,
        leave: Callable[[], None] | None = None,
    ) -> None:
        # all at once, without the constructor of the base class: every call pays for this
        self._loop = loop = asyncio._get_running_loop()
        self._asyncio_future_blocking = None if loop is None else False
        self._unended = [True]
        self._done = self._cancelled = self.is_counted = False
        self._value = self._packed = self._error = None
        self._callbacks = []
        self._leave = leave
        self._actor = actor
        self.method = method
        self.packed = packed
        self.timeout_s = timeout_s
        self.retries_left = retries
        self.call_id = next(_call_ids) & 0xFFFFFFFF
        self.slot = -1  # in the page of the child; -1 while it is with none

    @property
    def label(self) -> str:
        return f"{self.method}() of actor {self._actor.spec.name!r}" if self._actor is not None else self.method

    def cancel(self, msg: object = None) -> bool:
        if not super().cancel(msg):
            return False
        if self._actor is not None:
            self._actor.cancel(self)
        return True

    def _end(self) -> None:
        self._done = True
        self.packed = _NOTHING  # whoever keeps the future has no use for the arguments
        if self._leave is not None:
            self._leave()
        if self._callbacks:
            self._call_back()


class Actor(Protocol):
    """What a handle needs. Every method may be called from any thread and returns at once."""

    @property
    def spec(self) -> ActorSpec: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def restarts(self) -> int: ...

    @property
    def pending(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def is_down(self) -> bool: ...

    def submit(self, call: Call) -> None: ...

    def cancel(self, call: Call) -> None: ...

    def ready(self) -> CallFuture[None]: ...

    def stop(self, grace_s: float) -> CallFuture[None]: ...

    def kill(self) -> None: ...

    def on_death(self, callback: DeathCallback) -> None: ...

    def statistics(self) -> dict[str, Any]: ...

    def reduce(self) -> tuple[Any, ...]:
        """Say how the actor of a handle that travels is rebuilt elsewhere, as ``__reduce__`` does."""
        ...


class CallCounts(Counter[str]):
    """How calls ended: ok, raised, timeout, cancelled, died, unavailable."""


ENDINGS = ("ok", "raised", "timeout", "cancelled", "died", "unavailable", "retried")


def cut_off(actor: Any, name: str) -> None:
    """Let an actor refuse everything that takes a connection, since this process is a fork of the one that has it."""

    def refuse_everything(*_args: Any) -> NoReturn:
        refuse(f"Actor {name!r} cannot be called, awaited, stopped or passed on")

    for method in ("submit", "ready", "stop", "kill", "on_death", "reduce"):
        setattr(actor, method, refuse_everything)  # on the instance, so that calls elsewhere need not ask
    actor.cancel = _ignore


def _ignore(_call: Call) -> None:
    """What cancelling a call comes to in a fork."""


def timeout_error(spec: ActorSpec, call: Call, stack: str = "", *, silent_s: float = 0.0) -> ActorTimeoutError:
    """The error of a call that ran longer than its limit.

    Args:
        spec: Of the actor.
        call: The call.
        stack: What ``faulthandler`` wrote about it.
        silent_s: Seconds for which the event loop of the actor has not turned, where it ought to have.
    """
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    own = list(itertools.takewhile(lambda line: _OUR_FRAME not in line, frames))
    doing = "\nIt was here (innermost first):\n" + "\n".join(f"  {line}" for line in own) if own else ""
    blocked = f"\nIts event loop has not turned for {silent_s:.1f} s: an async method blocks it." if silent_s else ""
    error = ActorTimeoutError(
        f"{call.method}() of actor {spec.name!r} ran longer than its limit of {call.timeout_s:g} s and was ended. "
        f"Raise timeout_s if the work is honest, or look at what it waits for.{blocked}{doing}"
    )
    error.is_loop_blocked = bool(silent_s)
    return error


def unborn_error(spec: ActorSpec, waited_s: float) -> ActorTimeoutError:
    """The error of an actor whose process was not there in time."""
    modules = f" (it imports {', '.join(spec.preload)})" if spec.preload else ""
    error = ActorTimeoutError(
        f"Actor {spec.name!r} has no process after {waited_s:g} s: the fork server is not ready{modules}. "
        f"Raise start_timeout_s if that takes so long, or look at what hangs; the log of the fork server may tell."
    )
    return _of(spec, error)


def died_error(spec: ActorSpec, how: str, *, running: str = "", log: str = "", tail: str = "") -> ActorDiedError:
    """The error of a call whose process died."""
    lines = [f"Actor {spec.name!r} died: {how}{running}."]
    if log:
        lines.append(f"Its log: {log}")
    if tail:
        lines += ["The last lines it wrote:", *(f"  {line}" for line in tail.splitlines())]
    return _of(spec, ActorDiedError("\n".join(lines)))


def unavailable_error(spec: ActorSpec, why: str) -> ActorUnavailableError:
    """The error of a call that no process will serve."""
    return _of(spec, ActorUnavailableError(f"Actor {spec.name!r} is not available: {why}."))


def again(error: ActorDiedError) -> ActorDiedError:
    """Return the same error for another caller: each has the traceback of its own."""
    copy = type(error)(*error.args)
    copy.actor = error.actor
    return copy


def restarts_used_up_error(spec: ActorSpec, how: str) -> ActorUnavailableError:
    """The error of a call to an actor whose process died once too often."""
    policy = spec.restart
    allowed = f"{policy.max_restarts} in {policy.window_s:g} s" if policy.max_restarts else "none"
    return unavailable_error(spec, f"{how}, and its restarts ({allowed}) are used up")


def _of(spec: ActorSpec, error: Ended) -> Ended:
    error.actor = spec.name
    return error
