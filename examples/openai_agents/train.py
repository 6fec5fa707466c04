"""Trains the agent of `shop.py`, which stays as it is: each attempt talks to the gateway of the run.

Settings of a run that uses it (`pip install openai-agents`)::

    agent_loop_config:
      type: black_box
      agents: {shop: {runner: "examples/openai_agents/train.py:run_shop_assistant", max_concurrent: 32}}
      gateway: {tool_format: hermes}
      prompt_length: 1024
      sample_params: {max_tokens: 512}

What the function returns is the reward; without one, the judgers of the task score the attempt.
"""

from __future__ import annotations

import re
from typing import Any

from agents import MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

from examples.openai_agents.shop import shop_assistant
from xrl_lite.gateway import SessionHandle

MAX_TURNS = 6


async def run_shop_assistant(session: SessionHandle, raw_prompt: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Let the agent answer one question; its answer is right if the last number in it is."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        model = OpenAIChatCompletionsModel(model=session.model, openai_client=client)
        config = RunConfig(model=model, tracing_disabled=True)
        question = raw_prompt[-1]["content"]
        try:
            result = await Runner.run(shop_assistant, question, max_turns=MAX_TURNS, run_config=config)
        except MaxTurnsExceeded:
            return 0.0
    numbers = re.findall(r"\d+", str(result.final_output))
    return float(bool(numbers) and numbers[-1] == row["reward_model"]["ground_truth"])
