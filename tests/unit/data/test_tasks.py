"""Synthetic tasks: right answers, one side of the split each, the same rows for the same seed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrl_lite.data.tasks import TASKS, ProblemSet, addition, iterate_rows, make_rows, sort_digits, split_of
from xrl_lite.errors import ConfigError, DataError, UnknownNameError


def prompts_of(task: str, split: Any, *, num_rows: int = 400, seed: int = 0) -> list[str]:
    rows = make_rows(task, split=split, num_rows=num_rows, seed=seed, options={})
    return [row["prompt"][0]["content"] for row in rows]


def test_a_row_has_the_format_of_verl() -> None:
    rows = make_rows("sort_digits", split="eval", num_rows=2, seed=0, options={"num_digits": 3})
    digits = rows[1]["prompt"][0]["content"].removeprefix("sort ")
    assert len(digits) == 3
    assert rows[1] == {
        "prompt": [{"role": "user", "content": f"sort {digits}"}],
        "data_source": "sort_digits",
        "reward_model": {"style": "rule", "ground_truth": "".join(sorted(digits))},
        "extra_info": {"index": 1, "split": "eval"},
    }


@given(st.integers(0, 8099))
def test_sums_are_right_and_have_two_digits_each(number: int) -> None:
    problem = addition().problem(number)
    x, y = problem.prompt.removesuffix("=").split("+")
    assert (len(x), len(y)) == (2, 2)
    assert problem.answer == str(int(x) + int(y))


@given(st.integers(1, 5), st.data())
def test_sorting_keeps_every_digit(num_digits: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 10**num_digits - 1))
    problem = sort_digits(num_digits=num_digits).problem(number)
    digits = problem.prompt.removeprefix("sort ")
    assert len(digits) == num_digits
    assert int(digits) == number
    assert list(problem.answer) == sorted(digits)


@pytest.mark.parametrize(("make", "size"), [(sort_digits, 10_000), (addition, 8_100)])
def test_all_problems_differ(make: Any, size: int) -> None:
    problems = make()
    assert problems.size == size
    assert len({problems.problem(number).prompt for number in range(size)}) == size


def test_sums_with_swapped_terms_are_on_one_side_whatever_the_seeds() -> None:
    train = {
        frozenset(prompt[:-1].split("+")) for seed in (0, 1) for prompt in prompts_of("addition", "train", seed=seed)
    }
    held = {
        frozenset(prompt[:-1].split("+")) for seed in (0, 2) for prompt in prompts_of("addition", "eval", seed=seed)
    }
    assert not train & held


def test_orderings_of_the_same_digits_are_on_one_side() -> None:
    train = {tuple(sorted(prompt)) for prompt in prompts_of("sort_digits", "train", num_rows=5000)}
    held = {tuple(sorted(prompt)) for prompt in prompts_of("sort_digits", "eval", num_rows=1000)}
    assert not train & held


@pytest.mark.parametrize("task", list(TASKS))
def test_every_problem_is_on_exactly_one_side(task: str) -> None:
    counts = [sum(1 for _ in iterate_rows(task, split=split, seed=0, options={})) for split in ("train", "eval")]
    assert sum(counts) == TASKS.resolve(task)().size
    assert 0.08 < counts[1] / sum(counts) < 0.2


def test_rows_follow_from_the_seed() -> None:
    assert prompts_of("addition", "train") == prompts_of("addition", "train")
    assert prompts_of("addition", "train") != prompts_of("addition", "train", seed=1)
    assert len(set(prompts_of("addition", "train"))) == 400


def test_the_split_is_the_same_in_every_process_and_release() -> None:
    # not hash(), which is salted per process; a changed value would let old training rows into eval
    assert [split_of("sort_digits", key) for key in ("1247", "0136")] == ["train", "eval"]


def test_an_unknown_task_gets_the_closest_name() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown task 'sort_digit'. Did you mean 'sort_digits'\?"):
        make_rows("sort_digit", split="train", num_rows=1, seed=0, options={})


def test_an_unknown_option_gets_the_closest_name() -> None:
    with pytest.raises(ConfigError, match=r"no option 'num_digit'. Did you mean 'num_digits'\?"):
        make_rows("addition", split="train", num_rows=1, seed=0, options={"num_digit": 2})


@pytest.mark.parametrize("value", [0, 4, "2", True, 1.0])
def test_an_option_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="takes num_digits from 1 to 3, got"):
        make_rows("addition", split="train", num_rows=1, seed=0, options={"num_digits": value})


def test_too_many_rows_are_refused_with_the_number_there_is() -> None:
    with pytest.raises(DataError, match=r"has 100 eval problems, but num_rows=101 .* Ask for at most 100"):
        make_rows("sort_digits", split="eval", num_rows=101, seed=0, options={"num_digits": 3})


def test_a_task_of_ones_own_is_given_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(**options: Any) -> ProblemSet:
        return sort_digits(num_digits=options["length"])

    monkeypatch.setattr("xrl_lite.data.tasks.own", own, raising=False)
    [row] = make_rows("xrl_lite.data.tasks:own", split="train", num_rows=1, seed=0, options={"length": 2})
    assert len(row["reward_model"]["ground_truth"]) == 2


def test_tasks_need_no_torch() -> None:
    code = "import sys, xrl_lite.data.tasks, xrl_lite.engine.tiny_model_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
