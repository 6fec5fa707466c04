"""`xrl-lite score`: responses in a file are judged, counted, written, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.build import write_rows
from xrl_lite.cli import EXIT_BELOW, EXIT_ERROR, EXIT_USAGE, main
from xrl_lite.data import DataConfig, RolloutState
from xrl_lite.errors import DataError
from xrl_lite.judger import JUDGERS, BaseJudger, JudgerConfig
from xrl_lite.judger.score import read_samples, score_samples


def answers(num_rows: int = 6) -> list[dict[str, Any]]:
    """GSM8K rows, every third of them answered wrongly."""
    return [
        {"question": f"{n}?", "answer": f"so\n#### {n}", "response": f"#### {n if n % 3 else n + 1}"}
        for n in range(num_rows)
    ]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "answers.jsonl", answers())


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_rewards_are_written_in_the_order_of_the_rows_and_counted(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(data)]) == 0
    written = records(data.with_suffix(".scored.jsonl"))
    assert [record["reward"]["score"] for record in written] == [0, 1, 1, 0, 1, 1]
    assert [record["row"] for record in written] == list(range(6))
    assert written[1]["question"] == "1?"
    assert {record["judgement"]["outcome"] for record in written} == {"ok"}
    shown = said(capsys)
    assert "openai/gsm8k" in shown
    assert "0.6667" in shown


@pytest.mark.parametrize(("threshold", "code"), [("0.5", 0), ("0.9", EXIT_BELOW)])
def test_the_exit_code_goes_by_the_threshold(
    data: Path, threshold: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(data), "--threshold", threshold]) == code
    assert ("below the threshold 0.9" in said(capsys)) is (code == EXIT_BELOW)


def test_a_run_that_was_ended_goes_on_behind_the_last_whole_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "rewards.jsonl"
    arguments = ["score", str(data), "--output", str(output)]
    assert main(arguments) == 0
    whole = output.read_text()
    lines = whole.splitlines(keepends=True)
    marked = lines[0].replace('"row": 0', '"row":  0')  # so that it can be told from one that is written again
    output.write_text(marked + lines[1] + lines[2][:20])
    assert main([*arguments]) == EXIT_USAGE
    assert "Go on with it by --resume" in said(capsys)
    assert main([*arguments, "--resume"]) == 0
    again = output.read_text()
    assert again.startswith(marked + lines[1])
    assert [record["reward"] for record in records(output)] == [json.loads(line)["reward"] for line in lines]
    assert "0.6667" in said(capsys)  # those that were there are counted as well


def test_a_run_goes_on_though_texts_hold_every_kind_of_line_break(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answers(2)
    rows[0]["question"] = "one\u2028two\u2029three\x85four\rfive\x1csix"
    data = write_rows(tmp_path / "answers.jsonl", rows)
    arguments = ["score", str(data)]
    assert main(arguments) == 0
    output = data.with_suffix(".scored.jsonl")
    output.write_text(output.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
    assert main([*arguments, "--resume"]) == 0
    capsys.readouterr()
    written = output.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["question"] for line in written[:-1]] == [rows[0]["question"], "1?"]


def test_an_output_of_other_samples_is_not_gone_on_with(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(data)]) == 0
    rows = answers()
    rows[2]["response"] = "#### 9"
    write_rows(data, rows)
    assert main(["score", str(data), "--resume"]) == EXIT_USAGE
    assert "line 3 is not about the sample that stands there" in said(capsys)


def test_records_of_other_settings_are_not_gone_on_with(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", str(data), "--judger", "gsm8k"]
    assert main(arguments) == 0
    output = data.with_suffix(".scored.jsonl")
    output.write_text("".join(output.read_text().splitlines(keepends=True)[:3]))
    assert main([*arguments, "--resume", "extra_info.score=2"]) == EXIT_USAGE
    assert main(["score", str(data), "--judger", "exact_match", "--resume"]) == EXIT_USAGE
    assert "judged by a judger with other settings or code, with another label or prompt" in said(capsys)
    assert len(records(output)) == 3
    assert main([*arguments, "--resume", "max_pending=4", "request_timeout=5"]) == 0
    assert len(records(output)) == 6


def test_records_of_reward_code_that_was_edited_are_not_gone_on_with(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def reward(response, label, extra_info):\n    return 1.0\n")
    settings = {"judger_name": "mine", "reward_handler": f"{code}:reward"}
    (tmp_path / "judger.yaml").write_text(json.dumps(settings))
    arguments = ["score", str(data), "--judger", str(tmp_path / "judger.yaml"), "--no-self-test", "--resume"]
    assert main(arguments) == 0
    assert main(arguments) == 0
    code.write_text("def reward(response, label, extra_info):\n    return 0.0\n")
    assert main(arguments) == EXIT_USAGE
    assert "judged by a judger with other settings or code" in said(capsys)


def test_records_of_other_labels_are_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "q", "response": "1", "one": "1", "two": "2", "data_source": "addition"}
    arguments = ["score", str(write_rows(tmp_path / "answers.jsonl", [row])), "--resume", "--label-column"]
    assert main([*arguments, "one"]) == 0
    assert main([*arguments, "two"]) == EXIT_USAGE
    assert "with another label or prompt" in said(capsys)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("extra_info.max_retries=1", "extra_info.max_retries=2"),
        ("reward_kwargs.request_timeout=1", "reward_kwargs.request_timeout=2"),
    ],
)
def test_what_reward_code_is_given_is_about_scores_whatever_its_name(
    data: Path, given: str, then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["score", str(data), "--judger", "gsm8k", "--resume"]
    assert main([*arguments, given]) == 0
    assert main([*arguments, given]) == 0
    assert main([*arguments, then]) == EXIT_USAGE
    assert "judged by a judger with other settings" in said(capsys)


def test_a_branch_may_have_the_name_of_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "q", "response": "#### 1", "label": "1", "data_source": "rate_limit"}
    data = write_rows(tmp_path / "answers.jsonl", [row])
    settings = {"branches": {"rate_limit": {"type": "gsm8k"}}}
    (tmp_path / "judger.yaml").write_text(json.dumps(settings))
    arguments = ["score", str(data), "--judger", str(tmp_path / "judger.yaml"), "--resume"]
    assert main(arguments) == 0
    assert main([*arguments, "branches.rate_limit.max_pending=4"]) == 0
    assert main([*arguments, "branches.rate_limit.extra_info.score=2"]) == EXIT_USAGE
    assert "judged by a judger with other settings" in said(capsys)


def test_records_of_other_prompts_are_not_gone_on_with(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "other": f"{row['question']}!"} for row in answers()]
    write_rows(data, rows)
    arguments = ["score", str(data), "--resume", "--prompt-column"]
    assert main([*arguments, "question"]) == 0
    assert main([*arguments, "question"]) == 0
    assert main([*arguments, "other"]) == EXIT_USAGE
    assert "with another label or prompt" in said(capsys)


def test_columns_of_any_kind_tell_samples_apart(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(last: float) -> None:
        write_rows(data, [{**row, "hints": {"all": [0.5, None, {"last": last}]}} for row in answers()])

    write(1.5)
    arguments = ["score", str(data), "--resume"]
    assert main(arguments) == 0
    assert main(arguments) == 0
    write(2.5)
    assert main(arguments) == EXIT_USAGE
    assert "line 1 is not about the sample that stands there" in said(capsys)


def test_an_output_of_an_older_version_is_told_from_one_of_other_settings(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(data)]) == 0
    output = data.with_suffix(".scored.jsonl")
    old = [{name: value for name, value in record.items() if name != "judged_by"} for record in records(output)]
    write_rows(output, old)
    assert main(["score", str(data), "--resume"]) == EXIT_USAGE
    shown = said(capsys)
    assert "line 1 does not say by which settings it was judged (judged_by): an older version" in shown
    assert "other settings" not in shown
    assert records(output) == old


def test_an_output_that_was_cut_inside_of_a_character_is_gone_on_with(tmp_path: Path) -> None:
    rows = [{**row, "question": f"{row['question']} \N{SNOWMAN}"} for row in answers(3)]
    data = write_rows(tmp_path / "answers.jsonl", rows)
    assert main(["score", str(data)]) == 0
    output = data.with_suffix(".scored.jsonl")
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.rfind("\N{SNOWMAN}".encode()) + 1])
    assert main(["score", str(data), "--resume"]) == 0
    assert [record["question"] for record in records(output)] == [row["question"] for row in rows]


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"hello\n", b"[1]\n", b"notes without an end"])
def test_a_file_of_another_kind_is_left_alone(
    data: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "notes.txt"
    output.write_bytes(content)
    arguments = ["score", str(data), "--output", str(output), "--resume"]
    assert main(arguments) == EXIT_USAGE
    assert "Name another output" in said(capsys)
    assert output.read_bytes() == content


def test_half_of_a_surrogate_pair_is_written_and_read_again(tmp_path: Path) -> None:
    rows = answers(2)
    rows[0]["response"] = "#### 1\ud83d"
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["score", str(data)]) == 0
    output = data.with_suffix(".scored.jsonl")
    assert records(output)[0]["response"] == "#### 1\ud83d"
    output.write_text(output.read_text().partition("\n")[0] + "\n")
    assert main(["score", str(data), "--resume"]) == 0
    assert len(records(output)) == 2


BROKEN = """
def sometimes(response, label, extra_info):
    if response.endswith("5"):
        raise ValueError("no such unit")
    return {"score": 1.0}

def in_two_ways(response, label, extra_info):
    number = int(response.split()[-1])
    raise (ZeroDivisionError if number % 2 else KeyError)(number)

def never(response, label, extra_info):
    raise KeyError("unit")
"""


def test_failures_are_kept_apart_from_zeros(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text(BROKEN)
    handler = f"{tmp_path / 'rewards.py'}:sometimes"
    arguments = ["score", str(data), "--judger", handler, "judger_name=mine", "--max-failed"]
    assert main([*arguments, "0"]) == EXIT_BELOW
    shown = said(capsys)
    assert "mine" in shown
    assert "raised" in shown
    (failed,) = [record for record in records(data.with_suffix(".scored.jsonl")) if record["reward"] is None]
    assert failed["row"] == 5
    assert "ValueError: no such unit" in failed["judgement"]["error"]


@pytest.mark.parametrize(("options", "code"), [([], EXIT_BELOW), (["--max-failed", "1"], 0)])
def test_a_sample_that_failed_misses_a_threshold(
    data: Path, tmp_path: Path, options: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(BROKEN)
    handler = f"{tmp_path / 'rewards.py'}:sometimes"
    assert main(["score", str(data), "--judger", handler, "--threshold", "0.9", *options]) == code
    shown = said(capsys)
    assert "The first of its kind: judger 'score', sample 5: raised: ValueError: no such unit" in shown
    assert ("1 of 6 samples failed, and at most 0 may (--max-failed)" in shown) is (code == EXIT_BELOW)


def test_where_all_fail_the_first_error_of_each_kind_is_shown(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(BROKEN)
    assert main(["score", str(data), "--judger", f"{tmp_path / 'rewards.py'}:in_two_ways"]) == EXIT_ERROR
    shown = said(capsys)
    assert [shown.count(text) for text in ("KeyError: 2 ", "KeyError: 4 ", "ZeroDivisionError: 1 ")] == [1, 0, 1]
    assert "No sample got a score." in shown


def test_a_judger_that_never_works_stops_it(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text(BROKEN)
    arguments = ["score", str(data), "--judger", f"{tmp_path / 'rewards.py'}:never", "max_initial_failures=2"]
    assert main(arguments) == EXIT_ERROR
    assert "The first 2 judgements of judger 'score' all failed" in said(capsys)


def test_a_judger_that_fails_its_test_stops_it(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text(BROKEN)
    arguments = ["score", str(data), "--judger", f"{tmp_path / 'rewards.py'}:sometimes", "gold_template=A {label}"]
    assert main(arguments) == EXIT_ERROR
    assert "self-test of judger 'score' failed" in said(capsys)
    assert main([*arguments, "--no-self-test", "--resume"]) == 0


@pytest.mark.parametrize("inside", [["judger_config"], ["task", "judger_config"], []])
def test_the_judger_of_a_run_or_of_a_file_may_be_used(data: Path, tmp_path: Path, inside: list[str]) -> None:
    settings: Any = {"type": "gsm8k", "extra_info": {"score": 2, "format_score": 0}}
    for name in reversed(inside):
        settings = {name: settings}
    (tmp_path / "judger.yaml").write_text(json.dumps(settings))
    assert main(["score", str(data), "--judger", str(tmp_path / "judger.yaml"), "extra_info.score=3"]) == 0
    assert records(data.with_suffix(".scored.jsonl"))[1]["reward"] == {"score": 3}


@pytest.mark.parametrize("override", ["extra_info.score=3", "branches.openai/gsm8k.extra_info.score=3"])
def test_a_judger_that_is_chosen_by_data_source_may_be_changed(data: Path, override: str) -> None:
    if override.startswith("branches"):
        others = [{"prompt": "b, a", "solution": "a b", "response": "a b", "data_source": "sort_digits"}]
        write_rows(data, [*answers(), *others])
    assert main(["score", str(data), override]) == 0
    assert records(data.with_suffix(".scored.jsonl"))[1]["reward"]["score"] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--judger", "gms8k"], "There is no judger 'gms8k'. Did you mean 'gsm8k'?"),
        (["--judger", "no_such.yaml"], "There is no config file no_such.yaml"),
        (["--judger", "no_such.py:f"], "there is no such file"),
        (["--judger", "gsm8k", "request_timout=3"], "Did you mean 'request_timeout'"),
        (["request_timout=3"], "Did you mean 'request_timeout'"),
        (["--response-column", "respons"], "Looked for respons. Did you mean 'response'? The row has question, answer"),
        (["--label-column", "gold"], "there is no column 'gold'"),
    ],
)
def test_what_is_typed_wrong_is_explained(
    data: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(data), *arguments]) == EXIT_USAGE
    assert says in said(capsys)


def test_parquet_and_several_responses_of_a_row(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [
        {
            "prompt": [{"role": "user", "content": "1?"}],
            "label": "1",
            "responses": ["1", "2"],
            "data_source": "addition",
        }
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    assert main(["score", str(tmp_path / "rows.parquet")]) == 0
    written = records(tmp_path / "rows.scored.jsonl")
    assert [(record["sample"], record["responses"], record["reward"]["score"]) for record in written] == [
        (0, "1", 1.0),
        (1, "2", 0.0),
    ]


@pytest.mark.parametrize(
    ("row", "responses"),
    [
        ({"label": "1", "response": "a"}, ["a"]),
        ({"label": "1", "completion": [{"role": "assistant", "content": "a"}]}, ["a"]),
        ({"label": "1", "completions": [[{"role": "assistant", "content": "a"}], "b"]}, ["a", "b"]),
    ],
)
def test_responses_come_in_several_forms_and_need_no_prompt(
    tmp_path: Path, row: dict[str, Any], responses: list[str]
) -> None:
    samples = read_samples(DataConfig(path=write_rows(tmp_path / "rows.jsonl", [row])))
    assert [sample.response for sample in samples] == responses


def test_each_response_has_its_own_tokens(tmp_path: Path) -> None:
    row = {"label": "1", "responses": ["a", "b"], "response_ids": [[1], [2, 3]]}
    samples = read_samples(DataConfig(path=write_rows(tmp_path / "rows.jsonl", [row])))
    assert [sample.state(0).response_ids for sample in samples] == [[1], [2, 3]]
    assert [sample.columns["response_ids"] for sample in samples] == [[1], [2, 3]]


@pytest.mark.parametrize("ids", [[1, 2], [[1]], [[1], ["a"]], 3, "ab"])
def test_tokens_that_do_not_fit_the_responses_are_refused(tmp_path: Path, ids: Any) -> None:
    row = {"label": "1", "responses": ["a", "b"], "response_ids": ids}
    with pytest.raises(DataError, match=r"row 0: response_ids must hold the tokens of 2 response"):
        read_samples(DataConfig(path=write_rows(tmp_path / "rows.jsonl", [row])))


READS_PROMPT = """
def score(prompts, completions, **kwargs):
    return [float(prompt == "1?") for prompt in prompts]
"""


def test_a_judger_that_reads_the_prompt_is_given_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text(READS_PROMPT)
    data = write_rows(tmp_path / "rows.jsonl", [{"label": "1", "response": "a", "query": "1?", "promt": ""}])
    arguments = ["score", str(data), "--judger", f"{tmp_path / 'rewards.py'}:score", "signature=trl"]
    assert main(arguments) == EXIT_USAGE
    shown = said(capsys)
    assert "judger 'score' reads the prompt, which row 0 does not have. Did you mean 'promt'?" in shown
    assert "--prompt-column" in shown
    assert main([*arguments, "--prompt-column", "query"]) == 0
    assert records(data.with_suffix(".scored.jsonl"))[0]["reward"] == {"score": 1.0}


@pytest.mark.parametrize(
    ("kind", "settings", "reads_prompt"),
    [
        ("llm_judge", {"hosts": ["one:1"]}, True),
        ("llm_judge", {"hosts": ["one:1"], "prompt_template": "{label} {response}"}, False),
        ("compass_verifier_v2", {"hosts": ["one:1"]}, True),
        ("reward_model_http", {"hosts": ["one:1"]}, True),
        ("reward_model", {"model": "m"}, True),
        ("gsm8k", {}, False),
        ("verl", {}, False),
        ("native", {"judger_name": "x", "signature": "trl", "reward_handler": lambda completions, **_: [1.0]}, False),
        ("native", {"judger_name": "x", "signature": "areal", "reward_handler": lambda prompt, **_: 1.0}, True),
        ("native", {"judger_name": "x", "signature": "openrlhf", "reward_handler": lambda queries, **_: 1.0}, True),
    ],
)
def test_it_is_known_who_reads_the_prompt(kind: str, settings: dict[str, Any], reads_prompt: bool) -> None:
    config = JUDGERS.resolve(kind).model_validate(settings)
    assert isinstance(config, JudgerConfig)
    assert config.reads_prompt() is reads_prompt


class OwnFlow(BaseJudger):
    """Owns the whole flow, and tells nobody how it ended."""

    async def judge(self, rollout_state: RolloutState) -> RolloutState:
        if rollout_state.response != "nothing":
            rollout_state.reward = {"score": float(len(str(rollout_state.response)))}
        return rollout_state


async def test_a_judger_that_owns_the_whole_flow_is_counted(tmp_path: Path) -> None:
    rows = [{"label": "1", "response": text} for text in ("abc", "nothing")]
    samples = read_samples(DataConfig(path=write_rows(tmp_path / "rows.jsonl", rows)))
    found: list[dict[str, Any]] = []
    with (tmp_path / "out.jsonl").open("w") as output:
        await score_samples(OwnFlow("own"), samples, output, judged_by=lambda _: "", on_record=found.append)
    assert [record["reward"] for record in found] == [{"score": 3.0}, None]
    assert [record["judgement"]["outcome"] for record in found] == ["ok", "raised"]
    assert "must be a dict; it is None" in found[1]["judgement"]["error"]


def test_a_response_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"label": "1", "response": "a"}, {"label": "1", "response": 3}])
    with pytest.raises(DataError, match="row 1: response must be a text"):
        read_samples(DataConfig(path=path))
