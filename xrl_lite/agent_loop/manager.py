"""Runs groups: each in a task of its own, from the buffer to the buffer.

::

    generate_sequences(groups) --> lease --> agent loop (attempts that are not complete yet) --> finished | failure
                                                 '--- pause(): its requests are ended --> aborted, with what it has

Waits for    the agent loops; a group that takes longer than `group_timeout_s` closes with the attempts that have ended
Is woken by  a group that ends

A failed attempt is data: its siblings go on. Anything else (a dead engine, a bug) ends `running`: all groups in flight
are cancelled, awaited and given back, then the error is raised.

Another class can take this one's place (`AgentLoopManagerConfig.agent_loop_manager_class`): see `RunsGroups`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, Protocol, Self

import anyio
from anyio.abc import TaskGroup

from xrl_lite.actors import now
from xrl_lite.agent_loop.base import AgentLoop, is_to_be_run
from xrl_lite.agent_loop.failure import late, refuse_untrainable
from xrl_lite.agent_loop.strategy import AgentLoopManagerConfig, IsValidSampleFn, all_are_valid
from xrl_lite.data import RolloutState, Status, failed, reset_rollout_response, split_sessions
from xrl_lite.errors import ActorError, ConfigError, LeaseError, RunError, errors_as_themselves
from xrl_lite.log import get_logger
from xrl_lite.registry import load_object
from xrl_lite.replay_buffer import GroupStatus, Lease, PromptGroup, ReplayBuffer

logger = get_logger(__name__)

CLOSING_S = 30.0
"""How much longer a loop may take to hand over a group that has had its time; then the whole group has failed."""

MAX_EVALUATED_AT_ONCE = 256
"""Groups of an evaluation under way at the same time: the time that each has is not to be spent in line."""

LEASE_SLACK_S = 60.0
"""How much longer than a group itself its lease lasts: storing it takes time too."""


class RunsGroups(Protocol):
    """What a class that takes the place of `AgentLoopManager` must have."""

    @classmethod
    async def create(cls, **kwargs: Any) -> Any:
        """Make it.

        Gets `config` (`AgentLoopManagerConfig`), `llm_client` (generates states), `replay_buffer`, `judger` and
        `agent_loops` (by task); accept ``**kwargs``, there may be more.
        """
        ...

    def generate_sequences(self, prompts: Sequence[PromptGroup]) -> Any:
        """Begin to run groups, and return at once.

        For each of them, later: ``lease = replay_buffer.start(group.uid, timeout_s=...)``, then exactly one of
        ``await replay_buffer.finish(lease, states)``, ``fail(lease, reason)`` and ``abort(lease, states)``. A group
        that is never ended becomes a failure at the deadline of its lease.
        """
        ...


class AbortsRequests(Protocol):
    """Ends what an engine is generating."""

    async def abort_all(self) -> int:
        """End every request in flight; return how many there were."""
        ...


@dataclass(kw_only=True)
class GroupCounts:
    """What became of the groups of a task since the last look."""

    num_groups: int = 0
    """Groups that ended."""
    num_failed: int = 0
    """Of these, without enough good attempts."""
    num_filtered: int = 0
    """Of these, refused by the validity filter."""
    num_samples: int = 0
    """Attempts of all of them."""
    num_tokens: int = 0
    """Response tokens of all of them."""
    raw_rewards_sum: float = 0.0
    """Sum of the scores before the filter."""
    raw_rewards_count: int = 0
    """Attempts with a score."""
    seconds: list[float] = field(default_factory=list[float])
    """How long each group took."""

    def metrics(self, task_name: str) -> dict[str, float]:
        """Return the counts, and the spread of the times."""
        prefix = f"produce/{task_name}"
        metrics = {
            f"{prefix}/groups": float(self.num_groups),
            f"{prefix}/failed_groups": float(self.num_failed),
            f"{prefix}/filtered_groups": float(self.num_filtered),
            f"{prefix}/samples": float(self.num_samples),
            f"{prefix}/tokens": float(self.num_tokens),
        }
        if self.raw_rewards_count:
            metrics[f"{prefix}/raw_reward"] = self.raw_rewards_sum / self.raw_rewards_count
        if self.seconds:
            ordered = sorted(self.seconds)
            p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
            metrics |= {
                f"time/{prefix}/mean": sum(ordered) / len(ordered),
                f"time/{prefix}/p50": p50,
                f"time/{prefix}/p99": p99,
                f"time/{prefix}/p99_p50_ratio": p99 / p50 if p50 else 1.0,
            }
        return metrics


class GroupTasks:
    """Where groups run: a task group that is there inside `running`."""

    _tasks: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Let groups run while inside; what still runs at the end is cancelled and given back.

        An error of a group ends the block, and is raised as itself.
        """
        assert self._tasks is None, "it runs already"
        with errors_as_themselves():
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                try:
                    yield
                finally:
                    self._tasks = None
                    tasks.cancel_scope.cancel()


class AgentLoopManager(GroupTasks):
    """Runs groups in the driver.

    Args:
        agent_loops: Makes attempts, by task.
        replay_buffer: Groups come from it and go back to it.
        config: Time limits.
        requests: Ends requests in flight when generation is paused; None lets them end by themselves.
        partial_rollout: Tasks whose aborted attempts go on from their tokens.
        is_valid: Validity filters, by task; no filter where there is none.
        needs_logprobs: Fail attempts without log-probs: the algorithm cannot do without.
        worker: Name in the leases.
    """

    def __init__(
        self,
        agent_loops: Mapping[str, AgentLoop],
        *,
        replay_buffer: ReplayBuffer,
        config: AgentLoopManagerConfig | None = None,
        requests: AbortsRequests | None = None,
        partial_rollout: frozenset[str] = frozenset(),
        is_valid: Mapping[str, IsValidSampleFn] | None = None,
        needs_logprobs: bool = False,
        worker: str = "driver",
    ) -> None:
        self.agent_loops = dict(agent_loops)
        self.replay_buffer = replay_buffer
        self.config = config or AgentLoopManagerConfig()
        self._requests = requests
        self._partial_rollout = partial_rollout
        self._is_valid = is_valid or {}
        self._needs_logprobs = needs_logprobs
        self._worker = worker
        self._in_flight: dict[str, anyio.CancelScope] = {}
        self._is_pausing = False
        self._counts: dict[str, GroupCounts] = {}
        self._busy_s, self._busy_since = 0.0, 0.0

    @classmethod
    async def create(
        cls,
        *,
        config: AgentLoopManagerConfig,
        llm_client: Any,
        replay_buffer: ReplayBuffer,
        agent_loops: Mapping[str, AgentLoop],
        **kwargs: Any,
    ) -> Self:
        """Make a manager; what else is in `kwargs` and fits the constructor is handed on."""
        known = {"partial_rollout", "is_valid", "needs_logprobs", "worker"} & kwargs.keys()
        requests = llm_client if hasattr(llm_client, "abort_all") else None
        options = {name: kwargs[name] for name in known}
        return cls(agent_loops, replay_buffer=replay_buffer, config=config, requests=requests, **options)

    def generate_sequences(self, prompts: Sequence[PromptGroup]) -> None:
        """Begin to run groups that are in the buffer, and return at once."""
        if self._tasks is None:
            raise RunError("Groups can only be run inside `async with manager.running()`.")
        for group in prompts:
            timeout_s = self._longest_s(self._loop_of(group.task_name)) + LEASE_SLACK_S
            lease = self.replay_buffer.start(
                group.uid, worker=self._worker, timeout_s=timeout_s, global_steps=group.global_steps
            )
            if not self._in_flight:
                self._busy_since = now()
            scope = self._in_flight[group.uid] = anyio.CancelScope()
            self._tasks.start_soon(partial(self._run_group, group, lease, scope), name=f"group-{group.uid}")

    @property
    def num_in_flight(self) -> int:
        """Groups that are being run."""
        return len(self._in_flight)

    @property
    def busy_s(self) -> float:
        """Seconds, so far, in which there were groups in flight."""
        return self._busy_s + (now() - self._busy_since if self._in_flight else 0.0)

    async def pause(self) -> float:
        """Bring all groups in flight to an end; return the seconds it took.

        Requests are ended in the engine, again and again as attempts make new ones, and judgements get the grace of
        their agent loop. Groups that end meanwhile count as ever; the others are stored as aborted with what they have.
        After `pause_timeout_s` the rest is cancelled, and waits to be run again.
        """
        started = now()
        self._is_pausing = True
        try:
            with anyio.move_on_after(self.config.pause_timeout_s):
                await self._on_all_loops("pause")
                while self._in_flight:
                    if self._requests is not None:
                        await self._requests.abort_all()
                    with anyio.move_on_after(self.config.abort_interval_s):
                        await self._wait_until_idle()
            for scope in list(self._in_flight.values()):
                scope.cancel()
            await self._wait_until_idle()
        finally:
            self._is_pausing = False
            with anyio.move_on_after(self.config.pause_timeout_s, shield=True):  # loops are used again, however it ends
                await self._on_all_loops("resume")
        return now() - started

    async def evaluate(
        self,
        groups: Sequence[list[RolloutState]],
        *,
        on_group: Callable[[int, list[RolloutState]], None] | None = None,
        **kwargs: Any,
    ) -> list[list[RolloutState]]:
        """Run groups that the buffer never sees, and return them in order; each has `group_timeout_s`.

        Their agent loop is that of the task they name, or of the first one.

        Args:
            groups: Fresh states.
            on_group: Told of each group that ends: its place, and its states.
            **kwargs: For the agent loop.
        """
        finished = list(groups)
        room = anyio.CapacityLimiter(MAX_EVALUATED_AT_ONCE)

        async def run(index: int, group: list[RolloutState]) -> None:
            async with room:
                finished[index] = await self._run_within_limit(self._loop_of(group[0].task_name), group, **kwargs)
            if on_group is not None:
                on_group(index, finished[index])

        with errors_as_themselves():
            async with anyio.create_task_group() as running:
                for index, group in enumerate(groups):
                    running.start_soon(run, index, group)
        return finished

    def counts(self, *, reset: bool = False) -> dict[str, GroupCounts]:
        """Return what became of the groups of each task, since the last reset."""
        counts = self._counts
        if reset:
            self._counts = {}
        return counts

    # --- one group

    async def _run_group(self, group: PromptGroup, lease: Lease, scope: anyio.CancelScope) -> None:
        started = now()
        try:
            with scope:
                states = await self._generate(group)
                await self._hand_over(group, lease, states, now() - started)
        except LeaseError as error:
            logger.warning("%s", error)
        finally:
            del self._in_flight[group.uid]
            if not self._in_flight:
                self._busy_s += now() - self._busy_since
            self.replay_buffer.put_back(lease)  # nothing to give back if it was handed over
            self.replay_buffer.wake()

    async def _generate(self, group: PromptGroup) -> list[RolloutState]:
        """Make the attempts that are not complete, and return all of them in their places."""
        loop = self._loop_of(group.task_name)
        states = [state for state in group.states if state.status is Status.COMPLETED or is_to_be_run(state)]
        places = [place for place, state in enumerate(states) if not _has_ended(loop, state)]
        todo = [self._prepare(states[place]) for place in places]
        made = await self._run_within_limit(loop, todo)
        if len(made) != len(todo):  # a loop may split an attempt into several trajectories
            return [state for place, state in enumerate(states) if place not in places] + made
        for place, state in zip(places, made, strict=True):
            states[place] = state
        return states

    async def _run_within_limit(
        self, loop: AgentLoop, states: Sequence[RolloutState], **kwargs: Any
    ) -> list[RolloutState]:
        """Run attempts; the loop keeps the limit, and loses them all where it does not (its process hangs, say)."""
        limit_s = self.config.group_timeout_s
        if _keeps_limits(type(loop)):
            kwargs["timeout_s"] = limit_s
        with anyio.move_on_after(self._longest_s(loop)):
            return await loop.generate_group(states, **kwargs)
        return [late(state, limit_s) for state in states]

    def _longest_s(self, loop: AgentLoop) -> float:
        """Return how long a group may take until it is handed over, its last judgement included."""
        return self.config.group_timeout_s + loop.judge_grace_s + CLOSING_S

    def _prepare(self, state: RolloutState) -> RolloutState:
        if state.status is Status.ABORTED and state.task_name in self._partial_rollout:
            return state  # the engine goes on from its tokens
        if state.status is not Status.INIT:
            reset_rollout_response(state)
            state.status = Status.INIT
        return state

    async def _hand_over(self, group: PromptGroup, lease: Lease, states: list[RolloutState], seconds: float) -> None:
        buffer, counts = self.replay_buffer, self._counts.setdefault(group.task_name, GroupCounts())
        if self._is_pausing and any(state.status is Status.ABORTED for state in states):
            await buffer.abort(lease, states)
            return
        for state in states:
            if state.status is Status.ABORTED:  # nobody here did it, so nobody would run it again
                failed(state, "aborted by the engine")
        for attempt in split_sessions(states):
            refuse_untrainable(attempt, needs_logprobs=self._needs_logprobs)
        self._count(counts, states, seconds)
        is_valid = self._is_valid.get(group.task_name, all_are_valid)
        good = [state for state in states if state.status is Status.COMPLETED]
        if good and not is_valid(states):
            counts.num_filtered += 1
            await buffer.fail(lease, "refused by is_valid_sample_fn")
        elif await buffer.finish(lease, states) is GroupStatus.FAILURE:
            counts.num_failed += 1

    def _count(self, counts: GroupCounts, states: Sequence[RolloutState], seconds: float) -> None:
        attempts = split_sessions(states)
        counts.num_groups += 1
        counts.num_samples += len(attempts)
        counts.num_tokens += sum(len(state.response_ids or ()) for state in states)
        rewards = [reward.get("score") for *_, last in attempts if (reward := last.reward)]
        scores = [score for score in rewards if isinstance(score, int | float)]
        counts.raw_rewards_sum += sum(scores)
        counts.raw_rewards_count += len(scores)
        counts.seconds.append(seconds)

    def _loop_of(self, task_name: str | None) -> AgentLoop:
        loop = self.agent_loops.get(task_name or "")
        return loop or next(iter(self.agent_loops.values()))

    async def _on_all_loops(self, method: Literal["pause", "resume"]) -> None:
        """Pause or resume every loop. One whose process is gone has no groups that could be waited for."""

        async def call(loop: AgentLoop) -> None:
            try:
                await getattr(loop, method)()
            except ActorError as error:
                logger.warning("an agent loop did not %s: %s", method, error)

        async with anyio.create_task_group() as calling:
            for loop in dict.fromkeys(self.agent_loops.values()):
                calling.start_soon(call, loop)

    async def _wait_until_idle(self) -> None:
        while self._in_flight:
            await self.replay_buffer.changed()


@lru_cache
def _keeps_limits(loop: type[AgentLoop]) -> bool:
    """Whether a loop takes `timeout_s`; one of a user's own may have the signature that XTuner's have."""
    parameters = inspect.signature(loop.generate_group).parameters.values()
    return any(each.name == "timeout_s" or each.kind is each.VAR_KEYWORD for each in parameters)


def _has_ended(loop: AgentLoop, state: RolloutState) -> bool:
    """Whether an attempt is complete; one that was interrupted while it was judged is not."""
    return state.status is Status.COMPLETED and (loop.judger is None or state.reward is not None)


async def create_agent_loop_manager(
    config: AgentLoopManagerConfig,
    *,
    llm_client: Any,
    replay_buffer: ReplayBuffer,
    agent_loops: Mapping[str, AgentLoop],
    **kwargs: Any,
) -> Any:
    """Make the manager that the settings name.

    Raises:
        PluginError: it cannot be loaded.
        ConfigError: it lacks `create` or `generate_sequences`.
    """
    cls: Any = load_object(config.agent_loop_manager_class) if config.agent_loop_manager_class else AgentLoopManager
    missing = [name for name in ("create", "generate_sequences") if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(
            f"agent_loop_manager_class: {config.agent_loop_manager_class} has no {' and no '.join(missing)}. See "
            f"xrl_lite.agent_loop.RunsGroups for what such a class must have."
        )
    create: Callable[..., Any] = cls.create
    made = create(config=config, llm_client=llm_client, replay_buffer=replay_buffer, agent_loops=agent_loops, **kwargs)
    return await made if inspect.isawaitable(made) else made
