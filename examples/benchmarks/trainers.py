"""What orchestration costs: the replay buffer with its file, and the driver per trajectory.

    python examples/benchmarks/trainers.py                        # everything
    python examples/benchmarks/trainers.py buffer                 # insert and sample, in memory and on the disk
    python examples/benchmarks/trainers.py driver                 # CPU of the driver per trajectory, nothing generated
    python examples/benchmarks/trainers.py buffer --trajectories 20000

The machine may be busy, so times are given as wall time and as CPU time of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xrl_lite.agent_loop import AgentLoop, AgentLoopManager, ProduceLimits, Producer, ProducerTask
from xrl_lite.data import RolloutState, Row, SampleParams, Sampler, Status, make_group
from xrl_lite.replay_buffer import (
    MemoryStore,
    ReplayBuffer,
    ReplayBufferConfig,
    SQLiteStore,
    StorageConfig,
    build_replay_buffer,
)

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 1536
GROUP_SIZE = 8
GROUPS_PER_STEP = 32
WAITING_GROUPS = 64
"""Groups that are written at the same time, and wait to be trained on."""
VOCABULARY = 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["all", "buffer", "driver"], default="all", help="what to measure")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the file is written; a temporary folder when not given")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if options.part != "driver":
        figures["buffer in memory"] = measure_buffer(options.trajectories, None, level=0)
        for level in (0, 1):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                figures[f"buffer on disk, compression {level}"] = measure_buffer(
                    options.trajectories, Path(folder), level=level
                )
    if options.part != "buffer":
        figures["driver"] = asyncio.run(measure_driver(min(options.trajectories, 20_000)))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def measure_buffer(num_trajectories: int, folder: Path | None, *, level: int) -> dict[str, Any]:
    """Insert and sample groups of trajectories of 2 k tokens; as much waits as in an asynchronous run."""
    settings = ReplayBufferConfig(storage=StorageConfig(keep_steps=None))
    store = SQLiteStore(folder / "buffer.sqlite", compression_level=level) if folder else MemoryStore()
    figure = asyncio.run(fill_and_drain(num_trajectories, settings, store))
    if folder:
        size = sum(path.stat().st_size for path in folder.iterdir())
        figure["bytes_per_token"] = round(size / num_trajectories / (PROMPT_TOKENS + RESPONSE_TOKENS), 2)
    show(f"buffer {'on disk' if folder else 'in memory'}, compression {level}", figure)
    return figure


async def fill_and_drain(num_trajectories: int, settings: ReplayBufferConfig, store: Any) -> dict[str, Any]:
    buffer = build_replay_buffer(settings, trainer_mode="separate_async", store=store)
    make = trajectory_maker()
    num_groups = num_trajectories // GROUP_SIZE
    num_steps = num_groups // GROUPS_PER_STEP
    tenths: list[float] = []
    gc.collect()
    gc.freeze()
    started, cpu_started, number = time.perf_counter(), cpu_s(), 0
    made_s = 0.0
    part_started, part_made = started, 0.0
    for step in range(1, num_steps + 1):
        while number < min(num_groups, step * GROUPS_PER_STEP + WAITING_GROUPS):
            making = time.perf_counter()
            batch = [make(number + place) for place in range(WAITING_GROUPS)]
            made_s += time.perf_counter() - making
            await insert(buffer, batch, number, step)
            number += len(batch)
        groups, _ = await buffer.sample(step, "train", GROUPS_PER_STEP)
        assert sum(len(group.states) for group in groups) == GROUPS_PER_STEP * GROUP_SIZE
        if step * 10 // num_steps > (step - 1) * 10 // num_steps:
            now = time.perf_counter()
            count = GROUPS_PER_STEP * GROUP_SIZE * num_steps / 10
            tenths.append(count / (now - part_started - (made_s - part_made)))
            part_started, part_made = now, made_s
    await buffer.flush()
    wall = time.perf_counter() - started - made_s
    trained = num_steps * GROUPS_PER_STEP * GROUP_SIZE
    cpu = cpu_s() - cpu_started - made_s
    await buffer.close()
    return {
        "trajectories": trained,
        "per_second_wall": round(trained / wall),
        "cpu_us_per_trajectory": round(cpu / trained * 1e6),
        "last_tenth_over_first": round(tenths[-1] / tenths[0], 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


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


def trajectory_maker() -> Callable[[int], list[RolloutState]]:
    """Return what makes groups; tokens follow a power law, log-probs are noise, as those of a model."""
    generator = random.Random(0)
    row = Row(index=0, prompt=[{"role": "user", "content": "word " * PROMPT_TOKENS}], ground_truth="1")
    prompt_ids = [int(generator.paretovariate(0.6)) % VOCABULARY for _ in range(PROMPT_TOKENS)]
    ids = [int(generator.paretovariate(0.6)) % VOCABULARY for _ in range(RESPONSE_TOKENS + 1000)]
    logprobs = [-math.ldexp(generator.getrandbits(23), -23) for _ in range(RESPONSE_TOKENS + 1000)]
    text = " ".join(f"word{token}" for token in ids[:RESPONSE_TOKENS])

    def make(number: int) -> list[RolloutState]:
        group = make_group(row, prompt_ids, number, GROUP_SIZE, task_name="t")
        for place, state in enumerate(group):
            start = (number * GROUP_SIZE + place) % 1000
            state.response_ids = ids[start : start + RESPONSE_TOKENS]
            state.logprobs = logprobs[start : start + RESPONSE_TOKENS]
            state.response_mask = [1] * RESPONSE_TOKENS
            state.response_model_steps = [number] * RESPONSE_TOKENS
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


async def measure_driver(num_trajectories: int) -> dict[str, Any]:
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


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def show(name: str, figure: Any) -> None:
    print(json.dumps({name: figure}, indent=2), flush=True)


if __name__ == "__main__":
    main()
