"""Schemas of tools: from a function's type hints and docstring, as transformers makes them, but without transformers.

::

    def add(x: int, y: int = 0) -> int: ...    with a docstring that describes x and y

    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer", "description": "The first."}, "y": {...}},
        "required": ["x"]}}}

The result is that of ``transformers.utils.get_json_schema``, without its ``return``, which templates do not show.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from xrl_lite.errors import ToolError

ToolSchema = dict[str, Any]
"""An OpenAI tool schema as plain data."""

_BASIC: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"^\s*(Args|Arguments|Returns|Raises|Yields|Examples?|Note):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def schema_of_function(function: Callable[..., Any], *, name: str | None = None) -> ToolSchema:
    """Return the schema of a function, from its type hints and its docstring in Google style.

    Args:
        function: Sync or async; a receiver named self or cls is left out.
        name: Instead of the function's own.

    Raises:
        ToolError: an argument has no type hint, one that JSON cannot express, or no description; there is no docstring;
            or there are ``*args`` or ``**kwargs``.
    """
    label = name or getattr(function, "__name__", type(function).__name__)
    description, argument_texts = _read_docstring(function, label)
    properties: dict[str, Any] = {}
    required: list[str] = []
    hints = _type_hints(function, label)
    for parameter in _parameters(function):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(f"Tool {label!r} takes {parameter}, which no schema can describe. Name its arguments.")
        if parameter.name not in hints:
            raise ToolError(
                f"Tool {label!r}: argument {parameter.name!r} has no type hint. Write {parameter.name}: str."
            )
        if parameter.name not in argument_texts:
            raise ToolError(
                f"Tool {label!r}: argument {parameter.name!r} is not described. Add it to the docstring:\n"
                f"    Args:\n        {parameter.name}: What it is."
            )
        schema = schema_of_type(hints[parameter.name], where=f"tool {label!r}, argument {parameter.name!r}")
        properties[parameter.name] = {**schema, **_described(argument_texts[parameter.name], label)}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": label, "description": description, "parameters": parameters}}


def schema_of_type(hint: Any, *, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint.

    Raises:
        ToolError: JSON has nothing like it.
    """
    origin = get_origin(hint)
    args: list[Any] = list(get_args(hint))
    if origin is None:
        basic = _BASIC.get(hint) if _is_hashable(hint) else None
        if basic is None:
            raise ToolError(
                f"{where}: {hint!r} cannot be written as JSON. Use int, float, str, bool, list, dict, Literal."
            )
        return dict(basic)
    if origin is Union or origin is types.UnionType:
        return _union(args, where)
    if origin is Literal:
        return _literal(args, where)
    if origin is list:
        return {"type": "array", "items": schema_of_type(args[0], where=where)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [schema_of_type(arg, where=where) for arg in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of_type(args[1], where=where)}
    raise ToolError(f"{where}: {hint!r} cannot be written as JSON. For any number of values use list[...].")


def check_schema(schema: object, *, label: str) -> ToolSchema:
    """Return a tool schema as plain data, complete with what templates rely on.

    Args:
        schema: A mapping, or an `OpenAIFunctionToolSchema`.
        label: What to call the tool in messages.

    Raises:
        ToolError: it has no function, name or object of parameters.
    """
    if isinstance(schema, OpenAIFunctionToolSchema):
        schema = schema.model_dump()
    if not isinstance(schema, Mapping):
        raise ToolError(f"{label}: a tool schema must be a mapping, got {schema!r}.")
    given = cast("Mapping[str, Any]", schema)
    function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(cast("Any", function).get("name"), str):
        raise ToolError(
            f"{label}: a tool schema is {{type: function, function: {{name, description, parameters}}}}; "
            f"got {dict(given)!r}."
        )
    filled = {"description": "", **cast("Mapping[str, Any]", function)}
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    parameters |= cast("Mapping[str, Any]", filled.get("parameters") or {})
    if parameters["type"] != "object" or not isinstance(parameters["properties"], Mapping):
        raise ToolError(
            f"{label}: the parameters of {filled['name']!r} must be a schema of type object with properties."
        )
    return {"type": "function", "function": {**filled, "parameters": parameters}}


@dataclass
class OpenAIFunctionParametersSchema:
    """Arguments of a tool, as verl's tools describe them."""

    type: str = "object"
    """Always "object"."""
    properties: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Schema of each argument."""
    required: list[str] = field(default_factory=list[str])
    """Names that must be given."""


@dataclass
class OpenAIFunctionSchema:
    """A function, as verl's tools describe it."""

    name: str
    """Name of the tool."""
    description: str = ""
    """What it is for."""
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    """Its arguments."""
    strict: bool = False
    """Kept for schemas that have it."""


@dataclass
class OpenAIFunctionToolSchema:
    """A tool schema as an object, so that tools written for verl find the attributes they look for."""

    type: str
    """Always "function"."""
    function: OpenAIFunctionSchema
    """The function."""

    @classmethod
    def model_validate(cls, schema: Mapping[str, Any]) -> Self:
        """Make it of plain data.

        Raises:
            ToolError: it is no tool schema.
        """
        function = check_schema(schema, label="tool schema")["function"]
        parameters = function["parameters"]
        return cls(
            type="function",
            function=OpenAIFunctionSchema(
                name=function["name"],
                description=function["description"],
                parameters=OpenAIFunctionParametersSchema(
                    properties=dict(parameters["properties"]), required=list(parameters.get("required", []))
                ),
                strict=bool(function.get("strict", False)),
            ),
        )

    def model_dump(self, **_: Any) -> ToolSchema:
        """Return it as plain data; the options that pydantic's method has are taken and not needed."""
        parameters = self.function.parameters
        dumped: dict[str, Any] = {"type": parameters.type, "properties": parameters.properties}
        if parameters.required:
            dumped["required"] = parameters.required
        return {
            "type": self.type,
            "function": {
                "name": self.function.name,
                "description": self.function.description,
                "parameters": dumped,
            },
        }


def _read_docstring(function: Callable[..., Any], label: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function and of each of its arguments."""
    text = inspect.getdoc(function)
    if not text:
        raise ToolError(
            f"Tool {label!r} has no docstring. The model knows of a tool what its docstring says; write one."
        )
    marks = list(_SECTION.finditer(text))
    description = text[: marks[0].start()] if marks else text
    arguments: dict[str, str] = {}
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=False):
        if mark.group(1) in ("Args", "Arguments"):
            arguments = _read_arguments(text[mark.end() : end])
    return description.strip(), arguments


def _read_arguments(block: str) -> dict[str, str]:
    lines = [line for line in block.split("\n") if line.strip()]
    if not lines:
        return {}
    indent = len(lines[0]) - len(lines[0].lstrip())
    entries: list[str] = []
    for line in lines:
        if len(line) - len(line.lstrip()) <= indent:
            entries.append(line.strip())
        else:
            entries[-1] += f" {line.strip()}"
    found = (_ARGUMENT.match(entry) for entry in entries)
    return {match.group(1): match.group(2).strip() for match in found if match}


def _described(text: str, label: str) -> dict[str, Any]:
    """Return the description of an argument; ``(choices: [...])`` at its end becomes an enum."""
    match = _CHOICES.search(text)
    if match is None:
        return {"description": text}
    try:
        choices = json.loads(match.group(1))
    except json.JSONDecodeError as error:
        raise ToolError(f"Tool {label!r}: the choices {match.group(1)!r} are not a JSON list: {error}") from error
    return {"enum": [str(choice).strip() for choice in choices], "description": text[: match.start()].strip()}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0] if parameters else None
    if first is not None and first.name in ("self", "cls") and first.annotation is first.empty:
        return parameters[1:]
    return parameters


def _type_hints(function: Callable[..., Any], label: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError as error:
        raise ToolError(f"Tool {label!r}: a type hint cannot be resolved: {error}") from error


def _union(args: list[Any], where: str) -> dict[str, Any]:
    parts = [schema_of_type(arg, where=where) for arg in args if arg is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    return {**schema, "nullable": True} if type(None) in args else schema


def _literal(values: list[Any], where: str) -> dict[str, Any]:
    kinds: list[str] = []
    for value in values:
        kind = _BASIC.get(type(value), {}).get("type")
        if kind in (None, "array", "object"):
            raise ToolError(f"{where}: {value!r} in Literal cannot be written as JSON.")
        if kind not in kinds:
            kinds.append(kind)
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
