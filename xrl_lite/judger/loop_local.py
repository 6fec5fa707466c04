"""Objects that belong to one event loop: clients, limiters. A judger may be used from several loops in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class LoopLocal(Generic[T]):
    """Makes one object for each running loop. A pickled copy starts empty."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        self._last: tuple[ref[asyncio.AbstractEventLoop], T] | None = None

    def get(self, loop: asyncio.AbstractEventLoop | None = None) -> T:
        """Return the object of the running loop, made on first use; `loop` is that loop, where it is at hand."""
        if loop is None:
            loop = asyncio.get_running_loop()
        if self._last is not None and self._last[0]() is loop:  # nearly always
            return self._last[1]
        if loop not in self._made:
            self._made[loop] = self._make()
        self._last = (ref(loop), self._made[loop])
        return self._last[1]

    def take(self) -> T | None:
        """Return and forget the object of the running loop, if it was made."""
        self._last = None
        return self._made.pop(asyncio.get_running_loop(), None)

    def __reduce__(self) -> tuple[type[LoopLocal[T]], tuple[Callable[[], T]]]:
        return LoopLocal, (self._make,)
