"""What only the inline backend can do: an order that a seed decides, virtual time, and scripted faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts import test_handle_bodies as bodies
from xrl_lite.actors import ActorSystem, Fault, FaultPlan, RestartPolicy, VirtualClock
from xrl_lite.actors.ledger import Claim
from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError

FORGIVING = RestartPolicy(max_restarts=10)


async def order_of(seed: int) -> list[str]:
    order: list[str] = []
    async with ActorSystem(num_cpus=8, backend="inline", seed=seed) as system:
        handles = [system.spawn(bodies.Stateful, name=name) for name in "abcd"]
        calls = [handle.add.remote() for _ in range(5) for handle in handles]
        for index, call in enumerate(calls):
            call.add_done_callback(lambda _, index=index: order.append("abcd"[index % 4]))
        await asyncio.gather(*calls)
    return order


async def test_one_seed_gives_one_order_and_another_seed_another() -> None:
    first = await order_of(1)
    assert await order_of(1) == first
    assert len({tuple(await order_of(seed)) for seed in range(5)}) > 1


def test_without_a_loop_a_call_runs_at_once() -> None:
    system = ActorSystem(num_cpus=2, backend="inline")
    assert system.spawn(bodies.Stateful).add.remote().result() == 1
    assert system.spawn(bodies.Concurrent).echo.remote(5).result() == 5
    system.shutdown_now()


async def faulty(*faults: Fault) -> tuple[ActorSystem, list[ActorDiedError]]:
    return ActorSystem(num_cpus=2, backend="inline", faults=FaultPlan(faults)), []


async def test_a_scripted_kill_hits_its_call_and_no_other() -> None:
    system, _ = await faulty(Fault(actor="a", action="kill", at_call=2))
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    outcomes = await asyncio.gather(*(handle.add.remote() for _ in range(4)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, ActorDiedError, int, int]
    assert outcomes[2:] == [1, 2]  # the successor starts anew
    assert handle.restarts == 1


async def test_a_scripted_kill_can_be_retried() -> None:
    system, _ = await faulty(Fault(actor="a", action="kill"))
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    assert await handle.add.options(max_task_retries=1).remote() == 1


@pytest.mark.parametrize("cls", [bodies.Stateful, bodies.Concurrent])
async def test_a_scripted_delay_takes_no_time_but_uses_up_the_limit(cls: type) -> None:
    system, _ = await faulty(Fault(actor="a", action="delay", delay_s=1000.0))
    handle = system.spawn(cls, name="a", restart=FORGIVING)
    with pytest.raises(ActorTimeoutError):
        await handle.echo.options(timeout_s=500.0).remote(1)
    assert await handle.echo.options(timeout_s=500.0).remote(2) == 2


@pytest.mark.parametrize("timeout_s", [None, 5.0])
async def test_a_lost_reply_still_ends_the_call(timeout_s: float | None) -> None:
    system, _ = await faulty(Fault(actor="a", action="drop_reply"))
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    with pytest.raises((ActorTimeoutError, ActorDiedError)):
        await handle.add.options(timeout_s=timeout_s).remote()
    assert await handle.add.remote() == 1


async def test_a_spawn_that_fails_is_tried_again_as_the_policy_says() -> None:
    system, _ = await faulty(*(Fault(actor=name, action="fail_spawn") for name in "ab"))
    with pytest.raises(ActorDiedError):
        await system.spawn(bodies.Stateful, name="a").ready()
    handle = system.spawn(bodies.Stateful, name="b", restart=FORGIVING)
    await handle.ready()
    assert handle.restarts == 1


def test_faults_are_for_the_inline_backend() -> None:
    with pytest.raises(ValueError, match="inline"):
        ActorSystem(faults=FaultPlan())
    with pytest.raises(ValueError, match="inline"):
        ActorSystem(clock=VirtualClock())
    with pytest.raises(ValueError, match="backend must be"):
        ActorSystem(backend="inlin")  # pyright: ignore[reportArgumentType]


class Sleeper:
    """Sleeps in every way there is."""

    def __init__(self, start_s: float = 0.0) -> None:
        time.sleep(start_s)
        self.state = 0

    def sync(self, seconds: float) -> float:
        self.state += 1
        time.sleep(seconds)
        return seconds

    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def read(self) -> int:
        return self.state

    def die(self) -> None:
        raise SystemExit(1)


T = TypeVar("T")


def in_virtual_time(
    program: Callable[[ActorSystem, VirtualClock], Awaitable[T]], *faults: Fault, seed: int = 0
) -> tuple[T, float]:
    """Run a program, and return what it returns and how long it took."""
    clock = VirtualClock()

    async def main() -> T:
        plan = FaultPlan(faults)
        async with ActorSystem(num_cpus=8, backend="inline", faults=plan, clock=clock, seed=seed) as system:
            result = await program(system, clock)
        assert plan.left == []
        return result

    return clock.run(main()), clock.time()


@pytest.mark.parametrize("method", ["sync", "sleep"])
def test_actors_sleep_side_by_side_and_nobody_waits(method: str) -> None:
    async def program(system: ActorSystem, _: VirtualClock) -> list[float]:
        handles = [system.spawn(Sleeper) for _ in range(3)]
        calls = [handle.method_named(method).remote(3600.0 * (3 - n)) for n, handle in enumerate(handles)]
        return [await call for call in asyncio.as_completed([asyncio.ensure_future(call) for call in calls])]

    assert in_virtual_time(program) == ([3600.0, 7200.0, 10800.0], 10800.0)


def test_sync_methods_of_one_actor_take_turns_in_virtual_time() -> None:
    async def program(system: ActorSystem, _: VirtualClock) -> None:
        handle = system.spawn(Sleeper, max_concurrency=2)
        await asyncio.gather(handle.sync.remote(10.0), handle.sync.remote(10.0), handle.sleep.remote(15.0))

    assert in_virtual_time(program)[1] == 25.0  # the async one begins with the second


@pytest.mark.parametrize(
    ("method", "on_cancel", "state"), [("sync", "kill", 0), ("sync", "interrupt", 1), ("sleep", "kill", 0)]
)
def test_a_time_limit_in_virtual_time_ends_the_call_on_the_dot(method: str, on_cancel: Any, state: int) -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> tuple[float, int, int]:
        handle = system.spawn(Sleeper, on_cancel=on_cancel)
        with pytest.raises(ActorTimeoutError, match=f"{method}.* 30 s"):
            await handle.method_named(method).options(timeout_s=30.0).remote(1000.0)
        return clock.time(), await handle.read.remote(), handle.restarts

    replaced = 1 if (method, on_cancel) == ("sync", "kill") else 0
    assert in_virtual_time(program)[0] == (30.0, state, replaced)


def test_a_call_that_sleeps_is_cancelled_in_the_middle() -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> tuple[int, int]:
        handle = system.spawn(Sleeper)
        running, behind = handle.sync.remote(1000.0), handle.read.remote()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running, 5.0)
        assert (await behind, clock.time()) == (0, 5.0)
        return handle.restarts, handle.pending

    assert in_virtual_time(program)[0] == (1, 0)


def test_a_restart_waits_for_its_back_off() -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> list[float]:
        handle = system.spawn(Sleeper, restart=RestartPolicy(max_restarts=4, backoff_s=2.0))
        times: list[float] = []
        for _ in range(4):
            with pytest.raises(ActorDiedError):
                await handle.die.remote()
            assert handle.statistics()["state"] in ("up", "pause")
            await handle.ready()
            times.append(clock.time())
        with pytest.raises(ActorDiedError):
            await handle.die.remote()
        with pytest.raises(ActorUnavailableError, match="4 in 60 s"):
            await handle.ready()
        return times

    assert in_virtual_time(program)[0] == [0.0, 2.0, 6.0, 14.0]


def test_a_constructor_may_take_its_time_but_not_more() -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> float:
        slow = system.spawn(Sleeper, 100.0)
        assert not slow.is_up
        with pytest.raises(ActorTimeoutError, match=r"__init__.* 120 s"):
            await system.spawn(Sleeper, 130.0).ready()
        await slow.ready()
        return clock.time()

    assert in_virtual_time(program)[0] == 120.0


def test_stopping_lets_calls_end_within_the_grace() -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> list[object]:
        handle = system.spawn(Sleeper)
        calls = [asyncio.ensure_future(handle.sync.remote(seconds)) for seconds in (4.0, 20.0)]
        await asyncio.sleep(0)
        stop = handle.stop(grace_s=10.0)
        with pytest.raises(ActorUnavailableError, match="being stopped"):
            await handle.read.remote()
        await stop
        assert clock.time() == 10.0
        return list(await asyncio.gather(*calls, return_exceptions=True))

    outcomes, _ = in_virtual_time(program)
    assert outcomes[0] == 4.0
    assert isinstance(outcomes[1], ActorUnavailableError)


@pytest.mark.parametrize("method", ["sync", "sleep"])
def test_faults_in_virtual_time(method: str) -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> list[tuple[str, float]]:
        handle = system.spawn(Sleeper, name="a", restart=FORGIVING)
        seen: list[tuple[str, float]] = []
        for _ in range(6):
            try:
                await handle.method_named(method).options(timeout_s=20.0).remote(1.0)
                seen.append(("ok", clock.time()))
            except (ActorDiedError, ActorTimeoutError) as error:
                seen.append((type(error).__name__, clock.time()))
        return seen

    faults = [
        Fault(actor="a", action="delay", at_call=2, delay_s=9.0),
        Fault(actor="a", action="drop_reply", at_call=3),
        Fault(actor="a", action="kill", at_call=4),
        Fault(actor="a", action="kill_after", at_call=5),
    ]
    seen, _ = in_virtual_time(program, *faults)
    assert seen == [
        ("ok", 1.0),
        ("ok", 11.0),
        ("ActorTimeoutError", 31.0),
        ("ActorDiedError", 31.0),
        ("ok", 32.0),
        ("ok", pytest.approx(33.1)),  # the second restart in a row waits
    ]


def test_a_fault_hits_the_call_it_names_also_among_calls_that_run_side_by_side() -> None:
    async def program(system: ActorSystem, _: VirtualClock) -> list[object]:
        handle = system.spawn(Sleeper, name="a", max_concurrency=4, restart=FORGIVING)
        calls = (handle.sleep.options(timeout_s=50.0).remote(4.0 - n) for n in range(4))
        return [type(outcome) for outcome in await asyncio.gather(*calls, return_exceptions=True)]

    kinds, _ = in_virtual_time(program, Fault(actor="a", action="delay", at_call=2, delay_s=60.0))
    assert kinds == [float, ActorTimeoutError, float, float]


def test_a_kill_after_a_call_is_seen_by_those_behind_it_only() -> None:
    system = ActorSystem(
        num_cpus=2, backend="inline", faults=FaultPlan([Fault(actor="a", action="kill_after", at_call=17)])
    )
    handle = system.spawn(bodies.Stateful, name="a", restart=FORGIVING)
    assert [handle.add.remote().result() for _ in range(20)] == [*range(1, 18), 1, 2, 3]


async def test_a_lost_reply_of_an_async_method_ends_the_call() -> None:
    system, _ = await faulty(Fault(actor="a", action="drop_reply"), Fault(actor="a", action="drop_reply", at_call=2))
    handle = system.spawn(bodies.Concurrent, name="a", restart=FORGIVING)
    with pytest.raises(ActorTimeoutError):
        await handle.echo.options(timeout_s=5.0).remote(1)
    with pytest.raises(ActorDiedError, match="reply was lost"):
        await handle.echo.remote(1)
    assert await handle.echo.remote(2) == 2


@pytest.mark.parametrize("seed", range(3))
def test_virtual_time_has_one_order_for_one_seed(seed: int) -> None:
    async def program(system: ActorSystem, clock: VirtualClock) -> list[tuple[int, float]]:
        handles = [system.spawn(Sleeper, name=name, restart=FORGIVING) for name in "abc"]
        ends: list[tuple[int, float]] = []

        async def call(number: int) -> None:
            await handles[number % 3].sync.options(max_task_retries=1).remote(float(number % 2))
            ends.append((number, clock.time()))

        await asyncio.gather(*(call(number) for number in range(30)))
        return ends

    kill = Fault(actor="b", action="kill", at_call=3)
    assert in_virtual_time(program, kill, seed=seed) == in_virtual_time(program, kill, seed=seed)


async def test_a_virtual_clock_wants_its_own_loop() -> None:
    async with ActorSystem(num_cpus=2, backend="inline", clock=VirtualClock()) as system:
        with pytest.raises(RuntimeError, match=r"clock\.run"):
            system.spawn(Sleeper).read.remote()


def test_without_a_loop_virtual_time_passes_at_once() -> None:
    clock = VirtualClock()
    system = ActorSystem(num_cpus=2, backend="inline", clock=clock)
    handle = system.spawn(Sleeper, 5.0)
    handle.sync.remote(10.0).result()
    handle.sleep.remote(100.0).result()
    assert clock.time() == 115.0
    system.shutdown_now()


def test_a_virtual_loop_still_hears_threads() -> None:
    async def main() -> str:
        return await asyncio.to_thread(lambda: "heard")

    assert VirtualClock().run(main()) == "heard"
    with pytest.raises(ValueError, match="does not go back"):
        VirtualClock().advance(-1)


def test_what_is_left_of_a_plan_is_told() -> None:
    fault = Fault(actor="a", action="kill", at_call=3)
    plan = FaultPlan([fault])
    assert plan.left == [fault]
    assert plan.take("a", "kill", 3) is fault
    assert plan.left == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"action": "kil"}, "Did you mean 'kill'"),
        ({"action": "kill", "at_call": 0}, "counted from 1"),
        ({"action": "kill", "delay_s": 1.0}, "delay_s"),
        ({"action": "delay"}, "delay_s"),
    ],
)
def test_faults_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(actor="a", **wrong)
    with pytest.raises(ValueError, match="twice"):
        FaultPlan([Fault(actor="a", action="kill")] * 2)


faults = st.builds(
    Fault,
    actor=st.sampled_from(["a", "b"]),
    action=st.sampled_from(["kill", "kill_after", "drop_reply"]),
    at_call=st.integers(1, 8),
) | st.builds(
    Fault,
    actor=st.sampled_from(["a", "b"]),
    action=st.just("delay"),
    at_call=st.integers(1, 8),
    delay_s=st.sampled_from([1.0, 30.0]),
)
calls = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(["sync", "sleep", "die", "read"]),
    st.sampled_from([None, 5.0]),  # time limit
    st.sampled_from([None, 0.0, 2.0]),  # cancelled after so long
    st.integers(0, 1),  # retries
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(calls, max_size=12),
    st.lists(faults, max_size=6, unique_by=lambda fault: (fault.actor, fault.action, fault.at_call)),
    st.integers(0, 3),
)
def test_whatever_happens_every_call_ends_once_and_nothing_is_held(
    sent: list[tuple[str, str, float | None, float | None, int]], plan: list[Fault], seed: int
) -> None:
    def run() -> list[tuple[int, str, float]]:
        clock = VirtualClock()
        ends: list[tuple[int, str, float]] = []

        async def call(number: int, system: ActorSystem) -> None:
            actor, method, timeout_s, cancel_after_s, retries = sent[number]
            arguments = [3.0] if method in ("sync", "sleep") else []
            try:
                handle = system.get(actor)
                bound = handle.method_named(method).options(timeout_s=timeout_s, max_task_retries=retries)
                async with asyncio.timeout(cancel_after_s):
                    await bound.remote(*arguments)
                ends.append((number, "ok", clock.time()))
            except (ActorDiedError, ActorTimeoutError, ActorUnavailableError, TimeoutError, KeyError) as error:
                ends.append((number, type(error).__name__, clock.time()))

        async def main() -> None:
            policy = RestartPolicy(max_restarts=3, backoff_s=1.0)
            system = ActorSystem(num_cpus=2, backend="inline", faults=FaultPlan(plan), clock=clock, seed=seed)
            handles = [system.spawn(Sleeper, name=name, restart=policy, max_concurrency=2) for name in "ab"]
            await asyncio.gather(*(call(number, system) for number in range(len(sent))))
            assert [handle.pending for handle in handles] == [0, 0]
            await system.shutdown()
            assert system.ledger.held == Claim()
            assert all(handle.is_down for handle in handles)

        clock.run(main())
        return ends

    first = run()
    assert sorted(number for number, _, _ in first) == list(range(len(sent)))
    assert run() == first
