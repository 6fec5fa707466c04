"""A task for two tools: look a price up, multiply it. Rows, tools and reward; `grpo.yaml` puts them together.

    python examples/two_tools/prices.py [FOLDER]        # writes prices-train.jsonl and prices-eval.jsonl

Every prompt shows two questions that were answered with both tools, then asks another. The reward is built up, so that
a model that never called a tool before has something to climb:

    0.2   some call was carried out
    0.5   the price of the right thing was looked up
    1.0   the last words are the right number, and both tools were used
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from xrl_lite.tools import function_tool

PRICES = {"pen": 3, "book": 12, "cup": 5, "lamp": 21, "chair": 40, "bag": 17, "hat": 9, "ball": 6}
SHOWN = [(4, "book"), (2, "pen")]
NUM_HELD_OUT = 12


@function_tool
def price(item: str) -> str:
    """Return the price of one item in euros.

    Args:
        item: What is bought, in the singular.
    """
    return str(PRICES[item]) if item in PRICES else f"There is no {item}."


@function_tool
def multiply(x: int, y: int) -> str:
    """Multiply two numbers.

    Args:
        x: The first.
        y: The second.
    """
    return str(x * y)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """Score a trajectory by its messages, which agent loops put into ``extra_info``."""
    messages = extra_info.get("messages")
    if messages is None:  # no agent ran: a judger is tried on a right and a wrong answer before training starts
        return {"score": float(solution_str == ground_truth), "acc": float(solution_str == ground_truth)}
    made = messages[extra_info["num_prompt_messages"] :]
    results = [message for message in made if message["role"] == "tool" and not message["content"].startswith("Error")]
    used = {message.get("name") for message in results}
    looked_up = any(
        message.get("name") == "price" and message["content"] == str(PRICES[extra_info["item"]]) for message in results
    )
    numbers = re.findall(r"\d+", str(messages[-1].get("content") or ""))
    right = bool(numbers) and numbers[-1] == ground_truth
    score = 1.0 if right and used == {"price", "multiply"} else 0.5 if looked_up else 0.2 if results else 0.0
    return {"score": score, "acc": float(right), "both_tools": float(used == {"price", "multiply"})}


def make_rows(problems: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return a row per problem, each with two that are answered before it."""
    examples = [message for shown in SHOWN for message in _answered(*shown)]
    return [
        {
            "prompt": [*examples, _question(count, item)],
            "data_source": "prices",
            "reward_model": {"ground_truth": str(count * PRICES[item])},
            "extra_info": {"item": item, "num_prompt_messages": len(examples) + 1},
        }
        for count, item in problems
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("~/.cache/xrl-lite"))
    folder: Path = parser.parse_args().folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    problems = [(count, item) for count in range(2, 10) for item in PRICES if item not in dict(SHOWN).values()]
    random.Random(0).shuffle(problems)
    for name, part in (("train", problems[NUM_HELD_OUT:]), ("eval", problems[:NUM_HELD_OUT])):
        path = folder / f"prices-{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(part)), encoding="utf-8")
        print(f"{path}: {len(part)} rows")


def _question(count: int, item: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What do {count} {item}s cost together?"}


def _answered(count: int, item: str) -> list[dict[str, Any]]:
    """Return a conversation that does it right."""
    total = str(count * PRICES[item])
    return [
        _question(count, item),
        _call("price", item=item),
        {"role": "tool", "name": "price", "content": str(PRICES[item])},
        _call("multiply", x=count, y=PRICES[item]),
        {"role": "tool", "name": "multiply", "content": total},
        {"role": "assistant", "content": total},
    ]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


if __name__ == "__main__":
    main()
