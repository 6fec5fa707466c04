"""Schemas of functions: those of transformers, and errors that say what to write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from xrl_lite.errors import ToolError
from xrl_lite.tools import OpenAIFunctionToolSchema, schema_of_function


def add(x: int, y: float = 0.0) -> float:
    """Add two numbers.

    Both may be negative.

    Args:
        x: The first.
        y: The second, which may
            be left out.

    Returns:
        The sum.
    """
    return x + y


def find(query: str, tags: list[str], limit: int | None = None, exact: bool = False) -> list[str]:
    """Find texts.

    Args:
        query: Words.
        tags: Only with these.
        limit: At most so many.
        exact: As they stand.
    """
    return [query, *tags]


def convert(
    amount: int | float | str,
    unit: Literal["m", "km"],
    options: dict[str, int],
    pair: tuple[int, str],
    anything: Any,
    either: Optional[list[int]] = None,  # noqa: UP045 - both ways to write it
    mixed: list[int] | dict[str, str] = {},  # noqa: B006
) -> str:
    """Convert.

    Args:
        amount: How much.
        unit: Of what. (choices: ["m", "km"])
        options: More.
        pair: Two.
        anything: At all.
        either: Or not.
        mixed: Any of two.
    """
    return unit


def nothing() -> None:
    """Do nothing."""


class Service:
    def look(self, where: str) -> str:
        """Look.

        Args:
            where: The place.
        """
        return where


@pytest.mark.parametrize("function", [add, find, convert, nothing, Service().look, Service.look])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    for place in expected["function"]["parameters"]["properties"].values():
        place.pop("return", None)
    expected["function"]["parameters"]["properties"].pop("return", None)
    assert schema_of_function(function) == expected


def without_hint(x) -> str:  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
    """Do something.

    Args:
        x: What.
    """
    return ""


def without_docstring(x: int) -> str:
    return ""


def without_description(x: int) -> str:
    """Do something."""
    return ""


def with_rest(*values: int) -> str:
    """Do something.

    Args:
        values: Many.
    """
    return ""


def with_object(x: Service) -> str:
    """Do something.

    Args:
        x: What.
    """
    return ""


def with_any_length(x: tuple[int, ...]) -> str:
    """Do something.

    Args:
        x: What.
    """
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_hint, r"'without_hint': argument 'x' has no type hint. Write x: str"),
        (without_docstring, r"'without_docstring' has no docstring"),
        (without_description, r"'without_description': argument 'x' is not described"),
        (with_rest, r"'with_rest' takes \*values"),
        (with_object, r"Service.*cannot be written as JSON"),
        (with_any_length, r"use list\[\.\.\.\]"),
    ],
)
def test_what_no_schema_can_be_made_of_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        schema_of_function(function)


def test_a_schema_object_of_verl_is_plain_data_again() -> None:
    plain = schema_of_function(add)
    schema = OpenAIFunctionToolSchema.model_validate(plain)
    assert schema.function.name == "add"
    assert schema.function.parameters.required == ["x"]
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == plain


def test_a_schema_without_a_function_is_refused() -> None:
    with pytest.raises(ToolError, match="tool schema is"):
        OpenAIFunctionToolSchema.model_validate({"name": "add"})


def test_tools_work_without_torch_numpy_and_transformers() -> None:
    code = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None
from xrl_lite.tools import ToolParser, schema_of_function
from xrl_lite.tools.builtin.calculator import evaluate
print(evaluate("1+1"), ToolParser.get_tool_parser("hermes").parse("a", []).content)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.split() == ["2", "a"], result.stderr
