from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from xrl_lite.actors.segments import HEADER_BYTES, THRESHOLD_BYTES, BlockPool, Mappings, Segment, place, size_class


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def lend(pool: BlockPool, content: bytes) -> Segment:
    return pool.write([memoryview(content)], place([len(content)], HEADER_BYTES))


def receive(segment: Segment, mappings: Mappings) -> Segment:
    segment.pass_on()
    return Segment.received(os.dup(segment.fd), mappings, lent=True)


@pytest.mark.parametrize("size", [1, THRESHOLD_BYTES, (1 << 20) + 7])
@pytest.mark.parametrize("lent", [False, True])
def test_segments_hold_what_was_written_at_aligned_places(size: int, lent: bool) -> None:
    parts = [memoryview(bytes([index % 256]) * (size + index)) for index in range(3)]
    places = place([part.nbytes for part in parts], HEADER_BYTES if lent else 0)
    segment = BlockPool().write(parts, places) if lent else Segment.write(parts, places)
    view = segment.borrow() if lent else segment.view()
    assert [bytes(view[offset : offset + length]) for offset, length in places] == parts
    assert all(offset % 64 == 0 for offset, _ in places)


def test_a_block_is_lent_again_when_its_reader_and_its_owner_have_let_go() -> None:
    pool, mappings = BlockPool(), Mappings()
    for turn in range(4):
        segment = lend(pool, bytes([turn]) * 100_000)
        view = receive(segment, mappings).borrow()[HEADER_BYTES : HEADER_BYTES + 100_000]
        assert bytes(view) == bytes([turn]) * 100_000
        del segment
        assert pool.idle_bytes == size_class(100_000)
        del view
    assert pool.idle_bytes == size_class(100_000), "one block served all four"


def test_what_a_reader_still_sees_is_never_written_again() -> None:
    pool, mappings = BlockPool(), Mappings()
    views: list[np.ndarray] = []
    for turn in range(5):
        segment = lend(pool, bytes([turn]) * 100_000)
        views.append(np.frombuffer(receive(segment, mappings).borrow(), np.uint8)[HEADER_BYTES:][:100_000])
    assert [set(view) for view in views] == [{turn} for turn in range(5)]
    assert len({view.ctypes.data for view in views}) == 5


def test_a_block_that_its_owner_may_still_send_again_is_not_reused() -> None:
    pool, mappings = BlockPool(), Mappings()
    first = lend(pool, b"a" * 100_000)
    receive(first, mappings).borrow()  # read and dropped: the reader has let go
    second = lend(pool, b"b" * 100_000)
    assert second.fd != first.fd
    assert bytes(receive(first, mappings).borrow()[HEADER_BYTES:][:3]) == b"aaa"


def test_a_block_that_nobody_read_is_lent_again() -> None:
    pool, mappings = BlockPool(), Mappings()
    lend(pool, b"a" * 100_000)  # never sent
    assert pool.idle_bytes == size_class(100_000)
    receive(lend(pool, b"b" * 100_000), mappings)  # dropped
    assert pool.idle_bytes == size_class(100_000)
    at_last = receive(receive(lend(pool, b"c" * 100_000), mappings), mappings)
    held = lend(pool, b"d" * 100_000)
    assert bytes(at_last.borrow()[HEADER_BYTES:][:3]) == b"ccc"
    del at_last
    held.close()
    assert pool.idle_bytes == 2 * size_class(100_000)


def test_idle_blocks_over_the_bound_are_given_back_also_if_their_reader_vanished() -> None:
    pool = BlockPool(max_idle_bytes=3 * size_class(100_000))
    before = open_descriptors()
    for _ in range(50):
        lend(pool, b"x" * 100_000).pass_on()  # nobody ever reads it, as when its reader was killed
    assert pool.idle_bytes <= 4 * size_class(100_000)
    assert open_descriptors() <= before + 5
    pool.clear()
    assert open_descriptors() == before


def test_readers_forget_the_mappings_of_blocks_that_were_given_up() -> None:
    def shared_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:xrl-lite")

    pool, mappings = BlockPool(), Mappings()
    before = shared_mappings()
    receive(lend(pool, b"x" * 100_000), mappings).borrow()
    pool.clear()
    receive(lend(pool, b"y" * 300_000), mappings).borrow()
    pool.clear()
    gc.collect()
    assert shared_mappings() == before + 1, "the last one is kept until another block arrives"
