"""Several actors of one class behind one call.

Waiting:
    a call waits for    the replica that it was given to
    `map` waits for     the first of its calls under way to end; there are never more than `max_in_flight`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from xrl_lite.actors.future import CallFuture
from xrl_lite.actors.handle import ActorHandle, end_together
from xrl_lite.errors import ActorDiedError, ActorError, ActorUnavailableError, did_you_mean, errors_as_themselves

if TYPE_CHECKING:
    from xrl_lite.actors.system import ActorSystem

Policy = Literal["round_robin", "least_loaded"]

_IN_FLIGHT_PER_REPLICA = 16


class ActorPool:
    """Spreads calls over replicas, in turn or to the one with fewest calls. Those that are down are skipped.

    Args:
        handles: The replicas. They are the pool's from then on: `stop` stops them.
        policy: "round_robin": each in its turn. "least_loaded": the one with the fewest calls that have not ended;
            among equals the one whose turn it is.
    """

    def __init__(self, handles: Sequence[ActorHandle], policy: Policy = "round_robin") -> None:
        if not handles:
            raise ValueError("An ActorPool needs at least one handle.")
        if policy not in get_args(Policy):
            raise ValueError(
                f"policy must be one of {', '.join(get_args(Policy))}, got {policy!r}."
                f"{did_you_mean(policy, get_args(Policy))}"
            )
        self.handles = list(handles)
        self.policy: Policy = policy
        self._next = 0

    @classmethod
    def spawn(
        cls,
        system: ActorSystem,
        actor_cls: Callable[..., Any],
        *args: Any,
        num_actors: int,
        name: str | None = None,
        policy: Policy = "round_robin",
        **options: Any,
    ) -> ActorPool:
        """Start `num_actors` replicas, all or none, and return the pool of them at once.

        Args:
            system: Where they run.
            actor_cls: Their class.
            *args: Arguments of its constructor.
            num_actors: How many.
            name: The replicas are called ``<name>/0`` and so on; by default after the class.
            policy: As for the pool itself.
            **options: As for `ActorSystem.spawn`, for each replica.
        """
        if num_actors < 1:
            raise ValueError(f"num_actors must be at least 1, got {num_actors}.")
        handles: list[ActorHandle] = []
        try:
            for number in range(num_actors):
                own_name = f"{name}/{number}" if name is not None else None
                handles.append(system.spawn(actor_cls, *args, name=own_name, **options))
            return cls(handles, policy)
        except BaseException:
            end_together(handles)
            raise

    def __len__(self) -> int:
        return len(self.handles)

    async def ready(self) -> None:
        """Wait until all replicas are constructed; raises what the first failing constructor raised."""
        await asyncio.gather(*(handle.ready() for handle in self.handles))

    def pick(self) -> ActorHandle:
        """Return the replica whose turn it is.

        Raises:
            ActorUnavailableError: all of them are down.
        """
        count = len(self.handles)
        turn = [self.handles[(self._next + step) % count] for step in range(count)]
        living = [handle for handle in turn if not handle.is_down]
        if not living:
            names = ", ".join(handle.name for handle in self.handles)
            raise ActorUnavailableError(f"All {count} actors of the pool are down: {names}.")
        # one that is being restarted waits for its turn only if nobody else can serve
        candidates = [handle for handle in living if handle.is_up] or living
        least_loaded = self.policy == "least_loaded"
        chosen = min(candidates, key=lambda handle: handle.pending) if least_loaded else candidates[0]
        self._next = (self.handles.index(chosen) + 1) % count
        return chosen

    def submit(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> CallFuture[Any]:
        """Send a call to one replica and return its future at once."""
        return self.pick().method_named(method).options(timeout_s=timeout_s).remote(*args, **kwargs)

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, max_task_retries: int = 0, **kwargs: Any
    ) -> Any:
        """Call `method` on one replica and return what it returns. Cancelling it cancels the call.

        Args:
            method: Name of the method.
            *args: Its arguments.
            timeout_s: Seconds that the call may run, each time that it is tried.
            max_task_retries: How often the call is given to another replica after its own has died. It may then have
                run more than once. A replica that was down before it ran does not count.
            **kwargs: Its keyword arguments.
        """
        retries_left = max_task_retries
        while True:
            handle = self.pick()
            try:
                return await handle.method_named(method).options(timeout_s=timeout_s).remote(*args, **kwargs)
            except ActorUnavailableError as error:
                if max_task_retries == 0 or not self._serves_without(handle, error):
                    raise
            except ActorDiedError as error:
                if retries_left == 0 or not self._serves_without(handle, error):
                    raise
                retries_left -= 1

    def _serves_without(self, handle: ActorHandle, error: ActorError) -> bool:
        """Whether it was this replica that ended, not an actor that its method called; and others are left."""
        return error.actor == handle.name and not all(each.is_down for each in self.handles)

    async def call_all(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `method` on every replica and return their results in the order of the replicas.

        The first exception is raised, and cancels the other calls. To send something large, `share` it first.
        """
        with errors_as_themselves():
            async with asyncio.TaskGroup() as group:
                bound = [handle.method_named(method).options(timeout_s=timeout_s) for handle in self.handles]
                calls = [group.create_task(_await(each.remote(*args, **kwargs))) for each in bound]
        return [call.result() for call in calls]

    async def map(
        self,
        method: str,
        items: Iterable[Any],
        *,
        timeout_s: float | None = None,
        max_task_retries: int = 0,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Call `method` with every item and return the results in the order of the items.

        Args:
            method: Name of the method; it takes one item.
            items: Taken one by one, as there is room.
            timeout_s: Limit of each call.
            max_task_retries: As for `call`.
            max_in_flight: Calls under way at the same time; by default 16 per replica.
            return_exceptions: Put an exception in the place of its result instead of ending the whole.
            on_progress: Called with the number of calls that have ended, once for each.

        Cancelling it, or the first exception, cancels the calls under way.
        """
        ends = self.map_unordered(
            method,
            items,
            timeout_s=timeout_s,
            max_task_retries=max_task_retries,
            max_in_flight=max_in_flight,
            return_exceptions=return_exceptions,
            on_progress=on_progress,
        )
        results = {index: outcome async for index, outcome in ends}
        return [results[index] for index in range(len(results))]

    async def map_unordered(
        self,
        method: str,
        items: Iterable[Any],
        *,
        timeout_s: float | None = None,
        max_task_retries: int = 0,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (position of the item, result) as the calls end. Arguments as for `map`.

        Leaving the loop early cancels the calls under way; for that, use ``contextlib.aclosing``.
        """
        limit = _IN_FLIGHT_PER_REPLICA * len(self.handles) if max_in_flight is None else max_in_flight
        if limit < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}.")
        running: dict[asyncio.Task[Any], int] = {}
        source = enumerate(items)
        num_ended = 0
        try:
            more = True
            while more or running:
                while more and len(running) < limit:
                    index, item = next(source, (-1, None))
                    if more := index >= 0:
                        call = self.call(method, item, timeout_s=timeout_s, max_task_retries=max_task_retries)
                        running[asyncio.ensure_future(call)] = index
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=running.__getitem__):
                    index = running.pop(task)
                    error = task.exception()
                    if error is not None and not return_exceptions:
                        raise error
                    num_ended += 1
                    if on_progress is not None:
                        on_progress(num_ended)
                    yield index, error if error is not None else task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def statistics(self) -> dict[str, Any]:
        """Return how many replicas serve, and each one's statistics."""
        each = [handle.statistics() for handle in self.handles]
        return {
            "num_actors": len(each),
            "num_up": sum(handle.is_up for handle in self.handles),
            "num_down": sum(handle.is_down for handle in self.handles),
            "pending": sum(handle.pending for handle in self.handles),
            "actors": each,
        }

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop all replicas, and wait until nothing of them is left."""
        await asyncio.gather(*(handle.stop(grace_s) for handle in self.handles))

    def kill(self) -> None:
        """End all replicas at once."""
        for handle in self.handles:
            handle.kill()


async def _await(future: CallFuture[Any]) -> Any:
    return await future
