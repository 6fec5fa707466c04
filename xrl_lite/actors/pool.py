"""Several actors of one class behind one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from xrl_lite.actors.handle import ActorHandle
from xrl_lite.errors import ActorUnavailableError, did_you_mean

Policy = Literal["round_robin", "least_loaded"]


class ActorPool:
    """Spreads calls over replicas, in turn or to the one with fewest calls. Those that are down are skipped."""

    def __init__(self, handles: Sequence[ActorHandle], policy: Policy = "round_robin") -> None:
        if not handles:
            raise ValueError("An ActorPool needs at least one handle.")
        if policy not in get_args(Policy):
            raise ValueError(f"Unknown policy {policy!r}.{did_you_mean(policy, get_args(Policy))}")
        self.handles = list(handles)
        self.policy: Policy = policy
        self._next = 0

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

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call `method` on one replica and return what it returns. Cancelling it cancels the call."""
        return await self.pick().method_named(method).options(timeout_s=timeout_s).remote(*args, **kwargs)

    async def map(
        self,
        method: str,
        items: Iterable[Any],
        *,
        timeout_s: float | None = None,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Call `method` with every item and return the results in the order of the items.

        Args:
            method: Name of the method; it takes one item.
            items: Taken one by one, as there is room.
            timeout_s: Limit of each call.
            max_in_flight: Calls under way at the same time; by default 16 per replica.
            return_exceptions: Put an exception in the place of its result instead of ending the whole.
            on_progress: Called with the number of calls that have ended.

        Cancelling it, or the first exception, cancels the calls under way.
        """
        results: dict[int, Any] = {}
        async for index, outcome in self.map_unordered(
            method, items, timeout_s=timeout_s, max_in_flight=max_in_flight, return_exceptions=return_exceptions
        ):
            results[index] = outcome
            if on_progress is not None:
                on_progress(len(results))
        return [results[index] for index in range(len(results))]

    async def map_unordered(
        self,
        method: str,
        items: Iterable[Any],
        *,
        timeout_s: float | None = None,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (position of the item, result) as the calls end. Arguments as for `map`."""
        limit = max_in_flight or 16 * len(self.handles)
        running: dict[asyncio.Task[Any], int] = {}
        source = enumerate(items)
        try:
            more = True
            while more or running:
                while more and len(running) < limit:
                    index, item = next(source, (-1, None))
                    if more := index >= 0:
                        running[asyncio.ensure_future(self.call(method, item, timeout_s=timeout_s))] = index
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=running.__getitem__):
                    index = running.pop(task)
                    error = task.exception()
                    if error is not None and not return_exceptions:
                        raise error
                    yield index, error if error is not None else task.result()
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def statistics(self) -> dict[str, Any]:
        """Return how many replicas serve, and each one's statistics."""
        each = [handle.statistics() for handle in self.handles]
        return {
            "num_actors": len(each),
            "num_up": sum(handle.is_up for handle in self.handles),
            "pending": sum(handle.pending for handle in self.handles),
            "actors": each,
        }

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop all replicas."""
        await asyncio.gather(*(handle.stop(grace_s) for handle in self.handles))
