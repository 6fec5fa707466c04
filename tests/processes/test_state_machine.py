"""Any order of spawns, calls, cancellations, kills and stops: every call ends once, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from tests.conftest import children_of
from tests.processes import bodies
from xrl_lite.actors import ActorHandle, ActorSystem, CallFuture, RestartPolicy
from xrl_lite.errors import ActorDiedError, ActorTimeoutError, ActorUnavailableError

LIMIT_S = 30.0
ENDINGS = (ActorDiedError, ActorTimeoutError, ActorUnavailableError, asyncio.CancelledError)
CALLS = {
    "ping": (),
    "process_id": (),
    "sleep": (0.01,),
    "hang_in_python": (),
    "end_hard": (3,),
    "large_result": (300_000,),
}


class Actors(RuleBasedStateMachine):
    handles = Bundle("handles")
    futures = Bundle("futures")

    def __init__(self) -> None:
        super().__init__()
        self.processes_before = children_of(os.getpid())
        self.descriptors_before = len(os.listdir("/proc/self/fd"))
        self.system = ActorSystem(num_cpus=100)
        self.calls: list[tuple[CallFuture[Any], list[int]]] = []

    @rule(target=handles, restarts=st.integers(0, 3), on_cancel=st.sampled_from(["kill", "interrupt"]))
    def spawn(self, restarts: int, on_cancel: Any) -> ActorHandle:
        policy = RestartPolicy(max_restarts=restarts, backoff_s=0.0)
        return self.system.spawn(bodies.Victim, restart=policy, on_cancel=on_cancel)

    @rule(target=futures, handle=handles, method=st.sampled_from(sorted(CALLS)), retries=st.integers(0, 1))
    def call(self, handle: ActorHandle, method: str, retries: int) -> CallFuture[Any]:
        timeout_s = 0.1 if method == "hang_in_python" else None
        options = handle.method_named(method).options(timeout_s=timeout_s, max_task_retries=retries)
        future = options.remote(*CALLS[method])
        ended: list[int] = []
        future.when_done(lambda _: ended.append(1))
        self.calls.append((future, ended))
        return future

    @rule(future=futures)
    def cancel(self, future: CallFuture[Any]) -> None:
        future.cancel()

    @rule(handle=handles)
    def kill_the_process(self, handle: ActorHandle) -> None:
        if (pid := handle.pid) is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    @rule(handle=consumes(handles), grace_s=st.sampled_from([0.0, 0.05, 5.0]))
    def stop(self, handle: ActorHandle, grace_s: float) -> None:
        handle.stop(grace_s).result(LIMIT_S)
        assert handle.pending == 0

    @rule(future=futures)
    def wait(self, future: CallFuture[Any]) -> None:
        try:
            future.result(LIMIT_S)
        except ENDINGS:
            return

    def teardown(self) -> None:
        self.system.shutdown_now(0.2)
        for future, ended in self.calls:
            assert future.done(), future
            assert ended == [1]
            self.wait(future)  # a result that nobody has read holds its memory
        assert self.system.statistics()["num_cpus_held"] == 0
        assert self.system.statistics()["actors"] == {}
        self.calls.clear()
        assert children_of(os.getpid()) <= self.processes_before
        assert len(os.listdir("/proc/self/fd")) <= self.descriptors_before


TestActors = Actors.TestCase
TestActors.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
