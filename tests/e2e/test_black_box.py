"""A program that knows nothing of training is trained for a step on a tiny model, and a model is served."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.build import run_config
from xrl_lite.config.serve_config import ServeConfig, load_serve_config
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.gateway import Gateway
from xrl_lite.run import serve, train

AGENT = """
import json, os, sys, urllib.request
messages = []
for text in (sys.stdin.read(), "sure?"):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
async def test_a_program_is_trained_through_the_gateway(tmp_path: Path, tiny_model_folder: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = {"command": [sys.executable, "-S", str(tmp_path / "agent.py")], "max_concurrent": 4}
    changes = {
        "task.agent_loop_config": {
            "type": "black_box",
            "agents": {"asks_twice": agent},
            "prompt_length": 60,
            "sample_params": {"max_tokens": 40},
        },
        "trainer.num_steps": 1,
        "evaluation.data": {"task": "addition", "split": "eval", "num_rows": 1},
    }
    config = run_config(tmp_path, tiny_model_folder, **changes)
    assert await train(config) is not None
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert len(steps) == 1
    # two turns of at most 4 sampled tokens each, and the question between them
    assert all(record["completions/max_length"] > 8 for record in steps)
    assert all(record["logprob_gap/max"] < 1e-4 for record in steps)


@asynccontextmanager
async def served(config: ServeConfig) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """Serve while inside; ended by a signal."""
    ready = anyio.Event()
    gateways: list[Gateway] = []

    def on_ready(gateway: Gateway) -> None:
        gateways.append(gateway)
        ready.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(serve, config, on_ready=on_ready))
        await ready.wait()
        headers = {"x-api-key": gateways[0].api_key}
        async with httpx.AsyncClient(base_url=gateways[0].url, headers=headers, verify=False) as client:
            yield gateways[0], client
        signal.raise_signal(signal.SIGTERM)


BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": 9}


@pytest.mark.process
async def test_a_model_is_served_until_a_signal(tiny_model_folder: Path) -> None:
    config = load_serve_config(str(tiny_model_folder), ["gateway.port=0", "rollout.engine=fake", "num_cpus=1"])
    async with served(config) as (gateway, client):
        assert gateway.max_trajectory_tokens == 128, "of the model's config"
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.process
async def test_a_stream_tells_what_the_engine_has_sampled_while_it_goes_on(tiny_model_folder: Path) -> None:
    tokenizer = Tokenizer.load(str(tiny_model_folder))
    prompt, answer = tokenizer.encode(BODY["messages"]), tokenizer.encode_text("12345")
    options = {"responses": [answer], "hang_prompts": prompt[:1], "hang_tokens": 3}  # and then no more
    engine = ["rollout.engine=fake", f"rollout.engine_options={json.dumps(options)}"]
    config = load_serve_config(str(tiny_model_folder), ["gateway.port=0", "num_cpus=1", *engine])
    said = ""
    async with (
        served(config) as (_, client),
        client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response,
    ):
        lines = aiter(response.aiter_lines())
        while said != "123":
            line = await anext(lines)
            if line.startswith("data: "):
                said += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_serves_until_it_is_told_to_stop(tiny_model_folder: Path) -> None:
    command = [sys.executable, "-m", "xrl_lite.cli", "serve", str(tiny_model_folder), "gateway.port=0", "num_cpus=1"]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PATH": "/usr/bin:/bin",
        "XRL_LITE_GATEWAY_KEY": "sk-k",
    }
    with subprocess.Popen(
        [*command, "rollout.num_threads=1"], stdout=subprocess.PIPE, text=True, env=environment
    ) as it:
        assert it.stdout is not None
        told = [it.stdout.readline() for _ in range(4)]
        (url,) = {word.partition("ANTHROPIC_BASE_URL=")[2] for word in told[1].split() if "ANTHROPIC" in word}
        with httpx.Client(base_url=url, headers={"x-api-key": "sk-k"}, verify=False) as client:
            made = client.post("/sessions", json={}).json()
            body = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": 3}
            own = {"x-api-key": made["api_key"]}
            answer = client.post("/v1/chat/completions", json=body, headers=own, timeout=60).json()
            ended = client.post(f"/sessions/{made['session_id']}/finalize").json()
        it.send_signal(signal.SIGTERM)
        assert it.wait(30) == 0
    assert answer["usage"]["completion_tokens"] == sum(ended["trajectories"][0]["response_mask"]) > 0
