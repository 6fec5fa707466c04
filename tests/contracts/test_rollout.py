"""Controller, agent loop, manager and weight sync over the scripted engine, on both backends of the actor layer."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

from tests.build import ByText, make_state
from xrl_lite.actors import ActorSystem
from xrl_lite.agent_loop import AgentLoopManager, ProduceLimits, Producer, ProducerTask, SingleTurnAgentLoopConfig
from xrl_lite.data import RolloutState, Row, SampleParams, Sampler, Status
from xrl_lite.errors import ActorDiedError, ActorUnavailableError, BufferStarvedError, ConfigError, WeightSyncError
from xrl_lite.replay_buffer import PromptGroup, ReplayBufferConfig, build_replay_buffer
from xrl_lite.rollout import RolloutConfig, link
from xrl_lite.rollout.adapter import FixedWeightsAdapter
from xrl_lite.rollout.client import LLMClient
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.rollout.fake import FakeReplica
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplicaRegistry
from xrl_lite.weight_sync import LocalWeights, WeightSync, make_transport

BACKENDS = ["inline", pytest.param("process", marks=pytest.mark.process)]
WEIGHTS = {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[ActorSystem]:
    """A system whose fork server has torch loaded, before the first test counts processes."""
    before, link.PRELOAD["fake"] = link.PRELOAD.get("fake", ()), ("torch",)
    running = ActorSystem(num_cpus=8)
    first = running.spawn(dict, preload=("torch",))
    first.ready().result(60.0)
    first.stop().result(10.0)
    yield running
    running.shutdown_now()
    link.PRELOAD["fake"] = before


@pytest.fixture(params=BACKENDS)
async def system(request: pytest.FixtureRequest) -> AsyncIterator[ActorSystem]:
    if request.param == "process":
        yield request.getfixturevalue("processes")
    else:
        async with ActorSystem(num_cpus=8, backend="inline") as running:
            yield running


def make_controller(
    system: ActorSystem, *, settings: dict[str, Any] | None = None, **options: Any
) -> RolloutController:
    defaults = {"engine": "fake", "request_timeout_s": 30.0, "num_threads": 1, "health_interval_s": 0.2}
    config = RolloutConfig(**{**defaults, **(settings or {}), "engine_options": options})
    return RolloutController(
        system,
        config=config,
        model_path="none",
        decode=lambda ids, _: "".join(map(chr, ids)),
        seed=0,
        eos_token_ids=frozenset([99]),
    )


def make_sync(controller: RolloutController, weights: Any = None, **options: Any) -> WeightSync:
    return WeightSync(
        source=LocalWeights(weights or (lambda: WEIGHTS)),
        targets=controller.adapters,
        gate=controller,
        transport=make_transport(
            options.pop("transport", "shared_memory"),
            folder=None,
            bucket_bytes=20,
            timeout_s=options.pop("timeout_s", 10.0),
        ),
        **options,
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait on a state that other tasks bring about."""
    while not condition():  # noqa: ASYNC110 - it may be anything
        await anyio.sleep(0.005)


def loads(controller: RolloutController) -> list[int]:
    return [replica["load"] for replica in controller.statistics()["replicas"].values()]


def num_with_tokens(replica: link.ReplicaLink) -> int:
    """How many requests of a replica it has told some tokens of, since they were sent to it."""
    return sum(bool(pending.known.token_ids) for pending in replica._pending.values())


def fresh(**fields: Any) -> RolloutState:
    defaults = {"status": Status.INIT, "reward": None, "response": None, "response_ids": None, "logprobs": None}
    return make_state(**(defaults | fields))


async def test_a_response_fills_the_state(system: ActorSystem) -> None:
    async with make_controller(system, responses=[[65]]) as controller:
        state = fresh()
        assert await controller.generate(state) is state
        assert (state.status, state.response, state.response_ids) == (Status.COMPLETED, "A", [65])
        assert (state.logprobs, state.response_mask, state.response_model_steps) == ([-0.5], [1], [0])
        assert loads(controller) == [0]


async def test_a_request_that_fails_is_data_and_its_sibling_goes_on(system: ActorSystem) -> None:
    async with make_controller(system, fail_prompts=[9]) as controller:
        bad, good = fresh(prompt_ids=[9], rollout_id=1), fresh(rollout_id=2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, bad)
            tasks.start_soon(controller.generate, good)
        assert bad.status is Status.FAILED
        assert bad.error_msg == "sample 1: rollout/0: scripted failure of prompt [9]"
        assert good.status is Status.COMPLETED


class Censor(FakeReplica):
    """Ends every response as servers do whose filter objects to it."""

    def _answer(self, request: GenerateRequest) -> GenerateResult:
        result = super()._answer(request)
        result.finish_reason = "content_filter"
        return result


async def test_a_response_that_the_engine_ends_in_its_own_way_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RolloutReplicaRegistry._table, "censor", lambda: Censor)
    async with (
        ActorSystem(num_cpus=8, backend="inline") as system,
        make_controller(system, settings={"engine": "censor"}) as controller,
    ):
        state = await controller.generate(fresh(rollout_id=3))
    assert state.status is Status.FAILED
    assert state.error_msg == "sample 3: the engine ended the response with 'content_filter'"


async def test_closed_gate_holds_requests_until_it_opens(system: ActorSystem) -> None:
    async with make_controller(system) as controller:
        await controller.pause_generation()
        state = fresh()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, state)
            await until(lambda: controller.statistics()["num_waiting"] == 1)
            assert state.status is Status.INIT
            await controller.continue_generation()
        assert state.status is Status.COMPLETED


async def test_abort_ends_what_runs_and_what_waits(system: ActorSystem) -> None:
    async with make_controller(
        system, hang_prompts=[5], hang_tokens=2, responses=[[65, 66, 67]], settings={"max_in_flight": 2}
    ) as controller:
        states = [fresh(rollout_id=number) for number in range(3)]
        async with anyio.create_task_group() as tasks:
            for state in states:
                tasks.start_soon(controller.generate, state)
            await until(lambda: loads(controller) == [2] and controller.statistics()["num_waiting"] == 1)
            await until(lambda: num_with_tokens(controller._links[0]) == 2)
            await controller.pause_generation()
            assert await controller.abort_all() == 3
        assert [state.status for state in states] == [Status.ABORTED] * 3
        assert sorted(len(state.response_ids or []) for state in states) == [0, 2, 2]


@pytest.mark.parametrize("partial", [True, False])
async def test_an_aborted_sample_goes_on_or_starts_over(system: ActorSystem, partial: bool) -> None:
    async with make_controller(
        system, hang_prompts=[5], hang_tokens=2, responses=[[65, 66, 67, 68]], settings={"partial_rollout": partial}
    ) as controller:
        await controller.ready()
        state = fresh(sample_params=SampleParams(max_tokens=3))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, state)
            await until(lambda: num_with_tokens(controller._links[0]))
            await controller.abort_all()
        assert (state.status, state.response_ids) == (Status.ABORTED, [65, 66])
        state.prompt_ids = [6]  # this one does not hang
        await controller.generate(state)
        assert (state.status, state.response_ids) == (Status.COMPLETED, [65, 66, 67])
        assert state.finish_reason == "length"
        assert state.logprobs == [-0.5] * 3
        assert controller.statistics()["num_requests"] == 2
        assert await controller.generate(state) is state
        assert controller.statistics()["num_requests"] == 2  # what is complete is left alone


async def test_a_stop_text_that_is_cut_by_an_abort_ends_the_response_where_it_is_whole(system: ActorSystem) -> None:
    async with make_controller(
        system, hang_prompts=[5], hang_tokens=2, responses=[list(range(65, 75))], settings={"partial_rollout": True}
    ) as controller:
        await controller.ready()
        state = fresh(sample_params=SampleParams(max_tokens=9, stops=["ZZ", "BCD"]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, state)
            await until(lambda: num_with_tokens(controller._links[0]))
            await controller.abort_all()
        assert (state.status, state.response_ids) == (Status.ABORTED, [65, 66])
        state.prompt_ids = [6]  # this one does not hang
        await controller.generate(state)
        assert (state.status, state.finish_reason) == (Status.COMPLETED, "stop")
        assert (state.response_ids, state.response) == ([65, 66, 67, 68], "ABCD")
        assert len(state.logprobs or []) == len(state.response_model_steps or []) == 4


@pytest.mark.parametrize("ending", [{"stops": ["AB"]}, {"stop_token_ids": [66]}], ids=["text", "token"])
async def test_what_was_whole_when_its_replica_died_is_not_sent_again(
    system: ActorSystem, ending: dict[str, Any]
) -> None:
    async with make_controller(
        system, hang_prompts=[5], hang_tokens=2, responses=[[65, 66, 67, 68]], settings={"max_resends": 0}
    ) as controller:
        await controller.ready()
        state = fresh(sample_params=SampleParams(max_tokens=9, **ending))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, state)
            (replica,) = controller._links
            await until(lambda: num_with_tokens(replica))
            replica.fail(ActorDiedError("scripted"))
        assert (state.status, state.finish_reason) == (Status.COMPLETED, "stop"), state.error_msg
        assert state.response_ids == [65, 66]
        assert controller.statistics()["num_resent"] == 0


@pytest.mark.parametrize(("response", "reason"), [([65, 99], "stop"), ([65, 66, 67], "length")])
async def test_an_aborted_sample_that_is_whole_needs_no_request(
    system: ActorSystem, response: list[int], reason: str
) -> None:
    async with make_controller(system, settings={"partial_rollout": True}) as controller:
        state = fresh(
            status=Status.ABORTED,
            response_ids=response,
            logprobs=[-1.0] * len(response),
            response_model_steps=[0] * len(response),
            sample_params=SampleParams(max_tokens=3),
        )
        await controller.generate(state)
        assert (state.status, state.finish_reason, state.response_ids) == (Status.COMPLETED, reason, response)
        assert controller.statistics()["num_requests"] == 0


async def test_abort_reaches_those_that_were_let_through_and_have_not_sent_yet(system: ActorSystem) -> None:
    async with make_controller(system, hang_prompts=[5]) as controller:
        await controller.ready()
        await controller.pause_generation()
        state = fresh()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, state)
            await until(lambda: controller.statistics()["num_waiting"] == 1)
            await controller.continue_generation()
            assert await controller.abort_all() == 1
        assert state.status is Status.ABORTED
        assert loads(controller) == [0]


async def test_tokens_stream_as_they_come_and_are_the_response(system: ActorSystem) -> None:
    async with make_controller(system, hang_prompts=[5], hang_tokens=2, responses=[[65, 66, 67]]) as controller:
        state = fresh()
        streamed: list[int] = []
        async with controller.streaming(state) as chunks:
            async for chunk in chunks:
                streamed += chunk.token_ids
                if len(streamed) == 2:
                    await controller.abort_all()
        assert streamed == state.response_ids == [65, 66]
        async with controller.streaming(fresh()) as chunks:
            await chunks.receive()  # leaving now ends the request
        await until(lambda: loads(controller) == [0])
        health = await controller.check_health()
        await until(lambda: health["rollout/0"].num_running <= 1)


async def test_whoever_fails_to_hear_of_tokens_costs_neither_the_response_nor_the_replica(system: ActorSystem) -> None:
    told: list[GenerateResult] = []

    def listen(new: GenerateResult) -> None:
        told.append(new)
        raise anyio.BrokenResourceError  # what a stream raises that nobody reads any more

    async with make_controller(system, responses=[[65] * 4], seconds_per_token=0.01) as controller:
        state = await controller.generate(fresh(), on_tokens=listen)
        assert (state.status, state.response_ids) == (Status.COMPLETED, [65] * 4)
        assert len(told) == 1
        assert controller.statistics()["replicas"]["rollout/0"]["num_replaced"] == 0
        assert controller.statistics()["num_resent"] == 0


async def test_one_that_gives_up_takes_nobody_along_and_frees_its_place(system: ActorSystem) -> None:
    async with make_controller(system, hang_prompts=[5]) as controller:
        states = [fresh(rollout_id=number) for number in range(3)]
        async with anyio.create_task_group() as tasks:
            first = anyio.CancelScope()

            async def give_up() -> None:
                with first:
                    await controller.generate(states[0])

            tasks.start_soon(give_up)
            for state in states[1:]:
                tasks.start_soon(controller.generate, state)
            await until(lambda: loads(controller) == [3])
            first.cancel()
            await until(lambda: loads(controller) == [2])
            while (await controller.check_health())["rollout/0"].num_running != 2:
                pass
            assert await controller.abort_all() == 2
        assert [state.status for state in states] == [Status.INIT, Status.ABORTED, Status.ABORTED]


async def test_a_request_that_takes_too_long_is_failed_and_ended_in_the_engine(system: ActorSystem) -> None:
    told: list[GenerateResult] = []
    for limit_s in (0.2, 2.0, 20.0):  # a machine that is slow may need more for the request to get there
        settings = {"request_timeout_s": limit_s}
        async with make_controller(system, hang_prompts=[5], hang_tokens=1, settings=settings) as controller:
            await controller.ready()
            state = await controller.generate(fresh(), on_tokens=told.append)
            assert state.status is Status.FAILED
            assert f"no whole response within {limit_s:g} s" in (state.error_msg or "")
            while (await controller.check_health())["rollout/0"].num_running:
                pass
        if told:
            return
    raise AssertionError("the request never came to the engine")


async def test_leaving_the_controller_ends_what_is_in_flight_with_an_error(system: ActorSystem) -> None:
    sent, waits = fresh(rollout_id=1), fresh(rollout_id=2)
    refusals: list[ActorUnavailableError] = []

    async def wait_for_a_turn() -> None:
        try:
            await controller.generate(waits)
        except ActorUnavailableError as error:
            refusals.append(error)

    with anyio.fail_after(10):
        async with (
            anyio.create_task_group() as tasks,
            make_controller(system, hang_prompts=[5], settings={"max_in_flight": 1}) as controller,
        ):
            await controller.ready()
            tasks.start_soon(controller.generate, sent)
            await until(lambda: loads(controller) == [1])
            tasks.start_soon(wait_for_a_turn)
            await until(lambda: controller.statistics()["num_waiting"] == 1)
    assert sent.status is Status.FAILED
    assert sent.error_msg == (
        "sample 1: rollout/0: generation was ended (its controller was left) before the response was whole"
    )
    assert "rollout/0: generation was ended" in str(refusals[0])


async def test_requests_go_to_the_least_loaded_replica_and_sessions_stay(system: ActorSystem) -> None:
    async with make_controller(system, hang_prompts=[5], settings={"num_replicas": 2}) as controller:
        await controller.ready()
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(controller.generate, fresh(rollout_id=number))
            await until(lambda: loads(controller) == [2, 2])
            for number in range(3):
                tasks.start_soon(controller.generate, fresh(rollout_id=10 + number, session_id="s"))
            await until(lambda: sorted(loads(controller)) == [2, 5])
            tasks.cancel_scope.cancel()
        assert loads(controller) == [0, 0]


async def test_waiting_is_fair_and_bounded(system: ActorSystem) -> None:
    async with make_controller(system, hang_prompts=[5], settings={"max_in_flight": 1}) as controller:
        order: list[int] = []

        async def run(number: int) -> None:
            await controller.generate(fresh(rollout_id=number))
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(run, number)
            for number in range(5):
                await until(lambda: loads(controller) == [1] and len(controller._links[0]._pending) == 1)
                controller._links[0].abort_all()
                await until(lambda number=number: len(order) == number + 1)
        assert order == [0, 1, 2, 3, 4]


# --- verl's way


async def test_verl_style_requests_are_answered(system: ActorSystem) -> None:
    async with make_controller(system, responses=[[65, 66, 67]]) as controller:
        client = LLMClient(controller)
        params = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 2, "logprobs": True, "stop": None}
        output = await client.generate("r1", prompt_ids=[1, 2], sampling_params=params)
        assert (output.token_ids, output.log_probs, output.stop_reason) == ([65, 66], [-0.5, -0.5], "completed")
        assert output.extra_fields["global_steps"] == 0
        async with client.streaming("r2", prompt_ids=[1], sampling_params={}) as outputs:
            parts = [part async for part in outputs]
        assert [token for part in parts for token in part.token_ids] == [65, 66, 67]
        assert parts[-1].stop_reason == "completed"
        with pytest.raises(ConfigError, match=r"Unknown sampling parameter 'temprature'. Did you mean 'temperature'"):
            await client.generate("r3", prompt_ids=[1], sampling_params={"temprature": 1.0})
        with pytest.raises(ConfigError, match="one request gives one response"):
            await client.generate("r3", prompt_ids=[1], sampling_params={"n": 2})


async def test_a_client_may_go_on_after_an_abort(system: ActorSystem) -> None:
    async with make_controller(system, hang_prompts=[5], hang_tokens=2, responses=[[65, 66, 67]]) as controller:
        outputs: list[Any] = []
        client = LLMClient(controller, resume_aborted=True)

        async def run() -> None:
            outputs.append(await client.generate("r", prompt_ids=[5], sampling_params={"max_tokens": 2}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await until(lambda: num_with_tokens(controller._links[0]))
            await controller.abort_all()
        assert outputs[0].token_ids == [65, 66]
        assert outputs[0].extra_fields["finish_reason"] == "length"


# --- weights


@pytest.mark.parametrize("transport", ["shared_memory", "folder", "process_group"])
async def test_weights_reach_every_replica_with_their_version(system: ActorSystem, transport: str) -> None:
    if transport == "process_group" and system.backend == "inline":
        pytest.skip("a group needs processes of its own")
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    async with make_controller(system, settings={"num_replicas": 2}, weights=shapes) as controller:
        await controller.ready()
        sync = make_sync(controller, lambda: weights, transport=transport)
        for version in (3, 4):
            weights["w"] += 1
            report = await sync.sync(version)
            assert (sync.policy_version, report.version, report.num_replaced) == (version, version, 0)
            states = [fresh(rollout_id=number) for number in range(4)]
            async with anyio.create_task_group() as tasks:
                for state in states:
                    tasks.start_soon(controller.generate, state)
            assert [state.response_model_steps for state in states] == [[version]] * 4
        sync.close()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"w": torch.zeros(3)}, r"version 1 failed in phase prepare: rollout/0: .*tensor 'w' has shape \(3,\)"),
        ({"v": torch.zeros(3)}, r"phase prepare: rollout/0: .*tensor 'v' is not in the model"),
    ],
)
async def test_weights_that_do_not_fit_name_replica_phase_and_tensor(
    system: ActorSystem, change: dict[str, torch.Tensor], wanted: str
) -> None:
    async with make_controller(system, weights={"w": [2, 3], "b": [2]}) as controller:
        await controller.ready()
        wrong = WEIGHTS | change
        sync = make_sync(controller, lambda: wrong)
        with pytest.raises(WeightSyncError, match=wanted):
            await sync.sync(1)
        assert sync.policy_version == -1
        state = await controller.generate(fresh())
        assert (state.status, state.response_model_steps) == (Status.COMPLETED, [0])  # nothing has changed
        wrong.clear()
        wrong |= WEIGHTS
        await sync.sync(1)
        assert (await controller.generate(fresh())).response_model_steps == [1]


async def test_a_replica_with_other_weights_is_named_and_serves_nobody_until_it_has_the_right_ones(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_controller(system) as controller:
        await controller.ready()
        sync = make_sync(controller)
        adapter = controller.adapters[0]
        load = adapter.load

        async def lie(bucket: Any) -> dict[str, str]:
            return {**await load(bucket), "b": "00000000"}

        monkeypatch.setattr(adapter, "load", lie)
        with pytest.raises(WeightSyncError, match=r"phase transfer: rollout/0: tensor 'b' is other than it was sent"):
            await sync.sync(1)
        monkeypatch.undo()
        waiting = fresh()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, waiting)
            await anyio.wait_all_tasks_blocked()
            assert waiting.status is Status.INIT
            await sync.sync(1)
        assert waiting.response_model_steps == [1]


async def test_pushes_that_change_nothing_are_reported(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    async with make_controller(system) as controller:
        await controller.ready()
        source = LocalWeights(lambda: WEIGHTS)
        sync = make_sync(controller, max_unchanged=2)
        sync._source = source
        await sync.sync(0)
        for version in (1, 2, 3):
            await sync.sync(version)  # no update was made: nothing to report
        assert "brought the same weights" not in caplog.text
        for version in (4, 5):
            source.num_updates += 1
            report = await sync.sync(version)
        assert report.unchanged == 2
        assert "2 weight syncs in a row brought the same weights" in caplog.text


async def test_the_server_of_others_keeps_its_weights(system: ActorSystem) -> None:
    async with make_controller(system) as controller:
        await controller.ready()
        controller.adapters[0] = FixedWeightsAdapter(controller._links[0], timeout_s=1.0)
        with pytest.raises(WeightSyncError, match="keeps its own weights"):
            await make_sync(controller).sync(1)


# --- deaths


async def test_what_a_dead_replica_had_is_sent_again_with_the_tokens_it_had_told_of(system: ActorSystem) -> None:
    if system.backend == "inline":
        pytest.skip("there is no process to kill")
    async with make_controller(
        system, hang_prompts=[5], hang_tokens=2, responses=[[65, 66, 67, 68]], settings={"num_replicas": 2}
    ) as controller:
        await controller.ready()
        sync = make_sync(controller)
        await sync.sync(7)
        states = [fresh(rollout_id=number) for number in range(6)]
        async with anyio.create_task_group() as tasks:
            for state in states:
                tasks.start_soon(controller.generate, state)
            await until(lambda: loads(controller) == [3, 3])
            first = controller._links[0]
            await until(lambda: num_with_tokens(first) == 3)
            os.kill(first.replica.pid, signal.SIGKILL)
            await until(lambda: first.num_replaced == 1)
            await until(lambda: sum(loads(controller)) == 6)
            await until(lambda: first.state.value == "up")
            # the successor has the present weights before it answers
            assert (await first.health()).policy_version == 7
            await until(lambda: sum(map(num_with_tokens, controller._links)) == 6)
            while any(state.status is Status.INIT for state in states):
                await controller.abort_all()
                await anyio.sleep(0.01)
        assert [state.status for state in states] == [Status.ABORTED] * 6
        assert controller.statistics()["num_resent"] == 3
        assert sorted(len(state.response_ids or []) for state in states)[-3:] == [4, 4, 4]


async def test_a_request_that_kills_replicas_fails_and_names_the_death(system: ActorSystem) -> None:
    settings = {"max_resends": 1, "max_restarts": 5}
    async with make_controller(system, exit_prompts=[5], settings=settings) as controller:
        poison, good = fresh(rollout_id=1), fresh(rollout_id=2, prompt_ids=[6])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.generate, poison)
        assert poison.status is Status.FAILED
        assert "its replica died 2 times under it" in (poison.error_msg or "")
        assert (await controller.generate(good)).status is Status.COMPLETED


async def test_a_replica_that_makes_no_token_is_replaced(system: ActorSystem) -> None:
    settings = {"stall_timeout_s": 1.0, "max_resends": 0, "health_interval_s": 0.1}
    async with make_controller(system, hang_prompts=[5], settings=settings) as controller:
        state = await controller.generate(fresh())
        assert state.status is Status.FAILED
        assert "made no token for 1 s (stall_timeout_s)" in (state.error_msg or "")
        assert (await controller.generate(fresh(prompt_ids=[6]))).status is Status.COMPLETED
        assert controller.statistics()["replicas"]["rollout/0"]["num_replaced"] == 1


async def test_replicas_that_die_too_often_end_generation_with_the_reason(system: ActorSystem) -> None:
    settings = {"max_resends": 9, "max_restarts": 1}
    async with make_controller(system, exit_prompts=[5], settings=settings) as controller:
        with pytest.raises(ActorUnavailableError, match=r"(?s)No rollout replica is left.*rollout/0"):
            await controller.generate(fresh())


async def test_a_replica_that_dies_or_hangs_in_a_sync_is_replaced_and_catches_up(system: ActorSystem) -> None:
    for options in ({"exit_at_load": 0}, {"hang_at_prepare": 0}):
        settings = {"num_replicas": 2, "sync_timeout_s": 2.0, "max_restarts": 0}
        async with make_controller(system, settings=settings, **options) as controller:
            await controller.ready()
            report = await make_sync(controller).sync(2)
            assert report.num_replaced == 1
            states = [fresh(rollout_id=number) for number in range(3)]
            for state in states:
                await controller.generate(state)
            assert [state.response_model_steps for state in states] == [[2]] * 3


async def test_the_others_get_the_weights_where_one_dies_in_the_group(system: ActorSystem) -> None:
    if system.backend == "inline":
        pytest.skip("a group needs processes of its own")
    settings = {"num_replicas": 2, "max_restarts": 0}
    async with make_controller(system, settings=settings, exit_at_load=1) as controller:
        await controller.ready()
        report = await make_sync(controller, transport="process_group", timeout_s=1000.0).sync(2)
        assert report.num_replaced == 1
        assert (await controller.generate(fresh())).response_model_steps == [2]


async def test_the_successor_of_the_only_replica_is_waited_for_and_gets_the_new_weights(system: ActorSystem) -> None:
    present = 1.0
    async with make_controller(system) as controller:
        await controller.ready()
        sync = make_sync(controller, lambda: {name: tensor * present for name, tensor in WEIGHTS.items()})
        await sync.sync(1)
        present = 2.0  # the trainer has moved on: nobody has the weights of version 1 any more
        controller._links[0].replica.kill()
        assert (await sync.sync(2)).version == 2
        state = await controller.generate(fresh())
        assert state.response_model_steps == [2]


async def test_an_engine_that_cannot_start_says_why(system: ActorSystem) -> None:
    async with make_controller(system, respnses=[]) as controller:
        with pytest.raises(
            ConfigError, match=r"engine_options.respnses: the fake engine has no such option.*responses"
        ):
            await controller.ready()
        with pytest.raises(ActorUnavailableError, match="no such option"):
            await controller.generate(fresh())


async def test_replicas_get_accelerators_of_their_own() -> None:
    async with ActorSystem(num_cpus=8, backend="inline", accelerators=["0", "1", "2", "3"]) as system:
        async with make_controller(system, settings={"num_replicas": 2, "num_accelerators": 2}) as controller:
            await controller.ready()
            held = system.statistics()["num_accelerators_held"]
        assert held == 4


# --- manager and producer


def make_producer(
    controller: RolloutController, *, prompts: list[int], limit: int = 4, judger: ByText | None = None
) -> Producer:
    rows = [Row(index=n, prompt=[{"role": "user", "content": str(p)}], ground_truth="A") for n, p in enumerate(prompts)]
    config = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=4))
    buffer = build_replay_buffer(ReplayBufferConfig(), max_failed_groups=limit)
    loops = {"t": config.build_local(controller, judger or ByText())}
    manager = AgentLoopManager(loops, replay_buffer=buffer, requests=controller)
    sampler = Sampler(
        rows,
        encode=lambda row: [int(row.prompt[0]["content"])],
        group_size=2,
        shuffle=False,
        seed=0,
        task_name="t",
    )
    limits = ProduceLimits(max_failed_groups=limit, backoff_s=0.001, max_backoff_s=0.01)
    return Producer([ProducerTask(name="t", sampler=sampler)], manager=manager, replay_buffer=buffer, limits=limits)


async def one_batch(producer: Producer, size: int) -> tuple[list[PromptGroup], dict[str, Any]]:
    async with producer.running():
        await producer.produce_batch(size, train_step=1)
        return await producer.replay_buffer.sample(1, "train", size)


async def test_a_batch_is_generated_and_judged(system: ActorSystem) -> None:
    async with make_controller(system, responses=[[65], [66]]) as controller:
        groups, _ = await one_batch(make_producer(controller, prompts=[1, 2, 3]), 3)
        assert [group.uid for group in groups] == ["t-0", "t-1", "t-2"]
        states = [state for group in groups for state in group.states]
        assert all(state.reward == {"score": float(state.response == "A")} for state in states)
        assert len({state.response for state in states}) == 2


async def test_a_failed_group_is_replaced(system: ActorSystem) -> None:
    async with make_controller(system, fail_prompts=[2]) as controller:
        groups, metrics = await one_batch(make_producer(controller, prompts=[1, 2, 3]), 2)
        assert [group.states[0].prompt_ids for group in groups] == [[1], [3]]
        assert metrics["buffer/failed_groups"] == 1.0


async def test_failing_for_ever_ends_with_the_reason(system: ActorSystem) -> None:
    async with make_controller(system, fail_prompts=[1]) as controller:
        with pytest.raises(BufferStarvedError, match=r"(?s)max_failed_groups=3.*scripted failure"):
            await one_batch(make_producer(controller, prompts=[1], limit=3), 2)


async def test_a_judger_that_breaks_ends_the_batch(system: ActorSystem) -> None:
    class Broken(ByText):
        async def judge(self, rollout_state: RolloutState) -> RolloutState:
            raise KeyError("a bug in the judger")

    async with make_controller(system) as controller:
        with pytest.raises(KeyError, match="a bug in the judger"):
            await one_batch(make_producer(controller, prompts=[1], judger=Broken()), 2)


async def test_evaluation_passes_the_buffer_by(system: ActorSystem) -> None:
    async with make_controller(system) as controller:
        producer = make_producer(controller, prompts=[1])
        group = [fresh(rollout_id=n) for n in range(2)]
        params = SampleParams(temperature=0.0, max_tokens=2)
        (finished,) = await producer.manager.evaluate([group], sample_params=params)
        assert [state.status for state in finished] == [Status.COMPLETED] * 2
        assert len(producer.replay_buffer) == 0
