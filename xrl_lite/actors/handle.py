"""What callers hold: a handle with the actor's methods on it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xrl_lite.actors.actor import Actor, Call, DeathCallback
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.payload import pack
from xrl_lite.actors.room import Room
from xrl_lite.errors import ActorError, PayloadError, did_you_mean

_GONE_WITHIN_S = 5.0


class ActorHandle:
    """Calls an actor: ``await handle.method.remote(...)``. Usable from any event loop and any thread.

    A handle may be sent to other actors, which then call the same actor; only the process that spawned it can stop it.

    A method of the class that bears the name of one of the attributes below is reached by `method_named`.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._room = Room(actor.spec.max_pending)

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        method = self.__dict__[name] = self.method_named(name)  # found without this function from now on
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._actor.reduce()

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> ActorHandle:
        return self

    def __repr__(self) -> str:
        return f"<ActorHandle {self.name} pid={self.pid}>"

    @property
    def name(self) -> str:
        """The actor's name in its system."""
        return self._actor.spec.name

    @property
    def pid(self) -> int | None:
        """Process id of the current child; None while there is none, and in the inline backend."""
        return self._actor.pid

    @property
    def restarts(self) -> int:
        """How often the child has been replaced. An owner whose actor has state compares it before and after."""
        return self._actor.restarts

    @property
    def pending(self) -> int:
        """Calls that have not ended."""
        return self._actor.pending

    @property
    def is_up(self) -> bool:
        """Whether a constructed child serves calls right now."""
        return self._actor.is_up

    @property
    def is_down(self) -> bool:
        """Whether it will serve no more calls."""
        return self._actor.is_down

    def method_named(self, name: str) -> ActorMethod:
        """Return the method called `name`.

        Raises:
            AttributeError: the class has no such method.
        """
        cls = self._actor.spec.cls
        if isinstance(cls, type) and not hasattr(cls, name) and not hasattr(cls, "__getattr__"):
            known = [method for method in dir(cls) if not method.startswith("_")]
            raise AttributeError(f"{cls.__name__} has no method {name!r}.{did_you_mean(name, known)}")
        return ActorMethod(self._actor, name, self._room)

    def ready(self) -> CallFuture[None]:
        """Wait until the constructor has returned; raises what it raised."""
        return self._actor.ready()

    def stop(self, grace_s: float = 5.0) -> CallFuture[None]:
        """Take no more calls, let those that there are end, run exit handlers, end the child; by force after `grace_s`.

        Waits until nothing of the actor is left.
        """
        return self._actor.stop(grace_s)

    def kill(self) -> None:
        """End the actor at once and for good. Its calls fail with `ActorUnavailableError`."""
        self._actor.kill()

    def on_death(self, callback: DeathCallback) -> None:
        """Call `callback` with an `ActorDiedError` whenever the child ends unasked, in the thread that watches it."""
        self._actor.on_death(callback)

    def statistics(self) -> dict[str, Any]:
        """Return state, process id, restarts, and how many calls ended how."""
        return self._actor.statistics()


class ActorMethod:
    """One method of an actor, with the options of its calls."""

    __slots__ = ("_actor", "_name", "_retries", "_room", "_timeout_s")

    def __init__(
        self, actor: Actor, name: str, room: Room, *, timeout_s: float | None = None, max_task_retries: int = 0
    ) -> None:
        self._actor = actor
        self._name = name
        self._room = room
        self._timeout_s = timeout_s
        self._retries = max_task_retries

    def options(self, *, timeout_s: float | None = None, max_task_retries: int = 0) -> ActorMethod:
        """Return this method with other options.

        Args:
            timeout_s: Seconds that a call may run, counted from when it starts to execute.
            max_task_retries: How often a call that was running when the child died is sent again. Calls that had not
                started are always sent again.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}. Use None for no limit.")
        return ActorMethod(self._actor, self._name, self._room, timeout_s=timeout_s, max_task_retries=max_task_retries)

    def remote(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Send a call and return its future at once.

        Raises:
            PayloadError: an argument cannot be pickled.
            ActorError: `max_pending` calls are waiting already; see `submit`.
        """
        if not self._room.enter_now():
            raise ActorError(
                f"Actor {self._actor.spec.name!r} has {self._room.num_inside} calls that have not ended, and its "
                f"max_pending is {self._room.max_inside}. Await some before sending more, or send with "
                f"`future = await handle.{self._name}.submit(...)`, which waits until there is room."
            )
        return self._send(args, kwargs)

    async def submit(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Wait until fewer than `max_pending` calls are under way, first come first served; then send as `remote` does.

        Raises:
            PayloadError: an argument cannot be pickled.
        """
        await self._room.enter()
        return self._send(args, kwargs)

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Send a call for which there is room."""
        name = self._name
        try:
            packed = pack((name, args, kwargs), name=name, once=not self._retries)
        except PayloadError:
            self._room.leave()
            # once more, now saying which argument it is
            function = getattr(self._actor.spec.cls, name, None)
            pack((name, args, kwargs), name=name, names=lambda: name_arguments(function, args, kwargs, skip_first=True))
            raise
        except BaseException:
            self._room.leave()
            raise
        call = Call(self._actor, name, packed, self._timeout_s, self._retries, self._room.leave)
        self._actor.submit(call)
        return call

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"Call {self._name}() of an actor so: await handle.{self._name}.remote(...).")


def end_together(handles: Sequence[ActorHandle]) -> None:
    """End actors at once, and block until their names and resources are free again, which takes milliseconds."""
    for handle in handles:
        handle.kill()
    for handle in handles:
        with contextlib.suppress(TimeoutError):
            handle.stop(0.0).result(_GONE_WITHIN_S)


def _rebuild(build: Callable[..., Actor], arguments: tuple[Any, ...]) -> ActorHandle:
    return ActorHandle(build(*arguments))


def name_arguments(
    function: object, args: Sequence[Any], kwargs: Mapping[str, Any], *, skip_first: bool
) -> dict[str, Any]:
    """Return `args` and `kwargs` by the parameter names of `function`, as far as it has any."""
    names: list[str] = []
    if callable(function):
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in named][1 if skip_first else 0 :]
    found = {names[index] if index < len(names) else f"args[{index}]": value for index, value in enumerate(args)}
    return {**found, **kwargs}
