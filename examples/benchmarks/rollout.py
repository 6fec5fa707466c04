"""How fast rollouts and weight sync are, as ratios against a baseline in the same run.

    python examples/benchmarks/rollout.py                       # everything; what is not installed is skipped
    python examples/benchmarks/rollout.py --only torch sync     # parts: torch, vllm, sync, driver
    python examples/benchmarks/rollout.py --model FOLDER        # instead of a small random model (torch, vllm)

On a machine that others use too the seconds say little; the ratios hold better, since contenders take turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: waiting threads sleep

import anyio
import torch

from xrl_lite.actors import ActorSystem
from xrl_lite.data import RolloutState, SampleParams
from xrl_lite.engine.tiny_model import build_tiny_model
from xrl_lite.engine.tiny_model_config import TinyModelConfig
from xrl_lite.rollout import RolloutConfig
from xrl_lite.rollout.continuous_batch import ContinuousBatch
from xrl_lite.rollout.continuous_batch import Sequence as Running
from xrl_lite.rollout.controller import RolloutController
from xrl_lite.rollout.replica import GenerateRequest
from xrl_lite.run import RARE_COLLECTIONS
from xrl_lite.weight_sync import LocalWeights, WeightSync, make_transport

PARTS = ("torch", "vllm", "sync", "driver")
BATCH = 32
EQUAL_LENGTH = 64
RAGGED = (8, 128)
MAX_MODEL_LEN = 256
RUNS = 3
SYNC_PARAMETERS = 135_000_000
SYNC_TENSORS = 272
CONCURRENT = 1000

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--requests", type=int, default=8 * BATCH, help="of the ragged comparison")
    parser.add_argument("--num-driver-requests", type=int, default=100_000, help="for the growth of memory")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or build_tiny_model(
            # heads of a size that vLLM's CPU kernels know
            TinyModelConfig(
                hidden_size=64,
                num_layers=2,
                num_heads=2,
                intermediate_size=256,
                max_position_embeddings=MAX_MODEL_LEN,
                warm_up=None,
            ),
            Path(folder),
        )
        for part in options.only:
            match part:
                case "torch":
                    figures[part] = measure_torch(model, options.requests)
                case "vllm":
                    figures[part] = measure_vllm(model, options.requests)
                case "sync":
                    figures[part] = on_uvloop(measure_sync)
                case _:
                    figures[part] = on_uvloop(measure_driver, options.num_driver_requests)
            print(json.dumps({part: figures[part]}, indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def on_uvloop(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run a coroutine function on the loop that runs have."""
    return anyio.run(function, *arguments, backend_options={"use_uvloop": True})


@dataclass(frozen=True)
class Cost:
    """Seconds of the best of several runs."""

    wall: float
    cpu: float
    """Of all threads; others on the machine change it little."""


def best_of(contenders: dict[str, Callable[[], None]]) -> dict[str, Cost]:
    """Best seconds of each of several contenders that take turns."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(RUNS):
        for name, run in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            costs[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Cost(*map(min, zip(*values, strict=True))) for name, values in costs.items()}


def make_prompts(number: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, 250) for _ in range(20)] for _ in range(number)]


# --- torch


def measure_torch(path: Path, num_requests: int) -> dict[str, Any]:
    """The embedded engine beside transformers' batched generate: tokens that were asked for, per second."""
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()

    theirs = load()
    num_cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_cpus)
    ours = ContinuousBatch(load(), decode=str, max_batch_size=BATCH, kv_cache_bytes=2 << 30)
    rng = random.Random(1)
    ragged = [rng.randint(*RAGGED) for _ in range(num_requests)]
    result: dict[str, Any] = {}
    for name, lengths in (("equal lengths", [EQUAL_LENGTH] * BATCH), ("ragged lengths", ragged)):
        prompts = make_prompts(len(lengths))
        contenders = {
            f"transformers, threads: {number}": lambda p=prompts, n=lengths, t=number: with_threads(
                t, generate_with_transformers, theirs, p, n
            )
            for number in sorted({1, num_cpus})
        }
        contenders["ours"] = lambda p=prompts, n=lengths: with_threads(num_cpus, generate_with_ours, ours, p, n)
        rates = {key: sum(lengths) / cost.wall for key, cost in best_of(contenders).items()}
        result[name] = {f"{key}, tokens/s": round(rate) for key, rate in rates.items()}
        ours_rate = rates.pop("ours")
        result[name]["ours / the faster of transformers"] = round(ours_rate / max(rates.values()), 2)
    return result


def with_threads(number: int, function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(number)
    function(*arguments)


@torch.inference_mode()
def generate_with_transformers(model: Any, prompts: list[list[int]], lengths: list[int]) -> None:
    """A batch ends when its longest response does: there is no other way with one call."""
    for start in range(0, len(prompts), BATCH):
        ids = torch.tensor(prompts[start : start + BATCH])
        longest = max(lengths[start : start + BATCH])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=False,
        )


def generate_with_ours(batch: ContinuousBatch, prompts: list[list[int]], lengths: list[int]) -> None:
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        request = GenerateRequest(request_id=str(number), prompt_ids=prompt, sample_params=SampleParams(), seed=number)
        batch.add(Running(request=request, max_tokens=length, stop_ids=frozenset()))
    while batch.has_work:
        batch.step()


# --- vLLM


def measure_vllm(path: Path, num_requests: int) -> dict[str, Any] | str:
    """VLLM through our layers beside its own offline run, and the embedded engine through our layers."""
    if importlib.util.find_spec("vllm") is None:
        return "skipped: vLLM is not installed"
    rng = random.Random(1)
    lengths = [rng.randint(*RAGGED) for _ in range(num_requests)]
    prompts = make_prompts(num_requests)
    offline = offline_vllm(path, prompts, lengths)
    rates = {
        name: sum(lengths) / on_uvloop(through_controller, name, path, prompts, lengths) for name in ("vllm", "torch")
    }
    return {
        "vLLM's own offline run, tokens/s": round(sum(lengths) / offline),
        "vllm engine, tokens/s": round(rates["vllm"]),
        "torch engine, tokens/s": round(rates["torch"]),
        "vllm engine / offline": round(rates["vllm"] * offline / sum(lengths), 3),
        "torch engine / vllm engine": round(rates["torch"] / rates["vllm"], 2),
    }


def vllm_options() -> dict[str, Any]:
    return {"kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}


def offline_vllm(path: Path, prompts: list[list[int]], lengths: list[int]) -> float:
    """Best seconds of vLLM's LLM class, in a process of its own."""
    # not a multiprocessing.Pool: its processes may have no children, and vLLM's engine is one
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_offline_vllm, str(path), prompts, lengths).result()


def _offline_vllm(path: str, prompts: list[list[int]], lengths: list[int]) -> float:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        path,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=BATCH,
        logprobs_mode="processed_logprobs",
        **vllm_options(),
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, seed=number, detokenize=False)
        for number, length in enumerate(lengths)
    ]
    seconds = best_of({"offline": lambda: llm.generate(inputs, params, use_tqdm=False)})["offline"].wall
    llm.llm_engine.engine_core.shutdown()  # this process waits for its children
    return seconds


async def through_controller(engine: str, path: Path, prompts: list[list[int]], lengths: list[int]) -> float:
    """Best seconds of an engine behind the controller."""
    config = RolloutConfig(
        engine=engine,
        max_batch_size=BATCH,
        max_model_len=MAX_MODEL_LEN,
        start_timeout_s=600.0,
        engine_options=vllm_options() if engine == "vllm" else {},
    )
    times: list[float] = []
    async with (
        ActorSystem(num_cpus=4) as system,
        RolloutController(
            system, config=config, model_path=str(path), decode=lambda _ids, _skip: "", seed=0
        ) as control,
    ):
        await control.ready()
        for _ in range(RUNS):
            # no end of sequence before the last token, as ignore_eos does offline
            states = [
                RolloutState(
                    message=[],
                    prompt_ids=prompt,
                    rollout_id=number,
                    sample_params=SampleParams(max_tokens=length, min_tokens=length),
                )
                for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
            started = time.perf_counter()
            await generate_all(control, states)
            times.append(time.perf_counter() - started)
    return min(times)


async def generate_all(control: RolloutController, states: Sequence[RolloutState]) -> None:
    async with anyio.create_task_group() as tasks:
        for state in states:
            tasks.start_soon(control.generate, state)


# --- weight sync


async def measure_sync() -> dict[str, Any]:
    """Sync of 135M float32 parameters by shared memory beside memcpy of as many bytes."""
    size = SYNC_PARAMETERS // SYNC_TENSORS
    weights = {f"w{number}": torch.randn(size) for number in range(SYNC_TENSORS)}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    memcpy = best_of({"memcpy": copy})["memcpy"].wall
    config = RolloutConfig(engine="fake", num_threads=len(os.sched_getaffinity(0)))
    totals: list[float] = []
    paused: list[float] = []
    async with (
        ActorSystem(num_cpus=4) as system,
        RolloutController(system, config=config, model_path="", decode=lambda _ids, _skip: "", seed=0) as control,
    ):
        await control.ready()
        sync = WeightSync(
            source=LocalWeights(lambda: weights),
            targets=control.adapters,
            gate=control,
            transport=make_transport("shared_memory", folder=None, bucket_bytes=1 << 30, timeout_s=60.0),
        )
        for version in range(2 + RUNS):
            started = time.perf_counter()
            report = await sync.sync(version)
            totals.append(time.perf_counter() - started)
            paused.append(report.paused_s)
        sync.close()
    total, pause = min(totals[2:]), statistics.median(paused[2:])
    return {
        "bytes": num_bytes,
        "memcpy, GB/s": round(num_bytes / memcpy / 1e9, 2),
        "sync, GB/s": round(num_bytes / total / 1e9, 2),
        "sync / memcpy": round(memcpy / total, 2),
        "generation paused, s": round(pause, 3),
        "of that, beyond one memcpy, ms": round(1000 * (pause - memcpy)),
    }


# --- the driver


async def measure_driver(num_requests: int) -> dict[str, Any]:
    """CPU of the driver for a request to the scripted engine with 1,000 in flight, and growth of its memory."""
    config = RolloutConfig(engine="fake", num_threads=1, engine_options={"responses": [[1] * 8]})
    async with (
        ActorSystem(num_cpus=4) as system,
        RolloutController(system, config=config, model_path="", decode=lambda _ids, _skip: "", seed=0) as control,
    ):
        await control.ready()

        async def run(number: int) -> None:
            states = [RolloutState(message=[], prompt_ids=[1, 2, 3], rollout_id=i) for i in range(number)]
            await generate_all(control, states)

        for _ in range(5):
            await run(CONCURRENT)
        gc.freeze()  # as a run does
        gc.set_threshold(*RARE_COLLECTIONS)
        resident_before = resident_bytes()
        cpu_before = own_cpu_s()
        for _ in range(num_requests // CONCURRENT):
            await run(CONCURRENT)
        cpu = own_cpu_s() - cpu_before
        return {
            "requests": num_requests,
            "in flight": CONCURRENT,
            "driver CPU per request, us": round(1e6 * cpu / num_requests),
            "growth of resident memory, MB": round((resident_bytes() - resident_before) / 1e6, 1),
        }


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
