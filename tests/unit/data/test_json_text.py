"""JSON that others wrote: everything that cannot be read is one error, and lines end at line breaks only."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrl_lite.data.json_text import MAX_DEPTH, JsonTextError, read_json, read_json_at, split_lines


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{x", "Expecting property name enclosed in double quotes at character 1"),
        ("9" * 5000, "too many digits"),
        ("[" * 100_000, "more than 100 brackets"),
        ('{"a":' * 101 + "1" + "}" * 101, "more than 100 brackets"),
        (b"\xff\xfe{", "not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_one_error(text: str | bytes, reason: str) -> None:
    with pytest.raises(JsonTextError, match=reason):
        read_json(text)
    if isinstance(text, str):
        with pytest.raises(JsonTextError, match=reason):
            read_json_at(text, 0)


def test_a_value_as_deep_as_allowed_is_read() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(read_json(text)) == text
    assert read_json_at(f"x {text} y", 2)[1] == 2 + len(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**30), 10**30) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    value=VALUES,
    as_ascii=st.booleans(),
    cut=st.integers(0, 20),
    before=st.integers(0, 3),
    padding=st.integers(480, 530) | st.integers(990, 1040),
    behind=st.sampled_from(["", " ", "<x>", "0", ".5", "e7", "]", '"']),
)
def test_a_long_value_is_read_as_the_decoder_reads_it(
    value: object, as_ascii: bool, cut: int, before: int, padding: int, behind: str
) -> None:
    written = json.dumps(value, ensure_ascii=as_ascii)
    for text in (
        f"[{' ' * padding}{written}]",
        f"{'1' * padding}{written[cut:]}",
        f'["{"x" * padding}",{written[cut:]}]',
    ):
        whole = "#" * before + text + behind
        try:
            wanted = json.JSONDecoder().raw_decode(whole, before)
        except json.JSONDecodeError as error:
            with pytest.raises(JsonTextError, match=rf"^{re.escape(error.msg)} at character {error.pos}$"):
                read_json_at(whole, before)
        else:
            assert repr(read_json_at(whole, before)) == repr(wanted)


@given(st.lists(st.text(), max_size=5))
def test_lines_are_those_that_were_written(texts: list[str]) -> None:
    written = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
    assert [read_json(line) for line in split_lines(written)] == texts


def test_a_last_line_needs_no_line_break() -> None:
    assert split_lines("") == []
    assert split_lines("1\n\n2") == ["1", "", "2"]
