"""Programs that are agents: each in a process group of its own, below an actor that ends with the run.

::

    ProgramHosts.run --> a host that is free (an actor) --> program, and whatever it starts

Waits for    a host; the program, at most `wall_time_s`
Is woken by  the end of the program; its limit. Cancelling ends the host, and with it everything below it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite import actors
from xrl_lite.actors import ActorHandle, RestartPolicy
from xrl_lite.data.json_text import JsonTextError, read_json
from xrl_lite.errors import ActorDiedError, ActorTimeoutError

if TYPE_CHECKING:
    from xrl_lite.actors import ActorSystem

PRELOAD = ("xrl_lite.gateway.program",)
"""Imported once for all hosts."""

_TAIL_BYTES = 2000
_SLACK_S = 30.0
"""How much longer than a program its host may take, to end what the program left running."""
_RESTART = RestartPolicy(max_restarts=1000, window_s=60.0)
"""A program that eats too much memory takes its host along; that costs its sample only."""


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """One run of a program."""

    command: list[str]
    """Program and arguments."""
    stdin: str
    """Its standard input."""
    env: dict[str, str]
    """Environment variables, on top of those of the run."""
    cwd: str | None
    """Folder it runs in; a new one, gone afterwards, when None."""
    log_file: str | None
    """File for what it writes; not kept when None."""
    task: dict[str, Any]
    """Is written into the file that XRL_LITE_TASK_FILE names."""
    wall_time_s: float
    """Limit."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What came of it."""

    problem: str | None
    """What went wrong, in words, with the last lines it wrote; None if it ended with exit code 0."""
    reward: Any = None
    """What it wrote as JSON into the file that XRL_LITE_REWARD_FILE names; None if nothing."""


class ProgramHost:
    """Runs programs inside an actor, one at a time."""

    def run(self, spec: ProgramSpec, place: str) -> ProgramResult:
        """Run a program, and end whatever it leaves running.

        Args:
            spec: The program.
            place: Folder for its files, of this host alone. What a host that was killed left there is removed.
        """
        shutil.rmtree(place, ignore_errors=True)
        os.makedirs(place, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            task, reward, written = (Path(folder) / name for name in ("task.json", "reward.json", "output.log"))
            task.write_text(json.dumps(spec.task, default=str), encoding="utf-8")
            if spec.log_file is not None:
                written = Path(spec.log_file)
                written.parent.mkdir(parents=True, exist_ok=True)
            work = Path(folder) / "work"
            work.mkdir()
            files = {"XRL_LITE_TASK_FILE": str(task), "XRL_LITE_REWARD_FILE": str(reward)}
            ending = _run(spec, env={**os.environ, **spec.env, **files}, cwd=spec.cwd or str(work), output=written)
            if ending is not None:
                return ProgramResult(problem=f"{ending}{_last_lines(written, spec.log_file)}")
            return _with_reward(reward)


class ProgramHosts:
    """Hosts of the programs of one agent.

    Args:
        name: Of the agent.
        count: Programs at once.
        num_cpus: CPU slots of each.
        memory_bytes: Memory of each.
        system: Where the hosts are; the default system when not given.

    Raises:
        ResourceError: there are not enough CPU slots.
    """

    def __init__(
        self,
        name: str,
        *,
        count: int,
        num_cpus: float,
        memory_bytes: int | None = None,
        system: ActorSystem | None = None,
    ) -> None:
        pool = actors.ActorPool.spawn(
            system or actors.default_system(),
            ProgramHost,
            num_actors=count,
            name=f"agent/{name}/{uuid.uuid4().hex[:6]}",
            num_cpus=num_cpus,
            memory_bytes=memory_bytes,
            restart=_RESTART,
            preload=PRELOAD,
        )
        self._pool = pool
        self._folder = Path(tempfile.mkdtemp(prefix="xrl-lite-agent-"))
        self._idle: deque[tuple[ActorHandle, Path]] = deque(
            (host, self._folder / str(number)) for number, host in enumerate(pool.handles)
        )
        self._places = anyio.Semaphore(count)

    async def run(self, spec: ProgramSpec) -> ProgramResult:
        """Run a program and return what came of it; waits while all hosts are busy."""
        async with self._places:
            host, place = self._idle.popleft()
            try:
                return await host.run.options(timeout_s=spec.wall_time_s + _SLACK_S).remote(spec, str(place))
            except (ActorDiedError, ActorTimeoutError) as error:
                return ProgramResult(problem=f"took its process along: {error}")
            finally:
                self._idle.append((host, place))

    async def aclose(self) -> None:
        """End the hosts and everything below them, and remove their files."""
        try:
            await self._pool.stop()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _run(spec: ProgramSpec, *, env: dict[str, str], cwd: str, output: Path) -> str | None:
    """Run a program to its end; return what went wrong, None if nothing did."""
    with tempfile.TemporaryFile() as stdin, output.open("ab") as log:
        stdin.write(spec.stdin.encode())
        stdin.seek(0)
        try:
            program = subprocess.Popen(
                spec.command, stdin=stdin, stdout=log, stderr=log, env=env, cwd=cwd, start_new_session=True
            )
        except OSError as error:
            return f"could not be started: {error}"
        try:
            code = program.wait(spec.wall_time_s)
        except subprocess.TimeoutExpired:
            return f"took longer than {spec.wall_time_s:g} s (wall_time_s) and was ended"
        finally:
            _end_all(program)
    if code == 0:
        return None
    return f"ended with {f'exit code {code}' if code > 0 else signal.Signals(-code).name}"


def _end_all(program: subprocess.Popen[bytes]) -> None:
    """End a program and everything that it started, also what left its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    while pids := _children():  # an actor gets the orphans among its descendants, so all of them sooner or later
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _last_lines(written: Path, log_file: str | None) -> str:
    with written.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read().decode("utf-8", "replace").strip()
    where = f" (all of it: {log_file})" if log_file else ""
    return f". The last it wrote{where}:\n{tail}" if tail else ". It wrote nothing."


def _with_reward(file: Path) -> ProgramResult:
    if not file.exists():
        return ProgramResult(problem=None)
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        return ProgramResult(problem=None, reward=read_json(text))
    except JsonTextError as error:
        return ProgramResult(problem=f"wrote {text[:100]!r} into XRL_LITE_REWARD_FILE, which is no JSON: {error}")
