"""What every judger that the settings can build has in common, wherever it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest

from tests.build import judger_system
from tests.unit.judger import test_adapters as functions
from tests.unit.judger.states import make_state
from xrl_lite.actors import ActorSystem, CPUResourceManager, CPUResourcesConfig, set_cpu_resource_manager
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import JudgerError
from xrl_lite.judger import ComposedJudgerConfig, Judger, JudgerConfig, SkipSampleError, self_test

Place = Literal["thread", "loop", "worker", "pool", "composed", "composed pool", "inline worker", "inline pool"]
PLACES: list[Place] = ["thread", "loop", "worker", "pool", "composed", "composed pool", "inline worker", "inline pool"]
SOURCE = "openai/gsm8k"


def reward(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    if response == "raise":
        raise ValueError("no such unit")
    if response == "skip":
        raise SkipSampleError("nothing to compare")
    return {"score": 1.0 if response == label else 0.0, "length": len(response)}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


@pytest.fixture(scope="module")
def processes() -> Iterator[ActorSystem]:
    with judger_system() as system:
        yield system


@pytest.fixture
async def system(place: Place, processes: ActorSystem) -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=4, backend="inline") as inline:
        chosen = inline if place.startswith("inline") else processes
        set_cpu_resource_manager(CPUResourceManager(capacity=chosen))
        yield chosen
        set_cpu_resource_manager(None)


class Doubling(Judger):
    """A judger of one's own, with a payload and an output of its own."""

    def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
        return {"half": rollout_state.extra_fields["half"]}

    async def judge_payload(self, payload: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(payload, list):
            return [{"whole": 2 * one["half"]} for one in payload]
        return {"whole": 2 * payload["half"]}

    def postprocess(self, rollout_state: RolloutState, output: Any) -> RolloutState:
        rollout_state.reward = {"score": output["whole"]}
        return rollout_state


class DoublingConfig(JudgerConfig):
    def build_local(self) -> Judger:
        return Doubling(self.judger_name)


class Places:
    """Builds judgers in one place and closes them."""

    def __init__(self, place: Place, system: ActorSystem) -> None:
        self._place, self._system = place, system
        self._built: list[Judger] = []

    def build(self, kind: type[JudgerConfig] = JudgerConfig, **settings: Any) -> Judger:
        if "worker" in self._place or "pool" in self._place:
            workers = 2 if "pool" in self._place else 1
            settings["cpu_resources"] = CPUResourcesConfig(num_workers=workers, num_cpus_per_worker=0.2)
        if self._place == "loop":
            settings["sync_in"] = "loop"
        settings = {"judger_name": "x", "reward_handler": reward, **settings}
        config = kind(**settings)
        wrapped = ComposedJudgerConfig(branches={SOURCE: config}) if "composed" in self._place else config
        self._built.append(wrapped.build(self._system))
        return self._built[-1]

    async def close(self) -> None:
        for judger in self._built:
            await judger.aclose()


@pytest.fixture
async def places(place: Place, system: ActorSystem) -> AsyncIterator[Places]:
    made = Places(place, system)
    yield made
    await made.close()


def sample(response: str | None, label: Any = "right", **fields: Any) -> RolloutState:
    return make_state(response, label, data_source={SOURCE: 1.0}, **fields)


async def test_the_contract_of_judging(places: Places) -> None:
    judger = places.build(gold_template="{label}")
    responses = ["right", "wrong", "raise", "skip", ""]
    states = [sample(response, rollout_id=index) for index, response in enumerate(responses)]
    judged = await asyncio.gather(*map(judger.judge, states))
    assert all(one is other for one, other in zip(states, judged, strict=True))
    assert [state.reward for state in states] == [
        {"score": 1.0, "length": 5},
        {"score": 0.0, "length": 5},
        None,
        None,
        {"score": 0.0, "length": 0},
    ]
    done, failed = Status.COMPLETED, Status.FAILED
    assert [state.status for state in states] == [done, done, failed, failed, done]
    outcomes = [state.extra_fields["judgement"]["outcome"] for state in states]
    assert outcomes == ["ok", "ok", "raised", "skipped", "ok"]
    assert f"ValueError: no such unit (at {__file__}:" in str(states[2].error_msg)
    counts = judger.statistics()["x"]
    assert {name: counts[name] for name in ("ok", "timeout", "crashed", "raised", "skipped")} == {
        "ok": 3,
        "timeout": 0,
        "crashed": 0,
        "raised": 1,
        "skipped": 1,
    }
    for fields, message in (
        ({"response": None}, "must have a response"),
        ({"response": "x", "label": None}, "must have reward_model with 'ground_truth'"),
    ):
        with pytest.raises(AssertionError, match=message):
            await judger.judge(sample(**fields))
    assert [result.is_passed for result in await self_test(judger, states[0])] == [True]


@pytest.mark.parametrize("place", ["loop", "pool", "composed", "inline worker"], indirect=True)
async def test_policies_and_the_guard(places: Places) -> None:
    zero = places.build(judger_name="zero", on_error="zero")
    assert (await zero.judge(sample("raise"))).reward == {"score": 0.0}
    loud = places.build(judger_name="loud", on_error="raise")
    with pytest.raises(ValueError, match="no such unit"):
        await loud.judge(sample("raise"))
    guarded = places.build(judger_name="guarded", max_initial_failures=2)
    await guarded.judge(sample("raise"))
    with pytest.raises(JudgerError, match="first 2 judgements of judger 'guarded' all failed"):
        await guarded.judge(sample("raise"))


@pytest.mark.parametrize("place", ["thread", "inline pool"], indirect=True)
async def test_reward_functions_of_every_system_score_alike(places: Places) -> None:
    for index, (signature, function) in enumerate(functions.FUNCTIONS):
        judger = places.build(judger_name=f"x{index}", reward_handler=function, signature=signature)
        states = [functions.sample(functions.RIGHT), functions.sample(functions.WRONG)]
        judged = await asyncio.gather(*map(judger.judge, states))
        scores = [state.reward["score"] if state.reward else state.error_msg for state in judged]
        assert scores == [1.0, 0.0], signature
        await judger.aclose()


async def test_a_judger_of_ones_own_scores_singly_and_in_batches(places: Places) -> None:
    judger = places.build(DoublingConfig)
    states = [sample("x", extra_fields={"half": half}) for half in range(5)]
    await asyncio.gather(*map(judger.judge, states))
    assert [state.reward for state in states] == [{"score": 2 * half} for half in range(5)]
    batch = [sample("x", extra_fields={"half": half}) for half in (3, 1, 2)]
    judged = await judger.batch_judge(batch)
    assert [state.reward for state in judged] == [{"score": 6}, {"score": 2}, {"score": 4}]
    assert all(one is other for one, other in zip(batch, judged, strict=True))
