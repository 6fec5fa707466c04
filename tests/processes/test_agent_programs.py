"""Programs as agents: what they are given, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.unit.gateway.rig import END, QWEN3, answering
from xrl_lite.actors import ActorSystem
from xrl_lite.data import RolloutState, SampleParams
from xrl_lite.gateway import BlackBoxAgentsConfig
from xrl_lite.gateway.program import ProgramHost, ProgramHosts, ProgramResult, ProgramSpec

pytestmark = pytest.mark.process

AGENT = """
import json, os, sys, urllib.request

def say(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

prompt = sys.stdin.read() or sys.argv[-1]
messages = [{"role": "user", "content": prompt}]
messages.append(say(messages))
messages.append({"role": "user", "content": "Sure?"})
say(messages)
task = json.load(open(os.environ["XRL_LITE_TASK_FILE"]))
print("argv", sys.argv[1:], "in", os.listdir("."))
with open(os.environ["XRL_LITE_REWARD_FILE"], "w") as file:
    json.dump({"reward": 0.5, "index": task["sample_index"]}, file)
"""


@pytest.fixture(scope="module")
def system() -> Iterator[ActorSystem]:
    with_slots = ActorSystem(num_cpus=4)
    first = with_slots.spawn(ProgramHost, preload=("xrl_lite.gateway.program",))
    first.ready().result(60.0)
    first.stop().result(30.0)
    try:
        yield with_slots
    finally:
        with_slots.shutdown_now()


def spec_of(script: str, **fields: Any) -> ProgramSpec:
    defaults: dict[str, Any] = {
        "command": ["/bin/sh", "-c", script],
        "stdin": "",
        "env": {},
        "cwd": None,
        "log_file": None,
        "task": {},
        "wall_time_s": 30.0,
    }
    return ProgramSpec(**(defaults | fields))


async def run(system: ActorSystem, spec: ProgramSpec) -> ProgramResult:
    hosts = ProgramHosts("test", count=1, num_cpus=0.1, system=system)
    try:
        return await hosts.run(spec)
    finally:
        await hosts.aclose()


@pytest.mark.parametrize("prompt", ["stdin", "argument"])
async def test_w8_a_program_is_trained_on_and_gives_its_reward(
    tmp_path: Path, system: ActorSystem, prompt: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = {
        "command": [sys.executable, str(tmp_path / "agent.py"), "--quiet"],
        "prompt": prompt,
        "max_concurrent": 2,
        "log_dir": str(tmp_path / "logs"),
    }
    config = BlackBoxAgentsConfig.model_validate({"agents": {"coder": agent}})
    states = [
        RolloutState(message=[{"role": "user", "content": "--help"}], group_id=0, rollout_id=index, prompt_ids=[1])
        for index in range(3)
    ]
    loop = config.build(answering(), None, tokenizer=QWEN3, system=system)
    try:
        finished = await loop.generate_group(states, sample_params=SampleParams(max_tokens=300))
    finally:
        await loop.aclose()
    assert [state.error_msg for state in finished] == [None] * 3
    assert [state.reward for state in finished] == [{"score": 0.5, "index": index} for index in range(3)]
    for state in finished:
        assert QWEN3.decode(state.response_ids or [], False).count(END) == 3  # two turns, and what was said between
        assert "--help" in QWEN3.decode(state.prompt_ids or [], False)
    logs = sorted((tmp_path / "logs" / "coder").iterdir())
    arguments = ["--quiet", "--", "--help"] if prompt == "argument" else ["--quiet"]
    assert [log.read_text() for log in logs] == [f"argv {arguments} in []\n"] * 3


async def test_a_failed_program_tells_its_exit_code_and_its_last_lines(tmp_path: Path, system: ActorSystem) -> None:
    log = tmp_path / "logs" / "x.log"
    result = await run(system, spec_of("echo working; echo no such model >&2; exit 3", log_file=str(log)))
    assert str(result.problem).startswith("ended with exit code 3. The last it wrote")
    assert "working\nno such model" in str(result.problem)
    assert str(log) in str(result.problem)
    assert log.read_text() == "working\nno such model\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", "ended with SIGSEGV. It wrote nothing."),
        ('echo oops > "$XRL_LITE_REWARD_FILE"', "into XRL_LITE_REWARD_FILE, which is no JSON"),
    ],
)
async def test_other_ways_to_fail_are_named(system: ActorSystem, script: str, message: str) -> None:
    assert message in str((await run(system, spec_of(script))).problem)


async def test_a_program_that_is_not_there_fails_its_sample_only(system: ActorSystem) -> None:
    result = await run(system, spec_of("", command=["/no/such/program"]))
    assert "could not be started" in str(result.problem)


async def test_beyond_its_limit_a_program_ends_with_all_that_it_started(tmp_path: Path, system: ActorSystem) -> None:
    script = f"setsid sleep 600 & echo $! > {tmp_path}/away; sleep 600 & echo $! > {tmp_path}/near; wait"
    result = await run(system, spec_of(script, wall_time_s=0.3))
    assert "took longer than 0.3 s (wall_time_s) and was ended" in str(result.problem)
    for name in ("away", "near"):
        assert not is_alive(int((tmp_path / name).read_text()))


async def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path, system: ActorSystem) -> None:
    script = f"setsid sleep 600 >/dev/null 2>&1 & echo $! > {tmp_path}/away; exit 0"
    assert await run(system, spec_of(script)) == ProgramResult(problem=None, reward=None)
    assert not is_alive(int((tmp_path / "away").read_text()))


async def test_a_cancelled_sample_takes_its_program_along(tmp_path: Path, system: ActorSystem) -> None:
    hosts = ProgramHosts("test", count=1, num_cpus=0.1, system=system)
    told = tmp_path / "told"
    os.mkfifo(told)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hosts.run, spec_of(f"echo $$ $XRL_LITE_TASK_FILE > {told}; exec sleep 600"))
            pid, task_file = (await anyio.to_thread.run_sync(told.read_text)).split()
            assert Path(task_file).exists()
            tasks.cancel_scope.cancel()
        await gone(int(pid))
        assert (await hosts.run(spec_of("exit 0"))).problem is None, "its place is taken by the next"
        assert not Path(task_file).exists()
    finally:
        await hosts.aclose()


async def test_nothing_is_left_of_the_last_cancelled_sample(tmp_path: Path, system: ActorSystem) -> None:
    hosts = ProgramHosts("test", count=1, num_cpus=0.1, system=system)
    told = tmp_path / "told"
    os.mkfifo(told)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hosts.run, spec_of(f"echo $XRL_LITE_TASK_FILE > {told}; exec sleep 600"))
        task_file = Path((await anyio.to_thread.run_sync(told.read_text)).strip())
        tasks.cancel_scope.cancel()
    await hosts.aclose()
    top = Path(tempfile.gettempdir()) / task_file.relative_to(tempfile.gettempdir()).parts[0]
    assert top.name.startswith("xrl-lite-agent-")
    assert not top.exists()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(20):
            await anyio.wait_readable(process)
    finally:
        os.close(process)
