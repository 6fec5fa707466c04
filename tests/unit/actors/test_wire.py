from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrl_lite.actors.payload import Packed, pack, share, unpack
from xrl_lite.actors.slots import MethodKind, SlotPage
from xrl_lite.actors.wire import (
    EMPTY,
    Frame,
    FrameReader,
    FrameWriter,
    Kind,
    PipeReader,
    PipeWriter,
    SocketReader,
    reply_pipe,
)
from xrl_lite.errors import PayloadError


def read_all(reader: FrameReader, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        frames += reader.read()
    return frames


def exchange(payloads: list[Packed]) -> list[Frame]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer, reader = FrameWriter(ours), SocketReader(theirs)
        frames: list[Frame] = []
        for number, packed in enumerate(payloads):
            writer.put(Kind.CALL, number, number % 7, packed)
        while writer.pending:
            try:
                writer.flush()
            except BlockingIOError:
                frames += reader.read()
        return frames + read_all(reader, len(payloads) - len(frames))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60_000), max_size=40))
def test_frames_arrive_whole_and_in_order(sizes: list[int]) -> None:
    frames = exchange([Packed(os.urandom(1) * size) for size in sizes])
    assert [(frame.call_id, len(frame.packed.body)) for frame in frames] == list(enumerate(sizes))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60_000), max_size=40))
def test_frames_on_a_pipe_arrive_whole_and_in_order_also_where_it_is_full_between(sizes: list[int]) -> None:
    reading, writing = reply_pipe()
    reader, writer = PipeReader(reading), PipeWriter(writing)
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    sender = threading.Thread(
        target=lambda: [writer.send(Kind.RESULT, number, 5, body) for number, body in enumerate(bodies)]
    )
    sender.start()
    frames: list[Frame] = []
    while len(frames) < len(bodies):
        select.select([reader], [], [])
        frames += reader.read()
    sender.join()
    assert [(frame.call_id, frame.slot, frame.packed.body) for frame in frames] == [
        (number, 5, body) for number, body in enumerate(bodies)
    ]
    with pytest.raises(BlockingIOError):
        reader.read()
    os.close(writing)
    with pytest.raises(EOFError):
        reader.read()
    reader.close()


def test_what_a_dead_process_has_written_on_a_pipe_can_be_read() -> None:
    reading, writing = reply_pipe()
    program = (
        "import os, signal; from xrl_lite.actors.wire import Kind, PipeWriter\n"
        f"for number in range(100): PipeWriter({writing}).send(Kind.RESULT, number, 0, b'done')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], pass_fds=[writing], check=False, timeout=60)
    os.close(writing)
    reader = PipeReader(reading)
    assert [frame.call_id for frame in reader.read()] == list(range(100))
    with pytest.raises(EOFError):
        reader.read()
    reader.close()


def test_descriptors_stay_with_their_frames() -> None:
    sizes = [10, 100_000, 5, 5, 200_000, 300_000]
    frames = exchange([pack(np.full(size, size), name="value") for size in sizes])
    assert [int(unpack(frame.packed)[0]) for frame in frames] == sizes
    assert [bool(frame.packed.segments) for frame in frames] == [False, True, False, False, True, True]


def test_the_end_of_the_other_side_is_told() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        SocketReader(theirs).read()


def test_more_shared_values_than_fit_are_refused() -> None:
    shared = [share(b"x" * 100_000) for _ in range(101)]
    with pytest.raises(PayloadError, match="at most 100"):
        pack(shared, name="value")
    frames = exchange([pack(shared[:100], name="value"), pack(shared[:100], name="value")])
    assert all(unpack(frame.packed)[99].get() == b"x" * 100_000 for frame in frames)


def test_nothing_waits_where_nothing_is() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BlockingIOError):
        SocketReader(theirs).read(socket.MSG_DONTWAIT)
    assert EMPTY.size_bytes == 0


def test_a_slot_tells_each_side_what_the_other_did() -> None:
    ours = SlotPage.create(4)
    theirs = SlotPage(os.dup(ours.fd), 4)
    assert ours.started_ns(3) == 0
    assert theirs.start(3, MethodKind.ASYNC)
    assert ours.started_ns(3) > 0
    assert ours.kind(3) is MethodKind.ASYNC
    ours.cancel(3)
    assert theirs.cancelled(3)
    assert not theirs.cancelled(2)
    ours.clear(3)
    ours.cancel(3)
    assert not theirs.start(3, MethodKind.SYNC)
    assert ours.heartbeat_ns == 0
    theirs.beat()
    assert ours.heartbeat_ns > 0
    ours.close()
    theirs.close()
