"""Code in responses against tests, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.build import judger_system
from tests.unit.judger.states import make_state
from xrl_lite.actors import ActorSystem, CPUResourceManager, CPUResourcesConfig, set_cpu_resource_manager
from xrl_lite.data import RolloutState, Status
from xrl_lite.errors import DataError
from xrl_lite.judger import CodeJudgerConfig, self_test
from xrl_lite.judger.presets.code import AssertTest, CallTest, StdinTest, extract_code, read_tests, same_output
from xrl_lite.sandbox import SandboxLimits

pytestmark = pytest.mark.process

SUM = {"inputs": ["1 2\n", "20 22\n"], "outputs": ["3\n", "42\n"]}
CALLS = {"inputs": [[1, 2], [20, 22]], "outputs": [3, 42], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add(20, 22) == 42"]
RIGHT_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
RIGHT_FUNCTION = "def add(a, b):\n    print('noise')\n    return a + b"
DATACLASS_FUNCTION = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Pair:
    a: int
    b: "int"

def add(a, b):
    pair = Pair(a, b)
    return pair.a + pair.b
"""
HALF_FUNCTION = "def add(a, b):\n    return 3"


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nThat is it."


async def judge(code: str, label: Any, **settings: Any) -> RolloutState:
    return await CodeJudgerConfig(**settings).build().judge(make_state(fenced(code), label))


def reward(state: RolloutState) -> dict[str, Any]:
    assert state.reward is not None, state.error_msg
    return state.reward


@pytest.mark.parametrize(
    ("code", "label"),
    [
        pytest.param(RIGHT_PROGRAM, SUM, id="program"),
        pytest.param(RIGHT_PROGRAM, json.dumps(SUM), id="program, label as JSON"),
        pytest.param(RIGHT_FUNCTION, CALLS, id="function"),
        pytest.param(
            f"class Solution:\n    def add(self, a, b):\n        return {'a + b'}",
            {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"},
            id="method, arguments as lines of JSON",
        ),
        pytest.param(RIGHT_FUNCTION, ASSERTS, id="asserts"),
        pytest.param(RIGHT_FUNCTION, "\n".join(ASSERTS), id="asserts, one text"),
        pytest.param(
            RIGHT_FUNCTION,
            {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
            id="check function",
        ),
        pytest.param(DATACLASS_FUNCTION, CALLS, id="function, dataclass"),
        pytest.param(DATACLASS_FUNCTION, ASSERTS, id="asserts, dataclass"),
    ],
)
async def test_right_code_passes(code: str, label: Any) -> None:
    result = reward(await judge(code, label))
    assert (result["score"], result["acc"], result["reason"]) == (1.0, True, "")
    assert result["passed"] == result["total"] > 0


@pytest.mark.parametrize(
    ("code", "label", "reason"),
    [
        ("print(3)", SUM, "test 1: wrote '3', expected '42'"),
        (HALF_FUNCTION, CALLS, "test 1: {'value': 3}, expected 42"),
        (HALF_FUNCTION, ASSERTS, "AssertionError"),
        ("def add(a, b): raise KeyError('x')", CALLS, "KeyError"),
        ("def sub(a, b): return 3", CALLS, "there is no function 'add'"),
        ("while True: pass", SUM, "used too much CPU time"),
        ("x = bytearray(1 << 30)", SUM, "MemoryError"),
        ("import os; os._exit(0)", ASSERTS, "ended before the tests were through"),
        ("print(", SUM, "SyntaxError"),
        ("import sys; sys.stdout.write('1' * 10 ** 7)", SUM, "wrote too much output"),
        ("import ctypes; ctypes.string_at(0)", SUM, "SIGSEGV"),
    ],
)
async def test_wrong_code_scores_zero_and_says_why(code: str, label: Any, reason: str) -> None:
    state = await judge(code, label, limits=SandboxLimits(cpu_time_s=1, wall_time_s=20.0))
    result = reward(state)
    assert (result["score"], result["acc"]) == (0.0, False)
    assert reason in result["reason"]
    assert state.extra_fields["judgement"]["outcome"] == "ok"


async def test_code_that_only_waits_ends_at_the_wall_limit() -> None:
    result = reward(await judge("import time; time.sleep(60)", SUM, limits=SandboxLimits(wall_time_s=1.0)))
    assert (result["score"], result["reason"]) == (0.0, "test 0: took too long: ")


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("print(3)", SUM),
        (HALF_FUNCTION, CALLS),
        (HALF_FUNCTION, ASSERTS),
        ("def add(a, b):\n    assert a > 1\n    return 42", ASSERTS),
    ],
)
async def test_partial_credit_is_the_share_of_tests_passed(code: str, label: Any) -> None:
    result = reward(await judge(code, label, partial_credit=True))
    assert (result["score"], result["passed"], result["total"]) == (0.5, 1, 2)


BUSY = """
import time
def add(a, b):
    start = time.process_time()
    while time.process_time() - start < (60 if a == 20 else 0.3):
        pass
    return a + b
"""
MANY_CALLS = {"inputs": [[n, 2] for n in (1, 2, 3, 20, 5)], "outputs": [3, 4, 5, 22, 7], "fn_name": "add"}
MANY_ASSERTS = [f"assert add({n}, 2) == {n + 2}" for n in (1, 2, 3, 20, 5)]


@pytest.mark.parametrize("label", [MANY_CALLS, MANY_ASSERTS])
async def test_limits_are_those_of_each_test(label: Any) -> None:
    limits = SandboxLimits(cpu_time_s=1, wall_time_s=20.0)
    result = reward(await judge(BUSY, label, limits=limits, partial_credit=True))
    assert (result["passed"], result["total"]) == (4, 5)
    assert result["reason"].startswith("test 3: used too much CPU time")


@pytest.mark.parametrize("label", [MANY_CALLS, MANY_ASSERTS])
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "ctypes.string_at(0)"])
async def test_a_test_that_ends_the_process_costs_no_other_test(label: Any, end: str) -> None:
    code = f"import ctypes, os, sys\ndef add(a, b):\n    if a == 2: {end}\n    return a + b"
    result = reward(await judge(code, label, partial_credit=True))
    assert (result["passed"], result["total"]) == (4, 5)
    assert result["reason"].startswith("test 1: ")


@pytest.mark.parametrize("label", [CALLS, ASSERTS])
async def test_what_the_code_writes_is_no_verdict(label: Any) -> None:
    code = (
        "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'{\"value\": 3}\\n' * 9)\n    except OSError: pass"
    )
    assert reward(await judge(code, label, partial_credit=True))["passed"] == 0


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("print(floor(sqrt(int(input()))))", {"inputs": ["17"], "outputs": ["4"]}),
        (
            "def add(a: List[int]) -> int:\n    return sum(a)",
            {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "add"},
        ),
        ("def add(n):\n    return n and 1 + add(n - 1)", {"inputs": [[5000]], "outputs": [5000], "fn_name": "add"}),
        ("def add(a):\n    return Counter(a)[1]", ["assert add([1, 1]) == 2"]),
        (
            "from __future__ import annotations\nprint(pow(2, 3, 5), compile.__module__)",
            {"inputs": [""], "outputs": ["3 builtins"]},
        ),
    ],
)
async def test_usual_names_need_no_import_if_so_asked(code: str, label: Any) -> None:
    with_imports = await judge(code, label, common_imports=True)
    assert reward(with_imports)["score"] == 1.0, reward(with_imports)["reason"]
    if "__future__" not in code:
        assert reward(await judge(code, label))["score"] == 0.0


@pytest.mark.parametrize(("expected", "score"), [([3], 1.0), (3, 1.0), ([3, 4], 0.0), ([[3]], 0.0)])
async def test_an_expected_value_may_stand_in_a_list_of_its_own(expected: Any, score: float) -> None:
    label = {"inputs": [[1, 2]], "outputs": [expected], "fn_name": "add"}
    assert reward(await judge(RIGHT_FUNCTION, label))["score"] == score
    as_text = {"inputs": ["1\n2"], "outputs": [json.dumps(expected)], "fn_name": "add"}
    assert reward(await judge(RIGHT_FUNCTION, as_text))["score"] == float(expected == 3)


async def test_only_the_first_tests_are_run_if_so_asked() -> None:
    assert reward(await judge(HALF_FUNCTION, ASSERTS, max_tests=1))["score"] == 1.0


async def test_a_program_killed_from_outside_is_no_verdict() -> None:
    state = await judge("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", SUM)
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert "killed from outside" in str(state.error_msg)


async def test_a_label_without_tests_is_reported_and_never_zero() -> None:
    state = await judge(RIGHT_PROGRAM, {"answer": "3"})
    assert state.extra_fields["judgement"]["outcome"] == "raised"
    assert "holds no tests" in str(state.error_msg)


async def test_a_response_without_code_scores_zero_unless_it_is_code_itself() -> None:
    plain = make_state(RIGHT_PROGRAM, SUM)
    assert reward(await CodeJudgerConfig().build().judge(plain))["reason"] == "no code block"
    assert reward(await CodeJudgerConfig(needs_fence=False).build().judge(plain))["score"] == 1.0


async def test_it_proves_itself_where_the_label_has_a_solution() -> None:
    judger = CodeJudgerConfig().build()
    (with_solution,) = await self_test(judger, make_state(label={**SUM, "solution": RIGHT_PROGRAM}))
    (without,) = await self_test(judger, make_state(label=SUM))
    assert (with_solution.is_passed, without.is_passed) == (True, False)


@pytest.fixture
def system() -> Iterator[ActorSystem]:
    with judger_system() as running:
        set_cpu_resource_manager(CPUResourceManager(capacity=running))
        yield running
        set_cpu_resource_manager(None)


async def test_it_runs_in_workers_and_a_cancelled_one_leaves_nothing(system: ActorSystem) -> None:
    resources = CPUResourcesConfig(num_workers=2, num_cpus_per_worker=1)
    async with CodeJudgerConfig(cpu_resources=resources).build(system) as judger:
        codes = [RIGHT_PROGRAM, "print(3)", RIGHT_PROGRAM]
        states = await asyncio.gather(*(judger.judge(make_state(fenced(code), SUM)) for code in codes))
        assert [reward(state)["score"] for state in states] == [1.0, 0.0, 1.0]
        waiting = asyncio.create_task(judger.judge(make_state(fenced("import time; time.sleep(60)"), SUM)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert reward(await judger.judge(make_state(fenced(RIGHT_PROGRAM), SUM)))["score"] == 1.0


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\nNo:\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("```python\na\n```\nIt prints:\n```\n4\n```", "a\n"),
        ("1. So:\n   ```python\n   if a:\n     b\n   ```\n", "if a:\n  b\n"),
        ("```python\na", None),
        ("a", None),
    ],
)
def test_the_last_closed_python_block_is_read(response: str, code: str | None) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("label", "first"),
    [
        ([{"input": "1", "output": "2"}], StdinTest("1", "2")),
        ({"tests": ["assert 1"]}, AssertTest("assert 1")),
        ({"inputs": [["a", "b"]], "outputs": ["c"]}, StdinTest("a\nb", "c")),
        ({"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, CallTest("f", [1], [2], may_be_wrapped=True)),
        ({"inputs": ['[1]\n"x"'], "outputs": ["true"], "fn_name": "f"}, CallTest("f", [[1], "x"], True)),
        ({"inputs": ['"\u2028"\r\n"x"'], "outputs": ["true"], "fn_name": "f"}, CallTest("f", ["\u2028", "x"], True)),
        ("[1][0] == 1 or exit(1)", AssertTest("[1][0] == 1 or exit(1)")),
    ],
)
def test_every_form_of_label_is_read(label: Any, first: Any) -> None:
    assert read_tests(label)[0] == first


@pytest.mark.parametrize("label", [3, "", {}, [], [3], {"inputs": [1], "outputs": []}, {"answer": 1}])
def test_other_labels_are_refused(label: Any) -> None:
    with pytest.raises(DataError, match="label"):
        read_tests(label)


@pytest.mark.parametrize(
    ("given", "expected", "is_same"),
    [
        ("1 2\n", "1  2", True),
        ("0.3333333", "0.33333333", True),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("1", "1 2", False),
        ("abc", "1.5", False),
    ],
)
def test_outputs_are_compared_word_by_word(given: str, expected: str, is_same: bool) -> None:
    assert same_output(given, expected) is is_same
