"""Judgers in real worker processes: nothing that reward code does costs more than its own sample."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.build import judger_system
from tests.processes import judger_bodies as bodies
from tests.unit.judger.states import make_state
from xrl_lite.actors import ActorSystem, CPUResourceManager, CPUResourcesConfig, set_cpu_resource_manager
from xrl_lite.config import load_config
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import ConfigError, ResourceError
from xrl_lite.judger import (
    ComposedJudgerConfig,
    ExactMatchJudgerConfig,
    Judger,
    JudgerConfig,
    JudgerPool,
    MathJudgerConfig,
    NativeJudger,
    RemoteJudger,
    self_test,
)
from xrl_lite.registry import load_object

pytestmark = pytest.mark.process

MIB = 1 << 20
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def running() -> Iterator[ActorSystem]:
    with judger_system() as system:
        yield system


@pytest.fixture
def system(running: ActorSystem) -> Iterator[ActorSystem]:
    set_cpu_resource_manager(CPUResourceManager(capacity=running))
    yield running
    set_cpu_resource_manager(None)


def config(handler: Any = bodies.wild, *, workers: int = 1, **settings: Any) -> JudgerConfig:
    resources = CPUResourcesConfig(num_workers=workers, num_cpus_per_worker=0.5, cpu_memory_per_worker=256 * MIB)
    defaults: dict[str, Any] = {"judger_name": "wild", "reward_handler": handler, "cpu_resources": resources}
    return JudgerConfig(**{**defaults, **settings})


def outcome(state: RolloutState) -> str:
    return state.extra_fields["judgement"]["outcome"]


async def judge_all(judger: Judger, responses: list[str], **fields: Any) -> list[RolloutState]:
    states = [make_state(response, response, rollout_id=index, **fields) for index, response in enumerate(responses)]
    return await asyncio.gather(*map(judger.judge, states))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 it is about processes, which tell nobody
            await asyncio.sleep(0.01)


async def test_f1_one_endless_sample_costs_one_sample(system: ActorSystem) -> None:
    async with config(workers=2, request_timeout=2.0).build(system) as judger:
        states = await judge_all(judger, ["endless"] + ["slow"] * 99)
        assert outcome(states[0]) == "timeout"
        assert [state.reward for state in states[1:]] == [{"score": 1.0}] * 99
        later = await judge_all(judger, ["slow"] * 20)
        assert [state.reward for state in later] == [{"score": 1.0}] * 20
        assert isinstance(judger, JudgerPool)
        assert set(judger.get_worker_status().values()) == {0}
        assert judger.statistics()["wild"]["ok"] == 119


CULPRITS = {
    "regex": "timeout",
    "sleep": "timeout",
    "memory": "crashed",
    "_exit": "crashed",
    "exit": "crashed",
    "segfault": "crashed",
    "raise": "raised",
    "raise what does not pickle": "raised",
    "return what does not pickle": "raised",
    "print": "ok",
}


async def test_f2_every_culprit_ends_in_its_outcome_and_the_others_are_scored(system: ActorSystem) -> None:
    async with config(workers=2, request_timeout=2.0).build(system) as judger:
        responses = [response for culprit in CULPRITS for response in (culprit, "fine", "fine")]
        states = await judge_all(judger, responses)
        assert {state.response: outcome(state) for state in states if state.response != "fine"} == CULPRITS
        assert [state.reward for state in states if state.response == "fine"] == [{"score": 1.0}] * (2 * len(CULPRITS))
        messages = {state.response: str(state.error_msg) for state in states}
        assert "code 3" in messages["_exit"]
        assert "SIGSEGV" in messages["segfault"]
        assert "memory" in messages["memory"]
        assert f"ValueError: no such unit (at {bodies.__file__}:" in messages["raise"]
        assert "judger 'wild', sample" in messages["sleep"]


async def test_a_sample_that_hung_twice_takes_no_third_worker(system: ActorSystem) -> None:
    async with config(request_timeout=1.0, max_initial_failures=0).build(system) as judger:
        for _ in range(2):
            (state,) = await judge_all(judger, ["sleep"])
            assert outcome(state) == "timeout"
        again = await judge_all(judger, ["sleep"] * 50 + ["fine"])
        assert [outcome(state) for state in again] == ["timeout"] * 50 + ["ok"]
        assert all("not run again" in str(state.error_msg) for state in again[:50])
        assert judger.statistics()["wild"]["poisoned"] == 1


async def test_f3_a_worker_that_is_killed_loses_no_judgement(system: ActorSystem) -> None:
    async with config(bodies.identity).build(system) as judger:
        (first,) = await judge_all(judger, ["x"])
        assert first.reward is not None
        os.kill(first.reward["pid"], signal.SIGKILL)
        states = await judge_all(judger, ["x"] * 5)
        assert [outcome(state) for state in states] == ["ok"] * 5
        assert {state.reward["pid"] for state in states if state.reward} != {first.reward["pid"]}


async def test_a_sample_that_was_in_a_dying_worker_is_judged_again(system: ActorSystem, tmp_path: Path) -> None:
    async with config(bodies.die_once, extra_info={"file": str(tmp_path / "died")}).build(system) as judger:
        states = await judge_all(judger, ["once", "x"])
        assert [outcome(state) for state in states] == ["ok", "ok"]


async def test_f4_what_reward_code_started_ends_with_it(system: ActorSystem, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with config(request_timeout=2.0, extra_info={"pid_file": str(pid_file)}).build(system) as judger:
        (state,) = await judge_all(judger, ["child"])
        assert outcome(state) == "timeout"
        child = int(pid_file.read_text())
        await until(lambda: is_gone(child))


async def test_f6_loads_go_back_to_zero_after_failures(system: ActorSystem) -> None:
    async with config(workers=2, max_initial_failures=0).build(system) as judger:
        assert isinstance(judger, JudgerPool)
        for _ in range(3):
            await judge_all(judger, ["raise", "_exit"])
        assert judger.get_worker_status() == {"wild[0]": 0, "wild[1]": 0}


async def test_cancelling_frees_the_worker_at_once(system: ActorSystem) -> None:
    async with config().build(system) as judger:
        (ready,) = await judge_all(judger, ["fine"])
        assert ready.reward == {"score": 1.0}
        task = asyncio.create_task(judger.judge(make_state("sleep")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (state,) = await judge_all(judger, ["fine"])
        assert state.reward == {"score": 1.0}


async def test_signals_work_in_a_worker(system: ActorSystem) -> None:
    async with config(bodies.alarm).build(system) as judger:
        (state,) = await judge_all(judger, ["x"])
        assert state.reward == {"score": 1.0}, state.error_msg


async def test_r12_the_limits_of_math_verify_hold_in_a_worker(system: ActorSystem) -> None:
    resources = CPUResourcesConfig(num_workers=1)
    async with MathJudgerConfig(step_timeout=1, cpu_resources=resources).build(system) as judger:
        responses = [r"\boxed{9^{9^{9^9}}}", r"\boxed{10^{10^{10}}}"]
        states = [make_state(response, "10^{10^{10}}") for response in responses]
        judged = await asyncio.gather(*map(judger.judge, states))
        assert [outcome(state) for state in judged] == ["timeout", "ok"]
        assert "math-verify" in str(judged[0].error_msg)
        assert (await judger.judge(make_state(r"\boxed{\frac{2}{4} + 0}", r"\frac{1}{2}"))).reward == {
            "score": 1.0,
            "acc": True,
        }


@pytest.mark.parametrize("culprit", ["sleep", "segfault", "raise what does not pickle"])
async def test_short_judgements_travel_together_and_a_culprit_among_them_travels_alone(
    system: ActorSystem, culprit: str
) -> None:
    async with config(workers=2, request_timeout=2.0).build(system) as judger:
        await judge_all(judger, ["fine"] * 200)
        states = await judge_all(judger, ["fine"] * 100 + [culprit] + ["raise"] * 10 + ["fine"] * 100)
        outcomes = [outcome(state) for state in states]
        assert outcomes == ["ok"] * 100 + [CULPRITS[culprit]] + ["raised"] * 10 + ["ok"] * 100
        assert f"ValueError: no such unit (at {bodies.__file__}:" in str(states[105].error_msg)


@pytest.mark.parametrize(
    ("culprit", "ending"), [("_exit", "crashed"), pytest.param("endless", "timeout", marks=pytest.mark.slow)]
)
async def test_a_culprit_among_judgements_that_wait_side_by_side_ends_alone(
    system: ActorSystem, culprit: str, ending: str
) -> None:
    settings = config(reward_handler=bodies.wild_and_waiting, request_timeout=2.0, max_initial_failures=0)
    async with settings.build(system) as judger:
        states = await judge_all(judger, ["fine"] * 20 + [culprit] + ["fine"] * 19)
        assert [outcome(state) for state in states] == ["ok"] * 20 + [ending] + ["ok"] * 19
        again = await judge_all(judger, ["fine"] * 40)
        assert [outcome(state) for state in again] == ["ok"] * 40
        assert judger.statistics()["wild"]["poisoned"] == (ending == "crashed")


@pytest.mark.parametrize("workers", [1, 3])
async def test_rewards_do_not_depend_on_the_number_of_workers(system: ActorSystem, workers: int) -> None:
    gold = ["1", "2", "3", "4", "5"]
    labels = ["1", "9", "3", "9", "5"]
    resources = CPUResourcesConfig(num_workers=workers, num_cpus_per_worker=1)
    async with ExactMatchJudgerConfig(cpu_resources=resources).build(system) as judger:
        states = [make_state(response, label) for response, label in zip(gold * 4, labels * 4, strict=True)]
        judged = await asyncio.gather(*map(judger.judge, states))
        assert [state.reward["score"] for state in judged if state.reward] == [1.0, 0.0, 1.0, 0.0, 1.0] * 4
        assert all(one is other for one, other in zip(states, judged, strict=True))
        assert [result.is_passed for result in await self_test(judger, states[0])] == [True]


class TestBuilding:
    async def test_the_table_of_what_is_built(self, system: ActorSystem) -> None:
        local = JudgerConfig(judger_name="a", reward_handler=bodies.wild).build(system)
        async with (
            config(judger_name="b").build(system) as one,
            config(judger_name="c", workers=2).build(system) as two,
        ):
            assert [type(judger) for judger in (local, one, two)] == [NativeJudger, RemoteJudger, JudgerPool]
            assert isinstance(two, JudgerPool)
            assert [type(replica) for replica in two.replicas] == [RemoteJudger, RemoteJudger]

    async def test_training_and_evaluation_may_use_judgers_of_one_name(self, system: ActorSystem) -> None:
        async with config().build(system) as one, config().build(system) as other:
            states = [await judger.judge(make_state("x", "x")) for judger in (one, other)]
            assert [state.reward for state in states] == [{"score": 1.0}] * 2

    async def test_closing_gives_the_slots_back(self, system: ActorSystem) -> None:
        for _ in range(3):
            async with config(workers=4).build(system):
                pass
        judger = config(workers=4).build(system)
        judger.close()
        judger.close()
        await judger.aclose()
        assert system.statistics()["num_cpus_held"] == 0

    async def test_more_workers_than_slots_is_an_error_that_leaves_nothing(self, system: ActorSystem) -> None:
        big = CPUResourcesConfig(num_workers=3, num_cpus_per_worker=1)
        branches: dict[str, Any] = {
            "a": config(judger_name="a", cpu_resources=big),
            "b": config(judger_name="b", cpu_resources=big),
        }
        with pytest.raises(ResourceError, match="Insufficient"):
            ComposedJudgerConfig(branches=branches).build(system)
        await until(lambda: system.statistics()["num_cpus_held"] == 0)
        async with config(workers=4, cpu_resources=CPUResourcesConfig(num_workers=4)).build(system):
            pass

    async def test_without_a_resource_manager_it_is_an_error_that_says_what_to_do(self, system: ActorSystem) -> None:
        set_cpu_resource_manager(None)
        with pytest.raises(ValueError, match="CPUResourceManager is not initialized"):
            config().build(system)

    async def test_p3_what_cannot_travel_is_named_at_build_time_and_the_slots_are_free(
        self, system: ActorSystem
    ) -> None:
        lock = threading.Lock()

        def locked(response: str, label: Any, extra_info: Any) -> dict[str, Any]:
            with lock:
                return {"score": 1.0}

        with pytest.raises(ConfigError, match="judger 'wild' cannot be sent to a worker process") as caught:
            config(locked).build(system)
        assert "lock" in str(caught.value)
        assert "package.module:name" in str(caught.value)
        with pytest.raises(ConfigError, match=r"extra_info\['tokenizer'\]"):
            config(extra_info={"tokenizer": lock}).build(system)
        assert system.statistics()["num_cpus_held"] == 0
        state = await JudgerConfig(judger_name="local", reward_handler=locked).build(system).judge(make_state())
        assert state.reward == {"score": 1.0}

    async def test_p3_lambdas_and_closures_travel(self, system: ActorSystem) -> None:
        bonus = 0.25
        async with config(lambda response, label, extra_info: {"score": bonus}).build(system) as judger:
            (state,) = await judge_all(judger, ["x"])
            assert state.reward == {"score": 0.25}, state.error_msg


class SumJudger(Judger):
    """Reads more of the state than response and label, and is async."""

    def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
        return {"numbers": rollout_state.extra_fields["numbers"]}

    async def judge_payload(self, payload: Any) -> Any:
        await asyncio.sleep(0)
        return {"total": sum(payload["numbers"]), "pid": os.getpid()}

    def postprocess(self, rollout_state: RolloutState, output: Any) -> RolloutState:
        assert output["pid"] != os.getpid()
        rollout_state.reward = {"score": output["total"]}
        return rollout_state


class SumJudgerConfig(JudgerConfig):
    judger_name: str = "sum"

    def build_local(self) -> Judger:
        return SumJudger()


@pytest.mark.parametrize("max_concurrency", [None, 8])
async def test_a_judger_of_ones_own_runs_in_workers(system: ActorSystem, max_concurrency: int | None) -> None:
    settings = SumJudgerConfig(cpu_resources=CPUResourcesConfig(num_workers=2), max_concurrency=max_concurrency)
    async with settings.build(system) as judger:
        states = [make_state(extra_fields={"numbers": [index, 1]}) for index in range(6)]
        judged = await asyncio.gather(*map(judger.judge, states))
        assert [state.reward for state in judged] == [{"score": index + 1} for index in range(6)]


async def test_misuse_in_a_worker_is_raised_here(system: ActorSystem) -> None:
    async with config().build(system) as judger:
        with pytest.raises(AssertionError, match="must have a response"):
            await judger.judge(make_state(None))
        with pytest.raises(AssertionError, match="does not support batch payloads"):
            await judger.batch_judge([make_state()])


async def test_async_functions_run_at_the_same_time_in_one_worker(system: ActorSystem) -> None:
    async def meet(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
        here = globals().setdefault("_meeting", {"count": 0, "all": asyncio.Event()})
        here["count"] += 1
        if here["count"] == 5:
            here["all"].set()
        await here["all"].wait()
        return {"score": 1.0}

    async with config(meet, request_timeout=20.0).build(system) as judger:
        states = await judge_all(judger, ["x"] * 5)
        assert [state.reward for state in states] == [{"score": 1.0}] * 5
        assert states[0].status is Status.COMPLETED


async def test_a_sync_function_may_return_something_awaitable(system: ActorSystem) -> None:
    async with config(bodies.wrapped).build(system) as judger:
        assert [state.reward for state in await judge_all(judger, ["fine"] * 3)] == [{"score": 1.0}] * 3


class DoublingJudger(NativeJudger):
    """A step of its own around the reward function."""

    async def judge_payload(self, payload: Any) -> Any:
        output = await super().judge_payload(payload)
        return {"score": 2 * output["score"], "pid": os.getpid()}


class DoublingJudgerConfig(JudgerConfig):
    def build_local(self) -> Judger:
        return DoublingJudger(self.judger_name, self.reward_handler, request_timeout=self.request_timeout)


@pytest.mark.parametrize("kind", [JudgerConfig, DoublingJudgerConfig])
@pytest.mark.parametrize("max_concurrency", [None, 4])
async def test_a_sync_function_that_hangs_takes_its_worker_along(
    system: ActorSystem, kind: type[JudgerConfig], max_concurrency: int | None
) -> None:
    settings = kind(
        judger_name="wild",
        reward_handler=bodies.wild_with_pid,
        cpu_resources=CPUResourcesConfig(num_workers=1),
        request_timeout=1.0,
        max_concurrency=max_concurrency,
    )
    async with settings.build(system) as judger:
        before, hung, after = [await judger.judge(make_state(text)) for text in ("fine", "endless", "fine")]
        assert [outcome(state) for state in (before, hung, after)] == ["ok", "timeout", "ok"], after.error_msg
        assert before.reward is not None
        assert after.reward is not None
        assert after.reward["pid"] != before.reward["pid"]
        assert is_gone(before.reward["pid"])


@pytest.mark.parametrize("handler", [bodies.meeting, partial(bodies.meeting), bodies.alone])
async def test_a_sync_function_around_an_async_one_runs_as_often_as_it_is_told_and_can(
    system: ActorSystem, handler: Callable[..., Any]
) -> None:
    async with config(handler, max_concurrency=4, request_timeout=5.0).build(system) as judger:
        states = await judge_all(judger, ["a", "b", "c", "d"])
        assert [outcome(state) for state in states] == ["ok"] * 4, states[0].error_msg


async def test_a_function_of_a_python_config_goes_along(system: ActorSystem, tmp_path: Path) -> None:
    shipped = (Path(__file__).parents[2] / "configs" / "gsm8k.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(f"{shipped}\n\ndef score(response, label, extra_info):\n    return {{'score': len(response)}}\n")
    settings = config(load_object(f"{path}:score"))
    load_config(path)
    async with settings.build(system) as judger:
        assert [state.reward for state in await judge_all(judger, ["abc"])] == [{"score": 3}]


@pytest.mark.parametrize("as_path", [True, False])
async def test_a_worker_imports_the_helper_beside_reward_code_and_not_that_of_the_current_folder(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_path: bool
) -> None:
    helper = f"helper_of_{tmp_path.name}"
    for folder, points in (("current", 0.25), ("rewards", 1.0)):
        (tmp_path / folder).mkdir()
        code = f"def score(response, label, extra_info):\n    return {{'score': {points}}}\n"
        (tmp_path / folder / f"{helper}.py").write_text(code)
    file = tmp_path / "rewards" / "rewards.py"
    file.write_text(f"from {helper} import score\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "current"), *sys.path])
    handler = f"{file}:score"
    async with config(handler if as_path else load_object(handler)).build(system) as judger:
        assert (await judger.judge(make_state())).reward == {"score": 1.0}
