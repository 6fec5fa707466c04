"""A page of memory that the driver and one child share: which call started when, and which is to be cancelled.

::

    word 0        heartbeat of the child's event loop (ns)
    per slot      started (ns) and kind of method, 0 = not yet | cancelled by the driver

Every call that is with the child occupies one slot. The child writes `started`, then looks at `cancelled`; the driver
writes `cancelled`, then looks at `started`. So at least one of them notices, without a message and without a lock, also
while the child's only thread computes; and after a crash the page still tells which calls had begun.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum

HEARTBEAT_S = 0.5
"""Seconds from one heartbeat of a child's event loop to the next."""

_WORDS_PER_SLOT = 2
_KIND_BITS = 2
_BYTES_PER_WORD = 8


class MethodKind(IntEnum):
    """How the running method is executed."""

    UNKNOWN = 0
    SYNC = 1
    ASYNC = 2


class SlotPage:
    """The page. Times are of the monotonic clock, which all processes of a machine share."""

    def __init__(self, fd: int, num_slots: int) -> None:
        self.fd = fd
        self.num_slots = num_slots
        size = (1 + num_slots * _WORDS_PER_SLOT) * _BYTES_PER_WORD
        os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        self._words = memoryview(self._map).cast("Q")
        self._cancelled: set[int] = set()

    @classmethod
    def create(cls, num_slots: int) -> SlotPage:
        """Make a new page."""
        return cls(os.memfd_create("xrl-lite-slots"), num_slots)

    def close(self) -> None:
        """Unmap it and close its descriptor."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def clear(self, slot: int) -> None:
        """Prepare a slot for the next call (driver)."""
        at = 1 + slot * _WORDS_PER_SLOT
        self._words[at] = 0
        if slot in self._cancelled:
            self._cancelled.remove(slot)
            self._words[at + 1] = 0

    def start(self, slot: int, kind: MethodKind) -> bool:
        """Note that the call begins (child); return False where it was cancelled before."""
        at = 1 + slot * _WORDS_PER_SLOT
        self._words[at] = time.monotonic_ns() << _KIND_BITS | kind
        return not self._words[at + 1]

    def turn_async(self, slot: int) -> None:
        """Note that what is left of the call is awaited (child)."""
        at = 1 + slot * _WORDS_PER_SLOT
        self._words[at] = self._words[at] >> _KIND_BITS << _KIND_BITS | MethodKind.ASYNC

    def started_ns(self, slot: int) -> int:
        """When the call began, 0 if it has not (driver)."""
        return self._words[1 + slot * _WORDS_PER_SLOT] >> _KIND_BITS

    def kind(self, slot: int) -> MethodKind:
        """What kind of method runs (driver)."""
        return MethodKind(self._words[1 + slot * _WORDS_PER_SLOT] & ((1 << _KIND_BITS) - 1))

    def cancel(self, slot: int) -> None:
        """Mark the call as cancelled (driver)."""
        self._cancelled.add(slot)
        self._words[2 + slot * _WORDS_PER_SLOT] = 1

    def cancelled(self, slot: int) -> bool:
        """Whether the call is marked as cancelled (child)."""
        return bool(self._words[2 + slot * _WORDS_PER_SLOT])

    def beat(self) -> None:
        """Note that the child's event loop turns."""
        self._words[0] = time.monotonic_ns()

    @property
    def heartbeat_ns(self) -> int:
        """When the child's event loop last turned; 0 if it has none."""
        return self._words[0]
