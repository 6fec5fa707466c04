"""From settings to tools: files of functions, YAML of classes, built-in ones, MCP servers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import yaml

from xrl_lite.errors import PluginError, ToolError, did_you_mean
from xrl_lite.log import get_logger
from xrl_lite.registry import Registry, load_object
from xrl_lite.tools.actor_tool import ActorFunctionTool, ActorTool
from xrl_lite.tools.base import BaseTool
from xrl_lite.tools.config import ToolsConfig
from xrl_lite.tools.functions import FunctionTool
from xrl_lite.tools.schema import check_schema
from xrl_lite.tools.toolbox import by_name

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem

logger = get_logger(__name__)

BUILTIN_TOOLS: Registry[Any] = Registry(
    "tool",
    {
        "calculator": "xrl_lite.tools.builtin.calculator:calculator",
        "python": "xrl_lite.tools.builtin.python:PythonTool",
        "search_folder": "xrl_lite.tools.builtin.search_folder:SearchFolderTool",
    },
)
"""Tools that come along, and those that user code registers."""

_ENTRY_KEYS = ("class_name", "config", "tool_schema")
_ACTOR_KEYS = ("num_workers", "num_cpus", "max_concurrency")


@dataclass(frozen=True, kw_only=True)
class ToolSource:
    """Where a tool comes from: read and checked, but not made yet, and nothing of it started."""

    where: str
    """Place in the settings, for messages."""
    name: str | None
    """Its name; None where its class says so only once it is made."""
    make: Callable[[ActorSystem | None], BaseTool]
    """Makes it, and starts its processes in the system that is given, or in the default one."""
    num_workers: int = 0
    """Processes that it runs in; 0 for the one that calls it."""
    num_cpus: float = 0.0
    """CPU slots of each."""


def read_tools(config: ToolsConfig) -> list[ToolSource]:
    """Return what tools settings name, those of MCP servers left out. Files are read, nothing is started.

    Raises:
        ToolError: a file is missing or wrong, a function has no schema, two tools have one name.
        PluginError: a file or class cannot be loaded.
    """
    sources = [
        *(_function_source(tool) for path in _paths(config.function_tool_path) for tool in load_function_tools(path)),
        *(_function_source(_builtin(name)) for name in config.builtin),
        *(source for path in _paths(config.tool_config_path) for source in read_class_tools(path)),
    ]
    taken: dict[str, ToolSource] = {}
    for source in sources:
        if source.name is not None and source.name in taken:
            raise ToolError(
                f"Two tools are called {source.name!r}: {taken[source.name].where} and {source.where}. Rename one, "
                f'for example with @function_tool("other_name").'
            )
        taken[source.name or source.where] = source
    return sources


async def load_tools(config: ToolsConfig, *, system: ActorSystem | None = None) -> list[BaseTool]:
    """Return all tools that settings name, and connect to MCP servers.

    Args:
        config: The settings.
        system: Where tools run that have processes; the default system when not given.

    Raises:
        ToolError: a file is missing or wrong, a tool has no schema, two have one name, a server cannot be reached.
        PluginError: a file or class cannot be loaded.
        ResourceError: there are not enough CPU slots.
    """
    tools: list[BaseTool] = []
    try:
        for source in read_tools(config):
            tools.append(source.make(system))  # noqa: PERF401 - what was made is ended if the next fails
        for server in config.mcp_servers:
            from xrl_lite.tools.mcp import connect

            tools += await connect(server, system=system)
        return list(by_name(tools).values())
    except BaseException:
        with anyio.CancelScope(shield=True):  # what was started is ended, however this ends
            for tool in tools:
                await tool.aclose()
        raise


def load_function_tools(path: Path) -> list[BaseTool]:
    """Return the function tools that a Python file defines. It is run once, whoever loads it.

    Raises:
        ToolError: there is no such file, or two of its tools have one name.
        PluginError: it raises.
    """
    found = _find(path, "function_tool_path")
    module = load_object(f"{found}:__dict__")
    tools: list[BaseTool] = [value for value in module.values() if isinstance(value, FunctionTool)]
    if not tools:
        logger.warning("%s defines no tool: no function in it is under @function_tool", path)
    return list(by_name(list(dict.fromkeys(tools))).values())


def read_class_tools(path: Path) -> list[ToolSource]:
    """Return what tools a YAML file names.

    ::

        tools:
          - class_name: my_package.my_tools.Sandbox     # or package.module:Class, file.py:Class, a built-in name
            config: {type: native}                      # type: actor runs it in processes; the rest is the tool's own
            tool_schema: {type: function, function: {...}}   # or left out where the class has one

    Raises:
        ToolError: there is no such file, or it does not look like this.
        PluginError: a class cannot be loaded.
    """
    found = _find(path, "tool_config_path")
    try:
        document: object = yaml.safe_load(found.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ToolError(f"{path} is not YAML: {error}") from error
    entries: object = cast("Any", document).get("tools") if isinstance(document, Mapping) else None
    if not isinstance(entries, list):
        raise ToolError(f"{path} must hold a list under 'tools', got {yaml.safe_dump(document)[:100]!r}.")
    items = cast("list[object]", entries)
    return [_class_source(entry, f"{path}, tool {number}") for number, entry in enumerate(items)]


def _class_source(entry: object, where: str) -> ToolSource:
    if not isinstance(entry, Mapping):
        raise ToolError(f"{where}: must be a mapping with {', '.join(_ENTRY_KEYS)}, got {entry!r}.")
    given = cast("Mapping[str, Any]", entry)
    for key in given:
        if key not in _ENTRY_KEYS:
            raise ToolError(f"{where}: unknown key {key!r}.{did_you_mean(key, _ENTRY_KEYS)} It has {_ENTRY_KEYS}.")
    name = given.get("class_name")
    if not isinstance(name, str):
        raise ToolError(f"{where}: class_name is missing.")
    _load_class(name, where)
    config = dict(given.get("config") or {})
    kind = config.pop("type", "native")
    if kind not in ("native", "actor"):
        raise ToolError(f"{where}: config.type must be native or actor, got {kind!r}. For MCP see mcp_servers.")
    schema = given.get("tool_schema")
    checked = None if schema is None else check_schema(schema, label=where)
    called = None if checked is None else str(checked["function"]["name"])
    placement = {key: config.pop(key) for key in _ACTOR_KEYS if key in config} if kind == "actor" else {}
    make = partial(_make, name, config, schema, where)

    if kind == "native":
        return ToolSource(where=where, name=called, make=lambda system: make())
    return ToolSource(
        where=where,
        name=called,
        make=lambda system: ActorTool(make, schema_of=make(), system=system, **placement),
        num_workers=int(placement.get("num_workers", 1)),
        num_cpus=float(placement.get("num_cpus", 1.0)),
    )


def _make(name: str, config: Mapping[str, Any], schema: Any, where: str) -> BaseTool:
    """Make a tool, here or in a process: classes of user files travel by name."""
    tool_class = _load_class(name, where)
    try:
        return tool_class(dict(config), schema)
    except ToolError as error:
        raise ToolError(f"{where}: {error}") from error


def _load_class(name: str, where: str) -> type[BaseTool]:
    if name in BUILTIN_TOOLS or ":" in name:
        found = BUILTIN_TOOLS.resolve(name)
    else:
        module, _, attribute = name.rpartition(".")
        if not module:
            BUILTIN_TOOLS.check(name)
        found = _attribute(module, attribute, where)
    if isinstance(found, type) and issubclass(found, BaseTool):
        return found
    raise ToolError(f"{where}: {name!r} is not a BaseTool. Inherit xrl_lite.tools.BaseTool and implement execute().")


def _attribute(module: str, attribute: str, where: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise PluginError(f"{where}: {module}.{attribute} cannot be loaded: {error!r}") from error


def _builtin(name: str) -> BaseTool:
    tool = BUILTIN_TOOLS.resolve(name)
    if isinstance(tool, BaseTool):
        return tool
    raise ToolError(f"The tool {name!r} needs settings: name it as class_name in a file of tool_config_path.")


def _function_source(tool: BaseTool) -> ToolSource:
    where = f"{tool.__module__}.{getattr(tool, '__qualname__', type(tool).__qualname__)}"
    if isinstance(tool, FunctionTool) and tool.run_in == "process":
        return ToolSource(
            where=where,
            name=tool.name,
            make=lambda system: ActorFunctionTool(tool, system=system),
            num_workers=tool.num_workers,
            num_cpus=tool.num_cpus,
        )
    return ToolSource(where=where, name=tool.name, make=lambda system: tool)


def _find(path: Path, setting: str) -> Path:
    found = path.expanduser().resolve()
    if not found.is_file():
        raise ToolError(f"{setting}: there is no file {path} (looked for {found}).")
    return found


def _paths(value: list[Path] | Path | None) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    else:
        yield from value or []
