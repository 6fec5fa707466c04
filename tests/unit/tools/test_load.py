"""Files of tools, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from xrl_lite.errors import PluginError, ToolError, UnknownNameError
from xrl_lite.tools import McpServerConfig, Toolbox, ToolsConfig, load_tools, read_tools
from xrl_lite.tools.builtin.calculator import evaluate
from xrl_lite.tools.parsers import FunctionCall

FUNCTIONS = '''
from xrl_lite.tools import function_tool

@function_tool
def shout(text: str) -> str:
    """Say it loud.

    Args:
        text: What.
    """
    return text.upper()
'''

CLASSES = """
from xrl_lite.tools import BaseTool, ToolResponse

class Greeter(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=f"{self.config['greeting']} {parameters.get('name')}"), 0.0, {}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def yaml_of(folder: Path, entry: str) -> ToolsConfig:
    write(folder, "classes.py", CLASSES)
    return ToolsConfig(tool_config_path=write(folder, "tools.yaml", entry))


GREETER = """
tools:
  - class_name: {folder}/classes.py:Greeter
    config: {{type: native, greeting: Hello}}
    tool_schema:
      type: function
      function: {{name: greet, parameters: {{properties: {{name: {{type: string}}}}}}}}
"""


async def test_functions_classes_and_built_in_tools_come_together(tmp_path: Path) -> None:
    config = yaml_of(tmp_path, GREETER.format(folder=tmp_path)).model_copy(
        update={"function_tool_path": write(tmp_path, "functions.py", FUNCTIONS), "builtin": ["calculator"]}
    )
    toolbox = Toolbox(await load_tools(config))
    assert list(toolbox.tools) == ["shout", "calculator", "greet"]
    async with toolbox.session() as tools:
        (result,) = await tools.run([FunctionCall("greet", '{"name": "Ann"}')])
    assert result.response.text == "Hello Ann"


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"function_tool_path: there is no file .*nowhere.py"):
        read_tools(ToolsConfig(function_tool_path=tmp_path / "nowhere.py"))
    with pytest.raises(ToolError, match=r"tool_config_path: there is no file .*nowhere.yaml"):
        read_tools(ToolsConfig(tool_config_path=tmp_path / "nowhere.yaml"))


def test_a_file_that_raises_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        read_tools(ToolsConfig(function_tool_path=write(tmp_path, "raises.py", "1 / 0")))


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path, name, FUNCTIONS) for name in ("one.py", "two.py")]
    with pytest.raises(ToolError, match="Two tools are called 'shout'"):
        read_tools(ToolsConfig(function_tool_path=paths))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: 7", "must hold a list under 'tools'"),
        ("tools: [7]", "tool 0: must be a mapping"),
        ("tools: [{clas_name: x}]", r"unknown key 'clas_name'. Did you mean 'class_name'\?"),
        ("tools: [{config: {}}]", "class_name is missing"),
        ("tools: [{class_name: calculatr}]", r"Unknown tool 'calculatr'. Did you mean 'calculator'\?"),
        ("tools: [{class_name: builtins.dict}]", "is not a BaseTool"),
        ("tools: [{class_name: no.such.Tool}]", "cannot be loaded"),
        ("tools: [{class_name: search_folder, config: {type: remote}}]", "must be native or actor"),
        ("tools: [{class_name: search_folder, config: {folder: /no/such}}]", "there is no folder /no/such"),
        ("tools: [{class_name: search_folder, config: {folder: ., lifetime: ever}}]", "lifetime must be"),
        ("tools: [", "is not YAML"),
    ],
)
async def test_a_wrong_entry_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ToolError, PluginError, UnknownNameError), match=message):
        await load_tools(yaml_of(tmp_path, text))


async def test_a_class_without_a_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="Greeter has no schema"):
        await load_tools(yaml_of(tmp_path, f"tools: [{{class_name: '{tmp_path}/classes.py:Greeter'}}]"))


def test_an_unknown_format_is_refused_when_the_settings_are_read() -> None:
    with pytest.raises(ValidationError, match=r"Unknown tool parser 'herms'. Did you mean 'hermes'\?"):
        ToolsConfig(format="herms")


def test_a_server_has_one_address() -> None:
    with pytest.raises(ValidationError, match="exactly one of command and url"):
        McpServerConfig(name="s")


async def test_a_folder_is_searched(tmp_path: Path) -> None:
    write(tmp_path, "paris.txt", "Paris is the capital of France.\n\nIt has a tower.")
    write(tmp_path, "rome.txt", "Rome is the capital of Italy.")
    config = yaml_of(
        tmp_path, f"tools: [{{class_name: search_folder, config: {{folder: {tmp_path}, num_results: 1}}}}]"
    )
    async with Toolbox(await load_tools(config)).session() as tools:
        found, missed = [
            (await tools.run([FunctionCall("search", f'{{"query": "{query}"}}')]))[0].response.text
            for query in ("capital Italy", "zebra")
        ]
    assert found == "[1] rome.txt: Rome is the capital of Italy."
    assert missed == "No passage has any of these words."


SANDBOX = """
from types import SimpleNamespace

class Echo:
    async def run_async(self, command, *, files=None, wall_time_s=None):
        code = files[command[-1]]
        failed = code == "fail"
        return SimpleNamespace(
            stdout=code, stderr="oh" if failed else "", is_success=not failed, explain=lambda: "exited with code 1"
        )
"""


async def test_python_runs_in_the_sandbox_that_is_given(tmp_path: Path) -> None:
    write(tmp_path, "sandbox.py", SANDBOX)
    config = yaml_of(tmp_path, f"tools: [{{class_name: python, config: {{sandbox: '{tmp_path}/sandbox.py:Echo'}}}}]")
    async with Toolbox(await load_tools(config)).session() as tools:
        texts = [
            (await tools.run([FunctionCall("python", f'{{"code": "{code}"}}')]))[0].response.text
            for code in ("print(7)", "fail", "")
        ]
    assert texts == ["print(7)", "fail\noh\nexited with code 1", "The program printed nothing."]


async def test_python_without_a_sandbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="has no sandbox to run programs in"):
        await load_tools(yaml_of(tmp_path, "tools: [{class_name: python, config: {sandbox: 'no.such:Sandbox'}}]"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(3 + 4) * 2 ** 5", 224), ("7/2", 3.5), ("-3^2 =", -9), ("sqrt(16) + max(1, 2)", 6.0), ("round(pi, 2)", 3.14)],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "9**9**9",
        "'a' * 3",
        "x",
        "(1).real",
        "1 +",
        "[1]",
        "True",
        "9" * 501,
        "(-8) ** 0.5",
        "2**5000",
    ],
)
def test_what_is_not_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        evaluate(expression)
