"""Tools in processes of their own: what may hang, crash or compute for long.

::

    ActorTool --create--> least loaded host --> instance id
              --execute, release--> the host that has the instance

A host is an actor with CPU slots. A call that takes too long ends the host's process, which is replaced; instances that
lived in it are lost, and calls on them fail.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from xrl_lite import actors
from xrl_lite.actors import ActorHandle, RestartPolicy
from xrl_lite.errors import ToolError
from xrl_lite.registry import load_plugins
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.functions import FunctionTool
from xrl_lite.tools.response import ToolResponse, read_return

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem

PRELOAD = ("xrl_lite.tools.actor_tool",)
_RESTART = RestartPolicy(max_restarts=100, window_s=60.0, backoff_s=0.0)


class ToolHost:
    """Runs one tool inside an actor.

    Args:
        make: Makes the tool.
    """

    def __init__(self, make: Callable[[], BaseTool]) -> None:
        load_plugins()
        self._tool = make()
        self._known: set[str] = set()

    async def create(self, instance_id: str, kwargs: Mapping[str, Any]) -> ToolResponse:
        """Set up an instance."""
        _, response = await self._tool.create(instance_id, **kwargs)
        self._known.add(instance_id)
        return response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], extra_fields: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Carry out a call."""
        if instance_id not in self._known:
            raise ToolError("the process of the tool was replaced meanwhile, and what it kept is lost")
        return await self._tool.execute(instance_id, parameters, agent_data=extra_fields)

    async def release(self, instance_id: str) -> None:
        """Give back what an instance holds."""
        if instance_id in self._known:
            self._known.discard(instance_id)
            await self._tool.release(instance_id)


class FunctionHost:
    """Runs a sync function in the main thread of an actor, where a call can be ended.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def call(self, parameters: dict[str, Any]) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Carry out a call."""
        return read_return(self._function(**parameters))


class ActorFunctionTool(BaseTool):
    """A function tool whose function runs in processes.

    Args:
        tool: The tool, with its number of workers and their CPU slots.
        system: Where the processes run; the default system when not given.

    Raises:
        ResourceError: there are not enough CPU slots.
        PayloadError: the function cannot be sent to a process.
    """

    checks_arguments: ClassVar[bool] = True
    limits_itself: ClassVar[bool] = True

    def __init__(self, tool: FunctionTool, *, system: ActorSystem | None = None) -> None:
        super().__init__(tool_schema=tool.schema)
        self._pool = actors.ActorPool(
            [
                (system or actors.default_system()).spawn(
                    FunctionHost,
                    tool.function,
                    name=f"tool/{tool.name}/{uuid.uuid4().hex[:6]}/{number}",
                    num_cpus=tool.num_cpus,
                    restart=_RESTART,
                    preload=PRELOAD,
                )
                for number in range(tool.num_workers)
            ],
            policy="least_loaded",
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return await self._pool.call("call", parameters, timeout_s=kwargs.get("timeout_s"))

    async def aclose(self) -> None:
        await self._pool.stop()


class ActorTool(BaseTool):
    """A class tool that runs in processes. Tools there get the trajectory's ``extra_fields`` as `agent_data`.

    Args:
        make: Makes the tool, there; its class must be importable in a child process or picklable.
        schema_of: The same tool made here, for its schema and lifetime.
        num_workers: Processes.
        num_cpus: CPU slots of each.
        max_concurrency: Calls that run at once in one process.
        system: Where the processes run; the default system when not given.

    Raises:
        ResourceError: there are not enough CPU slots.
    """

    limits_itself: ClassVar[bool] = True

    def __init__(
        self,
        make: Callable[[], BaseTool],
        *,
        schema_of: BaseTool,
        num_workers: int = 1,
        num_cpus: float = 1.0,
        max_concurrency: int = 16,
        system: ActorSystem | None = None,
    ) -> None:
        super().__init__(config={"lifetime": schema_of.lifetime}, tool_schema=schema_of.schema)
        self._hosts = [
            (system or actors.default_system()).spawn(
                ToolHost,
                make,
                name=f"tool/{self.name}/{uuid.uuid4().hex[:6]}/{number}",
                num_cpus=num_cpus,
                max_concurrency=max_concurrency,
                restart=_RESTART,
                preload=PRELOAD,
            )
            for number in range(num_workers)
        ]
        self._pool = actors.ActorPool(self._hosts, policy="least_loaded")
        self._host_of: dict[str, ActorHandle] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or uuid.uuid4().hex
        host = self._pool.pick()
        response = await host.create.remote(instance_id, kwargs)
        self._host_of[instance_id] = host
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        fields = getattr(kwargs.get("agent_data"), "extra_fields", None)
        execute = self._host_of[instance_id].execute.options(timeout_s=kwargs.get("timeout_s"))
        return await execute.remote(instance_id, parameters, fields)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        host = self._host_of.pop(instance_id, None)
        if host is not None and not host.is_down:
            await host.release.remote(instance_id)

    async def aclose(self) -> None:
        await self._pool.stop()
