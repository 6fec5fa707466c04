"""How fast the training engine is beside a bare PyTorch loop that does the same work on the same packed rows.

    python examples/benchmarks/training.py                          # the quickstart's model and lengths
    python examples/benchmarks/training.py --model small            # a larger one, made on the spot, ragged lengths
    python examples/benchmarks/training.py --model PATH --groups 4  # a Hugging Face folder, ragged lengths
    python examples/benchmarks/training.py --ranks 2                # also: do so many ranks give the losses of one

Both compute old log-probs, make one forward and backward pass per micro-batch, clip, and step AdamW. They take turns in
one process, so that what else the machine does hits both; CPU time tells more where it does much. Where TRL is
installed, the training part of its GRPOTrainer gets the same rollouts, as padded rows. Peak memory is that of a process
of its own for each.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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


@dataclass(frozen=True)
class Workload:
    """What one step is made of; lengths are drawn evenly between two bounds."""

    num_groups: int
    attempts: int
    prompt_tokens: tuple[int, int]
    response_tokens: tuple[int, int]


RAGGED = Workload(num_groups=16, attempts=8, prompt_tokens=(20, 60), response_tokens=(8, 120))
"""Lengths vary as those of real samples do."""
QUICKSTART = Workload(num_groups=32, attempts=16, prompt_tokens=(13, 13), response_tokens=(4, 6))
"""Of configs/quickstart.yaml."""
MODELS = {
    "quickstart": (TinyModelConfig(hidden_size=64, num_layers=2, warm_up=None), QUICKSTART),
    "small": (TinyModelConfig(hidden_size=256, num_layers=4, warm_up=None), RAGGED),
}

Step = Callable[[TrainBatch], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="quickstart", help=f"{', '.join(MODELS)}, or a Hugging Face folder")
    parser.add_argument("--groups", type=int, help="prompts of a step")
    parser.add_argument("--steps", type=int, default=10, help="steps of each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, help="also train on so many ranks")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help="print the peak memory of one contender, in MiB")
    parser.add_argument("--folder", type=Path, help="the model, where it was made by the process that asks")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        config, workload = MODELS.get(options.model, (None, RAGGED))
        if options.groups:
            workload = Workload(options.groups, workload.attempts, workload.prompt_tokens, workload.response_tokens)
        model = options.folder or (Path(options.model) if config is None else build_tiny_model(config, Path(folder)))
        if options.only:
            print(peak_memory(CONTENDERS[options.only](model), workload, options.steps))
            return
        print(json.dumps(compare(model.expanduser(), workload, options), indent=2))


def compare(model: Path, workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """All figures; those that compare are ratios within this run."""
    batches = [make_batch(seed, workload) for seed in range(options.steps + 1)]
    names = [name for name in CONTENDERS if name != "trl" or not options.without_trl]
    steps = {name: CONTENDERS[name](model) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number, batch in enumerate(batches):
        for name, step in steps.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            step(batch)
            if number:  # the first one finds cold caches
                seconds[name].append(time.perf_counter() - started)
                cpu_seconds[name].append(time.process_time() - cpu_started)
    tokens = sum(sum(map(len, batch.responses)) for batch in batches[1:])
    figures: dict[str, Any] = {
        f"{name}, response tokens per s": round(tokens / sum(each)) for name, each in seconds.items()
    }
    memory = {name: peak_of_own_process(name, model, options) for name in names}
    for other in (name for name in names if name != "ours"):
        for what, spent in (("speed", seconds), ("speed by CPU time", cpu_seconds)):
            pairs = zip(spent[other], spent["ours"], strict=True)
            figures[f"{what}, ours / {other} (median of steps)"] = round(statistics.median(a / b for a, b in pairs), 3)
        figures[f"peak memory, ours / {other}"] = round(memory["ours"] / memory[other], 3)
    if options.ranks:
        one, several = (asyncio.run(losses_of(model, size, batches)) for size in (1, options.ranks))
        figures[f"largest difference of a loss, {options.ranks} ranks against 1"] = max(
            abs(a - b) for a, b in zip(one, several, strict=True)
        )
    return figures


def ours(model: Path) -> Step:
    """One step as a run makes it: measure the old log-probs, then update."""
    worker = EngineWorker(
        config=EngineConfig(), algorithm=AlgorithmConfig(), model_path=str(model), num_updates=1000, seed=0
    )

    def step(batch: TrainBatch) -> float:
        worker.measure(batch, ["old_logprobs"])
        return worker.train_batch(batch)["loss"]

    return step


def bare(model_path: Path) -> Step:
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


def trl(model_path: Path) -> Step:
    """TRL's GRPOTrainer from where the rollouts are there: rows padded to the longest, 8 at a time (its default)."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            rollouts = padded(inputs[0])
            ids = torch.cat([rollouts["prompt_ids"], rollouts["completion_ids"]], dim=1)
            mask = torch.cat([rollouts["prompt_mask"], rollouts["completion_mask"]], dim=1)
            width, size = rollouts["completion_ids"].shape[1], self.args.per_device_train_batch_size
            with torch.no_grad():
                old = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, size)[0]
            return rollouts | {"old_per_token_logps": old}

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to="none",
        beta=0.0,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=8,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    trainer = Trainer(
        model=model,
        reward_funcs=lambda **_: [0.0],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def step(batch: TrainBatch) -> float:
        parts = len(batch) // arguments.per_device_train_batch_size
        arguments.steps_per_generation = trainer.current_gradient_accumulation_steps = parts
        trainer._step, trainer._buffered_inputs = 0, None
        model.train()
        optimizer.zero_grad(set_to_none=True)
        total = sum(trainer.training_step(model, [batch], None).item() for _ in range(parts))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def padded(batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Rollouts as TRL holds them: prompts padded on the left, completions on the right, all to the longest."""

    def pad(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows))
        gaps = [[0] * (width - len(row)) for row in rows]
        ids = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
        ones = [gap + [1] * len(row) if left else [1] * len(row) + gap for row, gap in zip(rows, gaps, strict=True)]
        return torch.tensor(ids), torch.tensor(ones)

    prompt_ids, prompt_mask = pad(batch.prompts, left=True)
    completion_ids, completion_mask = pad(batch.responses, left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([row[0] for row in batch.advantages]),
        "num_items_in_batch": completion_mask.sum(),
    }


CONTENDERS: dict[str, Callable[[Path], Step]] = {"bare": bare, "ours": ours}
if importlib.util.find_spec("trl"):
    CONTENDERS["trl"] = trl


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
    command = [sys.executable, __file__, "--only", name, "--model", options.model, "--folder", str(model)]
    command += ["--steps", str(min(options.steps, 3)), "--threads", str(options.threads)]
    command += ["--groups", str(options.groups)] if options.groups else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_memory(step: Step, workload: Workload, num_steps: int) -> float:
    for seed in range(num_steps):
        step(make_batch(seed, workload))
    # not ru_maxrss: a child begins with that of its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def make_batch(seed: int, workload: Workload) -> TrainBatch:
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(5, 60) for _ in range(rng.randint(*bounds))]

    attempts, number = workload.attempts, workload.num_groups * workload.attempts
    prompts = [tokens(workload.prompt_tokens) for _ in range(workload.num_groups)]
    responses = [tokens(workload.response_tokens) for _ in range(number)]
    return TrainBatch(
        prompts=[prompts[index // attempts] for index in range(number)],
        responses=responses,
        response_masks=[[1] * len(response) for response in responses],
        rollout_logprobs=[[-4.0] * len(response) for response in responses],
        advantages=[[rng.uniform(-1, 1)] * len(response) for response in responses],
        groups=[index // attempts for index in range(number)],
        sessions=list(range(number)),
        step=seed,
    )


if __name__ == "__main__":
    main()
