"""A clean environment for every test, and nothing left behind by any."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# how long an example takes says how busy the machine is, not whether the code is right
settings.register_profile("house", deadline=None)
settings.load_profile("house")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: waiting threads sleep

LEFT_WITHIN_S = 30.0
_SCRUBBED = ("XRL_LITE_", "HF_", "TRANSFORMERS_", "WANDB_", "CUDA_")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay for good: looking through them takes seconds over a run


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(_SCRUBBED):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])  # folders of user code are put on it


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if "ray" in request.node.keywords:  # Ray starts and keeps processes as it likes
        yield
        return
    before = children_of(os.getpid())
    yield
    deadline = time.monotonic() + LEFT_WITHIN_S
    while (left := children_of(os.getpid()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes left behind: {[describe(pid) for pid in left]}"


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights and a tokenizer, as a Hugging Face folder."""
    from tests.build import build_random_model

    return build_random_model(tmp_path_factory.mktemp("model"))


def children_of(pid: int) -> set[int]:
    """Live processes below `pid`, fork servers of pytest-wide fixtures and the like included."""
    if pid == os.getpid() and not has_children():
        return set()
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def has_children() -> bool:
    """Whether this process has children, ended ones that nobody waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def describe(pid: int) -> str:
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().decode().replace(chr(0), ' ')}"
    except OSError:
        return f"{pid}: gone"
