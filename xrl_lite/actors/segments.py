"""Anonymous shared memory for large payloads.

A segment is a memfd: it has no name, so there is nothing to unlink and nothing to leak. The kernel frees it with the
last descriptor and the last mapping, also when a process is killed. There are two kinds:

own   written once, by `Segment.write`, and never changed; any number of processes may read it, each of them through a
      private mapping. For what is sent several times (`share`, constructors, calls that may be retried).
lent  a block of the sender's `BlockPool`, for one reader, through a shared mapping that the reader keeps. When the
      reader has let go of the last view, or has dropped what it never read, and the sender of its `Segment`, the block
      is written again: memory that is mapped already takes a copy five times faster than fresh memory does.

::

    block   word 0  lent: 1 from when it is filled until its reader has let go
            word 1  retired: 1 when its owner has given it up, so that readers forget their mapping
            from 64 contents
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from xrl_lite.actors.forks import tell_forks

THRESHOLD_BYTES = 64 * 1024
"""Smaller buffers travel inside the frame: a segment costs several system calls, which a copy beats below this size."""

MAX_IDLE_BYTES = 512 << 20
"""Memory that a pool keeps in blocks which nobody uses at the moment."""

HEADER_BYTES = 64
_ALIGN = 64
_LENT, _RETIRED = 0, 1
_MAP_FROM_BYTES = 1 << 20
_MAX_WRITE_BYTES = 1 << 30
_COPY_BYTES = 64 << 20  # without a pause, with the interpreter lock held; from here on the C library copies faster
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: all pages at once take half the time of one fault for each
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Places = list[tuple[int, int]]


class Segment:
    """One descriptor of one piece of anonymous memory. Given back by `close`, or when nobody refers to it any more."""

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        mappings: Mappings | None = None,
        release: Callable[[], None] | None = None,
        loan: _Loan | None = None,
    ) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._mappings = mappings
        self._loan = loan
        self._closer = weakref.finalize(self, release) if release is not None else weakref.finalize(self, os.close, fd)
        self._closer.atexit = False

    @classmethod
    def write(cls, parts: Sequence[memoryview], places: Places) -> Self:
        """Copy `parts` to their `places` in a new segment."""
        fd = os.memfd_create("xrl-lite")
        segment = cls(fd, 0)
        for part, (offset, _) in zip(parts, places, strict=True):
            _write_all(fd, part, offset)
        segment.size_bytes = end_of(places)
        return segment

    @classmethod
    def received(cls, fd: int, mappings: Mappings, *, lent: bool = False) -> Self:
        """Take over a descriptor that another process sent; `lent` for a block that wants to be given back."""
        size_bytes = os.fstat(fd).st_size
        if not lent:
            return cls(fd, size_bytes, mappings)
        loan = _Loan()
        return cls(fd, size_bytes, mappings, functools.partial(_close_unread, fd, loan), loan)

    def view(self) -> memoryview:
        """Return the contents as private, writable memory: writing to it changes neither the segment nor other views.

        Nothing is copied: a page is duplicated only when it is written to. The memory lives as long as the view.
        """
        if self.size_bytes < _MAP_FROM_BYTES:
            return self._copy()
        return memoryview(_map(self.fd, size_class(self.size_bytes), mmap.MAP_PRIVATE)).cast("B")

    def borrow(self) -> memoryview:
        """Return the contents of a lent block, writable. Its owner writes to it again when the last view is gone."""
        if self._mappings is None:  # the reader is in the owner's process
            self._mappings = Mappings()
        view = self._mappings.borrow(self.fd, self.size_bytes, self._loan.fork if self._loan is not None else None)
        self.pass_on()
        return view

    def pass_on(self) -> None:
        """Note that it was sent or is read, so that it is for others to say when its block may be written again."""
        if self._loan is not None:
            self._loan.is_ours = False

    def close(self) -> None:
        """Give the descriptor back. Views stay valid."""
        self._closer()

    def _copy(self) -> memoryview:
        memory = memoryview(bytearray(self.size_bytes))
        done = 0
        while done < self.size_bytes:
            done += os.preadv(self.fd, [memory[done:]], done)
        return memory


class _Forks:
    """How often this process, or one that it is a fork of, has been forked: what it had then it shares with others."""

    number = 0

    @classmethod
    def count(cls) -> None:
        """Note that another one begins."""
        cls.number += 1


os.register_at_fork(before=_Forks.count)


class _Loan:
    """A lent block whose reader is yet to come. Where none comes, whoever has the block last gives it back."""

    __slots__ = ("fork", "is_ours")

    def __init__(self) -> None:
        self.is_ours = True
        self.fork = _Forks.number

    @property
    def ends(self) -> bool:
        """Whether nobody else has the block, as one of its segments in this process ends."""
        return self.is_ours and _Forks.number == self.fork


def _close_unread(fd: int, loan: _Loan) -> None:
    if loan.ends:
        os.pwrite(fd, bytes(8), 8 * _LENT)
    os.close(fd)


class Mappings:
    """Where a process has mapped the blocks that one sender lends to it again and again."""

    def __init__(self) -> None:
        self._by_inode: dict[int, Any] = {}

    def borrow(self, fd: int, size_bytes: int, fork: int | None = None) -> memoryview:
        """Return the contents of the block behind `fd`; it counts as lent until the last view of them is gone.

        If this process was forked since it got the block (`fork`, now when not given), that is never.
        """
        inode = os.fstat(fd).st_ino  # no other block can have it while this one is mapped
        memory = self._by_inode.get(inode)
        if memory is None:
            self._forget_retired()
            memory = self._by_inode[inode] = _map(fd, size_bytes, mmap.MAP_SHARED)
        contents = (ctypes.c_char * size_bytes).from_buffer(memory)
        fork = _Forks.number if fork is None else fork
        weakref.finalize(contents, _give_back, memory, fork).atexit = False
        return memoryview(contents).cast("B")

    def _forget_retired(self) -> None:
        for inode, memory in list(self._by_inode.items()):
            if _word(memory, _RETIRED):
                del self._by_inode[inode]  # unmapped when the last view is gone


class BlockPool:
    """The blocks that this process fills and lends. May be used from any thread."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.RLock()  # the collector may run a user's __del__ in here, which sends something
        self._returned: deque[_Block] = deque()
        self._idle: deque[_Block] = deque()
        self._idle_bytes = 0
        tell_forks(self)

    @property
    def idle_bytes(self) -> int:
        """Memory in blocks that no `Segment` of this process refers to; some of them may have a reader still."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def write(self, parts: Sequence[memoryview], places: Places) -> Segment:
        """Copy `parts` to their `places` in a block, and lend it to whoever receives the segment."""
        block = self._take(size_class(end_of(places)))
        block.fill(parts, places)
        loan = _Loan()
        release = functools.partial(_return, block, self._returned, loan)
        return Segment(block.fd, block.size_bytes, release=release, loan=loan)

    def after_fork(self) -> None:
        """Leave all blocks to the parent; those that are in use here must not come back to this pool either."""
        self._lock = threading.RLock()
        self._returned, self._idle, self._idle_bytes = deque(), deque(), 0

    def clear(self) -> None:
        """Give up all blocks that nobody holds."""
        with self._lock:
            self._collect()
            self._shrink(0)

    def _take(self, size_bytes: int) -> _Block:
        with self._lock:
            self._collect()
            self._shrink(self._max_idle_bytes)
            for block in list(self._idle):
                if block.size_bytes == size_bytes and not block.lent and self._claim(block):
                    return block
        return _Block(size_bytes)

    def _claim(self, block: _Block) -> bool:
        try:
            self._idle.remove(block)
        except ValueError:
            return False
        self._idle_bytes -= block.size_bytes
        return True

    def _collect(self) -> None:
        # blocks come back through a queue, since a finalizer may run anywhere, also in a thread that holds the lock
        while self._returned:
            block = self._returned.popleft()
            self._idle.append(block)
            self._idle_bytes += block.size_bytes

    def _shrink(self, max_bytes: int) -> None:
        while self._idle_bytes > max_bytes and self._idle:
            block = self._idle[0]
            if self._claim(block):
                block.retire()


def _return(block: _Block, returned: deque[_Block], loan: _Loan) -> None:
    if loan.ends:
        block.give_back()
    returned.append(block)


class _Block:
    """A piece of shared memory of which this process is the only writer."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("xrl-lite")
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, size_bytes)
        self._header = _map(self.fd, HEADER_BYTES, mmap.MAP_SHARED)
        self._memory: memoryview | None = None
        self._filled = False

    @property
    def lent(self) -> bool:
        return bool(_word(self._header, _LENT))

    def fill(self, parts: Sequence[memoryview], places: Places) -> None:
        _set_word(self._header, _LENT, 1)
        if self._filled and self._memory is None:
            memory = _map(self.fd, self.size_bytes, mmap.MAP_SHARED)
            _madvise(ctypes.addressof(memory), end_of(places), _POPULATE_WRITE)  # older kernels refuse: no harm
            self._memory = memoryview(memory).cast("B")
        for part, (offset, _) in zip(parts, places, strict=True):
            if self._memory is None:
                _write_all(self.fd, part, offset)
            else:
                for done in range(0, part.nbytes, _COPY_BYTES):
                    piece = part[done : done + _COPY_BYTES]
                    self._memory[offset + done : offset + done + piece.nbytes] = piece
        self._filled = True

    def give_back(self) -> None:
        _set_word(self._header, _LENT, 0)

    def retire(self) -> None:
        _set_word(self._header, _RETIRED, 1)


def place(sizes: Sequence[int], begin: int) -> Places:
    """Return offset and length of each of several parts, behind one another from `begin` on."""
    places: Places = []
    for size in sizes:
        begin = -(-begin // _ALIGN) * _ALIGN
        places.append((begin, size))
        begin += size
    return places


def end_of(places: Places) -> int:
    """Return where the last part ends."""
    offset, length = places[-1]
    return offset + length


def size_class(num_bytes: int) -> int:
    """Return the size of the block for so many bytes: a power of two. Pages that are never written take no memory."""
    return max(2 * THRESHOLD_BYTES, 1 << (num_bytes - 1).bit_length())


def _map(fd: int, size_bytes: int, flags: int) -> Any:
    """Map a file; it is unmapped when nothing refers to the returned ctypes array any more."""
    # ctypes rather than the mmap module, which keeps a duplicate of the descriptor open for every live mapping
    address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"Cannot map {size_bytes} bytes of shared memory: {os.strerror(number)}")
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _munmap, address, size_bytes).atexit = False
    return memory


def _give_back(memory: Any, fork: int) -> None:
    if _Forks.number == fork:  # neither a fork nor its parent knows whether the other one still reads
        _set_word(memory, _LENT, 0)


def _word(memory: Any, index: int) -> int:
    return ctypes.c_uint64.from_buffer(memory, 8 * index).value


def _set_word(memory: Any, index: int, value: int) -> None:
    ctypes.c_uint64.from_buffer(memory, 8 * index).value = value


def _write_all(fd: int, buffer: memoryview, offset: int) -> None:
    # pwrite rather than a mapping: twice as fast into fresh memory, since it takes no page faults
    done = 0
    while done < buffer.nbytes:
        done += os.pwrite(fd, buffer[done : done + _MAX_WRITE_BYTES], offset + done)
