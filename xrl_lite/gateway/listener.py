"""The web server under the gateway: uvicorn, in the loop that is running, without a hand on its signals."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio
import uvicorn
from anyio.abc import TaskGroup

from xrl_lite.gateway.server import GatewayApp

if TYPE_CHECKING:
    from xrl_lite.gateway.gateway import Gateway

_CLOSE_WITHIN_S = 2
_BACKLOG = 4096
_IDLE_CONNECTION_S = 120
"""Longer than clients keep a connection: else they send on one that is just being closed."""


class Listener:
    """Serves a gateway on a socket.

    Args:
        gateway: What is served.
        listening: A bound socket.
    """

    def __init__(self, gateway: Gateway, listening: socket.socket) -> None:
        self._socket = listening
        self.address: tuple[str, int] = listening.getsockname()[:2]
        """Host and port."""
        config = uvicorn.Config(
            GatewayApp(gateway).asgi,
            http="httptools",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=_CLOSE_WITHIN_S,
        )
        self._server = _Server(config)

    @asynccontextmanager
    async def serving(self, tasks: TaskGroup) -> AsyncGenerator[None]:
        """Serve while inside; connections are closed at the end."""
        ended = anyio.Event()

        async def serve() -> None:
            try:
                with anyio.CancelScope(shield=True):  # it ends by word, so that it can close its connections
                    await self._server.serve(sockets=[self._socket])
            finally:
                ended.set()

        self._socket.listen(_BACKLOG)  # who connects before the server runs waits for it
        tasks.start_soon(serve, name="gateway-server")
        try:
            yield
        finally:
            self._server.end()
            with anyio.CancelScope(shield=True):
                await ended.wait()


class _Server(uvicorn.Server):
    """Ends when it is told to, not when it looks the next time, and does nothing while nothing comes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = anyio.Event()

    def end(self) -> None:
        self.should_exit = True  # also where it has not begun yet
        self._told.set()

    async def main_loop(self) -> None:
        await self._told.wait()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the run."""
        yield
