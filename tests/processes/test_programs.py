"""The layer in programs of every form: ``-c``, a script without a main guard, a notebook, the default system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio
from xrl_lite.actors import {imports}

class OwnError(Exception):
    pass

class Scorer:
    def score(self, text):
        if not text:
            raise OwnError("empty")
        return helper(text)

def helper(text):
    return len(text)

{body}
"""

WITH_SYSTEM = """
async def main():
    async with ActorSystem(num_cpus=2) as system:
        scorer = system.spawn(Scorer)
        print(await scorer.score.remote("four"))
        try:
            await scorer.score.remote("")
        except OwnError as error:
            print("caught", error)

asyncio.run(main())
"""

WITH_DEFAULT = """
init(num_cpus=2)
scorer = default_system().spawn(Scorer)
print(scorer.score.remote("four").result())
try:
    scorer.score.remote("").result()
except OwnError as error:
    print("caught", error)
{end}
"""

NOTEBOOK = """
import ast, asyncio, inspect, sys

async def run_cells():
    for cell in sys.argv[1:]:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(result := eval(code, globals())):
            await result

asyncio.run(run_cells())
"""
CELLS = (
    "from xrl_lite.actors import ActorSystem\nsystem = ActorSystem(num_cpus=2)",
    "class Scorer:\n    def score(self, text):\n        return len(text)",
    "first = system.spawn(Scorer)\nprint(await first.score.remote('four'))",
    "class Scorer:\n    def score(self, text):\n        return -len(text)",
    "second = system.spawn(Scorer)\nprint(await second.score.remote('four'), await first.score.remote('four'))",
    "await system.shutdown()",
)

LEFT_OPEN = WITH_DEFAULT.format(end="")
SHUT_DOWN = WITH_DEFAULT.format(end="shutdown()")
DEFAULT_NAMES = "default_system, init, shutdown"


@pytest.mark.parametrize(
    ("imports", "body"),
    [("ActorSystem", WITH_SYSTEM), (DEFAULT_NAMES, LEFT_OPEN), (DEFAULT_NAMES, SHUT_DOWN)],
    ids=["system", "default left open", "default shut down"],
)
@pytest.mark.parametrize("form", ["-c", "script"])
def test_classes_of_main_work_without_ceremony(tmp_path: Path, imports: str, body: str, form: str) -> None:
    program = PROGRAM.format(imports=imports, body=body)
    if form == "script":
        path = tmp_path / "program.py"
        path.write_text(program)
        assert output_of(str(path)) == ["4", "caught empty"]
    else:
        assert output_of("-c", program) == ["4", "caught empty"]


def test_classes_of_notebook_cells_work_also_when_a_cell_is_changed_and_run_again() -> None:
    assert output_of("-c", NOTEBOOK, *CELLS) == ["4", "-4 4"]


def output_of(*arguments: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (result.stderr, result.returncode) == ("", 0)
    return result.stdout.splitlines()


USER_REWARD = """
import beside

def score(response, label):
    import of_the_plugin
    return {"score": beside.points(response == label) + of_the_plugin.loaded[0]}
"""


@pytest.mark.parametrize("judger", ["in_folder.py:score", "code/rewards.py:score", "rewards_here:score"])
def test_the_command_and_its_workers_import_modules_of_the_users_folder(tmp_path: Path, judger: str) -> None:
    for name in ("in_folder.py", "rewards_here.py", "code/rewards.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(USER_REWARD, encoding="utf-8")
        (file.parent / "beside.py").write_text("def points(right):\n    return 1.0 * right\n", encoding="utf-8")
    (tmp_path / "of_the_plugin.py").write_text("loaded = [0.5]\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"response": "4", "ground_truth": "4"}\n', encoding="utf-8")
    command = [*(sys.executable, "-P", "-m", "xrl_lite.cli", "score", "rows.jsonl", "--judger", judger)]
    ended = subprocess.run(
        [*command, "cpu_resources.num_workers=1", "cpu_resources.num_cpus_per_worker=0.5", "--output", "out.jsonl"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XRL_LITE_USE_EXTERNAL_MODULES": "of_the_plugin"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["reward"] == {"score": 1.5}
