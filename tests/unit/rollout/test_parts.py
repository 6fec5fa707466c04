"""Sampling, capacities, choice of transports, checks of settings: parts without processes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.completions_server import CompletionsServer
from xrl_lite.algorithms.weights import spec_of, tensor_checksum
from xrl_lite.data import SampleParams
from xrl_lite.errors import ConfigError, PluginError, RolloutError, UnknownNameError
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.config import truncation_warning
from xrl_lite.rollout.continuous_batch import Sequence
from xrl_lite.rollout.fake import FakeReplica
from xrl_lite.rollout.kv_cache import capacity_for
from xrl_lite.rollout.openai_engine import OpenAIReplica
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, Outcome, RolloutReplicaRegistry
from xrl_lite.rollout.sampling import penalise, sample_tokens
from xrl_lite.rollout.torch_engine import TorchReplica
from xrl_lite.rollout.vllm_engine import _arguments
from xrl_lite.weight_sync import choose_transport, make_transport
from xrl_lite.weight_sync.senders import in_buckets, places_of


@given(st.integers(1, 100_000))
def test_a_capacity_holds_what_it_is_for_and_wastes_at_most_half_where_that_is_much(num_positions: int) -> None:
    capacity = capacity_for(num_positions)
    assert capacity >= num_positions
    assert capacity <= max(128, 1.5 * num_positions)


@pytest.mark.parametrize("vocab_size", [5, 300, 700])
def test_tokens_are_drawn_with_their_probabilities_and_never_with_none(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(vocab_size)
    logits[::3] = -torch.inf
    number = 20_000
    random = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    tokens, logprobs = sample_tokens(logits.expand(number, -1), random, torch.ones(number))
    shares = torch.bincount(tokens, minlength=vocab_size) / number
    assert torch.allclose(shares, logits.softmax(0), atol=2e-4)
    assert torch.allclose(logprobs.double(), logits.double().log_softmax(0)[tokens], rtol=0, atol=1e-6)


def test_logprobs_over_a_large_vocabulary_are_off_by_rounding_and_to_no_side() -> None:
    torch.manual_seed(0)
    logits = 6 * torch.randn(64, 50_000)
    tokens, logprobs = sample_tokens(logits.clone(), torch.full((64,), 0.5, dtype=torch.float64), torch.ones(64))
    exact = logits.double().log_softmax(1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (logprobs - exact).abs().max() < 1e-5
    assert (logprobs - exact).mean().abs() < 1e-6


@pytest.mark.parametrize("vocab_size", [200, 1000])
def test_the_ends_of_the_interval_are_tokens_too(vocab_size: int) -> None:
    logits = torch.full((2, vocab_size), -torch.inf)
    logits[:, 7] = 0.0
    tokens, _ = sample_tokens(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), torch.ones(2))
    assert tokens.tolist() == [7, 7]


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    penalise(logits, torch.tensor([0, 1, 1]), torch.tensor([1, 1]), repetition=2.0, presence=0.5, frequency=0.25)
    assert logits.tolist() == [[1.0, -4.0 - 0.5 - 2 * 0.25, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("source", "targets", "wanted"),
    [
        ("cpu", [{"cpu"}], "shared_memory"),
        ("gpu-a", [{"cpu"}], "shared_memory"),
        ("gpu-a", [{"gpu-a"}, {"gpu-a"}], "cuda_ipc"),
        ("gpu-a", [{"gpu-b"}, {"gpu-c"}], "process_group"),
        ("gpu-a", [{"gpu-a"}, {"gpu-b"}], "shared_memory"),
        ("gpu-a", [{"gpu-b"}, {"gpu-b"}], "shared_memory"),
        ("gpu-a", [{"gpu-a", "gpu-b"}], "shared_memory"),
        ("gpu-a", [{"gpu-b", "gpu-c"}, {"gpu-d", "gpu-e"}], "process_group"),
        ("gpu-a", [{"gpu-b", "gpu-c"}, {"gpu-c", "gpu-d"}], "shared_memory"),
    ],
)
def test_the_transport_fits_the_placement(source: str, targets: list[set[str]], wanted: str) -> None:
    assert choose_transport(frozenset({source}), [frozenset(target) for target in targets]) == wanted


def test_an_unknown_transport_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'shared_memry'. Did you mean 'shared_memory'"):
        make_transport("shared_memry", folder=None, bucket_bytes=1, timeout_s=1.0)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 400))
def test_buckets_keep_every_tensor_once_within_their_size(sizes: list[int], bucket_bytes: int) -> None:
    weights = [(str(number), torch.zeros(size)) for number, size in enumerate(sizes)]
    buckets = list(in_buckets(weights, bucket_bytes))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in weights]
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= bucket_bytes for bucket in buckets)
    places, size_bytes = places_of([spec_of(*item) for item in weights])
    assert all(place.offset + place.spec.size_bytes <= size_bytes for place in places)


@pytest.mark.parametrize("name", ["shared_memory", "folder"])
def test_weights_are_written_as_they_are_gathered_and_none_is_kept(name: str, tmp_path: Path) -> None:
    transport = make_transport(name, folder=str(tmp_path), bucket_bytes=4000, timeout_s=1.0)
    sender = transport.sender()
    for version, number in enumerate((3, 6, 6, 2)):  # the first fills fresh memory, later ones what is there
        made: list[weakref.ref[torch.Tensor]] = []

        def gathered(version: int = version, number: int = number, made: Any = made) -> Iterator[Any]:
            for each in range(number):
                yield f"w{each}", make(10 * version + each, made)
                assert sum(ref() is not None for ref in made) <= 2

        offer = sender.open(gathered(), version=version, num_updates=0)
        held = [item for bucket in range(offer.num_buckets) for item in sender.send(bucket, 1).tensors()]
        assert {key: tensor.unique().tolist() for key, tensor in held} == {
            f"w{each}": [10.0 * version + each] for each in range(number)
        }
        assert {key: tensor_checksum(tensor) for key, tensor in held} == offer.checksums
    transport.close()


def make(value: float, made: list[weakref.ref[torch.Tensor]]) -> torch.Tensor:
    tensor = torch.full((900,), float(value))
    made.append(weakref.ref(tensor))
    return tensor


@pytest.mark.parametrize("size", [1000, 100_000], ids=["whole", "samples"])
def test_a_checksum_knows_shape_type_and_contents(size: int) -> None:
    tensor = torch.arange(size, dtype=torch.float32)
    same = tensor_checksum(tensor)
    assert tensor_checksum(tensor.clone()) == same
    assert tensor_checksum(tensor.view(2, -1)) != same
    assert tensor_checksum(tensor.int()) != same
    for place in (0, len(tensor) - 1):
        changed = tensor.clone()
        changed[place] += 1
        assert tensor_checksum(changed) != same


@pytest.mark.parametrize(
    ("engine", "given", "available", "wanted"),
    [("vllm", None, 8, 4), ("vllm", None, 0, 0), ("torch", None, 8, 0), ("torch", 1, 8, 1)],
)
def test_an_engine_gets_the_accelerators_that_its_parallelism_needs(
    engine: str, given: int | None, available: int, wanted: int
) -> None:
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} if engine == "vllm" else {}
    config = RolloutConfig(engine=engine, num_accelerators=given, engine_options=options)
    assert config.accelerators_of(available) == wanted


@pytest.mark.parametrize(
    ("settings", "on_cpu", "sleeps", "share"),
    [
        ({"sleep_level": 1, "device_memory_share": 0.5}, False, True, 0.5),
        ({"sleep_level": 1, "device_memory_share": 0.5}, True, None, None),
        ({"sleep_level": 0}, False, None, None),
        ({"device_memory_share": 0.5, "engine_options": {"gpu_memory_utilization": 0.3}}, False, None, 0.3),
    ],
)
def test_vllm_leaves_room_and_can_sleep_where_it_shares_a_gpu(
    settings: dict[str, Any], on_cpu: bool, sleeps: bool | None, share: float | None
) -> None:
    known = make_dataclass("known", ["gpu_memory_utilization"])
    arguments = _arguments(RolloutConfig(engine="vllm", **settings), "model", known=known, on_cpu=on_cpu)
    assert arguments.get("enable_sleep_mode") == sleeps
    assert arguments.get("gpu_memory_utilization") == share


def test_k9_truncated_sampling_is_warned_about() -> None:
    assert truncation_warning(SampleParams()) is None
    assert "top_p=0.9, min_tokens=3" in (truncation_warning(SampleParams(top_p=0.9, min_tokens=3)) or "")


def test_engines_that_do_not_exist_or_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match=r"'vlm'. Did you mean 'vllm'.*'fake', 'openai', 'torch', 'vllm'"):
        RolloutReplicaRegistry.get("vlm")
    monkeypatch.setattr(RolloutReplicaRegistry, "_table", {"no": lambda: dict})
    with pytest.raises(PluginError, match="no subclass of RolloutReplica"):
        RolloutReplicaRegistry.get("no")


def request_of(request_id: str, prompt_ids: list[int], *, seed: int = 1, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sample_params=SampleParams(**{"max_tokens": 3, **params}),
        seed=seed,
    )


async def test_a_busy_replica_tells_what_long_responses_have_so_far() -> None:
    options = {"hang_prompts": [9], "hang_tokens": 2, "responses": [[7, 8]]}
    replica = FakeReplica(config=RolloutConfig(engine="fake", engine_options=options), model_path="none", replica=0)
    await replica.submit([request_of("long", [9])])
    told: list[int] = []
    with anyio.fail_after(5):
        while not told:  # something always ends before the interval is over
            await replica.submit([request_of("short", [1])])
            collected = await replica.collect(0.05)
            assert "short" in collected.ended
            told += collected.progress["long"].token_ids if "long" in collected.progress else []
    assert told == [7, 8]


# --- the embedded engine


@pytest.fixture(scope="module")
def torch_replica(tiny_model_folder: Path) -> TorchReplica:
    return TorchReplica(config=RolloutConfig(num_threads=1), model_path=str(tiny_model_folder), replica=0)


async def outcomes(replica: TorchReplica, *requests: GenerateRequest) -> dict[str, Outcome]:
    ended: dict[str, Outcome] = {}
    await replica.submit(list(requests))
    with anyio.fail_after(20):
        while len(ended) < len(requests):
            ended |= (await replica.collect(1.0)).ended
    return ended


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"seed": 2**63}, "sampling_seed must be a number of 64 bits"),
        ({"min_tokens": 2, "stop_token_ids": [10**6]}, "stop_token_ids holds token 1000000"),
    ],
    ids=["seed", "stop token"],
)
async def test_a_request_that_cannot_be_computed_fails_alone(
    torch_replica: TorchReplica, bad: dict[str, Any], problem: str
) -> None:
    good = [request_of(f"good{number}", [3, 20, 30 + number], seed=number) for number in range(3)]
    ended = await outcomes(torch_replica, *good, request_of("bad", [3, 4], **bad))
    refused = ended.pop("bad")
    assert isinstance(refused, RolloutError)
    assert problem in str(refused)
    assert all(isinstance(outcome, GenerateResult) for outcome in ended.values())


async def test_a_stop_text_is_seen_across_an_interruption(torch_replica: TorchReplica) -> None:
    prompt = [3, 20, 30]
    asked = [request_of(str(seed), prompt, seed=seed, max_tokens=20) for seed in range(16)]
    ended = await outcomes(torch_replica, *asked)
    seed, tokens, stop = next(
        (seed, tokens, text)
        for seed, tokens in ((int(name), outcome.token_ids) for name, outcome in ended.items())  # type: ignore[union-attr]
        for start in range(1, len(tokens) - 3)
        if len(text := torch_replica._tokenizer.decode(tokens[start : start + 3])) == 3 and text.isascii()
    )
    params: dict[str, Any] = {"seed": seed, "max_tokens": 20, "stops": [stop]}
    cut = (await outcomes(torch_replica, request_of("cut", prompt, **params)))["cut"]
    assert isinstance(cut, GenerateResult)
    assert (cut.token_ids, cut.finish_reason) == (tokens[: len(cut.token_ids)], "stop")
    for known in range(1, len(cut.token_ids)):
        request = request_of("rest", [*prompt, *tokens[:known]], **params)
        rest = (await outcomes(torch_replica, replace(request, num_sampled=known)))["rest"]
        assert isinstance(rest, GenerateResult)
        assert (tokens[:known] + rest.token_ids, rest.finish_reason) == (cut.token_ids, "stop")


async def test_keys_and_values_of_a_mixed_load_stay_within_their_limit(tiny_model_folder: Path) -> None:
    position_bytes = TorchReplica(
        config=RolloutConfig(num_threads=1), model_path=str(tiny_model_folder), replica=0
    )._batch._position_bytes
    limit = 24 * 64 * position_bytes
    config = RolloutConfig(num_threads=1, engine_options={"kv_cache_bytes": limit})
    batch = TorchReplica(config=config, model_path=str(tiny_model_folder), replica=0)._batch
    lengths = [(20, 50, 110, 150)[number * 7 % 4] for number in range(80)]
    sequences = [
        Sequence(request=request_of(str(number), [3] * 8, seed=number), max_tokens=length, stop_ids=frozenset())
        for number, length in enumerate(lengths)
    ]
    for sequence in sequences:
        batch.add(sequence)
    held: list[int] = []
    while batch.has_work:
        batch.step()
        held.append(batch._cache.size_bytes)
    assert limit / 2 < max(held) <= limit
    assert [len(sequence.token_ids) for sequence in sequences] == lengths


# --- the openai engine and its server


async def ask(replica: OpenAIReplica) -> RolloutError | GenerateResult:
    await replica.submit([request_of("r", [5])])
    with anyio.fail_after(10):
        while not (ended := (await replica.collect(1.0)).ended):
            pass
    return ended["r"]


async def test_a_busy_server_is_asked_again_and_one_without_ids_is_refused(tiny_model_folder: Path) -> None:
    async with CompletionsServer(tiny_model_folder) as server:
        config = RolloutConfig(engine="openai", engine_options={"base_urls": [server.url], "max_attempts": 3})
        replica = OpenAIReplica(config=config, model_path="m", replica=0)
        server.refuse_next = 2
        outcome = await ask(replica)
        assert isinstance(outcome, GenerateResult)
        assert len(outcome.token_ids) == 3
        assert server.num_requests == 3
        server.refuse_next = 3
        assert "answered 503: busy (3 attempts)" in str(await ask(replica))
        server.without_ids = True
        assert "returns text without token ids" in str(await ask(replica))
        await replica._client.aclose()


async def test_a_server_that_is_not_there_is_named() -> None:
    config = RolloutConfig(engine="openai", engine_options={"base_urls": ["http://127.0.0.1:9/v1"], "max_attempts": 1})
    replica = OpenAIReplica(config=config, model_path="m", replica=0)
    assert "ConnectError at http://127.0.0.1:9/v1" in str(await ask(replica))
    await replica._client.aclose()
    with pytest.raises(ConfigError, match="one address for each of the 2 replicas"):
        OpenAIReplica(config=RolloutConfig(engine="openai", num_replicas=2), model_path="m", replica=0)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ("[]", "an event that is none of the protocol: '\\[\\]'"),
        ('{"choices": [{"token_ids": [1], "logprobs": [-0.5]}]}', "none of the protocol.*choices.0.logprobs"),
        ('{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [null]}}]}', "token_logprobs.0"),
        ('{"error": {"message": "out of memory"}}', "the server reported .*out of memory"),
        ('{"error": null, "choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}}]}', None),
    ],
)
async def test_every_event_of_a_server_ends_in_a_response_or_in_an_error(event: str, problem: str | None) -> None:
    end = '{"choices": [{"finish_reason": "stop"}]}'

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=f"data: {event}\n\ndata: {end}\n\ndata: [DONE]\n\n")

    outcome = await ask(openai_replica(httpx.MockTransport(answer)))
    if problem is None:
        assert outcome == GenerateResult(token_ids=[1], logprobs=[-0.5], policy_versions=[0], finish_reason="stop")
    else:
        assert isinstance(outcome, RolloutError)
        assert re.search(problem, str(outcome), re.DOTALL)


async def test_whatever_goes_wrong_in_asking_is_told_to_whoever_asked() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("in the transport")

    outcome = await ask(openai_replica(httpx.MockTransport(answer)))
    assert str(outcome) == "asking the server failed with ZeroDivisionError: in the transport"


def openai_replica(transport: httpx.AsyncBaseTransport) -> OpenAIReplica:
    config = RolloutConfig(engine="openai", engine_options={"base_urls": ["http://127.0.0.1:9/v1"]})
    replica = OpenAIReplica(config=config, model_path="m", replica=0)
    replica._client = httpx.AsyncClient(base_url="http://127.0.0.1:9/v1/", transport=transport)
    return replica
