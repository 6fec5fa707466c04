"""Rows of every understood form, and errors that name row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.build import gsm8k_rows, write_rows
from xrl_lite.data import DataConfig, load_rows, parse_row
from xrl_lite.errors import DataError

CONFIG = DataConfig(path=Path("rows.jsonl"))


def refusal(raw: dict[str, Any], config: DataConfig = CONFIG) -> str:
    with pytest.raises(DataError) as caught:
        parse_row(raw, 7, config)
    return str(caught.value)


def test_raw_gsm8k_row() -> None:
    row = parse_row({"question": "How many?", "answer": "2+1\n#### 1,203"}, 0, CONFIG)
    assert row.prompt == [{"role": "user", "content": "How many?"}]
    assert row.ground_truth == "1203"
    assert row.data_source == "openai/gsm8k"
    assert row.extra_info == {"answer": "2+1\n#### 1,203"}  # what parses the column gets it as it is


def test_verl_row() -> None:
    raw = {
        "prompt": [{"role": "user", "content": "q"}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 3},
        "agent_name": "tool_agent",
    }
    row = parse_row(raw, 0, CONFIG)
    assert (row.ground_truth, row.data_source, row.agent_name) == ("42", "openai/gsm8k", "tool_agent")
    assert row.extra_info["index"] == 3


@pytest.mark.parametrize("column", ["ground_truth", "solution", "answer", "label"])
def test_trl_prompt_only_row(column: str) -> None:
    row = parse_row({"prompt": "Say 4", column: "4", "difficulty": 1}, 0, CONFIG)
    assert row.prompt == [{"role": "user", "content": "Say 4"}]
    assert row.ground_truth == "4"
    assert row.extra_info == {"difficulty": 1}


def test_branches_that_parquet_fills_in_are_left_out(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    sources = [{"a": 1.0}, {"b": {"x": 1.0}}, {"b": {"y": 0.0}}]
    table = pyarrow.Table.from_pylist([{"prompt": "q", "answer": "1", "data_source": source} for source in sources])
    parquet.write_table(table, path)
    assert [row.data_source for row in load_rows(DataConfig(path=path))] == sources


def test_columns_are_mapped() -> None:
    config = DataConfig(path=Path("rows.jsonl"), columns={"prompt": "text", "ground_truth": "target"})
    row = parse_row({"text": "q", "target": 5}, 0, config)
    assert (row.prompt[0]["content"], row.ground_truth) == ("q", 5)
    assert row.extra_info == {"text": "q", "target": 5}


@pytest.mark.parametrize(
    ("content", "dressed"),
    [
        ([{"type": "text", "text": "2+2?"}], [{"type": "text", "text": "2+2? Now."}]),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image", "image": "x.png"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b Now."}, {"type": "image", "image": "x.png"}],
        ),
        ([{"type": "image", "image": "x"}], [{"type": "image", "image": "x"}, {"type": "text", "text": " Now."}]),
        ("2+2?", "2+2? Now."),
    ],
)
def test_a_suffix_stands_behind_the_last_text_of_a_message(content: Any, dressed: Any) -> None:
    raw = {"prompt": [{"role": "user", "content": content}], "answer": "4"}
    row = parse_row(raw, 0, DataConfig(path=Path("rows.jsonl"), question_suffix=" Now."))
    assert row.prompt == [{"role": "user", "content": dressed}]


def test_system_prompt_and_suffix_are_added() -> None:
    config = DataConfig(path=Path("rows.jsonl"), system_prompt="Be brief.", question_suffix=" Now.")
    row = parse_row({"prompt": "q", "answer": "a"}, 0, config)
    assert row.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q Now."}]


def test_a_row_without_ground_truth_names_row_and_columns() -> None:
    text = refusal({"prompt": "q", "difficulty": 1})
    assert "row 7: there is no ground truth" in text
    assert "the row has prompt, difficulty" in text


@pytest.mark.parametrize("raw", [{"prompt": "q", "answer": ""}, {"prompt": "q", "reward_model": {"style": "rule"}}])
def test_an_empty_ground_truth_is_refused(raw: dict[str, Any]) -> None:
    assert "is empty, so no answer can be judged" in refusal(raw)


def test_a_row_without_prompt_names_the_closest_column() -> None:
    config = DataConfig(path=Path("rows.jsonl"), columns={"prompt": "questio"})
    assert "Did you mean 'question'?" in refusal({"question": "q", "answer": "a"}, config)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    assert "must be a text or a list of messages" in refusal({"prompt": [{"content": "no role"}], "answer": "a"})


@pytest.mark.parametrize("content", [None, 5, {"text": "q"}])
def test_a_message_without_content_is_refused(content: Any) -> None:
    text = refusal({"prompt": [{"role": "user", "content": content}], "answer": "a"})
    assert f"row 7: prompt has a message of role user whose content is {content!r}" in text
    assert "role is None" in refusal({"prompt": [{"role": None, "content": "q"}], "answer": "a"})


def test_a_message_of_tool_calls_needs_no_content() -> None:
    calls: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    prompt = [{"role": "user", "content": "q"}, calls, {"role": "tool", "content": "4"}]
    assert parse_row({"prompt": prompt, "answer": "4"}, 0, CONFIG).prompt == prompt
    assert "content is None" in refusal({"prompt": [{**calls, "tool_calls": None}], "answer": "a"})


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        ({"prompt": "2\ud800", "answer": "a"}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"text": "2\ud800"}]}], "answer": "a"}, "prompt.0.content.0.text"),
        ({"prompt": "q", "answer": "2\ud800"}, "answer"),
        ({"prompt": "q", "reward_model": {"ground_truth": {"any": ["2\ud800"]}}}, "reward_model.ground_truth.any.0"),
    ],
)
def test_half_a_surrogate_pair_is_refused(raw: dict[str, Any], place: str) -> None:
    assert f"row 7: {place} has half a surrogate pair ('\\ud800' at character 1)" in refusal(raw)


def test_a_ground_truth_of_nan_is_refused() -> None:
    assert "row 7: answer is NaN, which equals nothing" in refusal({"prompt": "q", "answer": float("nan")})


def test_missing_file_names_the_closest(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", gsm8k_rows(1))
    with pytest.raises(DataError, match=r"Did you mean 'train\.jsonl'\?"):
        load_rows(DataConfig(path=tmp_path / "trian.jsonl"))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load_rows(DataConfig(path=write_rows(tmp_path / "empty.jsonl", [])))


def test_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question"\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        load_rows(DataConfig(path=path))


def test_a_line_ends_at_a_line_break_and_nowhere_else(tmp_path: Path) -> None:
    texts = ["one\u2028two\u2029three\x85four", "five"]
    lines = [json.dumps({"question": text, "answer": "1"}, ensure_ascii=False) for text in texts]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join([*lines, ""]).encode())
    assert [row.prompt[-1]["content"] for row in load_rows(DataConfig(path=path))] == texts


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000])
def test_a_line_that_python_does_not_read_is_named(tmp_path: Path, value: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": {value}}}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        load_rows(DataConfig(path=path))


def test_num_rows_takes_the_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", gsm8k_rows(5))
    assert len(load_rows(DataConfig(path=path, num_rows=3))) == 3


def test_parquet_of_verl(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{n}"}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n},
        }
        for n in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = load_rows(DataConfig(path=tmp_path / "rows.parquet"))
    assert [row.ground_truth for row in loaded] == ["0", "1", "2"]


def test_a_data_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "my_data"
    folder.mkdir()
    write_rows(folder / "train.jsonl", gsm8k_rows(3))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = load_rows(DataConfig(dataset=str(folder), split="train"))
    assert [row.ground_truth for row in rows] == ["1", "3", "5"]
    with pytest.raises(DataError, match="load_dataset"):
        load_rows(DataConfig(dataset=str(tmp_path / "nowhere"), split="train"))


def test_exactly_one_origin() -> None:
    with pytest.raises(ValidationError, match="exactly one of path, dataset and task"):
        DataConfig(path=Path("rows.jsonl"), task="addition")
    with pytest.raises(ValidationError, match="exactly one of path, dataset and task"):
        DataConfig()


@pytest.mark.parametrize("part", ["data_source", "agent_name"])
def test_a_named_column_that_no_row_has_is_refused_with_the_closest_name(tmp_path: Path, part: Any) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "1", "sort": "a"}]
    )
    assert len(load_rows(DataConfig(path=path, columns={part: "sort"}))) == 2
    with pytest.raises(DataError, match=rf"no row has the column 'sorte', which columns\.{part} names.*'sort'"):
        load_rows(DataConfig(path=path, columns={part: "sorte"}))


@pytest.mark.parametrize("where", ["column", "extra_info"])
def test_names_by_which_attempts_are_described_are_no_columns(tmp_path: Path, where: str) -> None:
    field = {"num_turns": None} if where == "column" else {"extra_info": {"num_turns": 3}}
    path = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "1", **field}]
    )
    with pytest.raises(DataError, match=r"row 1: .*no column may be called num_turns"):
        load_rows(DataConfig(path=path))
