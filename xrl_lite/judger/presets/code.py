"""Programs against tests: the code in a response runs in a sandbox, what it should have said stays outside."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import dedent
from time import monotonic
from typing import Any, TypeVar, cast

import anyio
from pydantic import Field

from xrl_lite.data.json_text import split_lines
from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.errors import DataError
from xrl_lite.judger.base import Judger, JudgerOutputBatch, JudgerPayload, JudgerPayloadBatch, label_of
from xrl_lite.judger.config import JudgerConfig
from xrl_lite.judger.loop_local import LoopLocal
from xrl_lite.judger.outcome import JudgementPolicy, JudgerInputError, UnsupportedCallError
from xrl_lite.sandbox import Ending, Sandbox, SandboxError, SandboxLimits, SandboxResult, python_command

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("python", "py", "python3")
_MARGIN_S = 15.0
_SHOWN = 200
_TOLERANCE = 1e-6

T = TypeVar("T")

_COMMON_MODULES = (
    *("bisect", "collections", "copy", "datetime", "functools", "heapq", "io", "itertools", "json", "math", "operator"),
    *("random", "re", "statistics", "string", "sys", "time", "typing"),
)
COMMON_IMPORTS = "".join(
    [
        *(f"from {name} import *\n" for name in _COMMON_MODULES),
        *(f"import {name}\n" for name in _COMMON_MODULES),
        "from builtins import *\n",  # some of the modules have names like open and pow
        "sys.setrecursionlimit(600_000)\n",
    ]
)

PROGRAM_RUNNER = """\
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"))
"""

_LOAD = """\
import json, os, sys, types
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
work = json.load(sys.stdin)
sys.modules["solution"] = types.ModuleType("solution")  # dataclasses and typing look it up there
module = vars(sys.modules["solution"])
exec(work["imports"], module)
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), module)
"""

CALL_RUNNER = f"""\
{_LOAD}
name = work["function"]
owner = module["Solution"]() if "Solution" in module else None
function = module.get(name) or getattr(owner, name, None) or sys.exit(f"there is no function {{name!r}}")
print(work["word"], file=answers, flush=True)
for arguments in work["arguments"]:
    try:
        answer = json.dumps({{"value": function(*arguments)}}, default=list)
    except Exception as error:
        answer = json.dumps({{"error": repr(error)}})
    print(work["word"], answer, file=answers, flush=True)
"""

ASSERT_RUNNER = f"""\
{_LOAD}
print(work["word"], file=answers, flush=True)
for number, test in enumerate(work["tests"]):
    exec(compile(test, f"test {{number}}", "exec"), module)
    print(work["word"], file=answers, flush=True)
"""


@dataclass(frozen=True)
class StdinTest:
    """A whole program reads `stdin` and writes `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A function, or a method of ``Solution``, is called with `arguments` and returns `expected`."""

    function: str
    arguments: Sequence[Any]
    expected: Any
    may_be_wrapped: bool = False
    """Whether `expected` may be a list around what is returned, as it is in APPS and TACO."""


@dataclass(frozen=True)
class AssertTest:
    """Python code that raises if the program is wrong."""

    source: str


Tests = Sequence[StdinTest] | Sequence[CallTest] | Sequence[AssertTest]


def read_tests(label: Any) -> Tests:
    """Read the tests out of a label, in any of the usual forms.

    ==================================================================  ============================================
    ``{"inputs": [..], "outputs": [..]}``                               programs: standard input and output
    ``[{"input": .., "output": ..}, ..]``                               the same
    ``{"inputs": [..], "outputs": [..], "fn_name": ..}``                calls of a function
    ``["assert f(1) == 2", ..]``                                        Python that raises
    ``"assert f(1) == 2"``                                              the same
    ``{"test": "def check(f): ..", "entry_point": "f"}``                the same, with a function to check
    any of these as JSON text                                           what it holds
    ==================================================================  ============================================

    Raises:
        DataError: it is none of them, or holds no test.
    """
    if isinstance(label, str):
        return _read_text(label)
    if isinstance(label, Mapping):
        tests = _read_mapping(cast("Mapping[str, Any]", label))
    elif isinstance(label, Sequence):
        tests = _read_list(cast("Sequence[Any]", label))
    else:
        tests = None
    if not tests:
        raise DataError(
            f"the label holds no tests that are understood: {repr(cast('object', label))[:_SHOWN]}. Give "
            f"{{'inputs': [...], 'outputs': [...]}}, with 'fn_name' for a function, a list of {{'input', 'output'}}, "
            f"or assert statements."
        )
    return tests


def extract_code(response: str, *, needs_fence: bool = True) -> str | None:
    """Return the last closed Python code block of a response; without one, all of it or None.

    A block without a language counts as Python where no other block says that it is.
    """
    blocks: list[tuple[str, str]] = _FENCE.findall(response)
    for languages in (_LANGUAGES, ("",)):
        codes = [code for language, code in blocks if language.lower() in languages]
        if codes:
            return dedent(codes[-1]) if codes[-1].lstrip("\n")[:1].isspace() else codes[-1]
    return None if needs_fence or "```" in response else response


class CodeJudger(Judger):
    """Runs the code in a response against the tests in the label.

    Programs and function calls are judged outside of the sandbox: what would be right never gets in there. Tests with
    assert statements run inside, in one process with the code; code that looks for a way to seem right finds one. What
    the sandbox keeps out, and what not, says `xrl_lite.sandbox.Sandbox`.

    Args:
        judger_name: Name in messages and metrics.
        limits: Limits of each test.
        request_timeout: Seconds for all tests of a sample together; those left over then count as failed.
        max_concurrency: Samples at the same time.
        partial_credit: Whether the score is the share of tests passed; otherwise all have to.
        max_tests: Run so many tests only, the first ones.
        needs_fence: Whether code must stand in a code block.
        common_imports: Whether code may use names of usual standard modules without importing them.
    """

    limits_itself = True

    def __init__(
        self,
        judger_name: str = "code",
        *,
        limits: SandboxLimits | None = None,
        request_timeout: float = 30.0,
        max_concurrency: int = 1,
        partial_credit: bool = False,
        max_tests: int | None = None,
        needs_fence: bool = True,
        common_imports: bool = False,
    ) -> None:
        super().__init__(judger_name)
        self._sandbox = Sandbox(limits)
        self._time_s = request_timeout
        self._limiter: LoopLocal[anyio.Semaphore] = LoopLocal(partial(anyio.Semaphore, max_concurrency))
        self._partial_credit = partial_credit
        self._max_tests = max_tests
        self._needs_fence = needs_fence
        self._imports = COMMON_IMPORTS if common_imports else ""

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Return response and label."""
        return {"response": rollout_state.response, "label": label_of(rollout_state)}

    async def judge_payload(self, payload: JudgerPayloadBatch) -> JudgerOutputBatch:
        """Return ``score``, ``acc`` (all passed), ``passed``, ``total``, and ``reason`` (why the first failed).

        Raises:
            JudgerInputError: no response or no label.
            DataError: the label holds no tests.
            SandboxError: the sandbox cannot be built, or was ended from outside.
        """
        if isinstance(payload, list):
            raise UnsupportedCallError("CodeJudger does not support batch payloads.")
        if payload["response"] is None or payload["label"] is None:
            raise JudgerInputError(
                "RolloutState must have a response, and reward_model with 'ground_truth', for judging."
            )
        tests = read_tests(payload["label"])[: self._max_tests]
        code = extract_code(payload["response"], needs_fence=self._needs_fence)
        if code is None:
            passed, reason = 0, "no code block"
        else:
            async with self._limiter.get():
                passed, reason = await self._run_tests(code, tests)
        is_right = passed == len(tests)
        score = passed / len(tests) if self._partial_credit else float(is_right)
        return {"score": score, "acc": is_right, "passed": passed, "total": len(tests), "reason": reason[:_SHOWN]}

    async def batch_judge(self, rollout_states: list[RolloutState]) -> list[RolloutState]:
        """Not supported: one run judges one sample."""
        raise UnsupportedCallError("CodeJudger does not support batch_judge.")

    def gold_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return the solution that a label may hold beside the tests (``solution`` or ``canonical_solution``)."""
        values = cast("Mapping[str, Any]", label) if isinstance(label, Mapping) else dict[str, Any]()
        solution = values.get("solution") or values.get("canonical_solution")
        return f"```python\n{solution}\n```" if isinstance(solution, str) else None

    def wrong_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return a program that fails every test."""
        return "```python\nraise SystemExit('wrong on purpose')\n```"

    async def _run_tests(self, code: str, tests: Tests) -> tuple[int, str]:
        deadline = monotonic() + self._time_s
        if isinstance(tests[0], StdinTest):
            return await self._run_programs(code, cast("Sequence[StdinTest]", tests), deadline)
        if isinstance(tests[0], CallTest):
            return await self._run_calls(code, cast("Sequence[CallTest]", tests), deadline)
        return await self._run_asserts(code, cast("Sequence[AssertTest]", tests), deadline)

    async def _run_programs(self, code: str, tests: Sequence[StdinTest], deadline: float) -> tuple[int, str]:
        files = {"main.py": code}
        if self._imports:
            files = {"main.py": self._imports + PROGRAM_RUNNER, "solution.py": code}
        passed, reason = 0, ""
        for number, test in enumerate(tests):
            if (left_s := deadline - monotonic()) <= 0:
                reason = reason or f"test {number}: no time left"
                break
            result = await self._run(files, stdin=test.stdin, wall_time_s=left_s)
            if result.is_success and same_output(result.stdout, test.expected):
                passed += 1
                continue
            reason = reason or f"test {number}: {_why(result, test.expected)}"
            if not self._partial_credit:
                break
        return passed, reason

    async def _run_calls(self, code: str, tests: Sequence[CallTest], deadline: float) -> tuple[int, str]:
        def verdict(text: str, test: CallTest) -> str:
            answer = _read_json(text)
            return "" if _is_answer(answer, test) else f"{answer!r:.80}, expected {test.expected!r:.80}"

        def work(left: Sequence[CallTest]) -> dict[str, Any]:
            return {"function": left[0].function, "arguments": [test.arguments for test in left]}

        return await self._run_in_turns(CALL_RUNNER, code, tests, deadline, work=work, verdict=verdict)

    async def _run_asserts(self, code: str, tests: Sequence[AssertTest], deadline: float) -> tuple[int, str]:
        def work(left: Sequence[AssertTest]) -> dict[str, Any]:
            return {"tests": [test.source for test in left]}

        def verdict(text: str, test: AssertTest) -> str:
            return ""  # a test that failed has no line

        return await self._run_in_turns(ASSERT_RUNNER, code, tests, deadline, work=work, verdict=verdict)

    async def _run_in_turns(
        self,
        runner: str,
        code: str,
        tests: Sequence[T],
        deadline: float,
        *,
        work: Callable[[Sequence[T]], dict[str, Any]],
        verdict: Callable[[str, T], str],
    ) -> tuple[int, str]:
        """Run the tests in one process, and in another one from where a test or a limit ended it.

        Limits are those of one test: one that shared its process with others when it met a limit is run again.

        Args:
            runner: The program around the code; it writes a line once the code is loaded, and one for each test, all of
                which begin with a secret word.
            code: The code.
            tests: All tests.
            deadline: When to stop.
            work: Returns what the runner is given for tests.
            verdict: Returns why a test failed, or nothing, by what the line about it says behind the word.
        """
        passed, reason, at = 0, "", 0
        while at < len(tests) and (left_s := deadline - monotonic()) > 0:
            word = secrets.token_hex(16)  # code that does not look for it cannot say it
            given = {**work(tests[at:]), "word": word, "imports": self._imports}
            files = {"main.py": runner, "solution.py": code}
            result = await self._run(files, stdin=json.dumps(given), wall_time_s=left_s)
            whole_lines = split_lines(result.stdout.rpartition("\n")[0])
            said = [line.removeprefix(word) for line in whole_lines if line.startswith(word)]
            for text, test in zip(said[1:], tests[at:], strict=False):
                why = verdict(text, test)
                passed += not why
                reason = reason or (why and f"test {at}: {why}")
                at += 1
            if at < len(tests) and not (result.met_limit and said[1:]):
                reason = reason or f"test {at}: {_why(result)}"
                at += 1
            if not said or (reason and not self._partial_credit):
                return passed, reason
        return passed, reason or ("" if at == len(tests) else f"test {at}: no time left")

    async def _run(self, files: Mapping[str, str], *, stdin: str, wall_time_s: float) -> SandboxResult:
        result = await self._sandbox.run_async(
            python_command("main.py"), files=files, stdin=stdin, wall_time_s=max(wall_time_s, 0.1)
        )
        if result.signal_name == "SIGKILL" and result.ending is Ending.SIGNALLED:
            raise SandboxError("The program was killed from outside, perhaps for want of memory. That is no verdict.")
        return result


class CodeJudgerConfig(JudgerConfig):
    """1.0 if the Python code in the response passes the tests in the label; see `CodeJudger` for their forms.

    `reward_handler`, `extra_info` and `signature` have no effect here.
    """

    judger_name: str = "code"
    """Name in messages and metrics."""

    limits: SandboxLimits = Field(default_factory=SandboxLimits)
    """Limits of each test."""

    request_timeout: float = Field(default=30.0, gt=0)
    """Seconds for all tests of a sample together; those left over then count as failed."""

    partial_credit: bool = False
    """Whether the score is the share of tests passed; otherwise all have to."""

    max_tests: int | None = Field(default=None, gt=0)
    """Run so many tests only, the first ones; all when not given."""

    needs_fence: bool = True
    """Whether code must stand in a code block; if not, a response without one is code as a whole."""

    common_imports: bool = False
    """Whether code may use names of usual standard modules (math, collections, typing, ..) without importing them, as
    solutions of APPS, TACO and Codeforces do; set for these data sources where the settings name no judger."""

    @property
    def policy(self) -> JudgementPolicy:
        """The policy, with time for building sandboxes."""
        return JudgementPolicy(
            on_error=self.on_error,
            request_timeout=self.request_timeout + _MARGIN_S,
            max_initial_failures=self.max_initial_failures,
        )

    @property
    def concurrency_per_worker(self) -> int:
        """Samples at the same time: one for each CPU of a worker, or of the machine."""
        if self.max_concurrency is not None:
            return self.max_concurrency
        if self.cpu_resources is not None:
            return max(1, math.floor(self.cpu_resources.num_cpus_per_worker))
        return len(os.sched_getaffinity(0))

    def waits_rather_than_computes(self) -> bool:
        """Return True: it waits for the sandbox."""
        return True

    def build_local(self) -> Judger:
        """Return the judger."""
        return CodeJudger(
            self.judger_name,
            limits=self.limits,
            request_timeout=self.request_timeout,
            max_concurrency=self.concurrency_per_worker,
            partial_credit=self.partial_credit,
            max_tests=self.max_tests,
            needs_fence=self.needs_fence,
            common_imports=self.common_imports,
        )


def same_output(given: str, expected: str) -> bool:
    """Return whether two outputs are equal but for white space, and for rounding where numbers have a point."""
    ones, others = given.split(), expected.split()
    return len(ones) == len(others) and all(map(_same_word, ones, others))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    try:
        return math.isclose(float(given), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _is_answer(answer: Any, test: CallTest) -> bool:
    values = cast("dict[str, Any]", answer) if isinstance(answer, dict) else dict[str, Any]()
    if "value" not in values:
        return False
    expected: object = test.expected
    inner = cast("list[Any]", expected) if test.may_be_wrapped and isinstance(expected, list) else []
    return _same_value(values["value"], expected) or (len(inner) == 1 and _same_value(values["value"], inner[0]))


def _same_value(given: Any, expected: Any) -> bool:
    if isinstance(given, float) or isinstance(expected, float):
        if not (isinstance(given, int | float) and isinstance(expected, int | float)):
            return False
        return math.isclose(given, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if isinstance(given, list) and isinstance(expected, list | tuple):
        ones, others = list(cast("list[Any]", given)), list(cast("Sequence[Any]", expected))
        return len(ones) == len(others) and all(map(_same_value, ones, others))
    if isinstance(given, dict) and isinstance(expected, dict):
        one, other = cast("dict[str, Any]", given), cast("dict[Any, Any]", expected)
        return one.keys() == {str(key) for key in other} and all(
            _same_value(one[str(key)], value) for key, value in other.items()
        )
    return isinstance(given, bool) is isinstance(expected, bool) and given == expected


def _why(result: SandboxResult, expected: str | None = None) -> str:
    if result.is_success and expected is None:
        return "ended before the tests were through"
    if result.is_success and expected is not None:
        return f"wrote {result.stdout.strip()[-80:]!r}, expected {expected.strip()[-80:]!r}"
    last = result.stderr.strip().splitlines()[-1:] or [""]
    return f"{result.explain()}: {last[0]}"


def _read_text(label: str) -> Tests:
    if label.lstrip().startswith(("{", "[")):
        try:
            return read_tests(json.loads(label))
        except json.JSONDecodeError:
            pass  # Python that begins with a bracket
    if not label.strip():
        raise DataError("the label is empty, so there are no tests.")
    return [AssertTest(label)]


def _read_mapping(label: Mapping[str, Any]) -> Tests | None:
    if "inputs" in label and "outputs" in label:
        inputs, outputs = list(label["inputs"]), list(label["outputs"])
        if len(inputs) != len(outputs):
            raise DataError(f"the label has {len(inputs)} inputs and {len(outputs)} outputs.")
        name = label.get("fn_name")
        if name:
            return [_read_call(name, one, other) for one, other in zip(inputs, outputs, strict=True)]
        return [StdinTest(_as_text(one), _as_text(other)) for one, other in zip(inputs, outputs, strict=True)]
    if isinstance(label.get("test"), str):
        call = f"\ncheck({label['entry_point']})\n" if label.get("entry_point") else ""
        return [AssertTest(label["test"] + call)]
    inner = label.get("tests") or label.get("test_list")
    return read_tests(inner) if inner else None


def _read_list(label: Sequence[Any]) -> Tests | None:
    if all(isinstance(test, str) for test in label):
        return [AssertTest(test) for test in label]
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in label):
        return [StdinTest(_as_text(test["input"]), _as_text(test["output"])) for test in label]
    return None


def _read_call(name: str, given: Any, expected: Any) -> CallTest:
    """Read a call whose arguments are a list, or a text with one JSON value on each line."""
    if isinstance(given, str):
        return CallTest(name, [_read_json(line) for line in split_lines(given)], _read_json(expected))
    return CallTest(name, given, expected, may_be_wrapped=True)


def _read_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _as_text(value: Any) -> str:
    return "\n".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)
