"""The system of actors: starts them, knows them by name, ends them all.

::

    driver: any loops, any threads
      └─ hub thread        supervises: sockets, deaths, time limits
           └─ fork server  one per set of preloaded modules, started when first wanted
                └─ child   one per actor

Nothing outlives the driver: when it ends, however it ends, the fork servers see their sockets close and end every
process below them.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import faulthandler
import functools
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from xrl_lite.actors.actor import Actor, ActorSpec, OnCancel
from xrl_lite.actors.clock import Clock, VirtualClock, WallClock
from xrl_lite.actors.faults import FaultPlan
from xrl_lite.actors.forks import refuse, tell_forks
from xrl_lite.actors.forkserver import ForkServer
from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.handle import ActorHandle, name_arguments
from xrl_lite.actors.hub import Hub
from xrl_lite.actors.inline import InlineActor, InlineScheduler
from xrl_lite.actors.ledger import Claim, Ledger, Resources
from xrl_lite.actors.machine import (
    MILLI,
    allow_many_descriptors,
    milli_cpus,
    usable_cores,
    usable_memory_bytes,
    usable_milli_cpus,
    visible_accelerators,
)
from xrl_lite.actors.payload import pack
from xrl_lite.actors.placement import Bundle, PlacementGroup
from xrl_lite.actors.process_actor import ProcessActor
from xrl_lite.actors.restart import NEVER, RestartPolicy
from xrl_lite.actors.surroundings import Surroundings
from xrl_lite.actors.zygote import CORES_VARIABLE
from xrl_lite.errors import ActorUnavailableError, did_you_mean
from xrl_lite.log import get_logger

if TYPE_CHECKING:
    from xrl_lite.actors.ray_actor import RayCluster

logger = get_logger(__name__)

Backend = Literal["process", "inline", "ray"]

_GRACE_S = 5.0
_GRACE_AFTER_ERROR_S = 0.5
_SERVER_END_S = 6.0
_DUMP_WITHIN_S = 1.0


class ActorSystem:
    """Starts actors on this machine and ends them again.

    Args:
        num_cpus: CPUs that its actors may claim in sum; by default those this process may use.
        memory_bytes: Memory that they may claim in sum; by default what this process may use.
        accelerators: Names of the accelerators that they may claim, as ``CUDA_VISIBLE_DEVICES`` would name them; by
            default those that this process sees.
        log_dir: Folder for the output of every child, ``<actor name>.log``; without it only the last lines are kept.
        seed: Seeds the random generators of every child, and the order of calls of the inline backend.
        backend: "process"; "inline": everything in this process, in an order that the seed decides; or "ray": on the
            Ray cluster that this process is connected to, or else on a local one (extra ``ray``).
        faults: What is to go wrong, and when (inline backend).
        clock: A `VirtualClock`, so that nobody waits for time limits and sleeps (inline backend).
        heartbeat_timeout_s: An actor with async methods whose event loop has not turned for so long, while no sync
            method runs, is ended.

    Use it as an async context manager, or call `shutdown` yourself. At exit of the interpreter it ends its children.
    """

    def __init__(
        self,
        num_cpus: float | None = None,
        memory_bytes: int | None = None,
        log_dir: Path | str | None = None,
        seed: int = 0,
        backend: Backend = "process",
        *,
        accelerators: Sequence[str] | None = None,
        faults: FaultPlan | None = None,
        clock: VirtualClock | None = None,
        heartbeat_timeout_s: float = 600.0,
    ) -> None:
        if backend not in (known := get_args(Backend)):
            raise ValueError(
                f"backend must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {backend!r}."
                f"{did_you_mean(backend, known)}"
            )
        if faults is not None and backend != "inline":
            raise ValueError("faults can be scripted only with backend='inline'.")
        if clock is not None and backend != "inline":
            raise ValueError("A virtual clock is for backend='inline' only: processes live in the time of the wall.")
        self.backend: Backend = backend
        self.seed = seed
        self.log_dir = Path(log_dir) if log_dir is not None else None
        self._accelerator_variable = ""
        self._cluster: RayCluster | None = None
        self.ledger = Ledger(self._capacity(num_cpus, memory_bytes, accelerators))
        self.placement_groups: dict[str, PlacementGroup] = {}
        """Groups that have not been released, by name."""

        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.clock: Clock = clock or WallClock()
        self._scheduler = InlineScheduler(seed, faults or FaultPlan(), self.clock)
        self._lock = threading.RLock()  # a signal handler may call kill_all while its own thread is in here
        self._hub: Hub | None = None
        self._servers: dict[tuple[str, ...], ForkServer] = {}
        self._actors: dict[str, Actor] = {}
        self._handles: dict[str, ActorHandle] = {}
        self._num_named: dict[str, int] = {}
        self._closed = False
        self._is_inherited = False
        self._at_exit = functools.partial(_call_if_alive, weakref.WeakMethod(self.kill_all))
        atexit.register(self._at_exit)
        tell_forks(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(_GRACE_S if error is None else _GRACE_AFTER_ERROR_S)

    @property
    def num_cpus(self) -> float:
        """CPUs that actors may claim in sum."""
        return self.ledger.capacity.milli_cpus / MILLI

    @property
    def memory_bytes(self) -> int:
        """Memory that actors may claim in sum."""
        return self.ledger.capacity.memory_bytes

    @property
    def num_accelerators(self) -> int:
        """Accelerators that actors may claim in sum."""
        return len(self.ledger.capacity.accelerators)

    @property
    def num_cpus_free(self) -> float:
        """CPUs that no actor and no placement group holds."""
        return self.ledger.free.milli_cpus / MILLI

    @property
    def memory_bytes_free(self) -> int:
        """Memory that no actor and no placement group holds."""
        return self.ledger.free.memory_bytes

    def spawn(
        self,
        cls: Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        num_cpus: float | None = None,
        memory_bytes: int | None = None,
        num_accelerators: int = 0,
        pin_cpus: bool = False,
        bundle: Bundle | None = None,
        accelerators: Sequence[str] | None = None,
        num_threads: int | None = None,
        max_concurrency: int = 1,
        max_pending: int = 10_000,
        restart: RestartPolicy | None = None,
        on_cancel: OnCancel = "kill",
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        background: bool = False,
        start_timeout_s: float = 120.0,
    ) -> ActorHandle:
        """Start an actor and return its handle at once. ``await handle.ready()`` raises what its constructor raises.

        Args:
            cls: The class; any that pickles, also one of ``__main__`` or of a notebook cell.
            *args: Arguments of the constructor.
            kwargs: Keyword arguments of the constructor.
            name: A name that no living actor of the system has, for example ``judger/0``.
            num_cpus: CPUs it holds; may be a fraction. By default 1, or all that its bundle was given.
            memory_bytes: Memory it holds; a child that uses more, with what it starts, is ended. By default what its
                bundle was given.
            num_accelerators: Accelerators it holds. It sees these, by ``CUDA_VISIBLE_DEVICES``, and no other: an actor
                that asks for none sees none.
            pin_cpus: Give it whole cores of its own, next to each other, and keep it on them.
            bundle: Part of a `PlacementGroup` (see `reserve`) out of which it is taken. It sees all accelerators of
                the bundle, as every other actor in it does, and runs on the bundle's cores if those are pinned.
            accelerators: Names of those of the bundle's accelerators that it sees, instead of all.
            num_threads: Threads of OpenMP, MKL and torch; by default the whole part of `num_cpus`, at least 1.
            max_concurrency: How many async methods run at the same time. Sync methods run one at a time.
            max_pending: How many calls may be under way.
            restart: When a child that crashed is started again; by default never. A child that was ended because a call
                took too long or was cancelled is always replaced, and does not count.
            on_cancel: Whether a running sync call is ended by ending its process ("kill"), or by an exception in its
                main thread ("interrupt"), which keeps the actor's state.
            env: Environment variables for the child, on top of those that this process has now.
            preload: Modules that the fork server imports once for all children with the same list.
            background: Whether it only computes: a call that reaches it takes no core from a process that runs, such as
                this one (SCHED_BATCH of Linux). Its share of the cores stays the same.
            start_timeout_s: Seconds that the constructor may take; and, before it, the fork server with its imports.

        Raises:
            ResourceError: not that much is left; the message says who holds what.
            ValueError: the name is taken, or the backend cannot do what is asked for.
            PayloadError: class or arguments cannot be pickled.
            ActorUnavailableError: the system was shut down.
        """
        _check_positive(max_concurrency=max_concurrency, max_pending=max_pending, start_timeout_s=start_timeout_s)
        if accelerators is not None and bundle is None:
            raise ValueError("accelerators are named out of a bundle; without one, say num_accelerators.")
        resources = _resources(num_cpus, memory_bytes, num_accelerators, pin_cpus, bundle, accelerators)
        keywords = dict(kwargs or {})
        construction = pack(
            (cls, args, keywords),
            name="cls",
            names=lambda: {"cls": cls, **name_arguments(cls, args, keywords, skip_first=False)},
            code=True,
        )
        spec = ActorSpec(
            name=name or self._next_name(getattr(cls, "__name__", type(cls).__name__).strip("<>")),
            cls=cls,
            construction=construction,
            num_cpus=resources.num_cpus,
            memory_bytes=resources.memory_bytes,
            num_threads=num_threads or max(1, int(resources.num_cpus)),
            max_concurrency=max_concurrency,
            max_pending=max_pending,
            restart=restart or NEVER,
            on_cancel=on_cancel,
            env=dict(env or {}),
            preload=tuple(preload),
            background=background,
            start_timeout_s=start_timeout_s,
            resources=resources,
            bundle=bundle.name if bundle is not None else "",
            surroundings=Surroundings.here(),
        )
        if self._cluster is not None:
            from xrl_lite.actors.ray_actor import refuse_what_ray_cannot

            refuse_what_ray_cannot(spec)
        return self._start(spec)

    def reserve(
        self, bundles: Sequence[Resources], *, name: str | None = None, kind: Literal["GPU", "NPU"] = "GPU"
    ) -> PlacementGroup:
        """Reserve resources for several actors, for all of them or for none, before any is started.

        Args:
            bundles: What each bundle is to hold; `CPUResourcesConfig.bundles` and the like give such lists.
            name: A name that no other group of the system has.
            kind: What accelerators are called in the sizes of the bundles.

        Raises:
            ResourceError: not that much is left; the message says who holds what.
        """
        if not bundles:
            raise ValueError("A placement group needs at least one bundle.")
        if self._cluster is not None:
            from xrl_lite.actors.ray_actor import refuse_bundles_ray_cannot

            refuse_bundles_ray_cannot(bundles)
        with self._lock:
            self._check_open(f"Placement group {name!r} cannot be reserved")
            name = name or self._next_name("placement_group")
            if name in self.placement_groups:
                raise ValueError(f"There is a placement group called {name!r} already. Choose another name.")
            names = [f"{name}[{index}]" for index in range(len(bundles))]
            claims = self.ledger.reserve(names, bundles)
            parts = tuple(Bundle(*each, kind) for each in zip(names, bundles, claims, strict=True))
            group = PlacementGroup(name, self, parts, on_release=functools.partial(self._forget_group, name))
            self.placement_groups[name] = group
        return group

    def get(self, name: str) -> ActorHandle:
        """Return the handle of the living actor called `name`.

        Raises:
            KeyError: there is none.
        """
        handle = self._handles.get(name)
        if handle is None:
            known = ", ".join(map(repr, self._handles)) or "none"
            raise KeyError(f"No actor is called {name!r}.{did_you_mean(name, self._handles)} There are: {known}.")
        return handle

    def free_stem(self, stem: str) -> str:
        """Return `stem`, or ``stem#2`` and so on where an actor called ``stem/0`` is living."""
        number, name = 1, stem
        while f"{name}/0" in self._handles:
            number += 1
            name = f"{stem}#{number}"
        return name

    def statistics(self) -> dict[str, Any]:
        """Return capacity, what is held, and the statistics of every living actor by name."""
        held = self.ledger.held
        return {
            "num_cpus": self.num_cpus,
            "num_cpus_held": held.milli_cpus / MILLI,
            "memory_bytes": self.memory_bytes,
            "memory_bytes_held": held.memory_bytes,
            "num_accelerators": self.num_accelerators,
            "num_accelerators_held": len(held.accelerators),
            "actors": {name: actor.statistics() for name, actor in list(self._actors.items())},
        }

    def dump(self) -> CallFuture[str]:
        """Return what every actor is doing and the Python stacks of all threads of its child, under its name."""
        if self._hub is not None and self._hub.running:
            return self._hub.run(self._dump(), "dump()")
        nothing: CallFuture[str] = CallFuture("dump()")
        nothing.set_result("\n".join(f"== {name}: in this process" for name in self._actors))
        return nothing

    def after_fork(self) -> None:
        """Leave the actors to the process that started them; inline ones are in this process as well."""
        self._lock = threading.RLock()
        if self.backend != "inline":
            atexit.unregister(self._at_exit)
            self._closed = self._is_inherited = True

    async def _dump(self) -> str:
        actors = [actor for actor in list(self._actors.values()) if isinstance(actor, ProcessActor)]
        return "\n\n".join(await asyncio.gather(*(actor.dump(_DUMP_WITHIN_S) for actor in actors)))

    @contextmanager
    def dump_on_signal(self, number: signal.Signals = signal.SIGUSR1) -> Generator[None, None, None]:
        """Write what `dump` returns, and the stacks of this process, to stderr when the signal arrives while inside.

        Outside of the main thread, where signals cannot be handled, it does nothing. The stacks of this process are
        written also while it is stuck in native code.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def dump(_number: int, _frame: FrameType | None) -> None:
            self.dump().when_done(_write_dump)

        before = signal.signal(number, dump)
        faulthandler.register(number, all_threads=True, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(number)
            signal.signal(number, before)

    async def shutdown(self, grace_s: float = _GRACE_S) -> None:
        """Stop all actors, giving their calls `grace_s` to end, and wait until none of their processes is left.

        Cancelling it ends the wait, not the shutdown.
        """
        if (ended := self._begin_shutdown(grace_s)) is not None:
            await ended
            self._join_hub()

    def shutdown_now(self, grace_s: float = _GRACE_S) -> None:
        """Do what `shutdown` does, blocking this thread. Calls of inline actors that wait for its loop are ended."""
        if self.backend == "inline":
            grace_s = 0.0
        if (ended := self._begin_shutdown(grace_s)) is not None:
            ended.result(grace_s + 5 * _SERVER_END_S)
            self._join_hub()

    def kill_all(self) -> None:
        """End every process of this system at once, with everything it started. For the second Ctrl-C."""
        with self._lock:
            self._closed = False  # also while an orderly shutdown is under way, which this one overtakes
        self.shutdown_now(0.0)

    def _start(self, spec: ActorSpec) -> ActorHandle:
        with self._lock:
            self._check_open(f"Actor {spec.name!r} cannot be started")
            if spec.name in self._actors:
                raise ValueError(f"There is an actor called {spec.name!r} already. Choose another name, or stop it.")
            claim = self.ledger.claim(spec.name, spec.resources, bundle=spec.bundle)
            try:
                actor = self._make(dataclasses.replace(spec, env={**self._environment(claim), **spec.env}))
            except BaseException:
                self.ledger.release(spec.name)
                raise
            handle = ActorHandle(actor)
            if not actor.is_down:  # the constructor of an inline actor has run, and may have failed
                self._actors[spec.name] = actor
                self._handles[spec.name] = handle
        return handle

    def _capacity(self, num_cpus: float | None, memory_bytes: int | None, accelerators: Sequence[str] | None) -> Claim:
        if self.backend == "ray":
            from xrl_lite.actors.ray_actor import RayCluster

            if accelerators is not None:
                raise ValueError("accelerators cannot be named with backend='ray': Ray knows which there are.")
            self._cluster = RayCluster(num_cpus, memory_bytes)
            return self._cluster.capacity
        seen = visible_accelerators()
        self._accelerator_variable = seen.variable
        return Claim(
            usable_milli_cpus() if num_cpus is None else milli_cpus(num_cpus),
            usable_memory_bytes() if memory_bytes is None else memory_bytes,
            seen.names if accelerators is None else tuple(accelerators),
            usable_cores(),
        )

    def _environment(self, claim: Claim) -> dict[str, str]:
        """The variables by which a child learns what it was given."""
        given: dict[str, str] = {}
        if self.num_accelerators and self._accelerator_variable:
            given[self._accelerator_variable] = ",".join(claim.accelerators)
        if claim.cores:
            given[CORES_VARIABLE] = ",".join(map(str, claim.cores))
        return given

    def _check_open(self, what: str) -> None:
        if self._is_inherited:
            refuse(what)
        if self._closed:
            raise ActorUnavailableError(f"{what}: the system was shut down.")

    def _make(self, spec: ActorSpec) -> Actor:
        on_down = functools.partial(self._forget, spec.name)
        if self.backend == "inline":
            return InlineActor(spec, self._scheduler, on_down=on_down)
        if self._hub is None:
            allow_many_descriptors()
            self._hub = Hub("actor-hub")
        if self._cluster is not None:
            from xrl_lite.actors.ray_actor import RayActor

            return RayActor(
                spec, hub=self._hub, cluster=self._cluster, log_dir=self.log_dir, seed=self.seed, on_down=on_down
            )
        return ProcessActor(
            spec,
            hub=self._hub,
            server=functools.partial(self._server, spec.preload),
            log_dir=self.log_dir,
            seed=self.seed,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            on_down=on_down,
        )

    def _server(self, preload: tuple[str, ...]) -> ForkServer:
        """Return the fork server for a set of modules, starting it if needed (hub thread)."""
        assert self._hub is not None
        server = self._servers.get(preload)
        if server is None or not server.alive:
            server = self._servers[preload] = ForkServer(self._hub, preload, log_dir=self.log_dir, seed=self.seed)
        return server

    def _forget(self, name: str) -> None:
        self.ledger.release(name)
        self._actors.pop(name, None)
        self._handles.pop(name, None)

    def _forget_group(self, name: str) -> None:
        self.placement_groups.pop(name, None)

    def _next_name(self, stem: str) -> str:
        with self._lock:
            number = self._num_named.get(stem, 0)
            self._num_named[stem] = number + 1
        return f"{stem}/{number}"

    def _begin_shutdown(self, grace_s: float) -> CallFuture[None] | None:
        """Return the future of the end; None where there is nothing to wait for."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
        atexit.unregister(self._at_exit)
        if self._hub is not None:
            return self._hub.run(self._end_everything(grace_s), "shutdown()", last=True) if self._hub.running else None
        self._close_cluster()
        return when_all_have_ended([actor.stop(grace_s) for actor in list(self._actors.values())], "shutdown()")

    async def _end_everything(self, grace_s: float) -> None:
        await asyncio.gather(*(_end_actor(actor, grace_s) for actor in list(self._actors.values())))
        await asyncio.gather(*map(_end_server, list(self._servers.values())))

    def _join_hub(self) -> None:
        if self._hub is not None:
            self._hub.join()
        self._close_cluster()

    def _close_cluster(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (function := method()) is not None:
        function()


async def _end_actor(actor: Actor, grace_s: float) -> None:
    await actor.stop(grace_s)


def when_all_have_ended(futures: Sequence[CallFuture[None]], label: str) -> CallFuture[None]:
    """Return a future that ends when all of `futures` have, in whatever way."""
    whole: CallFuture[None] = CallFuture(label)
    left = itertools.count(len(futures), -1)  # its steps are atomic, and the futures end in any thread
    next(left)

    def count(_: CallFuture[None]) -> None:
        if next(left) == 0:
            whole.set_result(None)

    for future in futures:
        future.when_done(count)
    if not futures:
        whole.set_result(None)
    return whole


def _resources(
    num_cpus: float | None,
    memory_bytes: int | None,
    num_accelerators: int,
    pin_cpus: bool,
    bundle: Bundle | None,
    accelerators: Sequence[str] | None,
) -> Resources:
    """What an actor asks for; in a bundle, what it does not mention is all that the bundle was given."""
    if bundle is None:
        return Resources(
            num_cpus=1 if num_cpus is None else num_cpus,
            memory_bytes=memory_bytes,
            num_accelerators=num_accelerators,
            pin_cpus=pin_cpus,
        )
    return Resources(
        num_cpus=bundle.resources.num_cpus if num_cpus is None else num_cpus,
        memory_bytes=memory_bytes or bundle.resources.memory_bytes,
        num_accelerators=num_accelerators,
        accelerators=None if accelerators is None else tuple(accelerators),
        pin_cpus=pin_cpus,
    )


def _write_dump(dump: CallFuture[str]) -> None:
    text = dump.result() if not dump.cancelled() and dump.exception() is None else repr(dump.exception())
    os.write(2, f"\n{text}\n".encode("utf-8", "replace"))


async def _end_server(server: ForkServer) -> None:
    gone = asyncio.Event()
    server.close(gone.set)
    try:
        async with asyncio.timeout(_SERVER_END_S):
            await gone.wait()
    except TimeoutError:
        logger.warning("fork server %d did not end, it is killed", server.process_id)
        server.kill()
        await gone.wait()


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}.")
