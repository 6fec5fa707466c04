"""What every backend's actor has in common: its specification, its calls, and what a handle asks of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.ledger import Resources
from xrl_lite.actors.payload import Packed
from xrl_lite.actors.restart import RestartPolicy
from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError

OnCancel = Literal["kill", "interrupt"]
DeathCallback = Callable[[ActorDiedError], None]

_OUR_FRAME = "xrl_lite/actors/worker.py"

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
    resources: Resources = field(default_factory=Resources)
    """What was asked for."""

    bundle: str = ""
    """Name of the bundle out of which it is taken; empty for none."""


@dataclass(eq=False, slots=True)
class Call:
    """One call on its way."""

    method: str
    packed: Packed
    future: CallFuture[Any]
    timeout_s: float | None = None
    retries_left: int = 0
    call_id: int = field(default_factory=lambda: next(_call_ids) & 0xFFFFFFFF)
    slot: int = -1
    """Its slot in the child's page; -1 while it is not with a child."""
    is_counted: bool = False
    """Whether its end stands in the statistics."""


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


def timeout_error(spec: ActorSpec, call: Call, stack: str = "") -> ActorTimeoutError:
    """The error of a call that ran longer than its limit. `stack` is what ``faulthandler`` wrote about it."""
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    own = list(itertools.takewhile(lambda line: _OUR_FRAME not in line, frames))
    doing = "\nIt was here (innermost first):\n" + "\n".join(f"  {line}" for line in own) if own else ""
    return ActorTimeoutError(
        f"{call.method}() of actor {spec.name!r} ran longer than its limit of {call.timeout_s:g} s and was ended. "
        f"Raise timeout_s if the work is honest, or look at what it waits for.{doing}"
    )


def died_error(spec: ActorSpec, how: str, *, running: str = "", log: str = "", tail: str = "") -> ActorDiedError:
    """The error of a call whose process died."""
    lines = [f"Actor {spec.name!r} died: {how}{running}."]
    if log:
        lines.append(f"Its log: {log}")
    if tail:
        lines += ["The last lines it wrote:", *(f"  {line}" for line in tail.splitlines())]
    return ActorDiedError("\n".join(lines))


def unavailable_error(spec: ActorSpec, why: str) -> ActorUnavailableError:
    """The error of a call that no process will serve."""
    return ActorUnavailableError(f"Actor {spec.name!r} is not available: {why}.")
