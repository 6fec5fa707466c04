"""Objects that belong to one event loop: clients, limiters. A judger may be used from several loops in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LoopLocal(Generic[T]):
    """Makes one object for each running loop. A pickled copy starts empty."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        """Return the object of the running loop, made on first use."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]

    def take(self) -> T | None:
        """Return and forget the object of the running loop, if it was made."""
        return self._made.pop(asyncio.get_running_loop(), None)

    def __reduce__(self) -> tuple[type[LoopLocal[T]], tuple[Callable[[], T]]]:
        return LoopLocal, (self._make,)
