"""Reading answers out of texts and comparing them: numbers, fractions, lists, short LaTeX.

Comparison is exact: numbers become fractions, so 0.5 equals 1/2 and 42.0 equals 42, and nothing is rounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?", re.IGNORECASE)
_LATEX_FRACTION = re.compile(r"([+-]?)(\d*)\\frac\{([^{}]+)\}\{([^{}]+)\}")
_SHORT_FRACTION = re.compile(r"\\frac(\d|\{[^{}]*\})(\d|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_MIXED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)/(\d+)(?![\d./])")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|boxed|fbox)\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|~|\\quad|\\left|\\right|\\displaystyle")
_ANSWER_LINE = re.compile(r"answer\s*+(?:is\b|:|=)\s*+[:=]?+\s*+([^\s:=][^\n]*)", re.IGNORECASE)
_MARKED = re.compile(r"####[ \t]*([^\n]+)")
_NUMBER_IN_TEXT = re.compile(
    r"[-\N{MINUS SIGN}]?[$]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-\N{MINUS SIGN}]?\.\d+"
)
_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*\{")
_BRACE = re.compile(r"[{}]")
_LONGEST_NUMBER = 400


def last_boxed(text: str) -> str | None:
    r"""Return what is inside the last ``\boxed{...}`` or ``\fbox{...}`` whose braces close, or None; in linear time."""
    boxes = [match.end() - 1 for match in _BOX.finditer(text)]
    if not boxes:
        return None
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text, boxes[0]):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    closed = [brace for brace in boxes if brace in closing]
    return text[closed[-1] + 1 : closing[closed[-1]]] if closed else None


def last_number(text: str) -> str | None:
    """Return the last number in a text, as written, or None."""
    found = _NUMBER_IN_TEXT.findall(text)
    return found[-1] if found else None


def final_answer(text: str) -> str | None:
    r"""Return the answer of a solution: the last ``\boxed{}``, else the last ``####`` line, else "answer is ..."."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_MARKED, _ANSWER_LINE):
        found = pattern.findall(text)
        if found:
            return _without_end(found[-1])
    return None


def same_answer(given: str, right: str) -> bool:
    """Return whether two answers are equal as numbers, as lists of answers, or as texts without spacing and markup."""
    first, second = tidy(given), tidy(right)
    if first == second:
        return True
    one, other = parse_number(first), parse_number(second)
    if one is not None and other is not None:
        return one == other
    ones, others = _items(first), _items(second)
    if _differ(_brackets(first), _brackets(second)):
        return False
    return len(ones) > 1 and len(ones) == len(others) and all(map(same_answer, ones, others))


def differ_in_brackets(given: str, right: str) -> bool:
    """Return whether both are lists of several items, in brackets of different kinds: a point is no interval or set."""
    first, second = tidy(given), tidy(right)
    return min(len(_items(first)), len(_items(second))) > 1 and _differ(_brackets(first), _brackets(second))


def tidy(answer: str) -> str:
    """Return an answer without markup, units of money, spacing and the full stop behind it."""
    text = answer.strip().replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"<\|[^|]*\|>", "", text)
    text = _SPACING.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _WRAPPED.sub(r"\1", text)
    for mark in (
        "**",
        "\\$",
        "$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "\\%",
        "%",
        "`",
        "^{\\circ}",
        "^\\circ",
        "\N{DEGREE SIGN}",
    ):
        text = text.replace(mark, "")
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text.replace("{,}", ","))
    text = re.sub(r"\s+", "", text).rstrip(".").removeprefix("x=").lower()
    return _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(_long_fraction, text))


def parse_number(text: str) -> Fraction | None:
    r"""Return the number a tidied text stands for, or None; None as well for one of more than 400 characters.

    Numbers are ``-3``, ``.5``, ``1e3``, ``1/2``, ``\frac{1}{2}``, ``1\frac{1}{2}``.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    fraction = _LATEX_FRACTION.fullmatch(text)
    if fraction is not None:
        sign, whole, over, under = fraction.groups()
        part = _divide(over, under)
        return None if part is None else (part + int(whole or 0)) * (-1 if sign == "-" else 1)
    over, slash, under = text.partition("/")
    if slash:
        return _divide(over, under)
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _divide(over: str, under: str) -> Fraction | None:
    if not (_DECIMAL.fullmatch(over) and _DECIMAL.fullmatch(under)):
        return None
    below = Fraction(under)
    return Fraction(over) / below if below else None


def _long_fraction(match: re.Match[str]) -> str:
    over, under = (part if part[0] == "{" else f"{{{part}}}" for part in match.groups())
    return f"\\frac{over}{under}"


def _brackets(text: str) -> str:
    """Return the brackets around a tidied text, those of an interval that is half open as well; or nothing."""
    text = text.removeprefix("\\")
    pair = text[:1] + text[-1:]
    if len(text) < 2 or not (pair == "{}" or (pair[0] in "([" and pair[1] in ")]")):
        return ""
    depth = 0
    for sign in text[:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:  # they belong to different parts, as in (0,1) and [2,3]
            return ""
    return pair


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other


def _items(text: str) -> list[str]:
    if _brackets(text):
        text = text.removeprefix("\\")[1:-1].removesuffix("\\")
    return [item for item in re.split(r"[,;]", text) if item]


def _without_end(answer: str) -> str:
    return re.sub(r"<\|[^|]*\|>", "", answer).strip().strip("*").strip()
