"""Agent loops in processes of their own; generating and judging stay here.

::

    here                                              there (an actor)
    RemoteAgentLoop --generate_group(states)--------> loop.generate_group
         ^   '------<- take: generate this state ---- rollout_ctl stand-in
         '------------ answer: the state -----------> ...
         '<- take: withdrawn, who asked is cancelled -- ...
                    <- the finished states

Each group has its own line of requests, so a group that is cancelled takes its requests along. A process that dies is
replaced and its groups are begun anew, once; a group whose process dies again has failed. What the dead one asked for
is cancelled, and answers to it are dropped.

Waits for    the loop there; requests it makes meanwhile; what they ask for
Is woken by  its end, which ends the waiting for requests
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio

from xrl_lite import actors
from xrl_lite.actors import (
    ActorHandle,
    CPUResourcesConfig,
    RestartPolicy,
    register_cpu_resources,
    unregister_cpu_resources,
)
from xrl_lite.agent_loop.base import AgentLoop, AgentLoopConfig, RolloutCtl, StateJudger
from xrl_lite.data import RolloutState, SampleParams, failed
from xrl_lite.errors import ActorDiedError, ActorError, errors_as_themselves
from xrl_lite.lazy import is_installed
from xrl_lite.log import get_logger
from xrl_lite.registry import load_plugins

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem
    from xrl_lite.tools.schema import ToolSchema

logger = get_logger(__name__)

Asked = Literal["generate", "judge", "batch_judge", "withdraw"]
"""What is asked for; withdraw ends the request of the same id."""

RequestId = tuple[str, int]
"""The process that asks (a new one has a new name), and a number that counts up in it."""

Request = tuple[RequestId, Asked, Any]
"""A request: id, what is asked for, and for which states."""

PRELOAD = (
    "xrl_lite.agent_loop.remote",
    "xrl_lite.agent_loop.single_turn",
    "xrl_lite.agent_loop.sessions",
    "xrl_lite.agent_loop.tool_agent",
    "xrl_lite.data.tokenizer",
    "transformers.models.auto.tokenization_auto",
)
"""Imported once for all processes of loops; takes seconds."""

_MAX_CONCURRENCY = 65_536
_GROUP: ContextVar[str] = ContextVar("group of the request")


@dataclass
class _Line:
    """Requests of one group."""

    waiting: list[Request] = field(default_factory=list[Request])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, request_id: RequestId, what: Asked, payload: Any) -> None:
        """Add a request, and wake up who takes them."""
        self.waiting.append((request_id, what, payload))
        self.changed.set()


class LoopHost:
    """Runs a loop inside an actor.

    Args:
        config: Settings of the loop.
        has_judger: Whether there is a judger on the other side.
    """

    def __init__(self, config: AgentLoopConfig, has_judger: bool) -> None:
        load_plugins()
        self._running: set[str] = set()
        self._lines: dict[str, _Line] = {}
        self._answers: dict[RequestId, asyncio.Future[Any]] = {}
        self._ids = zip(itertools.repeat(uuid.uuid4().hex), itertools.count(), strict=False)
        stand_in = _StandIn(self)
        self._loop = config.build_local(stand_in, stand_in if has_judger else None)

    async def generate_group(
        self,
        group: str,
        states: list[RolloutState],
        sample_params: SampleParams | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutState]:
        """Run a group; its requests are taken with `take`."""
        _GROUP.set(group)
        self._running.add(group)
        self._lines.setdefault(group, _Line())
        try:
            return await self._loop.generate_group(states, sample_params=sample_params, timeout_s=timeout_s)
        finally:
            self._running.discard(group)
            self._lines.pop(group, None)

    async def take(self, group: str) -> list[Request]:
        """Return what a group asks for, waiting until it asks for something."""
        line = self._lines.setdefault(group, _Line())
        try:
            await line.changed.wait()
        finally:
            if group not in self._running:  # it ended before it was asked, or was never begun
                self._lines.pop(group, None)
        line.changed.clear()
        taken, line.waiting = line.waiting, []
        return taken

    async def answer(self, request_id: RequestId, value: Any, error: BaseException | None) -> None:
        """Hand over what came of a request; dropped where nobody waits for it (any more)."""
        future = self._answers.get(request_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    async def loop_ready(self) -> None:
        """Wait until the loop can serve."""
        await self._loop.ready()

    async def tool_schemas(self) -> list[ToolSchema]:
        """Return what the model is told of the loop's tools."""
        return await self._loop.tool_schemas()

    async def pause(self) -> None:
        """Pause the loop."""
        await self._loop.pause()

    async def resume(self) -> None:
        """Let the loop go on."""
        await self._loop.resume()

    async def aclose(self) -> None:
        """Give back what the loop holds."""
        await self._loop.aclose()

    async def ask(self, what: Asked, payload: Any) -> Any:
        """Ask the other side and wait for the answer; cancelling ends there what was asked for."""
        request_id = next(self._ids)
        future = self._answers[request_id] = asyncio.get_running_loop().create_future()
        line = self._lines[_GROUP.get()]
        line.add(request_id, what, payload)
        try:
            return await future
        except asyncio.CancelledError:
            line.add(request_id, "withdraw", None)
            raise
        finally:
            del self._answers[request_id]


class _StandIn:
    """Stands for generation and judger inside the actor."""

    def __init__(self, host: LoopHost) -> None:
        self._host = host

    async def generate(self, state: RolloutState) -> RolloutState:
        return await self._host.ask("generate", state)

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        return await self._host.ask("judge", rollout_state)

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        return await self._host.ask("batch_judge", rollout_states)


class RemoteAgentLoop(AgentLoop):
    """A loop in a process. States come back as copies.

    Args:
        config: Settings of the loop.
        host: Its actor.
        rollout_ctl: Generates.
        judger: Scores.
    """

    def __init__(
        self, config: AgentLoopConfig, host: ActorHandle, rollout_ctl: RolloutCtl, judger: StateJudger | None
    ) -> None:
        super().__init__(rollout_ctl, judger, sample_params=config.sample_params, judge_grace_s=config.judge_grace_s)
        self.host = host
        self.num_running = 0
        """Groups that it works on."""
        self.on_close: Callable[[], None] | None = None
        """Called once when it is closed; gives back CPU slots."""

    async def generate_sample(self, rollout_state: RolloutState) -> list[RolloutState]:
        return await self.generate_group([rollout_state], sample_params=rollout_state.sample_params)

    async def generate_group(
        self,
        rollout_states: Sequence[RolloutState],
        *,
        sample_params: SampleParams | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutState]:
        group, states = uuid.uuid4().hex, list(rollout_states)
        restarts = self.host.restarts
        self.num_running += 1
        finished: list[RolloutState] = []
        try:
            with errors_as_themselves():
                async with anyio.create_task_group() as serving:
                    serving.start_soon(self._serve, group)
                    run = self.host.generate_group.options(max_task_retries=1)
                    finished = await run.remote(group, states, sample_params, timeout_s)
                    serving.cancel_scope.cancel()
            return finished
        except ActorDiedError as error:
            if self.host.is_up and self.host.restarts == restarts:
                raise  # an engine, say: the loop told of it
            logger.warning("a group is lost, its process died twice: %s", error)
            return [failed(state, str(error)) for state in states]
        finally:
            self.num_running -= 1

    async def ready(self) -> None:
        await self.host.ready()
        await self.host.loop_ready.remote()

    async def tool_schemas(self) -> list[ToolSchema]:
        return await self.host.tool_schemas.remote()

    async def pause(self) -> None:
        await self.host.pause.remote()

    async def resume(self) -> None:
        await self.host.resume.remote()

    async def aclose(self) -> None:
        """End the process."""
        if not self.host.is_down:
            await self.host.aclose.remote()
        await self.host.stop()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    async def _serve(self, group: str) -> None:
        scopes: dict[RequestId, anyio.CancelScope] = {}

        async def answer(request_id: RequestId, what: Asked, payload: Any) -> None:
            with scopes[request_id]:
                await self._answer(request_id, what, payload)
            del scopes[request_id]

        async with anyio.create_task_group() as answering:
            while True:
                for request_id, what, payload in await self.host.take.options(max_task_retries=1).remote(group):
                    _cancel_others(scopes, process=request_id[0])
                    if what != "withdraw":
                        scopes[request_id] = anyio.CancelScope()
                        answering.start_soon(answer, request_id, what, payload)
                    elif request_id in scopes:  # else it was answered meanwhile
                        scopes[request_id].cancel()

    async def _answer(self, request_id: RequestId, what: Asked, payload: Any) -> None:
        answer = self.host.answer.options(max_task_retries=1)
        try:
            if what == "generate":
                value: Any = await self.rollout_ctl.generate(payload)
            else:
                assert self.judger is not None, "the host knows whether there is one"
                value = await getattr(self.judger, what)(payload)
        except Exception as error:  # noqa: BLE001 - raised again where it was asked for
            await answer.remote(request_id, None, error)
        else:
            await answer.remote(request_id, value, None)


def _cancel_others(scopes: Mapping[RequestId, anyio.CancelScope], *, process: str) -> None:
    """Cancel what processes asked for that this one has replaced."""
    for (asking, _), scope in scopes.items():
        if asking != process:
            scope.cancel()


class RouterAgentLoop(AgentLoop):
    """Several loops in processes; a group goes to the one with fewest, in turn among equals.

    Args:
        loops: The loops.
        config: Settings of each.
    """

    def __init__(self, loops: Sequence[RemoteAgentLoop], config: AgentLoopConfig) -> None:
        first = loops[0]
        super().__init__(
            first.rollout_ctl, first.judger, sample_params=config.sample_params, judge_grace_s=config.judge_grace_s
        )
        self._loops = list(loops)
        self._turn = 0

    async def generate_sample(self, rollout_state: RolloutState) -> list[RolloutState]:
        return await self._pick().generate_sample(rollout_state)

    async def generate_group(
        self,
        rollout_states: Sequence[RolloutState],
        *,
        sample_params: SampleParams | None = None,
        timeout_s: float | None = None,
    ) -> list[RolloutState]:
        return await self._pick().generate_group(rollout_states, sample_params=sample_params, timeout_s=timeout_s)

    async def ready(self) -> None:
        for loop in self._loops:
            await loop.ready()

    async def tool_schemas(self) -> list[ToolSchema]:
        return await self._loops[0].tool_schemas()

    async def pause(self) -> None:
        await self._on_each("pause")

    async def resume(self) -> None:
        await self._on_each("resume")

    async def aclose(self) -> None:
        """End the processes."""
        await self._on_each("aclose")

    def get_worker_status(self) -> dict[str, int]:
        """Return how many groups each loop works on, by the name of its actor."""
        return {loop.host.name: loop.num_running for loop in self._loops}

    async def _on_each(self, method: Literal["pause", "resume", "aclose"]) -> None:
        """Call a method of all loops at once, then raise the error of one whose process is gone, if any is."""
        errors: list[ActorError] = []

        async def call(loop: RemoteAgentLoop) -> None:
            try:
                await getattr(loop, method)()
            except ActorError as error:
                errors.append(error)

        with errors_as_themselves():
            async with anyio.create_task_group() as calling:
                for loop in self._loops:
                    calling.start_soon(call, loop)
        if errors:
            raise errors[0]

    def _pick(self) -> RemoteAgentLoop:
        count = len(self._loops)
        turn = [self._loops[(self._turn + step) % count] for step in range(count)]
        living = [loop for loop in turn if not loop.host.is_down] or turn
        chosen = min(living, key=lambda loop: loop.num_running)
        self._turn = (self._loops.index(chosen) + 1) % count
        return chosen


def build_remote(
    config: AgentLoopConfig,
    resources: CPUResourcesConfig,
    rollout_ctl: RolloutCtl,
    judger: StateJudger | None,
    *,
    model_path: str | None = None,
    system: ActorSystem | None = None,
) -> AgentLoop:
    """Start the processes of a loop, and a router where there are several.

    Raises:
        ResourceError: there are not enough CPU slots.
    """
    located = config if config.hf_checkpoint else config.model_copy(update={"hf_checkpoint": model_path})
    pool = register_cpu_resources(f"agent_loop:{type(config).__name__}", resources)
    loops: list[RemoteAgentLoop] = []
    system = system or actors.default_system()
    stem = system.free_stem("agent_loop")  # several tasks may have loops of their own
    try:
        for number in range(resources.num_workers):
            host = system.spawn(
                LoopHost,
                located.share_of(number, resources.num_workers),
                judger is not None,
                name=f"{stem}/{number}",
                num_cpus=resources.num_cpus_per_worker,
                memory_bytes=resources.cpu_memory_per_worker,
                max_concurrency=_MAX_CONCURRENCY,
                restart=RestartPolicy(max_restarts=10),
                preload=[module for module in PRELOAD if is_installed(module.partition(".")[0])],
            )
            loops.append(RemoteAgentLoop(located, host, rollout_ctl, judger))
    except BaseException:
        for loop in loops:
            loop.host.kill()
        unregister_cpu_resources(pool)
        raise
    loops[-1].on_close = partial(unregister_cpu_resources, pool)
    return loops[0] if len(loops) == 1 else RouterAgentLoop(loops, located)
