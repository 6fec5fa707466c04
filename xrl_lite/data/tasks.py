"""Small tasks with answers that can be checked, made from nothing: enough to see a policy learn on two CPU cores.

A task is a function of its options that returns a `ProblemSet`: a numbered, finite set of problems, none of them made
before it is asked for. `make_rows` draws rows from it, in the format of verl's data sets.

Train and eval share no problem, whatever the seeds: the side a problem is on follows from a hash of its `key` alone.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from xrl_lite.errors import ConfigError, DataError, did_you_mean
from xrl_lite.registry import Registry

Split = Literal["train", "eval"]

EVAL_SHARE = 1 / 8
"""Share of the keys that are held out for eval."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question and its only right answer."""

    prompt: str
    """What the user says."""
    answer: str
    """What the response must be, to the letter."""
    key: str
    """Problems with one key are variants of one problem: they are never on both sides of the train/eval split."""


@dataclass(frozen=True)
class ProblemSet:
    """All problems of a task under given options, numbered from 0."""

    size: int
    """How many there are, train and eval together."""
    problem: Callable[[int], Problem]
    """Returns the problem with the given number, 0 <= number < size."""


def sort_digits(*, num_digits: int = 4) -> ProblemSet:
    """Sort the digits of a number: ``sort 4721`` -> ``1247``.

    Two problems are one if they have the same digits in any order, so a held-out answer is never a training answer.

    Args:
        num_digits: Digits to sort, 1 to 5; leading zeros occur.
    """
    _check_range("sort_digits", "num_digits", num_digits, low=1, high=5)

    def problem(number: int) -> Problem:
        digits = f"{number:0{num_digits}d}"
        answer = "".join(sorted(digits))
        return Problem(prompt=f"sort {digits}", answer=answer, key=answer)

    return ProblemSet(10**num_digits, problem)


def addition(*, num_digits: int = 2) -> ProblemSet:
    """Add two numbers: ``27+95=`` -> ``122``.

    x+y and y+x are one problem.

    Args:
        num_digits: Digits of each number, 1 to 3; no leading zeros.
    """
    _check_range("addition", "num_digits", num_digits, low=1, high=3)
    low = 10 ** (num_digits - 1) if num_digits > 1 else 0
    choices = 10**num_digits - low

    def problem(number: int) -> Problem:
        x, y = low + number // choices, low + number % choices
        return Problem(prompt=f"{x}+{y}=", answer=str(x + y), key=f"{min(x, y)}+{max(x, y)}")

    return ProblemSet(choices**2, problem)


TASKS: Registry[Callable[..., ProblemSet]] = Registry(
    "task",
    {
        "sort_digits": "xrl_lite.data.tasks:sort_digits",
        "addition": "xrl_lite.data.tasks:addition",
    },
)


def make_rows(task: str, *, split: Split, num_rows: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw different rows of one side of a task, in random order; the same arguments give the same rows.

    Args:
        task: A name in `TASKS`, or the path of a function that returns a `ProblemSet`.
        split: The side of the train/eval split to draw from.
        num_rows: How many rows.
        seed: Which rows, in which order.
        options: Keyword arguments of the task.

    Returns:
        Rows of verl's format: ``prompt`` (chat messages), ``data_source`` (the task), ``reward_model`` (the
        ``ground_truth`` is the answer) and ``extra_info`` (``index`` in this list, ``split``).

    Raises:
        UnknownNameError: no such task.
        ConfigError: an option the task does not have, or a value it does not take.
        DataError: fewer problems exist than rows are asked for.
    """
    rows = list(islice(iterate_rows(task, split=split, seed=seed, options=options), num_rows))
    if len(rows) < num_rows:
        raise DataError(
            f"Task {task!r} with options {dict(options)} has {len(rows)} {split} problems, but num_rows={num_rows} "
            f"were asked for. Ask for at most {len(rows)}, or choose options that allow more problems."
        )
    return rows


def iterate_rows(task: str, *, split: Split, seed: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows that `make_rows` draws, as many as there are; arguments and errors as there."""
    for index, problem in enumerate(_draw(_problem_set(task, options), task=task, split=split, seed=seed)):
        yield {
            "prompt": [{"role": "user", "content": problem.prompt}],
            "data_source": task,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split},
        }


def split_of(task: str, key: str) -> Split:
    """Return the side of the split that all problems of a key are on."""
    digest = hashlib.sha256(f"{task}\0{key}".encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < EVAL_SHARE * 2**64 else "train"


def _problem_set(task: str, options: Mapping[str, Any]) -> ProblemSet:
    make = TASKS.resolve(task)
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    known = list(parameters)
    for name in options:
        if name not in known and not takes_any:
            raise ConfigError(
                f"Task {task!r} has no option {name!r}.{did_you_mean(name, known)} "
                f"Its options: {', '.join(known) or 'none'}."
            )
    return make(**options)


def _draw(problem_set: ProblemSet, *, task: str, split: Split, seed: int) -> Iterator[Problem]:
    """Yield each problem of one side once, in an order that follows from the seed."""
    numbers = list(range(problem_set.size))
    # seeded with a text, since small integer seeds of neighbouring runs must not give shifted copies of one order
    random.Random(f"{task}/{split}/{seed}").shuffle(numbers)
    for number in numbers:
        problem = problem_set.problem(number)
        if split_of(task, problem.key) == split:
            yield problem


def _check_range(task: str, name: str, value: object, *, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"Task {task!r} takes {name} from {low} to {high}, got {value!r}.")
