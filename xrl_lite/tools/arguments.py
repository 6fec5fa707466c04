"""Arguments as a model writes them, turned into what the schema asks for where that is safe, and refused where not."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, cast

from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.errors import did_you_mean
from xrl_lite.tools.schema import ToolSchema

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


class ArgumentsError(ValueError):
    """The arguments of a call do not fit. The message is meant for the model."""


def fit_arguments(arguments: Mapping[str, Any], schema: ToolSchema, *, strict: bool) -> dict[str, Any]:
    """Return the arguments with the types of the schema, where a value clearly means one of them.

    Numbers become text where text is asked for, and texts numbers, booleans or JSON where these are.

    Args:
        arguments: As the model gave them.
        schema: Of the tool.
        strict: Refuse names that the tool does not have, and calls that leave out required ones.

    Raises:
        ArgumentsError: a value or, if strict, the names do not fit.
    """
    parameters = schema["function"]["parameters"]
    properties = cast("Mapping[str, Mapping[str, Any]]", parameters["properties"])
    required = cast("list[str]", parameters.get("required") or [])
    if strict:
        name = schema["function"]["name"]
        for given in arguments:
            if given not in properties and parameters.get("additionalProperties") is not True:
                guess = did_you_mean(given, properties)
                raise ArgumentsError(f"{name} has no argument {given!r}.{guess} It takes: {_listed(properties)}.")
        missing = [argument for argument in required if argument not in arguments]
        if missing:
            raise ArgumentsError(f"{name} needs the argument {missing[0]!r}. It takes: {_listed(properties)}.")
    return {name: fit_value(value, properties.get(name, {}), where=name) for name, value in arguments.items()}


def fit_value(value: Any, schema: Mapping[str, Any], *, where: str) -> Any:
    """Return a value with a type of the schema.

    Raises:
        ArgumentsError: it has none of them, and does not clearly mean one.
    """
    kinds = _kinds(schema)
    if not kinds or value is None or any(_is(kind, value) for kind in kinds):
        return value
    for kind in kinds:
        fitted = _fit(value, kind)
        if fitted is not None:
            return fitted
    raise ArgumentsError(
        f"argument {where!r} must be of type {' or '.join(kinds)}, got {json.dumps(value, default=str)}."
    )


def read_text(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for in a format whose values have no quotes: by the schema, else JSON."""
    kinds = _kinds(schema)
    if "string" in kinds and len(kinds) == 1:
        return text
    stripped = text.strip()
    if stripped == "null" and "string" not in kinds:
        return None
    for kind in kinds:
        fitted = _fit(stripped, kind)
        if fitted is not None:
            return fitted
    if "string" in kinds:
        return text
    try:
        return read_json(stripped)
    except JsonTextError:
        return text


_ALIASES = {
    "string": ("str", "string", "text", "varchar", "char", "enum"),
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float", "double"),
    "boolean": ("bool", "binary"),
    "object": ("object", "dict", "map"),
    "array": ("array", "list", "tuple"),
    "null": ("null", "none"),
}
"""Beginnings of type names that data sets and tools use -> JSON schema's name."""


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema allows; none if it allows all."""
    if "anyOf" in schema or "oneOf" in schema:
        options = cast("list[Mapping[str, Any]]", schema.get("anyOf") or schema.get("oneOf"))
        found = [_kinds(option) for option in options]
        return [] if [] in found else [kind for kinds in found for kind in kinds]
    given = schema.get("type")
    names = cast("list[object]", given if isinstance(given, list) else [given] if given else [])
    return [_json_kind(str(name).lower()) for name in names]


def _json_kind(name: str) -> str:
    for kind, beginnings in _ALIASES.items():
        if name.startswith(beginnings):
            return kind
    return name


def _is(kind: str, value: object) -> bool:
    match kind:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
        case _:
            return True  # not a type of JSON schema: whoever wrote it knows better


def _fit(value: Any, kind: str) -> Any:
    """Return the value as this type, None where it does not mean one."""
    if kind == "string":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    if kind == "boolean":
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    if kind in ("integer", "number"):
        return _number(text, kind)
    if kind in ("array", "object"):
        read = _json_or_literal(text)
        return read if _is(kind, read) else None
    return None


def _number(text: str, kind: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    if number.is_integer():
        return int(number)
    return number if kind == "number" else None


def _json_or_literal(text: str) -> Any:
    try:
        return read_json(text)
    except JsonTextError:
        pass
    try:
        return read_json(json.dumps(ast.literal_eval(text)))  # literals know bytes and sets, which JSON does not
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _listed(properties: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} ({schema.get('type', 'any')})" for name, schema in properties.items()) or "no arguments"
