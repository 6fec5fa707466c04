"""An agent of the `openai-agents` package, as it is written to be used: it knows nothing of training."""

from __future__ import annotations

from agents import Agent, function_tool

PRICES = {"pen": 3, "book": 12, "cup": 5, "lamp": 21, "chair": 40, "bag": 17, "hat": 9, "ball": 6}


@function_tool
def price(item: str) -> str:
    """Return the price of one item in euros.

    Args:
        item: What is bought, in the singular.
    """
    return str(PRICES[item]) if item in PRICES else f"There is no {item}."


@function_tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers.

    Args:
        x: The first.
        y: The second.
    """
    return x * y


shop_assistant = Agent(
    name="shop assistant",
    instructions="Say what things cost. Look prices up, and multiply with the tool.",
    tools=[price, multiply],
)
