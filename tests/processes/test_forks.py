"""Processes that hold handles and results fork: nothing that a fork does reaches the actors of its parent."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.contracts import test_handle_bodies as handle_bodies
from tests.processes import bodies
from xrl_lite.actors import ActorHandle, ActorSystem, default_system, init, shutdown
from xrl_lite.actors.segments import HEADER_BYTES, BlockPool, place
from xrl_lite.errors import ActorUnavailableError

LIMIT_S = 30.0

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def victim(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(bodies.Victim)
    handle.ready().result(LIMIT_S)
    yield handle
    handle.stop(0.0).result(LIMIT_S)


def in_fork(function: Callable[[], Any]) -> str:
    """Run `function` in a fork and return what it returns or raises, as a text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(function())
        except BaseException as error:  # noqa: BLE001 to be told
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


class Forking:
    """Forks while it holds the handle of another actor."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def call_in_fork(self) -> str:
        return in_fork(lambda: self.handle.echo.remote("of the fork").result(LIMIT_S))

    def drop_in_fork(self) -> str:
        return in_fork(self._drop)

    def _drop(self) -> str:
        del self.handle
        gc.collect()
        return "dropped"

    def call(self, value: str) -> str:
        return self.handle.echo.remote(value).result(LIMIT_S)


def test_a_fork_is_refused_and_its_parent_gets_its_own_results(victim: ActorHandle) -> None:
    answers = [
        in_fork(lambda: victim.echo.remote("of the fork").result(LIMIT_S)),
        in_fork(lambda: victim.ready().result(LIMIT_S)),
        in_fork(lambda: victim.stop().result(LIMIT_S)),
        in_fork(victim.kill),
    ]
    for text in answers:
        assert text.startswith(f"ActorError: Actor '{victim.name}' cannot be called")
        assert "forked" in text
    assert victim.echo.remote("of the parent").result(LIMIT_S) == "of the parent"
    pid, running = victim.pid, victim.sleep.remote(600)
    assert in_fork(running.cancel) == "True"
    assert not running.done()
    assert victim.pid == pid


def test_a_fork_of_the_driver_starts_no_actors_and_ends_none(system: ActorSystem, victim: ActorHandle) -> None:
    assert in_fork(lambda: system.spawn(bodies.Victim)).startswith("ActorError: ")
    assert in_fork(system.shutdown_now) == "None"
    assert in_fork(system.kill_all) == "None"
    assert victim.ping.remote().result(LIMIT_S) == "pong"


def test_a_fork_has_a_default_system_of_its_own() -> None:
    def call() -> str:
        with_own = default_system().spawn(handle_bodies.Stateful)
        total = with_own.add.remote(2).result(LIMIT_S)
        shutdown()
        return str(total)

    init(num_cpus=2)
    try:
        handle = default_system().spawn(handle_bodies.Stateful)
        assert handle.add.remote(1).result(LIMIT_S) == 1
        assert in_fork(call) == "2"
        assert handle.add.remote(1).result(LIMIT_S) == 2
    finally:
        shutdown()


def test_a_fork_of_an_actor_cannot_use_its_handles_and_does_not_hang_up(
    system: ActorSystem, victim: ActorHandle
) -> None:
    forking = system.spawn(Forking, victim)
    assert forking.call.remote("first").result(LIMIT_S) == "first"
    assert "forked" in forking.call_in_fork.remote().result(LIMIT_S)
    assert forking.drop_in_fork.remote().result(LIMIT_S) == "dropped"
    assert forking.call.remote("second").result(LIMIT_S) == "second"
    forking.stop(0.0).result(LIMIT_S)


def test_memory_that_the_parent_still_reads_is_not_given_back_by_a_fork(victim: ActorHandle) -> None:
    held = [victim.evaluate.remote(LARGE.format(fill=1)).result(LIMIT_S)]
    assert in_fork(held.clear) == "None"
    for fill in (2, 3):
        victim.evaluate.remote(LARGE.format(fill=fill)).result(LIMIT_S)
    assert np.all(held[0] == 1)


def test_memory_that_a_fork_reads_stays_as_it_was_when_its_parent_lets_go(victim: ActorHandle) -> None:
    held = [victim.evaluate.remote(LARGE.format(fill=1)).result(LIMIT_S)]
    unread = victim.evaluate.remote(LARGE.format(fill=2))
    while not unread.done():
        time.sleep(0.001)
    reading, writing = os.pipe()
    with held[0].data as view:
        pid = os.fork()
        if pid == 0:
            try:
                unread.result(LIMIT_S)
                os.close(writing)
                os.read(reading, 1)  # until the parent has let go, and others were answered
                os._exit(0 if set(view.tobytes()) == {1} else 1)
            finally:
                os._exit(2)
    os.close(reading)
    held.clear()
    for fill in (3, 4, 5):
        victim.evaluate.remote(LARGE.format(fill=fill)).result(LIMIT_S)
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    assert np.all(unread.result(LIMIT_S) == 2)


def test_connections_end_for_others_while_a_fork_lives(system: ActorSystem, victim: ActorHandle) -> None:
    caller = system.spawn(Forking, victim)
    assert caller.call.remote("first").result(LIMIT_S) == "first"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        victim.stop(0.0).result(LIMIT_S)
        with pytest.raises(ActorUnavailableError):
            caller.call.remote("second").result(LIMIT_S)
        caller.stop(0.0).result(LIMIT_S)
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_a_fork_takes_no_block_of_its_parent() -> None:
    pool = BlockPool()
    content = [memoryview(bytes(100_000))]
    idle, used = (pool.write(content, place([100_000], HEADER_BYTES)) for _ in range(2))
    idle.close()

    def idle_bytes_in_fork() -> int:
        used.close()
        return pool.idle_bytes

    assert in_fork(idle_bytes_in_fork) == "0"
    assert pool.idle_bytes > 0


LARGE = "__import__('numpy').full(1 << 20, {fill}, 'uint8')"
