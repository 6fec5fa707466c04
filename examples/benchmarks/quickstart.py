"""Where the time of the quickstart goes, and how fast it is beside TRL's GRPOTrainer on the same work.

    python examples/benchmarks/quickstart.py                 # split of a step, start-up, import
    python examples/benchmarks/quickstart.py --trl           # also TRL (pip install trl): same model, task and batch
    python examples/benchmarks/quickstart.py --install       # also the size of a core install, in a fresh environment
    python examples/benchmarks/quickstart.py --learn 0 1 2   # instead: whole learning runs with these seeds

Figures are medians; every comparison is a ratio of two figures of one call of this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
PARTS = ("generate", "judge", "train", "sync", "other")
SKIPPED_STEPS = 2
"""First steps are left out of the medians: caches are cold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=25, help="steps of each contender")
    parser.add_argument("--trl", action="store_true", help="run TRL beside it")
    parser.add_argument("--install", action="store_true", help="measure a core install")
    parser.add_argument("--learn", type=int, nargs="*", default=[], metavar="SEED", help="whole learning runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures: dict[str, Any] = {}

    def add(name: str, figure: Any) -> None:
        figures[name] = figure
        print(json.dumps({name: figure}, indent=2), flush=True)

    add("import", measure_import())
    with tempfile.TemporaryDirectory() as folder:
        if not options.learn or options.trl:
            add("ours", measure_ours(options.config, options.steps, Path(folder)))
        if options.trl:
            # TRL makes one update per step, so ours does too here
            add("ours, one update per step", measure_step(options.config, options.steps, Path(folder)))
            add("trl", measure_trl(options.config, options.steps))
            ours, theirs = figures["ours, one update per step"]["step_s"], figures["trl"]["step_s"]
            add("steps per second, ours / TRL", round(theirs / ours, 2))
        for seed in options.learn:
            add(f"learning, seed {seed}", measure_learning(options.config, seed, Path(folder)))
    if options.install:
        add("core install, MB", measure_install())
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def measure_import() -> dict[str, Any]:
    """Seconds of ``import xrl_lite`` over those of an empty interpreter, and whether it loads torch."""
    code = "import sys, xrl_lite; print('torch' in sys.modules)"
    loads_torch = python("-c", code).stdout.strip()
    empty = median(timed("-c", "pass") for _ in range(5))
    whole = median(timed("-c", "import xrl_lite") for _ in range(5))
    config = f"import pathlib, xrl_lite.config as c; c.load_config(pathlib.Path({str(CONFIG)!r}))"
    return {
        "xrl_lite_s": round(whole - empty, 3),
        "reading_a_config_s": round(median(timed("-c", config) for _ in range(3)) - empty, 3),
        "loads_torch": loads_torch,
    }


def measure_ours(config: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Medians of the parts of a step, and the time from the command to the first step, with and without warm-up."""
    cold = run_to_end(config, folder, "cold", "trainer.num_steps=1", "evaluation.at_start=false")
    warm = run_to_end(
        config, folder, "warm", f"trainer.num_steps={steps}", "evaluation.at_start=false", "evaluation.every_steps=0"
    )
    records = [record for record in warm["records"] if "loss" in record][SKIPPED_STEPS:]
    split = {part: median(record[f"time/{part}"] for record in records) for part in PARTS}
    step = median(record["time/step"] for record in records)
    return {
        "command_to_first_step_s": {
            "without cached model": cold["first_step_s"],
            "with cached model": warm["first_step_s"],
        },
        "step_s": round(step, 4),
        "split_s": {part: round(value, 4) for part, value in split.items()},
        "own overhead, share of a step": round(
            median(record["time/other"] / record["time/step"] for record in records), 4
        ),
    }


def measure_step(config: Path, steps: int, folder: Path) -> dict[str, float]:
    """Median step with one update per step."""
    changes = ("engine.num_mini_batches=1", "evaluation.at_start=false", "evaluation.every_steps=0")
    result = run_to_end(config, folder, "one-update", f"trainer.num_steps={steps}", *changes)
    records = [record for record in result["records"] if "loss" in record][SKIPPED_STEPS:]
    return {"step_s": round(median(record["time/step"] for record in records), 4)}


def measure_learning(config: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Accuracy before and after a whole run, and its times."""
    result = run_to_end(config, folder, f"learn-{seed}", f"seed={seed}", f"model.build.seed={seed}")
    evaluations = [record for record in result["records"] if any(name.startswith("eval/") for name in record)]
    names = [name for name in evaluations[0] if name.endswith("/accuracy")]
    steps = [record["time/step"] for record in result["records"] if "loss" in record]
    spent_on_evaluation = sum(record.get("time/evaluation", 0.0) for record in evaluations)
    return {
        **{name: [round(record[name], 3) for record in evaluations] for name in names},
        "grpo_s": round(sum(steps), 1),
        "evaluations_s": round(spent_on_evaluation, 1),
        "command_to_end_s": result["total_s"],
        "peak_memory_mb": result["peak_memory_mb"],
    }


def run_to_end(config: Path, folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """Run the command line; return metrics and times."""
    settings = [f"name={name}", f"output_dir={folder}", f"model.cache_dir={folder / 'cache'}", *overrides]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "xrl_lite.cli", "train", str(config), *settings],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first_step = 0.0
    output: list[str] = []
    peak = 0
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        peak = max(peak, memory_of_tree(process.pid))
        if line.startswith("step") and not first_step:
            first_step = time.perf_counter() - started
    if process.wait():
        raise SystemExit("".join(output))
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {
        "records": [json.loads(line) for line in lines],
        "first_step_s": round(first_step, 1),
        "total_s": round(time.perf_counter() - started, 1),
        "peak_memory_mb": round(peak / 1e6),
    }


def memory_of_tree(pid: int) -> int:
    """Bytes of memory (proportional set size) of a process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    tree = {pid}
    while grown := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return sum(proportional_bytes(member) for member in tree)


def proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure_trl(config: Path, steps: int) -> dict[str, Any]:
    """Seconds per step of TRL's GRPOTrainer in a process of its own."""
    result = python(__file__, "--trl-worker", str(config), str(steps))
    if result.returncode:
        raise SystemExit(f"TRL did not run (pip install trl):\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def trl_worker(config_path: Path, steps: int) -> None:
    """Train with TRL on the same model, rows, reward, batch and length; print its median step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from xrl_lite.config import load_config
    from xrl_lite.data import load_rows
    from xrl_lite.engine.tiny_model import build_tiny_model

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = load_config(config_path)
    assert config.model.build is not None
    model_path = build_tiny_model(config.model.build, config.model.cache_dir.expanduser())
    rows = load_rows(config.task.sampler_config.data)
    group_size = config.task.sampler_config.prompt_repeat_k
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def exact(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
        return [
            float(completion[0]["content"].strip() == truth)
            for completion, truth in zip(completions, ground_truth, strict=True)
        ]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=config.trainer.groups_per_step * group_size,
            num_generations=group_size,
            max_completion_length=config.task.agent_loop_config.sample_params.max_tokens,
            max_steps=steps,
            learning_rate=config.engine.optimizer.learning_rate,
            temperature=1.0,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            reward_funcs=exact,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": row.prompt, "ground_truth": row.ground_truth} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(model_path),
            callbacks=[Clock()],
        )
        trainer.train()
    steps_s = [later - earlier for earlier, later in itertools.pairwise(times)][SKIPPED_STEPS:]
    print(json.dumps({"step_s": round(median(steps_s), 4), "min_step_s": round(min(steps_s), 4)}))


def measure_install() -> float:
    """Megabytes of a core install, without pip and setuptools."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/pip", "install", "-q", str(ROOT)], check=True)
        packages = next(Path(folder).glob("lib/python*/site-packages"))
        files = [path for path in packages.rglob("*") if path.is_file() and not path.is_symlink()]
        own = [path for path in files if path.relative_to(packages).parts[0] not in ("pip", "setuptools")]
        return round(sum(path.stat().st_size for path in own) / 1e6, 1)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def timed(*arguments: str) -> float:
    started = time.perf_counter()
    python(*arguments)
    return time.perf_counter() - started


def median(values: Iterator[float] | list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl-worker"]:
        trl_worker(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
