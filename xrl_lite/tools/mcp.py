"""Tools of MCP servers, with the official client (extra ``xrl-lite[mcp]``).

Each server has an actor that holds the connection, and the server's program below it, so that neither outlives the run
and calls may come from any loop.

Waits for    the server: `start_timeout_s` to connect, `call_timeout_s` for a call
Is woken by  its answer; what it does not answer is ended with the call
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from xrl_lite import actors
from xrl_lite.actors import ActorHandle, RestartPolicy
from xrl_lite.actors.orphans import family_mark
from xrl_lite.errors import ToolError, did_you_mean
from xrl_lite.lazy import is_installed
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.config import McpServerConfig
from xrl_lite.tools.response import ToolResponse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mcp import MCPError

    from xrl_lite.actors import ActorSystem

T = TypeVar("T")

_SESSION_IS_GONE = "Session terminated"
"""What the client says when a server does not know the session; the code alone stands for other troubles too."""
_RESTART = RestartPolicy(max_restarts=10, window_s=60.0)


async def connect(config: McpServerConfig, *, system: ActorSystem | None = None) -> list[BaseTool]:
    """Start or reach a server and return its tools.

    Raises:
        ToolError: the client is not installed, the server does not answer, or lacks a tool that was asked for.
    """
    if not is_installed("mcp"):
        raise ToolError("MCP servers need the official client. Install it: pip install 'xrl-lite[mcp]'.")
    host = (system or actors.default_system()).spawn(
        McpHost,
        config,
        name=f"tool/mcp/{config.name}/{uuid.uuid4().hex[:6]}",
        num_cpus=config.num_cpus,
        max_concurrency=64,
        restart=_RESTART,
        start_timeout_s=config.start_timeout_s,
    )
    try:
        listed = await host.list_tools.options(timeout_s=config.start_timeout_s).remote()
        return _tools(config, host, listed)
    except ToolError:
        await host.stop()
        raise
    except Exception as error:
        await host.stop()
        target = config.url or " ".join([config.command or "", *config.args])
        raise ToolError(
            f"MCP server {config.name!r} ({target}) cannot be used: {type(error).__name__}: {error}"
        ) from error


class McpHost:
    """Holds the connection to one server, inside an actor.

    Args:
        config: The server.
    """

    def __init__(self, config: McpServerConfig) -> None:
        self._config = config
        self._connection: _Connection | None = None

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return name, description and schema of every tool.

        Raises:
            ToolError: the connection ended meanwhile; the next call makes a new one.
        """
        return await self._ask(self._list)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResponse:
        """Carry out a call.

        Raises:
            ToolError: the tool reports an error; the message is its text. Or as in `list_tools`.
        """

        async def call(client: Any) -> Any:
            return await client.call_tool(name, arguments)

        result = await self._ask(call)
        texts = [part.text for part in result.content if part.type == "text"]
        images = [part.data for part in result.content if part.type == "image"]
        if result.is_error:
            raise ToolError("\n".join(texts) or "the tool reports an error without saying which")
        return ToolResponse(text="\n".join(texts), image=images or None)

    async def _list(self, client: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor) if cursor else await client.list_tools()
            found += [
                {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                return found

    async def _ask(self, request: Callable[[Any], Awaitable[T]]) -> T:
        """Make a request, connecting first where nobody did; a connection that ended is made anew by the next."""
        from mcp import MCPError

        if self._connection is None or self._connection.is_over:
            self._connection = _Connection(self._config)
        connection = self._connection
        client = await connection.client()
        try:
            return await request(client)
        except MCPError as error:
            if not _says_it_is_over(error):
                raise
            connection.close()
            raise ToolError(f"the connection to MCP server {self._config.name!r} ended: {error.message}") from error


class _Connection:
    """A connection, held by a task: its contexts must be left by the task that entered them.

    Args:
        config: The server.
    """

    def __init__(self, config: McpServerConfig) -> None:
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._holding = asyncio.create_task(self._hold(config), name=f"mcp-{config.name}")

    @property
    def is_over(self) -> bool:
        """Whether it serves no more requests."""
        return self._closing.is_set() or self._holding.done()

    async def client(self) -> Any:
        """Return the client, once it is connected."""
        return await asyncio.shield(self._client)

    def close(self) -> None:
        """Let it end."""
        self._closing.set()

    async def _hold(self, config: McpServerConfig) -> None:
        from mcp import Client, StdioServerParameters

        target = config.url or StdioServerParameters(
            command=config.command or "", args=config.args, env={**family_mark(), **config.env} or None, cwd=config.cwd
        )
        try:
            async with Client(target) as client:
                self._client.set_result(client)
                await self._closing.wait()  # or until the actor ends
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits for the connection
            if not self._client.done():
                self._client.set_exception(_innermost(error))


class McpTool(BaseTool):
    """One tool of a server.

    Args:
        host: The actor that holds the connection.
        schema: As the server describes it.
    """

    checks_arguments: ClassVar[bool] = True
    limits_itself: ClassVar[bool] = True

    def __init__(self, host: ActorHandle, schema: dict[str, Any]) -> None:
        super().__init__(tool_schema={"type": "function", "function": schema})
        self._host = host

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        call = self._host.call_tool.options(timeout_s=kwargs.get("timeout_s"))
        return await call.remote(self.name, parameters), 0.0, {}

    async def aclose(self) -> None:
        await self._host.stop()


def _tools(config: McpServerConfig, host: ActorHandle, listed: list[dict[str, Any]]) -> list[BaseTool]:
    names = [schema["name"] for schema in listed]
    for wanted in config.tools or ():
        if wanted not in names:
            raise ToolError(
                f"MCP server {config.name!r} has no tool {wanted!r}.{did_you_mean(wanted, names)} "
                f"It has: {', '.join(names) or 'none'}."
            )
    return [McpTool(host, schema) for schema in listed if config.tools is None or schema["name"] in config.tools]


def _says_it_is_over(error: MCPError) -> bool:
    """Return whether a pipe is closed, or a server that was started again does not know the session."""
    from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

    return error.code == CONNECTION_CLOSED or (error.code == INVALID_REQUEST and error.message == _SESSION_IS_GONE)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
