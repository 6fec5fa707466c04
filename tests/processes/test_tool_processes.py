"""Tools in processes: what hangs is ended, what dies is replaced, and a server of tools is a process of ours."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chat_templates import make_tokenizer
from xrl_lite.actors import (
    ActorSystem,
    CPUResourceManager,
    CPUResourcesConfig,
    clear_cpu_resource_manager,
    set_cpu_resource_manager,
)
from xrl_lite.agent_loop import AgentsConfig
from xrl_lite.agent_loop.scripted import ScriptedRolloutCtl
from xrl_lite.data import Row
from xrl_lite.data.tokenizer import Tokenizer
from xrl_lite.errors import ToolError
from xrl_lite.tools import FunctionCall, McpServerConfig, Toolbox, ToolResult, ToolsConfig, load_tools

pytestmark = pytest.mark.process

FUNCTIONS = '''
import os, time
from xrl_lite.tools import function_tool

FACTOR = 2

@function_tool(run_in="process", num_cpus=0.1)
def work(what: str) -> str:
    """Work, hang or die.

    Args:
        what: Which.
    """
    if what == "hang":
        while True:
            time.sleep(1)
    if what == "die":
        os._exit(3)
    return f"{what * FACTOR} in {os.getpid()}"
'''

CLASSES = """
import os
from xrl_lite.tools import BaseTool, ToolResponse

class Notebook(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        self.pages = {**getattr(self, "pages", {}), instance_id: kwargs.get("first", "")}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.pages[instance_id] += parameters["text"]
        return ToolResponse(text=self.pages[instance_id]), 0.0, {"pid": os.getpid()}
"""

ENTRY = """
tools:
  - class_name: {folder}/classes.py:Notebook
    config: {{type: actor, num_workers: 2, num_cpus: 0.1, lifetime: trajectory}}
    tool_schema: {{type: function, function: {{name: note, parameters: {{properties: {{text: {{type: string}}}}}}}}}}
"""

SERVER = """
import json, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")

@server.tool()
def add(x: int, y: int) -> int:
    '''Add two numbers.'''
    return x + y

@server.tool()
def fail(x: int) -> int:
    '''Fail.'''
    raise ValueError(f"no {x}")

@server.tool()
def end(x: int) -> int:
    '''End this process.'''
    os._exit(x)

server.run(*sys.argv[1:2], **json.loads(sys.argv[2] if sys.argv[2:] else "{}"))
"""


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem(num_cpus=2) as running:
        yield running


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


async def ask(toolbox: Toolbox, name: str, arguments: str) -> ToolResult:
    async with toolbox.session() as tools:
        (result,) = await tools.run([FunctionCall(name, arguments)])
    return result


async def test_a_function_in_a_process_is_ended_and_replaced(system: ActorSystem, tmp_path: Path) -> None:
    config = ToolsConfig(function_tool_path=write(tmp_path, "functions.py", FUNCTIONS))
    toolbox = Toolbox(await load_tools(config, system=system), call_timeout_s=2.0)
    outcomes = [await ask(toolbox, "work", f'{{"what": "{what}"}}') for what in ("a", "hang", "a", "die", "a")]
    assert [outcome.failure for outcome in outcomes] == [None, "timeout", None, "died", None]
    pids = {str(outcome.response.text).rpartition(" ")[2] for outcome in outcomes if outcome.failure is None}
    assert len(pids) == 3
    assert str(os.getpid()) not in pids
    assert str(outcomes[0].response.text).startswith("aa in ")


async def test_a_class_in_processes_keeps_each_trajectory_where_it_began(system: ActorSystem, tmp_path: Path) -> None:
    write(tmp_path, "classes.py", CLASSES)
    config = ToolsConfig(tool_config_path=write(tmp_path, "tools.yaml", ENTRY.format(folder=tmp_path)))
    toolbox = Toolbox(await load_tools(config, system=system), call_timeout_s=20.0)
    async with (
        toolbox.session(create_kwargs={"note": {"first": ">"}}) as one,
        toolbox.session() as two,
    ):
        results = [
            (await tools.run([FunctionCall("note", f'{{"text": "{text}"}}')]))[0]
            for tools, text in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))
        ]
    assert [result.response.text for result in results] == [">a", "b", ">ac", "bd"]


async def test_tools_of_a_server_are_called_like_others(system: ActorSystem, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    script = write(tmp_path, "server.py", SERVER)
    server = McpServerConfig(name="test", command=sys.executable, args=[str(script)])
    toolbox = Toolbox(await load_tools(ToolsConfig(mcp_servers=[server]), system=system), call_timeout_s=20.0)
    assert toolbox.tools["add"].schema["function"]["description"] == "Add two numbers."
    added = await ask(toolbox, "add", '{"x": 3, "y": "4"}')
    failed = await ask(toolbox, "fail", '{"x": 3}')
    assert (added.response.text, added.failure) == ("7", None)
    assert failed.failure == "raised"
    assert str(failed.response.text).startswith("Error: fail failed: ToolError: Error executing tool fail")


@pytest.mark.slow
async def test_prompts_are_measured_with_the_tools_of_servers_that_loops_in_processes_have(
    system: ActorSystem, tmp_path: Path
) -> None:
    pytest.importorskip("mcp")
    make_tokenizer("qwen3").save_pretrained(tmp_path)
    server = McpServerConfig(name="test", command=sys.executable, args=[str(write(tmp_path, "server.py", SERVER))])
    config = AgentsConfig(
        tools=ToolsConfig(mcp_servers=[server], builtin=["calculator"]),
        hf_checkpoint=str(tmp_path),
        cpu_resources=CPUResourcesConfig(num_workers=1, num_cpus_per_worker=0.1),
    )
    tokenizer = Tokenizer.load(str(tmp_path))
    set_cpu_resource_manager(CPUResourceManager(capacity=system))
    loop = config.build(ScriptedRolloutCtl(lambda _: [5]), None, system=system)
    clear_cpu_resource_manager()
    encode = config.row_encoder(tokenizer, tools=await loop.tool_schemas())
    shown = tokenizer.decode(encode(Row(index=0, prompt=[{"role": "user", "content": "1"}], ground_truth="")), False)
    await loop.aclose()
    assert "Add two numbers." in shown
    assert "calculator" in shown


async def test_a_server_that_died_is_started_anew_by_the_next_call(system: ActorSystem, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    script = write(tmp_path, "server.py", SERVER)
    server = McpServerConfig(name="test", command=sys.executable, args=[str(script)])
    toolbox = Toolbox(await load_tools(ToolsConfig(mcp_servers=[server]), system=system), call_timeout_s=20.0)
    ended = await ask(toolbox, "end", '{"x": 3}')
    assert ended.failure == "raised"
    assert "the connection to MCP server 'test' ended" in str(ended.response.text)
    for _ in range(2):
        assert (await ask(toolbox, "add", '{"x": 3, "y": 4}')).response.text == "7"


@pytest.mark.slow
async def test_a_service_that_was_started_again_is_gone_on_with(system: ActorSystem, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    script = write(tmp_path, "server.py", SERVER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def start() -> asyncio.subprocess.Process:
        options = json.dumps({"host": "127.0.0.1", "port": port})
        service = await asyncio.create_subprocess_exec(
            sys.executable, str(script), "streamable-http", options, stderr=asyncio.subprocess.PIPE
        )
        assert service.stderr is not None
        async with asyncio.timeout(30):
            while b"running on" not in (await service.stderr.readline()):
                assert service.returncode is None
        return service

    async def stop(service: asyncio.subprocess.Process) -> None:
        service.kill()
        await service.communicate()

    first = await start()
    server = McpServerConfig(name="test", url=f"http://127.0.0.1:{port}/mcp")
    toolbox = Toolbox(await load_tools(ToolsConfig(mcp_servers=[server]), system=system), call_timeout_s=20.0)
    assert (await ask(toolbox, "add", '{"x": 3, "y": 4}')).response.text == "7"
    await stop(first)
    assert (await ask(toolbox, "add", '{"x": 3, "y": 4}')).failure is not None
    second = await start()
    results = [await ask(toolbox, "add", '{"x": 3, "y": 4}') for _ in range(2)]
    await stop(second)
    assert results[-1].response.text == "7", results


@pytest.mark.slow
async def test_a_server_that_does_not_start_or_lacks_a_tool_is_named(system: ActorSystem, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    broken = McpServerConfig(name="broken", command="/no/such/program", start_timeout_s=20.0)
    with pytest.raises(ToolError, match=r"MCP server 'broken' \(/no/such/program\) cannot be used"):
        await load_tools(ToolsConfig(mcp_servers=[broken]), system=system)
    script = write(tmp_path, "server.py", SERVER)
    lacking = McpServerConfig(name="test", command=sys.executable, args=[str(script)], tools=["ad"])
    with pytest.raises(ToolError, match=r"has no tool 'ad'. Did you mean 'add'\?"):
        await load_tools(ToolsConfig(mcp_servers=[lacking]), system=system)
