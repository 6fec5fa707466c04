"""Programs that nobody has read: what they may do, and what ends them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xrl_lite.sandbox import Ending, Sandbox, SandboxError, SandboxLimits, python_command
from xrl_lite.sandbox import run as module

pytestmark = pytest.mark.process

MIB = 1 << 20
LIMIT_S = 30.0
LIMITS = SandboxLimits(
    wall_time_s=60.0,
    cpu_time_s=1,
    memory_bytes=256 * MIB,
    max_processes=8,
    max_file_bytes=MIB,
    max_disk_bytes=4 * MIB,
    max_output_bytes=10_000,
)


@pytest.fixture
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


def test_a_program_has_its_input_its_folder_and_nothing_of_ours(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "xyz")
    result = sandbox.run_python(
        "import os, sys; print(input(), os.listdir('.'), 'SECRET_KEY' in os.environ, len(os.listdir('/proc/self/fd')));"
        "print('oh', file=sys.stderr); sys.exit(3)",
        stdin="hi",
    )
    assert result.stdout == "hi ['main.py'] False 4\n"
    assert result.stderr == "oh\n"
    assert (result.ending, result.exit_code, result.is_success) == (Ending.EXITED, 3, False)
    assert result.explain() == "exit code 3"


@pytest.mark.parametrize("max_file_bytes", [0, MIB])
def test_the_input_is_no_file_that_the_program_writes(max_file_bytes: int) -> None:
    sandbox = Sandbox(LIMITS.model_copy(update={"max_file_bytes": max_file_bytes}))
    result = sandbox.run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * (3 * MIB))
    assert result.stdout == f"{3 * MIB}\n"


@pytest.mark.parametrize(
    ("source", "ending", "says"),
    [
        pytest.param("while True: pass", Ending.CPU_TIME, "", id="endless"),
        pytest.param(
            "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            Ending.CPU_TIME,
            "",
            id="endless, and deaf to the limit",
        ),
        pytest.param("bytearray(1 << 30)", Ending.EXITED, "MemoryError", id="memory"),
        pytest.param("import ctypes; ctypes.string_at(0)", Ending.SIGNALLED, "", id="segfault"),
        pytest.param("while True: print('x' * 1000)", Ending.OUTPUT, "", id="output"),
        pytest.param("open('a', 'wb').write(bytes(2 << 20))", Ending.EXITED, "File too large", id="file"),
        pytest.param("while True: open(str(id(0)), 'w')\n", Ending.EXITED, "Too many open files", id="open files"),
        pytest.param("import os\nwhile os.fork(): pass\nwhile True: pass", Ending.EXITED, "unavailable", id="fork"),
        pytest.param("import socket; socket.create_connection(('1.1.1.1', 53))", Ending.EXITED, "Error", id="network"),
        pytest.param("open('/tmp/evil', 'w')", Ending.EXITED, "OSError", id="other files"),
        pytest.param("import os; os.kill(-1, 9)", Ending.EXITED, "ProcessLookupError", id="kill"),
    ],
)
def test_what_goes_too_far_ends(sandbox: Sandbox, source: str, ending: Ending, says: str) -> None:
    source = source.replace("open(str(id(0)), 'w')", "globals().setdefault('kept', []).append(open('x', 'w'))")
    result = sandbox.run_python(source)
    assert (result.ending, says in result.stderr) == (ending, True), result
    assert not result.is_success
    assert len(result.stdout) <= LIMITS.max_output_bytes


def test_a_program_that_waits_ends_at_the_wall_limit(sandbox: Sandbox) -> None:
    result = sandbox.run_python("import time; print('here', flush=True); time.sleep(3600)", wall_time_s=2.0)
    assert (result.ending, result.exit_code) == (Ending.WALL_TIME, None)
    assert result.stdout == "here\n"


def test_all_files_together_are_limited(sandbox: Sandbox) -> None:
    result = sandbox.run_python("for name in range(9): open(str(name), 'wb').write(bytes(1 << 20))")
    if "disk" in result.isolation:
        assert "No space left" in result.stderr


def test_homes_and_temporary_files_of_others_are_hidden(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "label.txt").write_text("42")
    result = sandbox.run_python(f"import os; print(os.path.exists({str(tmp_path / 'label.txt')!r}))")
    if "home" in result.isolation:
        assert result.stdout == "False\n"


def test_this_machine_isolates(sandbox: Sandbox) -> None:
    isolation = sandbox.run_python("").isolation
    assert isolation & {"namespaces", "calls"}
    assert os.getuid() != 0 or "namespaces" not in isolation or "user" in isolation


def test_what_a_program_leaves_running_ends_with_it(sandbox: Sandbox) -> None:
    mark = f"sandbox-test-{os.getpid()}"
    source = (
        "import os, subprocess, sys\n"
        f"sleeper = [sys.executable, '-c', 'import time; time.sleep(3600)', {mark!r}]\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    subprocess.Popen(sleeper, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('done')\n"
    )
    assert sandbox.run_python(source).stdout == "done\n"
    until(lambda: not processes_with(mark))


async def test_cancelling_ends_the_program_at_once(sandbox: Sandbox) -> None:
    mark = f"sandbox-cancel-{os.getpid()}"
    files = {"main.py": "import time; time.sleep(3600)"}
    task = asyncio.create_task(sandbox.run_async(python_command("main.py", mark), files=files))
    await asyncio.to_thread(until, lambda: bool(processes_with(mark)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until(lambda: not processes_with(mark))


async def test_several_run_at_the_same_time(sandbox: Sandbox) -> None:
    runs = [
        sandbox.run_async(python_command("main.py"), files={"main.py": "print(input())"}, stdin=str(number))
        for number in range(4)
    ]
    assert [result.stdout for result in await asyncio.gather(*runs)] == ["0\n", "1\n", "2\n", "3\n"]


def test_what_cannot_be_run_is_our_error(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="There is no program"):
        sandbox.run(["/no/such/program"])
    with pytest.raises(ValueError, match="inside the working folder"):
        sandbox.run(python_command("main.py"), files={"../main.py": ""})


NESTED = """
import json, os, subprocess, sys
spec = json.load(open("spec.json"))
os.mkdir("inner")
spec["folder"] = os.path.abspath("inner")
spec_fd = os.memfd_create("spec")
os.write(spec_fd, json.dumps(spec).encode())
os.lseek(spec_fd, 0, os.SEEK_SET)
reads, writes = os.pipe()
command = [sys.executable, "-I", "-S", "inside.py", str(spec_fd), str(writes)]
process = subprocess.Popen(command, pass_fds=(spec_fd, writes), text=True, stdout=subprocess.PIPE)
os.close(writes)
said = process.stdout.readline()
if "background" in said:
    process.terminate()
process.wait()
print(json.dumps([said, os.read(reads, 10000).decode().splitlines(), sorted(filter(str.isdigit, os.listdir("/proc")))]))
"""
"""Builds a sandbox inside a sandbox, where the kernel refuses namespaces."""

IN_BACKGROUND = """
import os, time
heard, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("in the background", flush=True)
        os.write(told, b"x")
    time.sleep(3600)
{}
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('fine')", "fine\n"),
        ("import socket; socket.socket()", ""),
        pytest.param(IN_BACKGROUND.format("time.sleep(3600)"), "in the background\n", id="ended"),
        pytest.param(IN_BACKGROUND.format("os.read(heard, 1)"), "in the background\n", id="ends"),
    ],
)
def test_without_namespaces_the_network_is_closed_and_descendants_end(program: str, said: str) -> None:
    spec: dict[str, Any] = {
        "command": python_command("main.py"),
        "files": {"main.py": program},
        "stdin": "",
        "needed": [],
        "hidden": [],
        "anybody_can_run": True,
        "max_disk_bytes": MIB,
        "may_use_network": False,
        "max_processes": 8,
        "limits": {"RLIMIT_CPU": 5},
        "environment": {},
    }
    inside = Path(module.__file__).with_name("inside.py").read_text()
    files = {"spec.json": json.dumps(spec), "inside.py": inside, "main.py": NESTED}
    result = Sandbox().run(python_command("main.py"), files=files)
    if "calls" not in result.isolation:
        pytest.skip("no filter of system calls on this machine")
    assert result.is_success, result
    told, reports, left = json.loads(result.stdout)
    assert told == said
    assert left == ["1", "2"]  # the outer sandbox's own
    report = json.loads(reports[0])
    assert report == {"held": ["calls"]}
    assert len(reports) == 1 or (json.loads(reports[1])["status"] == 0) is bool(said)


def processes_with(mark: str) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in words:
                found.append(entry.name)
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it has not come true within {LIMIT_S:g} s"
        time.sleep(0.01)


def test_the_command_is_this_python() -> None:
    assert python_command("x.py")[0] == sys.executable
