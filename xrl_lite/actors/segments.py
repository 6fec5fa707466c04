"""Anonymous shared memory for large payloads.

A segment is a memfd: it has no name, so there is nothing to unlink and nothing to leak. The kernel frees it with the
last descriptor and the last mapping, also when a process is killed. It is written once, by `Segment.write`, and never
changed afterwards, so any number of processes may map it at the same time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

THRESHOLD_BYTES = 64 * 1024
"""Smaller buffers travel inside the frame: a segment costs four system calls, which a copy beats below this size."""

_ALIGN = 64
_MAP_FROM_BYTES = 1 << 20
_MAX_WRITE_BYTES = 1 << 30
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """One descriptor of one piece of anonymous memory. Closed by `close`, or when nobody refers to it any more."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._closer = weakref.finalize(self, os.close, fd)
        self._closer.atexit = False

    @classmethod
    def write(cls, buffers: Sequence[memoryview]) -> tuple[Self, list[tuple[int, int]]]:
        """Copy `buffers` into a new segment; return it with the offset and length of each of them."""
        fd = os.memfd_create("xrl-lite")
        segment = cls(fd, 0)
        places: list[tuple[int, int]] = []
        end = 0
        for buffer in buffers:
            offset = -(-end // _ALIGN) * _ALIGN
            _write_all(fd, buffer, offset)
            end = offset + buffer.nbytes
            places.append((offset, buffer.nbytes))
        segment.size_bytes = end
        return segment, places

    @classmethod
    def received(cls, fd: int) -> Self:
        """Take over a descriptor that another process sent."""
        return cls(fd, os.fstat(fd).st_size)

    def view(self) -> memoryview:
        """Return the contents as private, writable memory: writing to it changes neither the segment nor other views.

        Nothing is copied: a page is duplicated only when it is written to. The memory lives as long as the view.
        """
        if self.size_bytes < _MAP_FROM_BYTES:
            return self._copy()
        # ctypes rather than the mmap module, which keeps a duplicate of the descriptor open for every live mapping
        address = _mmap(None, self.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, self.fd, 0)
        if address is None or address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"Cannot map {self.size_bytes} bytes of shared memory: {os.strerror(number)}")
        memory = (ctypes.c_char * self.size_bytes).from_address(address)
        weakref.finalize(memory, _munmap, address, self.size_bytes).atexit = False
        return memoryview(memory).cast("B")

    def close(self) -> None:
        """Give the descriptor back. Views stay valid."""
        self._closer()

    def _copy(self) -> memoryview:
        memory = memoryview(bytearray(self.size_bytes))
        done = 0
        while done < self.size_bytes:
            done += os.preadv(self.fd, [memory[done:]], done)
        return memory


def _write_all(fd: int, buffer: memoryview, offset: int) -> None:
    # pwrite rather than a mapping: twice as fast into fresh memory, since it takes no page faults
    done = 0
    while done < buffer.nbytes:
        done += os.pwrite(fd, buffer[done : done + _MAX_WRITE_BYTES], offset + done)
