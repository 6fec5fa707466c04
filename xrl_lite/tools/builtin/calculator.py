"""Arithmetic without running code: of what is parsed, only numbers, operators and a few functions are let in."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from xrl_lite.tools.functions import function_tool

MAX_LENGTH = 500
MAX_DIGITS = 1000
"""Larger whole numbers are refused: computing them is how to keep a machine busy."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: left**right,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "floor": math.floor,
    "ceil": math.ceil,
    "gcd": math.gcd,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


@function_tool
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: The expression, for example "(3 + 4) * 2 ** 5" or "sqrt(2)".
    """
    return str(evaluate(expression))  # microseconds, whatever the expression: a thread would cost more


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: it is none, or too large to compute; says what is not understood.
        ZeroDivisionError, OverflowError: from the arithmetic.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are computed")
    cleaned = expression.strip().removesuffix("=").replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/")
    try:
        tree = ast.parse(cleaned, mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(op, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
        case _:
            pass
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic; there are + - * / // % **, {', '.join(_FUNCTIONS)}")


def _apply(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and right > 0:
        digits = right * math.log10(abs(left)) if abs(left) > 1 else 0
        if digits > MAX_DIGITS:
            raise ValueError(f"{left} ** {right} has more than {MAX_DIGITS} digits")
    result = _BINARY[type(op)](left, right)
    if isinstance(result, int) and result.bit_length() > MAX_DIGITS * 4:
        raise ValueError(f"the number has more than {MAX_DIGITS} digits")
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result
