"""`ComposedJudger`: picks branches by `data_source`, runs them, and merges what they say.

::

    data_source "math"                      -> branch math, its reward as it is
    data_source {"math": 1, "format": 1}    -> both at the same time, then merge_fn(state, {"math": .., "format": ..})

A branch may be composed itself; `routing` says what is selected inside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import anyio

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.errors import XrlLiteError
from xrl_lite.judger.base import BaseJudger, Judger, JudgerOutput
from xrl_lite.judger.ledger import Statistics, add_statistics
from xrl_lite.judger.merge import JudgerMergeFn
from xrl_lite.judger.outcome import Judgement, JudgementPolicy, Outcome
from xrl_lite.judger.reward_check import check_reward
from xrl_lite.judger.routing import inner_source, select_branches, select_inside
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_SEVERITY = (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.RAISED, Outcome.SKIPPED, Outcome.OK)


class BranchError(XrlLiteError):
    """A branch of a composed judger gave no score, so the sample has none."""


@dataclass(frozen=True)
class _Route:
    """A selected branch; for one that is composed itself, what is selected inside it."""

    key: str
    branch: Judger
    inside: Sequence[_Route] = ()


class ComposedJudger(Judger):
    """Routes by `RolloutState.data_source` and merges the outputs of several branches by `merge_fn`.

    A sample fails if one of its branches fails; a branch with ``on_error="zero"`` adds a score of 0.0 instead.
    Statistics of this judger itself count the samples with several branches; the others are counted by their branch.

    Args:
        branches: Judgers by name. Each must inherit `Judger`: branches share one state, so they may only see payloads.
        merge_fn: Called with the state and the raw outputs in the order of `data_source`, after all branches have
            ended; needed where a sample selects several branches. May be async.
        judger_name: Name in messages and metrics.
        policy: What happens to a sample with several branches that gets no score.
    """

    limits_itself = True

    def __init__(
        self,
        branches: Mapping[str, Judger],
        merge_fn: JudgerMergeFn | None = None,
        judger_name: str = "composed",
        *,
        policy: JudgementPolicy | None = None,
    ) -> None:
        super().__init__(judger_name)
        if not branches:
            raise ValueError("ComposedJudger requires at least one branch.")
        for name, branch in branches.items():
            _check_branch(name, branch)
        self.branches = dict(branches)
        self.merge_fn = merge_fn
        self.policy = policy or JudgementPolicy()
        self._warned_about_score = False

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        """Score one state by the branches that its data source names.

        Raises:
            ValueError: no data source, an empty one, or several branches and no `merge_fn`; before any branch runs.
            KeyError: a branch that does not exist.
            TypeError: a data source of another type; a list where one output belongs.
            JudgerMisuseError: the state lacks what a branch needs.
            JudgerError: the first judgements all failed.
        """
        judged, _ = await self._judge_routes(rollout_state, self._routes(rollout_state.data_source))
        return judged

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Score several states, each by its own data source, and return them in the order given.

        Each branch gets one list with all payloads meant for it, so it must support batches; `merge_fn` gets lists, for
        states that select the same branches.

        Raises:
            ValueError: no states; wrong number of outputs or of merged states; routing as in `judge`.
            KeyError: a branch that does not exist.
            TypeError: a single output or state where a list belongs; a data source of another type.
        """
        if not rollout_states:
            raise ValueError("ComposedJudger requires at least one RolloutState when input is a list.")
        routed = [self._routes(state.data_source) for state in rollout_states]
        judgements = await self._run_batches(rollout_states, routed)
        judged = list(rollout_states)
        for indexes in _alike(routed):
            states = [rollout_states[index] for index in indexes]
            merged = await self._merge_batch(states, routed[indexes[0]], [judgements[index] for index in indexes])
            for index, state in zip(indexes, merged, strict=True):
                judged[index] = state
        return judged

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Return counts and times of this judger and of all branches, by name; branches of one name are added up."""
        return add_statistics(
            [super().statistics(reset=reset), *(branch.statistics(reset=reset) for branch in self.branches.values())]
        )

    def parts(self, rollout_state: RolloutState) -> list[BaseJudger]:
        """Return the branches that a state selects, those inside of composed branches as well."""
        return _leaves(self._routes(rollout_state.data_source))

    async def aclose(self) -> None:
        """Close all branches."""
        async with anyio.create_task_group() as closing:
            for branch in self.branches.values():
                closing.start_soon(branch.aclose)

    def close(self) -> None:
        """Close all branches at once."""
        for branch in self.branches.values():
            branch.close()

    def _routes(self, data_source: Any) -> Sequence[_Route]:
        return self._routes_to(select_branches(data_source, list(self.branches)), data_source)

    def _routes_to(self, keys: Sequence[str], data_source: Any) -> Sequence[_Route]:
        if len(keys) > 1 and self.merge_fn is None:
            raise ValueError(
                f"ComposedJudger selected multiple branches but merge_fn is not provided. selected_keys={list(keys)}. "
                f"Give a merge_fn, for example weighted_merge({{'branch': weight, ...}})."
            )
        return tuple(_Route(key, self.branches[key], self._routes_inside(key, data_source)) for key in keys)

    def _routes_inside(self, key: str, data_source: Any) -> Sequence[_Route]:
        branch = self.branches[key]
        if not isinstance(branch, ComposedJudger):
            return ()
        keys = select_inside(key, data_source, list(branch.branches))
        return branch._routes_to(keys, inner_source(key, data_source))

    async def _judge_routes(self, state: RolloutState, routes: Sequence[_Route]) -> tuple[RolloutState, Judgement]:
        if len(routes) > 1:
            return await self._merge(state, routes, await _run_all(state, routes))
        route = routes[0]
        if isinstance(route.branch, ComposedJudger):
            return await route.branch._judge_routes(state, route.inside)
        return route.branch.settle(state, await _run(state, route))

    async def _merge(
        self, state: RolloutState, routes: Sequence[_Route], judgements: Sequence[Judgement]
    ) -> tuple[RolloutState, Judgement]:
        """Turn the judgements of several branches into the reward, or the failure, of the sample."""
        failure = self._failure(state, routes, judgements)
        if failure is not None:
            return self.settle_failure(state, failure), failure
        outputs = {route.key: _output(judgement) for route, judgement in zip(routes, judgements, strict=True)}
        try:
            merged = await self._call_merge_fn(state, outputs)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; here it turns into data
            failure = self._summed_up(judgements, Outcome.RAISED, error)
            return self.settle_failure(state, failure), failure
        if isinstance(merged, list):
            raise TypeError("ComposedJudger merge_fn returned a list for judge.")
        return self._finish(state, merged, judgements)

    async def _merge_batch(
        self, states: list[RolloutState], routes: Sequence[_Route], judgements: list[list[Judgement]]
    ) -> list[RolloutState]:
        """Settle states that all selected the same branches."""
        if len(routes) == 1:
            branch = routes[0].branch
            return [branch.settle(state, found[0])[0] for state, found in zip(states, judgements, strict=True)]
        judged = list(states)
        good: list[int] = []
        for index, (state, found) in enumerate(zip(states, judgements, strict=True)):
            failure = self._failure(state, routes, found)
            if failure is None:
                good.append(index)
            else:
                judged[index] = self.settle_failure(state, failure)
        if not good:
            return judged
        outputs = {
            route.key: [_output(judgements[index][place]) for index in good] for place, route in enumerate(routes)
        }
        try:
            merged = await self._call_merge_fn([states[index] for index in good], outputs)
        except Exception as error:  # noqa: BLE001 - as above
            for index in good:
                failure = self._summed_up(judgements[index], Outcome.RAISED, error)
                judged[index] = self.settle_failure(states[index], failure)
            return judged
        for index, state in zip(good, _as_many(merged, len(good)), strict=True):
            judged[index], _ = self._finish(states[index], state, judgements[index])
        return judged

    async def _call_merge_fn(self, original: Any, outputs: dict[str, Any]) -> Any:
        assert self.merge_fn is not None, "routing lets several branches through only with a merge_fn"
        merged: Any = self.merge_fn(original, outputs)
        return await merged if inspect.isawaitable(merged) else merged

    def _failure(
        self, state: RolloutState, routes: Sequence[_Route], judgements: Sequence[Judgement]
    ) -> Judgement | None:
        """Count the judgements of the branches, and return the one that fails the sample, if any does."""
        failed: list[Judgement] = []
        for route, judgement in zip(routes, judgements, strict=True):
            branch = route.branch
            if not isinstance(branch, ComposedJudger):  # that one has counted for itself
                branch.ledger.enter(judgement, state.rollout_id, branch.policy)
            if judgement.outcome is Outcome.OK or _adds_zero(branch, judgement):
                continue
            if branch.policy.on_error == "raise" and judgement.error is not None:
                raise judgement.error
            failed.append(judgement)
        if not failed:
            return None
        worst = min(failed, key=lambda judgement: _SEVERITY.index(judgement.outcome))
        error = BranchError(worst.explain(state.rollout_id))
        error.__cause__ = worst.error
        return self._summed_up(judgements, worst.outcome, error)

    def _finish(
        self, state: RolloutState, merged: Any, judgements: Sequence[Judgement]
    ) -> tuple[RolloutState, Judgement]:
        reward = getattr(merged, "reward", None)
        try:
            reward = check_reward(reward, judger=self.get_judger_name(), sample=state.rollout_id, needs_score=False)
        except AssertionError as error:
            failure = self._summed_up(judgements, Outcome.RAISED, error)
            return self.settle_failure(state, failure), failure
        merged.reward = reward
        if "score" not in reward and not self._warned_about_score:
            self._warned_about_score = True
            logger.warning(
                "judger %r: merge_fn gives rewards without 'score', and such samples cannot be trained on",
                self.get_judger_name(),
            )
        judgement = self._summed_up(judgements, Outcome.OK, None, output=reward)
        self.note(merged, judgement)
        return merged, judgement

    def _summed_up(
        self, judgements: Sequence[Judgement], outcome: Outcome, error: Exception | None, *, output: Any = None
    ) -> Judgement:
        return Judgement(
            self.get_judger_name(),
            queue_s=max(judgement.queue_s for judgement in judgements),
            run_s=max(judgement.run_s for judgement in judgements),
            output=output,
            error=error,
            outcome=outcome,
        )

    async def _run_batches(self, states: list[RolloutState], routed: list[Sequence[_Route]]) -> list[list[Judgement]]:
        """Call each branch once with the payloads meant for it; return the judgements of each state, as it selects."""
        members: dict[str, list[int]] = {}
        for index, routes in enumerate(routed):
            for route in routes:
                if route.inside:
                    raise TypeError(f"Branch {route.key!r} is composed itself, so batch_judge cannot use it.")
                members.setdefault(route.key, []).append(index)
        found: dict[tuple[str, int], Judgement] = {}

        async def run(key: str, indexes: list[int]) -> None:
            branch = self.branches[key]
            judgement = await branch.attempt([states[index] for index in indexes])
            for index, single in zip(indexes, _split(key, judgement, len(indexes)), strict=True):
                found[key, index] = single

        await _together([(run, (key, indexes)) for key, indexes in members.items()])
        return [[found[route.key, index] for route in routes] for index, routes in enumerate(routed)]


def _check_branch(name: str, branch: object) -> None:
    if isinstance(branch, Judger):
        return
    if isinstance(branch, BaseJudger):
        raise TypeError(
            f"ComposedJudger branch {name!r} must inherit Judger, not only BaseJudger: branches share one "
            f"RolloutState, so they may only work on payloads. Got {type(branch).__name__}."
        )
    raise TypeError(f"ComposedJudger branch must be a Judger instance, but {name!r} is {type(branch).__name__}.")


def _leaves(routes: Sequence[_Route]) -> list[BaseJudger]:
    return [leaf for route in routes for leaf in (_leaves(route.inside) if route.inside else [route.branch])]


async def _run(state: RolloutState, route: _Route) -> Judgement:
    branch = route.branch
    if isinstance(branch, ComposedJudger):
        # its merge_fn writes into the state, and so may those of its siblings: it gets one of its own
        judged, judgement = await branch._judge_routes(state.model_copy(), route.inside)  # pyright: ignore[reportPrivateUsage]
        if judgement.outcome is not Outcome.OK and judged.reward is not None:  # on_error="zero" somewhere inside
            return replace(judgement, outcome=Outcome.OK, output=judged.reward, error=None)
        return judgement
    judgement = await branch.attempt(state)
    if isinstance(judgement.output, list):
        raise TypeError(f"Branch {route.key!r} returned a list output for one RolloutState.")
    return judgement


async def _run_all(state: RolloutState, routes: Sequence[_Route]) -> list[Judgement]:
    found: dict[str, Judgement] = {}

    async def run(route: _Route) -> None:
        found[route.key] = await _run(state, route)

    await _together([(run, (route,)) for route in routes])
    return [found[route.key] for route in routes]


async def _together(calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    """Run calls at the same time; the first error cancels the others and is raised as it is."""
    if len(calls) == 1:
        function, arguments = calls[0]
        await function(*arguments)
        return
    first: list[Exception] = []

    async def guarded(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            await function(*arguments)
        except Exception as error:  # noqa: BLE001 - raised below; a task group would wrap it in a group
            first.append(error)
            running.cancel_scope.cancel()

    async with anyio.create_task_group() as running:
        for function, arguments in calls:
            running.start_soon(guarded, function, arguments)
    if first:
        raise first[0]


def _split(key: str, judgement: Judgement, count: int) -> list[Judgement]:
    if judgement.outcome is not Outcome.OK:
        return [judgement] * count
    outputs = cast("list[Any] | JudgerOutput", judgement.output)
    if not isinstance(outputs, list):
        raise TypeError(f"Branch {key!r} returned a single output for a rollout state list.")
    if len(outputs) != count:
        raise ValueError(f"Branch {key!r} returned {len(outputs)} outputs for {count} states.")
    return [judgement.with_output(output) for output in outputs]


def _alike(routed: list[Sequence[_Route]]) -> list[list[int]]:
    found: dict[tuple[str, ...], list[int]] = {}
    for index, routes in enumerate(routed):
        found.setdefault(tuple(route.key for route in routes), []).append(index)
    return list(found.values())


def _adds_zero(branch: Judger, judgement: Judgement) -> bool:
    return branch.policy.on_error == "zero" and judgement.outcome is not Outcome.SKIPPED


def _output(judgement: Judgement) -> JudgerOutput:
    return judgement.output if judgement.outcome is Outcome.OK else {"score": 0.0}


def _as_many(merged: Any, count: int) -> list[Any]:
    if not isinstance(merged, list):
        raise TypeError("ComposedJudger merge_fn returned a single RolloutState for batch_judge.")
    states = cast("list[Any]", merged)
    if len(states) != count:
        raise ValueError(f"ComposedJudger merge_fn returned {len(states)} states for {count}.")
    return states
