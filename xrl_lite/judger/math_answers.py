"""Reading answers out of texts and comparing them: numbers, fractions, lists, short LaTeX.

Comparison is exact: numbers become fractions, so 0.5 equals 1/2 and 42.0 equals 42, and nothing is rounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?", re.IGNORECASE)
_LATEX_FRACTION = re.compile(r"([+-]?)\\frac\{([^{}]+)\}\{([^{}]+)\}")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
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
    return len(ones) > 1 and len(ones) == len(others) and all(map(same_answer, ones, others))


def tidy(answer: str) -> str:
    """Return an answer without markup, units of money, spacing and the full stop behind it."""
    text = answer.strip().replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"<\|[^|]*\|>", "", text)
    text = _SPACING.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _WRAPPED.sub(r"\1", text)
    for mark in ("**", "\\$", "$", "\\(", "\\)", "\\[", "\\]", "\\%", "%", "`", "^{\\circ}", "^\\circ"):
        text = text.replace(mark, "")
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text.replace("{,}", ","))
    return re.sub(r"\s+", "", text).rstrip(".").removeprefix("x=").lower()


def parse_number(text: str) -> Fraction | None:
    r"""Return the number a tidied text stands for: ``-3``, ``.5``, ``1e3``, ``1/2``, ``\frac{1}{2}``; else None.

    None as well for one of more than 400 characters.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    fraction = _LATEX_FRACTION.fullmatch(text)
    if fraction is not None:
        return _divide(f"{fraction[1]}{fraction[2]}" if fraction[2][0] not in "+-" else fraction[2], fraction[3])
    over, slash, under = text.partition("/")
    if slash:
        return _divide(over, under)
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _divide(over: str, under: str) -> Fraction | None:
    if not (_DECIMAL.fullmatch(over) and _DECIMAL.fullmatch(under)):
        return None
    below = Fraction(under)
    return Fraction(over) / below if below else None


def _items(text: str) -> list[str]:
    if len(text) > 1 and (text[0], text[-1]) in (("[", "]"), ("(", ")"), ("{", "}")):
        text = text[1:-1]
    return [item for item in re.split(r"[,;]", text) if item]


def _without_end(answer: str) -> str:
    return re.sub(r"<\|[^|]*\|>", "", answer).strip().strip("*").strip()
