"""The connection to a child: who closes it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from xrl_lite.actors.hub import Hub
from xrl_lite.actors.link import Link

LIMIT_S = 20.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    async def end() -> None:
        pass

    hub = Hub("test")
    yield hub
    hub.run(end(), "end", last=True)
    hub.join()


def _ignore(*_: object) -> None:
    pass


def in_hub(hub: Hub, function: Callable[[], Link | None]) -> Link | None:
    done: Future[Link | None] = Future()
    hub.post(lambda: done.set_result(function()))
    return done.result(LIMIT_S)


def test_loops_that_were_closed_are_forgotten(hub: Hub) -> None:
    link = in_hub(hub, lambda: Link(hub, 4, on_readable=_ignore, on_writable=_ignore, on_broken=_ignore))
    assert link is not None

    async def poll() -> None:
        link.poll_from(asyncio.get_running_loop())

    for _ in range(5):
        asyncio.run(poll())
    assert len(link._registered) <= 2, "the hub's, and the last one"  # pyright: ignore[reportPrivateUsage]
    in_hub(hub, link.close)


def test_two_threads_that_find_a_link_unused_close_it_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    link = in_hub(hub, lambda: Link(hub, 4, on_readable=_ignore, on_writable=_ignore, on_broken=_ignore))
    assert link is not None
    closed: list[int] = []
    close = os.close

    def close_while_another_thread_comes(fd: int) -> None:
        closed.append(fd)
        if len(closed) < 10:
            other = threading.Thread(target=link._close_if_unused)  # pyright: ignore[reportPrivateUsage]
            other.start()
            other.join()
        close(fd)

    for fd in link.childs_ends():
        close(fd)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close_while_another_thread_comes)
        in_hub(hub, link.close)
    assert len(closed) == 1
