"""What one bad reward costs, and what judging costs. Run: ``python examples/benchmarks/judgers.py [--json FILE]``.

Three tables:

survival   400 samples of 10 ms and some that hang or crash, two workers, a limit of 1 s. Who scores the healthy
           ones, and the next 40? Beside our pool: `ProcessPoolExecutor` and `asyncio.to_thread`, both with a time-out
           on waiting.
rate       GSM8K answers in eight renderings: a plain loop, our local judger, our pool of two, `ProcessPoolExecutor.map`
           in chunks of 64, and Ray actors called one by one where Ray is installed. Beside them the least that Python
           can do to score each sample by a call of its own, in a thread and in a pool.
driver     CPU of this process for each judged sample of 1 KB, under load.

Each contender of the first table runs in a process of its own, as some of them do not survive. Ratios hold on a shared
machine as well; what is compared is measured in the same run, in turn, and each number is the median of several.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import importlib.util
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

import uvloop
from rich.console import Console
from rich.table import Table

from xrl_lite.actors import ActorSystem, CPUResourceManager, CPUResourcesConfig, set_cpu_resource_manager
from xrl_lite.data import RolloutState, Status
from xrl_lite.judger import GSM8KJudgerConfig, Judger, JudgerConfig
from xrl_lite.judger.presets.gsm8k import compute_reward
from xrl_lite.run import RARE_COLLECTIONS

NUM_HEALTHY, NUM_NEXT, WORK_S, LIMIT_S, NUM_WORKERS = 400, 40, 0.01, 1.0, 2
CELL_LIMIT_S = 60.0
NUM_AT_ONCE = 512
CHUNK = 64
CULPRITS = [("endless", count) for count in (0, 1, 4, 16)] + [("segfault", 4), ("memory", 4), ("regex", 4)]
CONTENDERS = ("xrl-lite pool", "ProcessPoolExecutor", "asyncio.to_thread")
RENDERINGS = (
    "{answer}",
    "#### {gold}",
    "So it is {gold}.\n#### {gold}.",
    "#### ${gold}",
    "#### **{gold}**",
    "The answer is {gold}.",
    "\\boxed{{{gold}}}",
    "<think>\n{answer}\n</think>\n\n#### {gold}<|im_end|>",
)
MIB = 1 << 20


def reward(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Work for 10 ms, or do what bad reward code does."""
    match response.partition(" ")[0]:
        case "endless":
            while True:
                pass
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            hoard: list[bytearray] = []
            while True:
                hoard.append(bytearray(16 * MIB))
        case "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case _:
            time.sleep(WORK_S)
    return {"score": 1.0}


# --- survival


async def survive_here(responses: Sequence[str], following: Sequence[str]) -> tuple[int, int, float]:
    """Score by our pool; return how many of both were right, and the seconds of the first."""
    resources = CPUResourcesConfig(num_workers=NUM_WORKERS, cpu_memory_per_worker=256 * MIB)
    config = JudgerConfig(judger_name="r", reward_handler=reward, request_timeout=LIMIT_S, cpu_resources=resources)
    async with ActorSystem(num_cpus=NUM_WORKERS) as system:
        set_cpu_resource_manager(CPUResourceManager(capacity=system))
        async with config.build(system) as judger:
            await judge_all(judger, [("warm", "x")] * NUM_WORKERS)
            began = time.perf_counter()
            first = count_right(await judge_all(judger, [(response, "x") for response in responses]))
            took = time.perf_counter() - began
            return first, count_right(await judge_all(judger, [(response, "x") for response in following])), took


async def survive_with(submit: Callable[[str], Any], responses: Sequence[str], following: Sequence[str]) -> Any:
    """Do the same with something that gives an awaitable, which is waited for 1 s, as is usual."""

    async def score(response: str) -> bool:
        try:
            return (await asyncio.wait_for(submit(response), LIMIT_S))["score"] == 1.0
        except Exception:  # noqa: BLE001 - the usual code takes any of them for a score of 0
            return False

    async def score_all(batch: Sequence[str]) -> int:
        # two at a time, or else those in line would be timed out as well
        limit = asyncio.Semaphore(NUM_WORKERS)

        async def one(response: str) -> bool:
            async with limit:
                return await score(response)

        return sum(await asyncio.gather(*map(one, batch)))

    await score("warm")
    began = time.perf_counter()
    first = await score_all(responses)
    took = time.perf_counter() - began
    return first, await score_all(following), took


def run_cell(contender: str, culprit: str, count: int) -> None:
    """Measure one cell of the survival table, print it as JSON, and leave without waiting for anything."""
    responses = ["healthy"] * NUM_HEALTHY
    for number, place in enumerate(random.Random(0).sample(range(NUM_HEALTHY), count)):
        responses.insert(place, f"{culprit} {number}")  # no two alike: the very same payload is run twice at most
    following = ["healthy"] * NUM_NEXT
    if contender == "xrl-lite pool":
        result = run_on_uvloop(survive_here(responses, following))
    elif contender == "ProcessPoolExecutor":
        pool = process_pool()
        list(pool.map(reward, ["warm"] * NUM_WORKERS, ["x"] * NUM_WORKERS, [{}] * NUM_WORKERS))

        def submit(response: str) -> Any:
            return asyncio.get_running_loop().run_in_executor(pool, reward, response, "x", {})

        result = asyncio.run(survive_with(submit, responses, following))
    else:
        # its threads are never ended, so the loop must not wait for them
        loop = asyncio.new_event_loop()
        result = loop.run_until_complete(
            survive_with(lambda response: asyncio.to_thread(reward, response, "x", {}), responses, following)
        )
    print(json.dumps(result), flush=True)
    os._exit(0)


def survival(contenders: Sequence[str]) -> list[dict[str, Any]]:
    """Measure every cell in a process of its own."""
    rows: list[dict[str, Any]] = []
    for culprit, count in CULPRITS:
        for contender in contenders:
            rows.append({"culprit": culprit, "count": count, "contender": contender, **cell(contender, culprit, count)})
            print_progress(f"{contender}: {count} {culprit}")
    return rows


def cell(contender: str, culprit: str, count: int) -> dict[str, Any]:
    """Run one cell; what happened to it, if it did not come to an end."""
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", contender, culprit, str(count)]
    limits = ["prlimit", f"--as={3 << 30}"] if culprit == "memory" and contender != CONTENDERS[0] else []
    # into a file: workers that are left behind would keep a pipe open
    with TemporaryFile("w+") as file:
        process = subprocess.Popen([*limits, *command], stdout=file, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(CELL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"ended": f"not within {CELL_LIMIT_S:g} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        output = file.read()
    if process.returncode != 0 or not output.strip():
        how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"code {process.returncode}"
        return {"ended": f"the run died ({how})"}
    right, following, wall_s = json.loads(output.splitlines()[-1])
    hung = 0 if culprit == "segfault" else count  # also one that eats memory goes on until it is stopped
    bound_s = (NUM_HEALTHY * WORK_S + hung * LIMIT_S) / NUM_WORKERS * 1.3
    return {"right": right, "next": following, "wall_s": wall_s, "bound_s": bound_s, "ended": "yes"}


def show_survival(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(
        "bad samples", "contender", f"right of {NUM_HEALTHY}", f"next {NUM_NEXT}", "wall (s)", "bound (s)", "ended"
    )
    table.title = f"{NUM_HEALTHY} samples of {WORK_S * 1e3:g} ms, {NUM_WORKERS} workers, limit {LIMIT_S:g} s"
    for row in rows:
        numbers = [str(row.get("right", "-")), str(row.get("next", "-"))]
        numbers += [f"{row[name]:.1f}" if name in row else "-" for name in ("wall_s", "bound_s")]
        table.add_row(f"{row['count']} {row['culprit']}", row["contender"], *numbers, row["ended"])
    Console(width=110).print(table)


# --- rate


def gsm8k_samples(path: Path | None, num_rows: int) -> list[tuple[str, str]]:
    """Return response and label of every row in every rendering; rows are made up where there is no file."""
    if path is not None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        answers = [row["answer"] for row in rows]
    else:
        numbers = random.Random(0)
        steps = "She has {a} + {b} = <<{a}+{b}={c}>>{c} of them, and then she gives some away and counts again.\n"
        answers = [
            steps.format(a=a, b=b, c=a + b) * numbers.randint(1, 5) + f"#### {a + b}"
            for a, b in ((numbers.randint(1, 2000), numbers.randint(1, 2000)) for _ in range(num_rows))
        ]
    samples: list[tuple[str, str]] = []
    for answer in answers:
        gold = answer.rsplit("####", 1)[1].strip().replace(",", "")
        samples += [(rendering.format(answer=answer, gold=gold), gold) for rendering in RENDERINGS]
    return samples


EXTRA = {"score": 1, "format_score": 0, "method": "flexible"}


def score(sample: tuple[str, str]) -> dict[str, Any]:
    """Score by the bare function."""
    return compute_reward(sample[0], sample[1], EXTRA)


def plain_loop(samples: Sequence[tuple[str, str]]) -> float:
    """Samples per second of a loop over the bare function."""
    collect_rarely()
    began = time.perf_counter()
    rewards = [score(sample) for sample in samples]
    return _rate(rewards, began)


def executor_map(samples: Sequence[tuple[str, str]]) -> float:
    """Samples per second of the standard library's pool, in chunks of 64."""
    with process_pool() as pool:
        list(pool.map(score, samples[:NUM_WORKERS]))
        collect_rarely()
        began = time.perf_counter()
        rewards = list(pool.map(score, samples, chunksize=CHUNK))
        return _rate(rewards, began)


def ours(num_workers: int, **settings: Any) -> Callable[[Sequence[tuple[str, str]]], float]:
    """Samples per second of our judger, local (0 workers) or in a pool."""

    def measure(samples: Sequence[tuple[str, str]]) -> float:
        return run_on_uvloop(_with_judger(num_workers, lambda judger: _judge_rate(judger, samples), **settings))

    return measure


async def _judge_rate(judger: Judges, samples: Sequence[tuple[str, str]]) -> float:
    states = [make_state(response, label) for response, label in samples]
    collect_rarely()
    began = time.perf_counter()
    await judge_with(NUM_AT_ONCE, judger, states)
    return _rate([state.reward for state in states], began)


async def _with_judger(num_workers: int, measure: Callable[[Judger], Any], **settings: Any) -> Any:
    resources = CPUResourcesConfig(num_workers=num_workers) if num_workers else None
    config = GSM8KJudgerConfig(extra_info=EXTRA, cpu_resources=resources, **settings)
    async with ActorSystem(num_cpus=max(num_workers, 1)) as system:
        set_cpu_resource_manager(CPUResourceManager(capacity=system))
        async with config.build(system) as judger:
            await judge_all(judger, [("#### 1", "1")] * 100)
            return await measure(judger)


class BareFutures:
    """The least that Python can do to judge each sample by a call of its own, in chunks as large as the executor's.

    A future for each sample, and reward and record written into its state. No time limit, no outcomes, no check of the
    reward, no counts, no bound, nothing that outlives a bad reward.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._line: list[tuple[RolloutState, asyncio.Future[dict[str, Any]]]] = []

    async def judge(self, state: RolloutState) -> RolloutState:
        """Score one state and return it."""
        if not self._line:
            self._loop.call_soon(self._send)
        done: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._line.append((state, done))
        state.reward = await done
        state.extra_fields = {**state.extra_fields, "judgement": {"judger": "bare", "outcome": "ok"}}
        return state

    def _send(self) -> None:
        line, self._line = self._line, []
        for start in range(0, len(line), CHUNK):
            chunk = line[start : start + CHUNK]
            samples = [(state.response, (state.reward_model or {})["ground_truth"]) for state, _ in chunk]
            sent = self._loop.run_in_executor(self._executor, score_all, samples)
            sent.add_done_callback(partial(self._receive, chunk))

    @staticmethod
    def _receive(chunk: Sequence[tuple[RolloutState, asyncio.Future[Any]]], sent: asyncio.Future[Any]) -> None:
        for (_, done), found in zip(chunk, sent.result(), strict=True):
            done.set_result(found)


def score_all(samples: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Score a chunk by the bare function."""
    return [score(sample) for sample in samples]


def bare(make_executor: Callable[[], Executor]) -> Callable[[Sequence[tuple[str, str]]], float]:
    """Samples per second of bare futures, with nothing between them and an executor."""

    async def run(executor: Executor, samples: Sequence[tuple[str, str]]) -> float:
        return await _judge_rate(BareFutures(executor), samples)

    def measure(samples: Sequence[tuple[str, str]]) -> float:
        with make_executor() as executor:
            list(executor.map(score, samples[:NUM_WORKERS]))
            return run_on_uvloop(run(executor, samples))

    return measure


def ray_actors(samples: Sequence[tuple[str, str]]) -> float:
    """Samples per second of Ray actors, called one by one with all calls under way at the same time."""
    import ray  # pyright: ignore[reportMissingImports]

    class Scorer:
        def score(self, sample: tuple[str, str]) -> dict[str, Any]:
            return score(sample)

    library: Any = ray
    library.init(num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        actors = [library.remote(Scorer).remote() for _ in range(NUM_WORKERS)]
        library.get([actor.score.remote(samples[0]) for actor in actors])
        began = time.perf_counter()
        calls = [actors[number % NUM_WORKERS].score.remote(sample) for number, sample in enumerate(samples)]
        return _rate(library.get(calls), began)
    finally:
        library.shutdown()


def _rate(rewards: Sequence[Any], began: float) -> float:
    took = time.perf_counter() - began
    wrong = [found for found in rewards if found is None or found["score"] != 1]
    assert not wrong, f"{len(wrong)} of {len(rewards)} gold answers are scored wrong"
    return len(rewards) / took


def rates(samples: Sequence[tuple[str, str]], runs: int) -> dict[str, float]:
    """Return the median rate of every contender, taken in turn."""
    contenders: dict[str, Callable[[Sequence[tuple[str, str]]], float]] = {
        "plain loop": plain_loop,
        "local judger, in a thread": ours(0),
        "local judger, in the loop": ours(0, sync_in="loop"),
        f"pool of {NUM_WORKERS}": ours(NUM_WORKERS),
        "ProcessPoolExecutor.map": executor_map,
        "bare futures, thread": bare(partial(ThreadPoolExecutor, 1)),
        f"bare futures, pool of {NUM_WORKERS}": bare(process_pool),
    }
    if importlib.util.find_spec("ray"):
        contenders["Ray actors"] = ray_actors
    else:
        print("Ray is not installed: skipped")
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, measure in contenders.items():
            found[name].append(measure(samples))
            print_progress(f"rate of {name}")
    return {name: statistics.median(values) for name, values in found.items()}


def show_rates(found: dict[str, float], num_samples: int) -> None:
    """Print the table, with the ratios that matter."""
    table = Table("contender", "samples/s", "ratio", "of", title=f"scoring {num_samples} GSM8K answers")
    table.caption = (
        "Bare futures are the least that Python can do to score each sample by a call of its own: no limit, outcome, "
        "check or count. In a thread, function and event loop share one interpreter, so what they take adds up; and "
        f"of {NUM_AT_ONCE} judgements under way each has left the caches when its reward comes. In the loop none has "
        "to wait, but there is no time limit."
    )
    against = {
        "local judger, in a thread": "plain loop",
        "local judger, in the loop": "plain loop",
        f"pool of {NUM_WORKERS}": "ProcessPoolExecutor.map",
        "bare futures, thread": "plain loop",
        f"bare futures, pool of {NUM_WORKERS}": "ProcessPoolExecutor.map",
        "Ray actors": f"pool of {NUM_WORKERS}",
    }
    for name, rate in found.items():
        other = against.get(name)
        ratio = f"{rate / found[other]:.2f}" if other else ""
        table.add_row(name, f"{rate:,.0f}", ratio, other or "")
    Console().print(table)


# --- driver


async def _driver_cost(judger: Judger, num_samples: int, num_at_once: int) -> float:
    states = [make_state("x" * 1000 + "\n#### 42", "42") for _ in range(num_samples)]
    collect_rarely()
    began = time.process_time()
    await judge_with(num_at_once, judger, states)
    return (time.process_time() - began) / num_samples


def driver_cost(runs: int) -> dict[str, float]:
    """Return the microseconds of CPU in this process for each sample."""
    found: dict[str, float] = {}
    for num_at_once in (64, NUM_AT_ONCE):
        costs = [
            run_on_uvloop(_with_judger(NUM_WORKERS, lambda judger, n=num_at_once: _driver_cost(judger, 10_000, n)))
            for _ in range(runs)
        ]
        found[f"{num_at_once} under way"] = statistics.median(costs) * 1e6
    return found


# --- common


class Judges(Protocol):
    """Whatever scores a state."""

    async def judge(self, rollout_state: RolloutState, /) -> RolloutState:
        """Score one state and return it."""
        ...


def process_pool() -> ProcessPoolExecutor:
    """Return the pool of the standard library."""
    return ProcessPoolExecutor(NUM_WORKERS, mp_context=get_context("spawn"))


def make_state(response: str, label: str) -> RolloutState:
    """Return a finished attempt."""
    return RolloutState(
        message=[{"role": "user", "content": "How many?"}],
        response=response,
        reward_model={"ground_truth": label},
        status=Status.COMPLETED,
    )


async def judge_all(judger: Judger, samples: Sequence[tuple[str, str]]) -> list[RolloutState]:
    """Judge all samples at the same time."""
    return await asyncio.gather(*(judger.judge(make_state(response, label)) for response, label in samples))


async def judge_with(num_at_once: int, judger: Judges, states: Sequence[RolloutState]) -> None:
    """Judge all states, so many at the same time."""
    waiting = iter(states)

    async def caller() -> None:
        for state in waiting:
            await judger.judge(state)

    await asyncio.gather(*(caller() for _ in range(num_at_once)))


def collect_rarely() -> None:
    """Set the garbage collector as a training run does; it is the same for every contender."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)


def run_on_uvloop(main: Any) -> Any:
    """Run a coroutine as a training run does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def count_right(states: Sequence[RolloutState]) -> int:
    """Count the samples with a full score."""
    return sum(state.reward == {"score": 1.0} for state in states)


def print_progress(text: str) -> None:
    """Say on a terminal what has been measured."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--gsm8k", type=Path, help="test.jsonl of GSM8K; made-up rows of the same form if not given")
    parser.add_argument("--rows", type=int, default=1319, help="made-up rows")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=("survival", "rate", "driver"), help="one of the tables")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        run_cell(options.cell[0], options.cell[1], int(options.cell[2]))
    numbers: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
    if options.only in (None, "survival"):
        numbers["survival"] = survival(CONTENDERS)
        show_survival(numbers["survival"])
    if options.only in (None, "rate"):
        samples = gsm8k_samples(options.gsm8k, options.rows)
        numbers["rate"] = rates(samples, options.runs)
        show_rates(numbers["rate"], len(samples))
    if options.only in (None, "driver"):
        numbers["driver"] = driver_cost(options.runs)
        table = Table("judgements", "CPU (us)", title="driver, for each judged sample of 1 KB")
        for name, cost in numbers["driver"].items():
            table.add_row(name, f"{cost:.0f}")
        Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
