"""How fast the training engine is beside a bare PyTorch loop that does the same work on the same packed rows.

    python examples/benchmarks/training.py                          # a small model, made on the spot
    python examples/benchmarks/training.py --model PATH --groups 4  # another one
    python examples/benchmarks/training.py --ranks 2                # also: do so many ranks give the losses of one

Both compute old log-probs, make one forward and backward pass per micro-batch, clip, and step AdamW. They take turns in
one process, so that what else the machine does hits both. Peak memory is that of a process of its own for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from xrl_lite.actors import ActorSystem
from xrl_lite.algorithms import AlgorithmConfig
from xrl_lite.algorithms.packing import collate, pack_groups
from xrl_lite.algorithms.planning import plan_micro_batches
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.config import EngineConfig
from xrl_lite.engine.controller import TrainingController
from xrl_lite.engine.tiny_model import build_tiny_model
from xrl_lite.engine.tiny_model_config import TinyModelConfig
from xrl_lite.engine.worker import EngineWorker

TINY = TinyModelConfig(hidden_size=256, num_layers=4, warm_up=None)
ATTEMPTS = 8
PROMPT_TOKENS = (20, 60)
RESPONSE_TOKENS = (8, 120)
"""Lengths vary as those of real samples do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder; by default a random model is made")
    parser.add_argument("--groups", type=int, default=16, help=f"prompts of a step, {ATTEMPTS} responses each")
    parser.add_argument("--steps", type=int, default=10, help="steps of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, help="also train on so many ranks")
    parser.add_argument("--only", choices=CONTENDERS, help="print the peak memory of one contender, in MiB")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or build_tiny_model(TINY, Path(folder))
        if options.only:
            print(peak_memory(CONTENDERS[options.only](model), options.groups, options.steps))
            return
        print(json.dumps(compare(model, options), indent=2))


def compare(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures; those that compare are ratios within this run."""
    batches = [make_batch(seed, options.groups) for seed in range(options.steps + 1)]
    steps = {name: make(model) for name, make in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number, batch in enumerate(batches):
        for name, step in steps.items():
            started = time.perf_counter()
            step(batch)
            if number:  # the first one finds cold caches
                seconds[name].append(time.perf_counter() - started)
    tokens = sum(sum(map(len, batch.responses)) for batch in batches[1:])
    figures: dict[str, Any] = {
        f"{name}, response tokens per s": round(tokens / sum(each)) for name, each in seconds.items()
    }
    pairs = zip(seconds["bare"], seconds["ours"], strict=True)
    figures["speed, ours / bare (median of steps)"] = round(statistics.median(bare / ours for bare, ours in pairs), 3)
    memory = {name: peak_of_own_process(name, model, options) for name in CONTENDERS}
    figures["peak memory, ours / bare"] = round(memory["ours"] / memory["bare"], 3)
    if options.ranks:
        one, several = (asyncio.run(losses_of(model, size, batches)) for size in (1, options.ranks))
        figures[f"largest difference of a loss, {options.ranks} ranks against 1"] = max(
            abs(a - b) for a, b in zip(one, several, strict=True)
        )
    return figures


def ours(model: Path) -> Callable[[TrainBatch], float]:
    """One step as a run makes it: measure the old log-probs, then update."""
    worker = EngineWorker(
        config=EngineConfig(), algorithm=AlgorithmConfig(), model_path=str(model), num_updates=1000, seed=0
    )

    def step(batch: TrainBatch) -> float:
        worker.measure(batch, ["old_logprobs"])
        return worker.train_batch(batch)["loss"]

    return step


def bare(model_path: Path) -> Callable[[TrainBatch], float]:
    """The same on the same rows, and nothing else: no metrics, no checks."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    config = EngineConfig()

    def logprobs(rows: Any) -> torch.Tensor:
        hidden = model.base_model(
            input_ids=rows.input_ids,
            position_ids=rows.position_ids,
            attention_mask=rows.attention_mask,
            use_cache=False,
        ).last_hidden_state
        logits = model.get_output_embeddings()(hidden.flatten(0, 1)[rows.predicted_at]).float()
        return logits.gather(1, rows.targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)

    def step(batch: TrainBatch) -> float:
        groups = pack_groups(batch.prompts, batch.responses, max_tokens_per_row=config.max_tokens_per_row)
        packed = [collate(rows) for rows in plan_micro_batches(groups, max_tokens=config.max_tokens_per_micro_batch)[0]]
        with torch.no_grad():
            old = [logprobs(rows) for rows in packed]
        num_tokens = sum(map(len, old))
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows, before in zip(packed, old, strict=True):
            advantages = torch.tensor([value for index in rows.trajectories for value in batch.advantages[index]])
            ratio = (logprobs(rows) - before).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum() / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


CONTENDERS = {"bare": bare, "ours": ours}


async def losses_of(model: Path, num_ranks: int, batches: list[TrainBatch]) -> list[float]:
    """Losses of a few steps on so many ranks."""
    async with ActorSystem() as system:
        controller = TrainingController(
            system,
            config=EngineConfig(num_ranks=num_ranks, num_threads=1),
            algorithm=AlgorithmConfig(),
            model_path=str(model),
            num_updates=1000,
            seed=0,
        )
        return [(await controller.train_batch(batch))["loss"] for batch in batches[:4]]


def peak_of_own_process(name: str, model: Path, options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--only", name, "--model", str(model), "--steps", "3"]
    command += ["--groups", str(options.groups), "--threads", str(options.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_memory(step: Callable[[TrainBatch], float], num_groups: int, num_steps: int) -> float:
    for seed in range(num_steps):
        step(make_batch(seed, num_groups))
    # not ru_maxrss: a child begins with that of its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def make_batch(seed: int, num_groups: int) -> TrainBatch:
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(num_groups)]
    number = num_groups * ATTEMPTS
    responses = [[rng.randrange(5, 60) for _ in range(rng.randint(*RESPONSE_TOKENS))] for _ in range(number)]
    return TrainBatch(
        prompts=[prompts[index // ATTEMPTS] for index in range(number)],
        responses=responses,
        response_masks=[[1] * len(response) for response in responses],
        rollout_logprobs=[[-4.0] * len(response) for response in responses],
        advantages=[[rng.uniform(-1, 1)] * len(response) for response in responses],
        groups=[index // ATTEMPTS for index in range(number)],
        sessions=list(range(number)),
        step=seed,
    )


if __name__ == "__main__":
    main()
