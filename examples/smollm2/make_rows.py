"""Write the rows of the subtraction task: one example in the prompt, then a problem; no problem is in both files.

python examples/smollm2/make_rows.py [FOLDER]      # ~/.cache/xrl-lite by default
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

NUM_HELD_OUT = 15
LARGEST = 9
"""Problems are x - y with 1 <= y < x <= LARGEST + 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("~/.cache/xrl-lite"))
    folder: Path = parser.parse_args().folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    problems = [(x, y) for x in range(2, LARGEST + 2) for y in range(1, x)]
    random.Random(0).shuffle(problems)
    for name, part in (("train", problems[NUM_HELD_OUT:]), ("eval", problems[:NUM_HELD_OUT])):
        path = folder / f"subtraction-{name}.jsonl"
        path.write_text("".join(json.dumps(row(x, y)) + "\n" for x, y in part), encoding="utf-8")
        print(f"{path}: {len(part)} rows")


def row(x: int, y: int) -> dict[str, Any]:
    prompt = [
        {"role": "user", "content": "8 - 3 ="},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": f"{x} - {y} ="},
    ]
    return {"prompt": prompt, "reward_model": {"ground_truth": str(x - y)}, "data_source": "subtraction"}


if __name__ == "__main__":
    main()
