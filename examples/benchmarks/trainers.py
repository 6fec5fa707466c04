"""What orchestration costs, and what generating beside training gains.

    python examples/benchmarks/trainers.py                        # everything but the real runs
    python examples/benchmarks/trainers.py buffer                 # insert and sample, in memory and on the disk
    python examples/benchmarks/trainers.py buffer --trajectories 1000000 --response-tokens 64
    python examples/benchmarks/trainers.py driver                 # CPU of the driver per trajectory, nothing generated
    python examples/benchmarks/trainers.py overlap                # modes in simulated time: how near to the bound
    python examples/benchmarks/trainers.py schedules              # staleness over random schedules, in simulated time
    python examples/benchmarks/trainers.py quickstart --seeds 3   # real runs: separate_async beside sync, two processes
    python examples/benchmarks/trainers.py kills                  # real kills: 20 a mode, what was lost or doubled

The machine may be busy, so times are given as wall time and as CPU time of the process; those of overlap and schedules
are simulated, and the same everywhere. Real runs are compared within one call, taking turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import random
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from xrl_lite.actors import ActorSystem, VirtualClock
from xrl_lite.agent_loop import (
    AgentLoop,
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    ProduceLimits,
    Producer,
    ProducerTask,
    ProduceStrategyConfig,
    SingleTurnAgentLoopConfig,
    SyncProduceStrategyConfig,
)
from xrl_lite.data import RolloutState, Row, SampleParams, Sampler, Status, make_group
from xrl_lite.replay_buffer import (
    MemoryStore,
    ReplayBuffer,
    ReplayBufferConfig,
    SQLiteStore,
    StorageConfig,
    build_replay_buffer,
)
from xrl_lite.replay_buffer.columns import encode_states
from xrl_lite.trainer.run_folder import read_lines

PROMPT_TOKENS = 512
GROUP_SIZE = 8
GROUPS_PER_STEP = 32
ROWS = [Row(index=n, prompt=[{"role": "user", "content": "x"}], ground_truth="1") for n in range(2_000)]
WAITING_GROUPS = 64
"""Groups that are written at the same time, and wait to be trained on."""
VOCABULARY = 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["all", *PARTS, *REAL], default="all", help="what to measure")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--response-tokens", type=int, default=1536, help="of each trajectory in the buffer")
    parser.add_argument("--schedules", type=int, default=1_000, help="how many random schedules")
    parser.add_argument("--seeds", type=int, default=3, help="real runs: seeds")
    parser.add_argument("--steps", type=int, default=150, help="real runs: steps of each")
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary folder when not given")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for part, measure in (PARTS | REAL).items():
        if options.part == part or (options.part == "all" and part in PARTS):
            figures |= measure(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def measure_buffers(options: argparse.Namespace) -> dict[str, Any]:
    """Buffers in memory and on the disk, and what a file of the same rows costs without any buffer."""
    size, tokens = options.trajectories, options.response_tokens
    figures = {"buffer in memory": measure_buffer(size, tokens, None, level=0)}
    for level in (0, 1):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            figures[f"buffer on disk, compression {level}"] = measure_buffer(size, tokens, Path(folder), level=level)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures["bare sqlite3, compression 1"] = measure_bare(size, tokens, Path(folder) / "bare.sqlite")
    return figures


def measure_bare(num_trajectories: int, response_tokens: int, path: Path) -> dict[str, Any]:
    """Insert the same columns, compressed the same way, by the sqlite3 module alone, as many in a transaction."""
    make = trajectory_maker(response_tokens)
    (example, *_) = encode_states(make(0))
    connection = sqlite3.connect(path, isolation_level=None)
    for setting in ("page_size=32768", "journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=2048"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute(f"CREATE TABLE trajectories (id INTEGER PRIMARY KEY, {', '.join(example)})")
    statement = f"INSERT INTO trajectories VALUES (NULL, {', '.join(f':{name}' for name in example)})"
    wall = cpu = 0.0
    num_groups = num_trajectories // GROUP_SIZE // WAITING_GROUPS * WAITING_GROUPS
    for number in range(0, num_groups, WAITING_GROUPS):
        groups = [make(number + place) for place in range(WAITING_GROUPS)]
        started, cpu_started = time.perf_counter(), cpu_s()
        connection.execute("BEGIN IMMEDIATE")
        for group in groups:
            connection.executemany(statement, encode_states(group))
        connection.commit()
        wall, cpu = wall + time.perf_counter() - started, cpu + cpu_s() - cpu_started
    connection.close()
    figure = {
        "trajectories": num_groups * GROUP_SIZE,
        "per_second_wall": round(num_groups * GROUP_SIZE / wall),
        "cpu_us_per_trajectory": round(cpu / (num_groups * GROUP_SIZE) * 1e6),
    }
    show("bare sqlite3, compression 1", figure)
    return figure


def measure_buffer(num_trajectories: int, response_tokens: int, folder: Path | None, *, level: int) -> dict[str, Any]:
    """Insert and sample groups; as much waits as in an asynchronous run."""
    settings = ReplayBufferConfig(storage=StorageConfig(keep_steps=None))
    store = SQLiteStore(folder / "buffer.sqlite", compression_level=level) if folder else MemoryStore()
    figure = asyncio.run(fill_and_drain(num_trajectories, response_tokens, settings, store))
    if folder:
        size = sum(path.stat().st_size for path in folder.iterdir())
        figure["bytes_per_token"] = round(size / num_trajectories / (PROMPT_TOKENS + response_tokens), 2)
        figure |= asyncio.run(restart(folder, settings, figure["trajectories"] // GROUP_SIZE // GROUPS_PER_STEP))
    show(f"buffer {'on disk' if folder else 'in memory'}, compression {level}", figure)
    return figure


async def fill_and_drain(
    num_trajectories: int, response_tokens: int, settings: ReplayBufferConfig, store: Any
) -> dict[str, Any]:
    buffer = build_replay_buffer(settings, trainer_mode="separate_async", store=store)
    make = trajectory_maker(response_tokens)
    num_groups = num_trajectories // GROUP_SIZE
    num_steps = num_groups // GROUPS_PER_STEP
    tenths: list[tuple[float, float]] = []
    gc.collect()
    gc.freeze()
    started, cpu_started, number = time.perf_counter(), cpu_s(), 0
    made_s = made_cpu_s = 0.0
    before = (0.0, 0.0)
    for step in range(1, num_steps + 1):
        while number < min(num_groups, step * GROUPS_PER_STEP + WAITING_GROUPS):
            making, making_cpu = time.perf_counter(), cpu_s()
            batch = [make(number + place) for place in range(WAITING_GROUPS)]
            made_s += time.perf_counter() - making
            made_cpu_s += cpu_s() - making_cpu
            await insert(buffer, batch, number, step)
            number += len(batch)
        groups, _ = await buffer.sample(step, "train", GROUPS_PER_STEP)
        assert sum(len(group.states) for group in groups) == GROUPS_PER_STEP * GROUP_SIZE
        if step * 10 // num_steps > (step - 1) * 10 // num_steps:
            spent = (time.perf_counter() - started - made_s, cpu_s() - cpu_started - made_cpu_s)
            tenths.append((spent[0] - before[0], spent[1] - before[1]))
            before = spent
    await buffer.flush()
    wall = time.perf_counter() - started - made_s
    trained = num_steps * GROUPS_PER_STEP * GROUP_SIZE
    cpu = cpu_s() - cpu_started - made_cpu_s
    await buffer.close()
    return {
        "trajectories": trained,
        "per_second_wall": round(trained / wall),
        "cpu_us_per_trajectory": round(cpu / trained * 1e6),
        "rate_of_last_tenth_over_first": round(tenths[0][0] / tenths[-1][0], 2),
        "cpu_of_last_tenth_over_first": round(tenths[-1][1] / tenths[0][1], 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


async def restart(folder: Path, settings: ReplayBufferConfig, step: int) -> dict[str, Any]:
    """Go on from the file, as a run does that was killed after a step."""
    started = time.perf_counter()
    buffer = build_replay_buffer(settings, trainer_mode="separate_async", store=SQLiteStore(folder / "buffer.sqlite"))
    await buffer.restore(step, keep_newer=True)
    took = time.perf_counter() - started
    figure = {"restart_s": round(took, 2), "groups_waiting_after_restart": len(buffer)}
    await buffer.close()
    return figure


async def insert(buffer: ReplayBuffer, batch: list[list[RolloutState]], first: int, step: int) -> None:
    """Hand over groups at the same time, as agent loops do."""
    groups = [
        buffer.new_group(f"t-{first + place}", partition_id="train", global_steps=step, task_name="t", states=[])
        for place in range(len(batch))
    ]
    buffer.admit_all(groups)
    async with asyncio.TaskGroup() as tasks:
        for group, states in zip(groups, batch, strict=True):
            tasks.create_task(buffer.finish(buffer.start(group.uid), states))


def trajectory_maker(response_tokens: int) -> Callable[[int], list[RolloutState]]:
    """Return what makes groups; tokens follow a power law, log-probs are noise, as those of a model."""
    generator = random.Random(0)
    row = Row(index=0, prompt=[{"role": "user", "content": "word " * PROMPT_TOKENS}], ground_truth="1")
    prompt_ids = [int(generator.paretovariate(0.6)) % VOCABULARY for _ in range(PROMPT_TOKENS)]
    ids = [int(generator.paretovariate(0.6)) % VOCABULARY for _ in range(response_tokens + 1000)]
    logprobs = [-math.ldexp(generator.getrandbits(23), -23) for _ in range(response_tokens + 1000)]
    text = " ".join(f"word{token}" for token in ids[:response_tokens])

    def make(number: int) -> list[RolloutState]:
        group = make_group(row, prompt_ids, number, GROUP_SIZE, task_name="t")
        for place, state in enumerate(group):
            start = (number * GROUP_SIZE + place) % 1000
            state.response_ids = ids[start : start + response_tokens]
            state.logprobs = logprobs[start : start + response_tokens]
            state.response_mask = [1] * response_tokens
            state.response_model_steps = [number] * response_tokens
            state.response, state.finish_reason, state.reward = text, "stop", {"score": float(place % 2)}
            state.status = Status.COMPLETED
        return group

    return make


class Instant(AgentLoop):
    """Answers at once, so that what is measured is the driver."""

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        state = rollout_state
        state.response_ids, state.logprobs, state.response = [7] * 8, [-0.5] * 8, "answer"
        state.response_mask, state.response_model_steps, state.finish_reason = [1] * 8, [0] * 8, "stop"
        state.status, state.reward = Status.COMPLETED, {"score": 1.0}
        return state


def measure_driver(options: argparse.Namespace) -> dict[str, Any]:
    """CPU of the driver."""
    return {"driver": asyncio.run(drive(min(options.trajectories, 20_000)))}


async def drive(num_trajectories: int) -> dict[str, Any]:
    """CPU of the whole process per trajectory: drawing, admitting, a task per attempt, the file, sampling."""
    rows = [Row(index=n, prompt=[{"role": "user", "content": "x"}], ground_truth="1") for n in range(1000)]
    figures: dict[str, Any] = {}
    for in_flight in (256, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            store = SQLiteStore(Path(folder) / "buffer.sqlite")
            buffer = build_replay_buffer(ReplayBufferConfig(), trainer_mode="sync", store=store)
            loop = Instant(None, None, sample_params=SampleParams())  # type: ignore[arg-type]
            manager = AgentLoopManager({"t": loop}, replay_buffer=buffer)
            sampler = Sampler(rows, encode=lambda _: [1] * 8, group_size=GROUP_SIZE, task_name="t")
            limits = ProduceLimits(max_failed_groups=0)
            task = ProducerTask(name="t", sampler=sampler)
            producer = Producer([task], manager=manager, replay_buffer=buffer, limits=limits)
            groups = in_flight // GROUP_SIZE
            steps = max(1, num_trajectories // (groups * GROUP_SIZE))
            cpu, wall = cpu_s(), time.perf_counter()
            for step in range(1, steps + 1):
                async with producer.running():
                    await producer.produce_batch(groups, train_step=step)
                    await buffer.sample(step, "train", groups)
            count = steps * groups * GROUP_SIZE
            figures[f"{in_flight} in flight"] = {
                "cpu_us_per_trajectory": round((cpu_s() - cpu) / count * 1e6),
                "wall_us_per_trajectory": round((time.perf_counter() - wall) / count * 1e6),
            }
            await buffer.close()
    show("driver", figures)
    return figures


# --- the modes in simulated time

OVERLAP_STEPS = 60
OVERLAP_GROUPS, OVERLAP_ATTEMPTS, OVERLAP_SLOTS = 16, 4, 16
"""Groups of a step, attempts of a group, sequences that the replica generates at once."""


def heavy_tailed_lengths(seed: int, count: int) -> list[int]:
    """Lengths of responses in blocks of tokens: log-normal, median 8, a long tail that is cut at 96."""
    draw = random.Random(seed)
    return [max(1, min(96, round(draw.lognormvariate(math.log(8), 0.8)))) for _ in range(count)]


class SimulatedEngine:
    """A trainer that computes nothing: an update takes `train_s`. A source of weights of one number."""

    def __init__(self, train_s: Callable[[], float]) -> None:
        from xrl_lite.weight_sync import LocalWeights

        self._train_s = train_s
        self._weights = LocalWeights(self._present, in_thread=False)
        self.num_updates = 0
        self.busy_s = 0.0
        self.attach_weights = self._weights.attach_weights
        self.open_weights = self._weights.open_weights
        self.send_weights = self._weights.send_weights
        self.interrupt_weights = self._weights.interrupt_weights
        self.close_weights = self._weights.close_weights

    def _present(self) -> dict[str, Any]:
        import torch

        return {"w": torch.full((1,), float(self.num_updates))}

    async def measure(self, batch: Any, names: list[str], *, kept_policy: bool = False) -> dict[str, Any]:
        return dict.fromkeys(names, batch.rollout_logprobs)

    async def train_batch(self, batch: Any) -> dict[str, float]:
        seconds = self._train_s()
        await anyio.sleep(seconds)
        self.busy_s += seconds
        self.num_updates += 1
        return {"loss": 0.0, "grad_norm": 1.0}

    async def save_checkpoint(self, folder: Path, *, hf_folder: Path | None = None) -> None:
        folder.mkdir()  # noqa: ASYNC240 - a thread would not live in simulated time


@dataclass(kw_only=True)
class Simulation:
    """A run in which nothing is computed."""

    mode: str
    strategy: ProduceStrategyConfig
    engine: SimulatedEngine
    lengths: list[int]
    """Of the responses, drawn by their seeds."""
    num_steps: int
    groups_per_step: int
    attempts: int
    slots: int
    """Attempts that are generated at the same time."""
    interval: int = 1
    stragglers: str | None = None


class Coin:
    """A judger that likes every other attempt."""

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        assert isinstance(rollout_state.rollout_id, int)
        rollout_state.reward = {"score": float(rollout_state.rollout_id % 2)}
        return rollout_state

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        return [await self.judge(state) for state in rollout_states]

    def statistics(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        return {}


class SimulatedLoop(AgentLoop):
    """Answers after a while, so many attempts at a time, with the weights of the moment at which it began."""

    def __init__(self, lengths: list[int], slots: int) -> None:
        super().__init__(None, None, sample_params=SampleParams())  # type: ignore[arg-type]
        self._lengths = lengths
        self._slots = anyio.Semaphore(slots)
        self._running: list[tuple[RolloutState, anyio.CancelScope]] = []
        self.policy_version = 0

    async def generate_sample(self, rollout_state: RolloutState) -> RolloutState:
        state, number = rollout_state, rollout_state.rollout_id
        assert isinstance(number, int)
        with anyio.CancelScope() as scope:
            self._running.append((state, scope))
            async with self._slots:
                state.response_model_steps = [self.policy_version]
                await anyio.sleep(self._lengths[number % len(self._lengths)])
        self._running.remove((state, scope))
        if scope.cancelled_caught:
            state.status = Status.ABORTED
            return state
        state.response_ids, state.logprobs, state.response, state.response_mask = [7], [-0.5], "answer", [1]
        state.status, state.reward, state.finish_reason = Status.COMPLETED, {"score": float(number % 2)}, "stop"
        return state

    async def abort_all(self) -> int:
        for _, scope in self._running:
            scope.cancel()
        return len(self._running)

    async def sync(self, version: int) -> None:
        self.policy_version = version


async def simulate_schedule(folder: Path, options: Simulation) -> list[dict[str, Any]]:
    """Run a real trainer, producer and buffer over a loop that only takes time; return the lines of metrics."""
    loop = SimulatedLoop(options.lengths, options.slots)
    return await train(folder, options, loop, requests=loop, weight_sync=loop, rollout=None)


async def simulate_system(system: ActorSystem, folder: Path, options: Simulation) -> list[dict[str, Any]]:
    """The same with replicas of the scripted engine, their controller and weight syncs."""
    from xrl_lite.rollout import RolloutConfig
    from xrl_lite.rollout.controller import RolloutController
    from xrl_lite.weight_sync import WeightSync, make_transport

    rollout = RolloutController(
        system,
        config=RolloutConfig(
            engine="fake",
            engine_options={"responses": [[7] * length for length in options.lengths], "seconds_per_token": 1},
            max_batch_size=options.slots,
            partial_rollout=options.strategy.enable_partial_rollout,
        ),
        model_path="none",
        decode=lambda ids, _: "answer",
        seed=0,
    )
    weights = WeightSync(
        source=options.engine,
        targets=rollout.adapters,
        gate=rollout,
        transport=make_transport("shared_memory", folder=None, bucket_bytes=1 << 20, timeout_s=10.0),
    )
    loop = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=1024)).build_local(rollout, Coin())
    async with rollout:
        records = await train(folder, options, loop, requests=rollout, weight_sync=weights, rollout=rollout)
    weights.close()
    return records


async def train(
    folder: Path, options: Simulation, loop: AgentLoop, *, requests: Any, weight_sync: Any, rollout: Any
) -> list[dict[str, Any]]:
    from xrl_lite.trainer import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig
    from xrl_lite.trainer.base import TrainerParts, TrainerSettings
    from xrl_lite.trainer.checkpoint import CheckpointCallback, CheckpointStore
    from xrl_lite.trainer.modes import trainer_class
    from xrl_lite.trainer.report import QuietReporter
    from xrl_lite.trainer.run_folder import RunFolder
    from xrl_lite.trainer.stop import StopRequest

    run, mode = RunFolder(folder), options.mode
    buffer = build_replay_buffer(ReplayBufferConfig(stragglers=options.stragglers), trainer_mode=mode)
    partial = frozenset({"t"} if options.strategy.enable_partial_rollout else ())
    manager = AgentLoopManager({"t": loop}, replay_buffer=buffer, requests=requests, partial_rollout=partial)
    sampler = Sampler(ROWS, encode=lambda _: [1] * 8, group_size=options.attempts, task_name="t")
    producer = Producer(
        [ProducerTask(name="t", sampler=sampler, strategy=options.strategy)],
        manager=manager,
        replay_buffer=buffer,
        limits=ProduceLimits(max_failed_groups=0),
        sync_weights_interval=options.interval,
    )
    parts = TrainerParts(
        engine=options.engine,  # type: ignore[arg-type]
        weight_sync=weight_sync,
        rollout=rollout,
        manager=manager,
        producer=producer,
        replay_buffer=buffer,
        evaluator=None,
        judger=Coin(),
        folder=run,
        store=CheckpointStore(run.checkpoints, keep=1),
        callback=CheckpointCallback(None),
        reporter=QuietReporter(),
    )
    settings = TrainerSettings(
        trainer=TrainerConfig(
            mode=mode,
            num_steps=options.num_steps,
            groups_per_step=options.groups_per_step,
            sync_weights_interval=options.interval,
        ),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(export_hf=False),
        report=ReportConfig(save_rollouts=False, completions_every=0),
    )
    await trainer_class(mode)(parts, settings, StopRequest()).fit()
    records = [record for record in run.metrics() if "loss" in record]
    run.close()
    return records


def measure_overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Simulated seconds of whole runs, beside the bound that no layout can beat: the longer of the two, always busy."""
    lengths = heavy_tailed_lengths(0, 1009)
    quantiles = statistics.quantiles(lengths, n=100)
    batch_s = statistics.mean(lengths) * OVERLAP_GROUPS * OVERLAP_ATTEMPTS / OVERLAP_SLOTS  # by a full replica
    figures: dict[str, Any] = {
        "lengths, blocks": {
            "mean": round(statistics.mean(lengths), 1),
            **{f"p{q}": round(quantiles[q - 1], 1) for q in (10, 50, 90, 99)},
            "max": max(lengths),
        }
    }
    for share in (0.5, 1.0, 2.0):
        name = f"training takes {share:g} of generation"
        figures[name] = compare_modes(share * batch_s, lengths, options.folder)
    show("overlap, simulated", figures)
    return {"overlap, simulated": figures}


def compare_modes(train_s: float, lengths: list[int], parent: Path | None) -> dict[str, Any]:
    took: dict[str, float] = {}
    bound = 0.0
    for mode, strategy in OVERLAP_MODES.items():
        simulation = Simulation(
            mode=mode,
            strategy=strategy,
            engine=SimulatedEngine(lambda: train_s),
            lengths=lengths,
            num_steps=OVERLAP_STEPS,
            groups_per_step=OVERLAP_GROUPS,
            attempts=OVERLAP_ATTEMPTS,
            slots=OVERLAP_SLOTS,
        )
        clock = VirtualClock()
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            records = clock.run(with_system(simulation, Path(folder), clock))
        took[mode] = sum(record["time/step"] for record in records)
        generation = sum(record["num_tokens"] for record in records) / OVERLAP_SLOTS
        bound = max(generation, simulation.engine.busy_s)
        assert max(record["off_policy/max"] for record in records) <= strategy.max_staleness
    return {
        "bound_s": round(bound),
        **{f"{mode}_s": round(seconds) for mode, seconds in took.items()},
        "separate_async, share of the bound": round(bound / took["separate_async"], 3),
        "separate_async, times sync": round(took["sync"] / took["separate_async"], 2),
    }


async def with_system(simulation: Simulation, folder: Path, clock: VirtualClock) -> list[dict[str, Any]]:
    async with ActorSystem(num_cpus=4, backend="inline", clock=clock) as system:
        return await simulate_system(system, folder, simulation)


OVERLAP_MODES: dict[str, ProduceStrategyConfig] = {
    "sync": SyncProduceStrategyConfig(),
    "colocate_async": AsyncProduceStrategyConfig(
        max_staleness=3, enable_partial_rollout=True, over_sample_threshold=1.0
    ),
    "separate_async": AsyncProduceStrategyConfig(max_staleness=3, enable_partial_rollout=True),
}


def measure_schedules(options: argparse.Namespace) -> dict[str, Any]:
    """Random sizes, speeds, bounds and intervals: is a sample ever older than allowed, is a group ever thrown away?"""
    above: list[int] = []
    discarded = 0
    worst: dict[int, float] = {}
    for seed in range(options.schedules):
        simulation = random_simulation(random.Random(seed))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            records = VirtualClock().run(simulate_schedule(Path(folder), simulation))
        allowed = (simulation.strategy.max_staleness + 1) * simulation.interval - 1
        oldest = max(record["off_policy/max"] for record in records)
        worst[allowed] = max(worst.get(allowed, 0.0), oldest)
        above += [seed] if oldest > allowed else []
        discarded += sum(int(record["training/off_policy/evicted_samples"]) for record in records)
    figure = {
        "schedules": options.schedules,
        "above the bound, seeds": above,
        "groups discarded": discarded,
        "worst staleness, by the bound": {str(bound): worst[bound] for bound in sorted(worst)},
    }
    show("staleness, simulated", figure)
    return {"staleness, simulated": figure}


def random_simulation(draw: random.Random) -> Simulation:
    return Simulation(
        mode="separate_async",
        strategy=AsyncProduceStrategyConfig(
            max_staleness=draw.choice((1, 1, 2, 4)), enable_partial_rollout=draw.random() < 0.7
        ),
        engine=SimulatedEngine(lambda: draw.lognormvariate(2, 1)),
        lengths=[max(1, round(draw.lognormvariate(2, 1))) for _ in range(53)],
        num_steps=draw.randint(6, 12),
        groups_per_step=draw.choice((1, 2, 3)),
        attempts=2,
        slots=draw.choice((1, 4, 16)),
        interval=draw.choice((1, 1, 2, 3)),
        stragglers=draw.choice(("wait", "pass")),
    )


# --- real runs

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"sync": ROOT / "configs" / "quickstart.yaml", "separate_async": ROOT / "configs" / "quickstart_async.yaml"}
SAMPLES_PER_STEP = 32 * 16
SKIPPED_STEPS = 5
"""First steps are left out: caches are cold, and the first batch has nothing to overlap with."""


def measure_quickstart(options: argparse.Namespace) -> dict[str, Any]:
    """The quickstart on two processes, side by side and in turns: samples per second, and what was learned."""
    rates: dict[str, list[float]] = {mode: [] for mode in CONFIGS}
    learned: dict[str, list[float]] = {mode: [] for mode in CONFIGS}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for seed, (mode, config) in itertools.product(range(options.seeds), CONFIGS.items()):
            name = f"{mode}-{seed}"
            run_cli(config, Path(folder), f"name={name}", f"seed={seed}", f"trainer.num_steps={options.steps}")
            records = list(read_lines(Path(folder) / name / "metrics.jsonl"))
            steps = [record["time/step"] for record in records if "loss" in record][SKIPPED_STEPS:]
            rates[mode].append(SAMPLES_PER_STEP * len(steps) / sum(steps))
            learned[mode].append([r["eval/greedy/accuracy"] for r in records if "eval/greedy/accuracy" in r][-1])
            show(name, {"samples_per_s": round(rates[mode][-1]), "held-out accuracy": round(learned[mode][-1], 3)})
    figure = {
        "samples per second": {mode: [round(rate) for rate in found] for mode, found in rates.items()},
        "separate_async, times sync": [
            round(other / one, 2) for one, other in zip(rates["sync"], rates["separate_async"], strict=True)
        ],
        "held-out accuracy": {mode: [round(value, 3) for value in found] for mode, found in learned.items()},
    }
    show("quickstart", figure)
    return {"quickstart": figure}


KILLS = 20
STEPS_BEFORE_A_KILL = (0, 1, 2, 5)
MOMENT_S = 6.0
"""A kill comes at any moment of such a time; without a step before it, it mostly hits a run that begins."""
STEP_TIMEOUT_S = 300.0


def measure_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Kill processes of real runs at random, and let the runs go on: which prompts were lost, which trained twice?"""
    figures: dict[str, Any] = {}
    for mode in ("sync", "colocate_async", "separate_async"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            figures[mode] = kill_and_resume(mode, Path(folder))
        show(f"kills, {mode}", figures[mode])
    return {"kills": figures}


def kill_and_resume(mode: str, folder: Path) -> dict[str, Any]:
    strategy = "{type: async, max_staleness: 1, enable_partial_rollout: true}"
    overrides = [
        f"output_dir={folder}",
        "name=kills",
        f"trainer.mode={mode}",
        "trainer.groups_per_step=8",
        "checkpoint={every_steps: 4, export_hf: false, resume: auto}",
        "evaluation={}",
        "report.completions_every=0",
        *([] if mode == "sync" else [f"task.produce_strategy_config={strategy}"]),
    ]
    draw, victims = random.Random(mode), dict[str, int]()
    trained, num_starts = folder / "kills" / "trained.jsonl", 0
    while sum(victims.values()) < KILLS:
        process = subprocess.Popen(
            cli(CONFIGS["sync"], "trainer.num_steps=100000", *overrides),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        num_starts += 1
        while process.poll() is None and sum(victims.values()) < KILLS:
            wait_for_steps(process, trained, draw.choice(STEPS_BEFORE_A_KILL))
            time.sleep(draw.uniform(0.0, MOMENT_S))
            pid = draw.choice([process.pid, *sorted(children_of(process.pid))])
            name = "driver" if pid == process.pid else actor_of(pid)
            if kill(pid):
                victims[name] = victims.get(name, 0) + 1
            time.sleep(1.0)  # a run that ends of it does so by then, or soon
        process.kill()
        process.wait()
    last_step = last_step_of(trained)
    command = cli(CONFIGS["sync"], f"trainer.num_steps={last_step + 4}", *overrides)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = list(read_lines(trained))
    drawn = [int(line["uid"].rpartition("-")[2]) for line in lines]
    return {
        "killed": dict(sorted(victims.items())),
        "starts": num_starts + 1,
        "steps": lines[-1]["step"],
        "prompts trained": len(drawn),
        "lost": len(set(range(len(set(drawn)))) - set(drawn)),
        "doubled": len(drawn) - len(set(drawn)),
    }


def wait_for_steps(process: subprocess.Popen[bytes], trained: Path, count: int) -> None:
    """Wait until a run has trained so many steps, or has ended."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    last = last_step_of(trained)
    while count and process.poll() is None:
        assert time.monotonic() < deadline, f"no step within {STEP_TIMEOUT_S:g} s; see the logs beside {trained}"
        time.sleep(0.05)
        newest = last_step_of(trained)
        count -= newest > last  # it falls back to the checkpoint when a run goes on
        last = newest


def last_step_of(trained: Path) -> int:
    """Return the last step that was trained; 0 for none."""
    return max((record["step"] for record in read_lines(trained)), default=0)


def cli(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "xrl_lite.cli", "train", str(config), *overrides]


def run_cli(config: Path, folder: Path, *overrides: str) -> None:
    """Run a config to its end, quietly."""
    command = cli(config, f"output_dir={folder}", "report.completions_every=0", "checkpoint.every_steps=0", *overrides)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def kill(pid: int) -> bool:
    """End a process without a word; return whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def actor_of(pid: int) -> str:
    """Return the actor that a child of a run is: its output goes to a log of that name."""
    with suppress(OSError):
        path = os.readlink(f"/proc/{pid}/fd/1")
        name = path.rpartition("/logs/")[2].removesuffix(".log")
        return "fork server" if name.startswith("fork-server") else name
    return "unknown"


def children_of(pid: int) -> set[int]:
    """Live processes below one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[:2]
        except (OSError, IndexError):
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found, frontier = set[int](), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def show(name: str, figure: Any) -> None:
    print(json.dumps({name: figure}, indent=2), flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "buffer": measure_buffers,
    "driver": measure_driver,
    "overlap": measure_overlap,
    "schedules": measure_schedules,
}
REAL: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "quickstart": measure_quickstart,
    "kills": measure_kills,
}


if __name__ == "__main__":
    main()
