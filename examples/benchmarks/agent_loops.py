"""What agent loops cost the driver: tokens of long conversations, and calls of tools.

Prints ratios against a baseline of the same run, and CPU time per tool call:

- incremental tokens of a conversation against rendering and encoding it anew at every turn;
- CPU of the driver per call of a tool that does nothing, tokens and parsing included.

    python examples/benchmarks/agent_loops.py --model FOLDER [--chat-template FILE.jinja]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import anyio

from xrl_lite.agent_loop import AgentsConfig
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import RolloutState, SampleParams
from xrl_lite.data.chat_template import ChatTemplate
from xrl_lite.data.token_builder import TokenBuilder
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.tools import FunctionCall, ToolParser, ToolsConfig

ANSWER = "The number is larger than the one before, so I would look for the next one in the list. " * 4
REPEATS = 8
QUESTION = "And after that one, which is the next, and why do you think so? " * 2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--model", type=Path, required=True, help="folder of a model with a chat template")
    arguments.add_argument("--turns", type=int, default=64)
    arguments.add_argument("--calls", type=int, default=512)
    arguments.add_argument("--chat-template", type=Path, help="Jinja file, if the model's own template knows no tools")
    given = arguments.parse_args()
    template = {"chat_template": given.chat_template.read_text()} if given.chat_template else {}
    tokenizer = Tokenizer.load(str(given.model.expanduser()), template_kwargs=template)
    incremental, anew = tokens(ChatTemplate(tokenizer), given.turns)
    print(f"tokens of {given.turns} turns: incremental {incremental * 1e3:.1f} ms, anew {anew * 1e3:.1f} ms")
    print(f"  anew / incremental = {anew / incremental:.1f}")
    # the least of several: other programs on the same cores make it more, never less
    whole, engine = min(
        anyio.run(tool_calls, tokenizer, given.calls, backend_options={"use_uvloop": True}) for _ in range(REPEATS)
    )
    print(f"driver CPU per tool call: {whole * 1e6:.0f} us, {engine * 1e6:.0f} us of it in the scripted engine")


def tokens(template: ChatTemplate, turns: int) -> tuple[float, float]:
    """Return the seconds of all turns of one conversation: incremental, and rendered anew."""
    prompt = [{"role": "user", "content": QUESTION}]
    sampled = [*template.tokenizer.encode_text(ANSWER), *sorted(template.tokenizer.eos_token_ids)[:1]]
    news = [{"role": "user", "content": QUESTION}]
    answer = {"role": "assistant", "content": ANSWER}
    template.continuation(None, template.shape_of("", has_calls=False), news)  # what is found out once
    builder = TokenBuilder(template, prompt)
    began = time.perf_counter()
    for _ in range(turns):
        builder.add_sampled(sampled, [0.0] * len(sampled), message=answer)
        builder.add_messages(news)
    incremental = time.perf_counter() - began
    messages = list(prompt)
    began = time.perf_counter()
    for _ in range(turns):
        messages += [answer, *news]
        template.encode(messages)
    return incremental, time.perf_counter() - began


async def tool_calls(tokenizer: Tokenizer, num_calls: int) -> tuple[float, float]:
    """Return CPU seconds of this process per tool call, in sessions of 8 calls, and those of the engine alone."""
    calls_per_session = 8
    written = ToolParser.get_tool_parser("hermes").render(
        [FunctionCall("calculator", json.dumps({"expression": "3+4"}))]
    )
    end = sorted(tokenizer.eos_token_ids)[:1]
    call, answer = tokenizer.encode_text(written) + end, tokenizer.encode_text("It is 7.") + end

    def script() -> Iterator[list[int]]:
        while True:
            yield from [call] * calls_per_session
            yield answer

    scripts: dict[object, Iterator[list[int]]] = {}
    rollout = ScriptedRolloutCtl(lambda state: next(scripts.setdefault(state.session_id, script())))
    config = AgentsConfig(tools=ToolsConfig(builtin=["calculator"]), response_length=1 << 16)
    loop = config.build(rollout, None, tokenizer=tokenizer)
    await loop.ready()
    states = [
        RolloutState(message=[{"role": "user", "content": "3 + 4?"}], group_id=0, rollout_id=number)
        for number in range(num_calls // calls_per_session)
    ]
    began = time.process_time()
    finished = await loop.generate_group(states, sample_params=SampleParams(max_tokens=1 << 16))
    used = time.process_time() - began
    assert all(state.extra_fields["tool_counts"]["calls"] == calls_per_session for state in finished)
    requests, rollout.requests = rollout.requests, []
    scripts.clear()
    began = time.process_time()
    for request in requests:
        await rollout.generate(request)
    engine = time.process_time() - began
    return used / (len(finished) * calls_per_session), engine / (len(finished) * calls_per_session)


if __name__ == "__main__":
    main()
