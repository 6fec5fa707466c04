"""Running a program that nobody has read.

::

    Sandbox.run() --spec--> inside.py --exec--> program
      waits for    the end of the program, output to read, or word to stop
      is woken by  the pipes; the deadline; `stop` of whoever cancels `run_async`
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from xrl_lite.errors import XrlLiteError
from xrl_lite.sandbox.limits import SandboxLimits

_INSIDE = Path(__file__).with_name("inside.py")
_CHUNK = 1 << 16
_GRACE_S = 5.0


class SandboxError(XrlLiteError, RuntimeError):
    """The sandbox could not be built, so the program did not run. Says nothing about the program."""


class Ending(StrEnum):
    """How a program ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What came of a run."""

    ending: Ending
    """How it ended."""
    exit_code: int | None
    """Exit code; None unless it exited."""
    signal_name: str | None
    """Name of the signal that ended it; None unless one did."""
    stdout: str
    """Standard output, at most `max_output_bytes`; what is not UTF-8 is replaced."""
    stderr: str
    """Standard error, likewise."""
    wall_time_s: float
    """Seconds it took, starting it included."""
    cpu_time_s: float
    """Seconds of CPU of the program and the children that it waited for; 0.0 if it was ended."""
    isolation: frozenset[str]
    """What held beside the limits: namespaces (network, processes, mounts), calls (filter of system calls), home (homes
    and temporary files are hidden), files (read-only), disk (working folder in memory), user (no longer root)."""

    @property
    def is_success(self) -> bool:
        """Whether it exited with code 0."""
        return self.exit_code == 0

    @property
    def met_limit(self) -> bool:
        """Whether it was ended because it had used up its time or its output."""
        return self.ending in (Ending.WALL_TIME, Ending.CPU_TIME, Ending.OUTPUT)

    def explain(self) -> str:
        """Say how it ended, in a few words."""
        match self.ending:
            case Ending.EXITED:
                return f"exit code {self.exit_code}"
            case Ending.SIGNALLED:
                return f"ended by {self.signal_name}"
            case Ending.WALL_TIME:
                return "took too long"
            case Ending.CPU_TIME:
                return "used too much CPU time"
            case Ending.OUTPUT:
                return "wrote too much output"


class _Stop:
    """Word to stop, from one thread to another. Lives as long as one of them has it."""

    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()

    def tell(self) -> None:
        os.write(self._writable, b"x")

    def __del__(self) -> None:
        os.close(self.readable)
        os.close(self._writable)


@dataclass
class _Run:
    """What is known about a run so far."""

    outputs: dict[str, bytearray] = field(default_factory=lambda: {"out": bytearray(), "err": bytearray()})
    report: bytearray = field(default_factory=bytearray)
    cut_short: Ending | None = None


class Sandbox:
    """Runs programs in a folder of their own, which is empty at first and gone afterwards, under limits.

    Held everywhere: limits of time, memory, processes, open files, file size and output; an environment with nothing
    of ours in it; no new privileges; everything the program started ends with it, and with us. Held where the kernel
    allows it, see `SandboxResult.isolation`: namespaces of its own for users, network, processes and mounts; homes and
    temporary files hidden, all files read-only but those in the working folder; the user nobody in the place of root;
    no sockets, ptrace, mounts, io_uring. A run without any way to close the network is refused.

    Not protected against: reading other files that this user (as root: nobody) can read; faults of the kernel; covert
    channels and side channels; slowing down the machine within the limits; as root where mounts are forbidden, the
    limit of processes. For hostile code use a virtual machine.

    Args:
        limits: What one run may use.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        wall_time_s: float | None = None,
    ) -> SandboxResult:
        """Run a command and return what came of it. Blocks the thread, which must go on until it returns.

        Args:
            command: Absolute path of a program, and its arguments.
            files: Texts by path inside the working folder.
            stdin: Standard input.
            wall_time_s: A shorter limit than `SandboxLimits.wall_time_s`.

        Raises:
            SandboxError: the sandbox could not be built.
        """
        return self._run(command, files or {}, stdin, wall_time_s, _Stop())

    def run_python(self, source: str, *, stdin: str = "", wall_time_s: float | None = None) -> SandboxResult:
        """Run a Python program with the interpreter and the libraries of this process; see `run`."""
        return self.run(python_command("main.py"), files={"main.py": source}, stdin=stdin, wall_time_s=wall_time_s)

    async def run_async(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        wall_time_s: float | None = None,
    ) -> SandboxResult:
        """Do what `run` does, in a thread. Cancelling ends the program at once."""
        stop = _Stop()
        call = partial(self._run, command, files or {}, stdin, wall_time_s, stop)
        try:
            # each has a thread of its own, as it does nothing but wait
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        finally:
            stop.tell()

    def _run(
        self, command: Sequence[str], files: Mapping[str, str], stdin: str, wall_time_s: float | None, stop: _Stop
    ) -> SandboxResult:
        if not os.path.isabs(command[0]) or not os.path.isfile(command[0]):
            raise SandboxError(f"There is no program {command[0]!r}. Give its absolute path.")
        began = time.monotonic()
        limit_s = min(self.limits.wall_time_s, wall_time_s or self.limits.wall_time_s)
        with tempfile.TemporaryDirectory(prefix="xrl-sandbox-", ignore_cleanup_errors=True) as folder:
            spec = self._spec(command, files, stdin, os.path.realpath(folder))
            run = _watch(spec, deadline=began + limit_s, max_output=self.limits.max_output_bytes, stop=stop)
        return self._result(run, time.monotonic() - began)

    def _spec(self, command: Sequence[str], files: Mapping[str, str], stdin: str, folder: str) -> dict[str, Any]:
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files are written inside the working folder, got the path {name!r}.")
        limits = self.limits
        return {
            "command": list(command),
            "files": dict(files),
            "stdin": stdin,
            "folder": folder,
            "needed": [folder, *_needed(command[0])],
            "hidden": _hidden(),
            "anybody_can_run": _anybody_can_run(command[0]),
            "max_disk_bytes": limits.max_disk_bytes,
            "may_use_network": limits.may_use_network,
            "max_processes": limits.max_processes,
            "limits": {
                "RLIMIT_CPU": limits.cpu_time_s,
                "RLIMIT_AS": limits.memory_bytes,
                "RLIMIT_FSIZE": limits.max_file_bytes,
                "RLIMIT_NOFILE": limits.max_open_files,
                "RLIMIT_CORE": 0,
            },
            "environment": {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        }

    def _result(self, run: _Run, wall_time_s: float) -> SandboxResult:
        report: dict[str, Any] = {}
        for line in run.report.splitlines():
            report.update(json.loads(line))
        if "error" in report:
            raise SandboxError(f"The sandbox cannot run the program: {report['error']}")
        if "held" not in report and run.cut_short is None:
            told = run.outputs["err"].decode(errors="replace").strip()[-500:]
            raise SandboxError(f"The sandbox ended before the program began. It said: {told or 'nothing'}")
        status: int | None = report.get("status")
        ending = run.cut_short
        if ending is None:
            if status is None:
                raise SandboxError("The sandbox was ended from outside while the program ran.")
            ending = Ending.EXITED if os.WIFEXITED(status) else Ending.SIGNALLED
            if ending is Ending.SIGNALLED and self._is_end_by_cpu(os.WTERMSIG(status), report["cpu_s"]):
                ending = Ending.CPU_TIME
        ended = status if run.cut_short is None else None
        return SandboxResult(
            ending=ending,
            exit_code=os.WEXITSTATUS(ended) if ended is not None and os.WIFEXITED(ended) else None,
            signal_name=signal.Signals(os.WTERMSIG(ended)).name
            if ended is not None and os.WIFSIGNALED(ended)
            else None,
            stdout=run.outputs["out"].decode(errors="replace"),
            stderr=run.outputs["err"].decode(errors="replace"),
            wall_time_s=wall_time_s,
            cpu_time_s=report.get("cpu_s", 0.0),
            isolation=frozenset(report.get("held", ())),
        )

    def _is_end_by_cpu(self, number: int, cpu_s: float) -> bool:
        """Tell by the signal: the limit goes by ticks, unlike the seconds that are reported. Who ignores it dies."""
        return number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= self.limits.cpu_time_s - 0.1)


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python, with its libraries, on the arguments."""
    return [sys.executable, "-s", "-B", *arguments]


def _watch(spec: Mapping[str, Any], *, deadline: float, max_output: int, stop: _Stop) -> _Run:
    """Start the sandbox, collect what comes out of it, and end it where it does not end by itself."""
    run = _Run()
    spec_fd = os.memfd_create("spec")
    report_read, report_write = os.pipe()
    try:
        with os.fdopen(os.dup(spec_fd), "w", encoding="utf-8") as file:
            json.dump(spec, file)
        os.lseek(spec_fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_INSIDE), str(spec_fd), str(report_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(spec_fd, report_write),
            env={},
        )
    except BaseException:
        os.close(report_read)
        raise
    finally:
        os.close(spec_fd)
        os.close(report_write)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr, selectors.DefaultSelector() as ready:
        try:
            ready.register(process.stdout, selectors.EVENT_READ, "out")
            ready.register(process.stderr, selectors.EVENT_READ, "err")
            ready.register(report_read, selectors.EVENT_READ, "report")
            ready.register(stop.readable, selectors.EVENT_READ, "stop")
            _collect(ready, run, deadline, max_output)
        finally:
            _end(process)
            os.close(report_read)
    return run


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _collect(ready: selectors.BaseSelector, run: _Run, deadline: float, max_output: int) -> None:
    num_open = 3
    while num_open:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            run.cut_short = Ending.WALL_TIME
            return
        for key, _ in ready.select(left_s):
            if key.data == "stop":
                run.cut_short = Ending.WALL_TIME
                return
            data = os.read(key.fd, _CHUNK)
            if not data:
                ready.unregister(key.fileobj)
                num_open -= 1
            elif key.data == "report":
                run.report += data
            else:
                output = run.outputs[key.data]
                output += data
                if len(output) > max_output:
                    del output[max_output:]
                    run.cut_short = Ending.OUTPUT
                    return


@cache
def _needed(program: str) -> tuple[str, ...]:
    """Return the folders that a program cannot do without: its own, and those of this interpreter."""
    folders = {sys.prefix, sys.base_prefix, os.path.dirname(program), os.path.dirname(os.path.realpath(program))}
    real = {os.path.realpath(folder) for folder in folders} | folders
    return tuple(sorted(real))


@cache
def _hidden() -> tuple[str, ...]:
    """Return the folders that hold what is private: homes and temporary files."""
    folders = {os.path.realpath(folder) for folder in (Path.home(), tempfile.gettempdir(), "/tmp", "/home", "/root")}
    existing = sorted(folder for folder in folders if os.path.isdir(folder) and folder != "/")
    return tuple(
        folder
        for folder in existing
        if not any(folder != other and os.path.commonpath([folder, other]) == other for other in existing)
    )


@cache
def _anybody_can_run(program: str) -> bool:
    """Return whether another user can reach and read a program and this interpreter's library."""
    paths = [Path(path) for path in (os.path.realpath(program), sys.prefix, sys.base_prefix)]
    everything = {*paths, *(parent for path in paths for parent in path.parents)}
    return all(path.stat().st_mode & 0o001 for path in everything)
