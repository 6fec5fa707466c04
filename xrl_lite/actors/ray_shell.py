"""What runs inside a Ray actor: a shell around the user's object, which runs its methods as our own workers do.

Payloads travel as our own pickles inside Ray's, so that what can be sent, and how errors look, is the same everywhere.
This module does not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xrl_lite.actors.failure import describe, pack_failure
from xrl_lite.actors.payload import Packed, pack, unpack
from xrl_lite.actors.segments import Segment
from xrl_lite.actors.wire import Kind
from xrl_lite.actors.worker import pack_result
from xrl_lite.actors.zygote import seed_generators

Ending = Literal["result", "error", "cancelled", "exit"]


class Parcel:
    """A packed payload on its way through Ray. The contents of shared memory go along, outside of Ray's pickle.

    Holds no memory that is lent, since nobody could tell its owner when it has been read.
    """

    def __init__(self, packed: Packed) -> None:
        self.packed = pack(unpack(packed), name="payload", once=False) if packed.own_segment else packed

    def __reduce__(self) -> tuple[Any, ...]:
        views = [pickle.PickleBuffer(segment.view()[: segment.size_bytes]) for segment in self.packed.segments]
        return _parcel, (self.packed.body, self.packed.own_segment, views)


def _parcel(body: bytes, own_segment: bool, contents: Sequence[Any]) -> Parcel:
    views = [memoryview(content).cast("B") for content in contents]
    segments = tuple(Segment.write([view], [(0, view.nbytes)]) for view in views)
    parcel = Parcel.__new__(Parcel)
    parcel.packed = Packed(body, segments, own_segment)
    return parcel


@dataclass(frozen=True, slots=True)
class Reply:
    """How a call ended in the shell."""

    ending: Ending
    parcel: Parcel | None = None
    exit_code: object = None
    """For ``exit``: what was given to ``sys.exit``. The shell goes on; whoever is answered ends it."""


@dataclass(frozen=True, slots=True)
class Constructed:
    """What is known once the constructor has run."""

    reply: Reply
    pid: int
    host: str
    async_methods: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellSettings:
    """What a shell is to do before it makes the object."""

    environment: Mapping[str, str]
    log_path: str
    """File for its output. Empty, or not on this host: it stays with Ray."""

    log_host: str
    """Host on which a path below ``/proc`` means anything."""

    seed: str


class SyncShell:
    """Runs the methods of a class that has only sync ones: one at a time, in the main thread."""

    def __init__(self, settings: ShellSettings) -> None:
        _prepare(settings)
        self._target: Any = None

    def construct(self, construction: Parcel) -> Constructed:
        """Make the object."""
        self._target, constructed = _construct(construction)
        return constructed

    def call(self, _call_id: int, _method: str, parcel: Parcel) -> Reply:
        """Run a method to its end."""
        return _run(self._target, parcel, lambda awaitable: asyncio.run(_await(awaitable)))


class AsyncShell:
    """Runs async methods on Ray's event loop, and sync ones one at a time in a thread.

    That thread is not the main one, which is Ray's.
    """

    def __init__(self, settings: ShellSettings) -> None:
        _prepare(settings)
        self._target: Any = None
        self._tasks: dict[int, asyncio.Task[Reply]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync-methods")

    async def construct(self, construction: Parcel) -> Constructed:
        """Make the object."""
        self._target, constructed = _construct(construction)
        return constructed

    async def call(self, call_id: int, method: str, parcel: Parcel) -> Reply:
        """Run a method to its end."""
        self._tasks[call_id] = task = asyncio.ensure_future(self._run(method, parcel))
        try:
            return await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return Reply("cancelled")
        finally:
            self._tasks.pop(call_id, None)

    async def cancel(self, call_id: int) -> None:
        """Cancel an async method, if it still runs."""
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()

    async def _run(self, method: str, parcel: Parcel) -> Reply:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if not is_async(getattr(self._target, method, None)):

            def wait(awaitable: Awaitable[Any]) -> Any:
                return asyncio.run_coroutine_threadsafe(_await(awaitable), loop).result()

            return await loop.run_in_executor(self._thread, _run, self._target, parcel, wait)
        try:
            name, args, kwargs = unpack(parcel.packed)
            result = await getattr(self._target, name)(*args, **kwargs)
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            return _failed(error)
        except SystemExit as error:
            return Reply("exit", exit_code=error.code)
        except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
            return _failed(error)
        return _answered(result, method)


def is_async(method: object) -> bool:
    """Whether a method is an async one."""
    return inspect.iscoroutinefunction(inspect.unwrap(method) if callable(method) else method)


def async_methods(kind: type[Any]) -> frozenset[str]:
    """Return the names of the async methods of a class."""
    names = (name for name in dir(kind) if not name.startswith("__"))
    return frozenset(name for name in names if is_async(inspect.getattr_static(kind, name, None)))


def host_name() -> str:
    """Return what tells this machine from others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _prepare(settings: ShellSettings) -> None:
    os.environ.update(settings.environment)
    seed_generators(settings.seed)
    is_here = host_name() == settings.log_host
    if settings.log_path and (is_here or not settings.log_path.startswith("/proc/")):
        path = Path(settings.log_path)
        if not is_here:
            path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


def _construct(construction: Parcel) -> tuple[Any, Constructed]:
    target: Any = None
    try:
        cls, args, kwargs = unpack(construction.packed)
        target = cls(*args, **kwargs)
        reply = Reply("result")
    except SystemExit as error:
        reply = Reply("exit", exit_code=error.code)
    except BaseException as error:  # noqa: BLE001 whatever the constructor raises is the caller's to see
        reply = _failed(error)
    return target, Constructed(reply, os.getpid(), host_name(), async_methods(target.__class__))


def _run(target: Any, parcel: Parcel, wait: Callable[[Awaitable[Any]], Any]) -> Reply:
    try:
        name, args, kwargs = unpack(parcel.packed)
        result = getattr(target, name)(*args, **kwargs)
        if inspect.isawaitable(result):
            result = wait(result)
    except SystemExit as error:
        return Reply("exit", exit_code=error.code)
    except BaseException as error:  # noqa: BLE001 whatever the method raises is the caller's to see
        return _failed(error)
    return _answered(result, name)


def _answered(result: object, name: str) -> Reply:
    kind, packed = pack_result(result, name)
    return Reply("result" if kind is Kind.RESULT else "error", Parcel(packed))


def _failed(error: BaseException) -> Reply:
    return Reply("error", Parcel(pack_failure(describe(error, skip_frames=1))))


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
