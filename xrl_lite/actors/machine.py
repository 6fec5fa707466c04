"""What this machine has, as far as this process may use it: affinity and cgroup limits count, not the hardware."""

from __future__ import annotations

import itertools
import os
import resource
import string
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path("/")
"""Where ``/proc``, ``/sys`` and ``/dev`` are looked for."""

MILLI = 1000
"""CPUs are counted in thousandths, as integers, so that sums of fractions are exact."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT = 1 << 60
_MANY_DESCRIPTORS = 65_536
_LETTERS = string.ascii_letters
_ACCELERATORS = (("CUDA_VISIBLE_DEVICES", "nvidia[0-9]*"), ("ASCEND_RT_VISIBLE_DEVICES", "davinci[0-9]*"))


def milli_cpus(num_cpus: float) -> int:
    """Return a number of CPUs in thousandths."""
    return round(num_cpus * MILLI)


def usable_cores() -> tuple[int, ...]:
    """Return the ids of the cores on which this process may run."""
    return tuple(sorted(os.sched_getaffinity(0)))


def usable_milli_cpus(root: Path = ROOT) -> int:
    """Return the CPUs that this process may use, in thousandths: cores of its affinity, or less by a cgroup's quota."""
    limits = [len(usable_cores()) * MILLI]
    limits += [limit for folder in _cgroup_folders("cpu", root) if (limit := _cpu_quota(folder)) is not None]
    return max(1, min(limits))


def usable_memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process and its children may use: what is built in, or a cgroup's limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    for folder in _cgroup_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name)
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                limits.append(int(limit))
    return min(limits)


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators that this process sees."""

    variable: str = "CUDA_VISIBLE_DEVICES"
    """Environment variable that tells a process which ones it may see."""

    names: tuple[str, ...] = ()
    """How that variable names them: numbers, or what the variable of this process holds ("GPU-5f3c...", "MIG-...")."""


def visible_accelerators(root: Path = ROOT) -> Accelerators:
    """Return the accelerators of this machine, as far as this process sees them. Loads no driver and no library."""
    for variable, pattern in _ACCELERATORS:
        devices = [device for device in (root / "dev").glob(pattern) if device.name.lstrip(_LETTERS).isdigit()]
        if devices:
            return Accelerators(variable, visible_names(os.environ.get(variable), len(devices)))
    return Accelerators()


def visible_names(value: str | None, num_devices: int) -> tuple[str, ...]:
    """Return the accelerators that a ``CUDA_VISIBLE_DEVICES`` of `value` leaves of `num_devices`; None is not set.

    As CUDA reads it: from the first entry on that names no device, it names nothing.
    """
    if value is None:
        return tuple(map(str, range(num_devices)))
    entries = [entry.strip() for entry in value.split(",")]
    known = (bool(entry) and (not entry.isdigit() or int(entry) < num_devices) and entry != "-1" for entry in entries)
    return tuple(entry for entry, _ in itertools.takewhile(lambda pair: pair[1], zip(entries, known, strict=True)))


def numa_nodes(root: Path = ROOT) -> list[frozenset[int]]:
    """Return the cores of each memory node; nothing where the kernel does not say."""
    lists = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return [frozenset(parse_cores(_read(path))) for path in lists]


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the numbers in a list as the kernel writes it: ``0-3,8,10-11``."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def neighbours(free: Sequence[T], wanted: int, order: Sequence[T], nodes: Iterable[frozenset[T]] = ()) -> tuple[T, ...]:
    """Choose `wanted` of `free`: next to each other in `order` if possible, inside one of `nodes`; else the first."""
    if wanted == 0:
        return ()
    rank = {item: place for place, item in enumerate(order)}
    inside = [sorted((item for item in free if item in node), key=rank.__getitem__) for node in nodes]
    everywhere = sorted(free, key=rank.__getitem__)
    for items in [*inside, everywhere]:
        for start in range(len(items) - wanted + 1):
            run = items[start : start + wanted]
            if rank[run[-1]] - rank[run[0]] == wanted - 1:
                return tuple(run)
    return tuple(everywhere[:wanted])


def allow_many_descriptors() -> None:
    """Raise this process's soft limit of open files: every large payload under way holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tree_bytes(pid: int, *, exact_above: int) -> int:
    """Return the memory that a process and its descendants hold for themselves; 0 if it is gone.

    Shared segments do not count. What a fork has not written to since is its parent's memory as well; a sum above
    `exact_above` counts it once, a smaller one for each, which is quicker to know.
    """
    pids = [pid]
    for parent in pids:  # grows on the way
        pids += _children_of(parent)
    rough = sum(map(_private_bytes, pids))
    return rough if rough <= exact_above or len(pids) == 1 else sum(map(_fair_share_bytes, pids))


def _children_of(pid: int) -> list[int]:
    """Return the children of a process, ended ones that nobody waited for included; none if it is gone."""
    found: list[int] = []
    with suppress(OSError):  # it ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
    return found


def _fair_share_bytes(pid: int) -> int:
    """Private memory, of which pages that several processes hold count in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
    except OSError:  # gone, or another user's
        return _private_bytes(pid)
    shares = [int(line.split()[1]) for line in lines if line.startswith(b"Pss_Anon:")]
    return shares[0] * 1024 if shares else _private_bytes(pid)


def _private_bytes(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """The folders of this process's cgroup and of those above it, version 2 and version 1."""
    folders: list[Path] = []
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = mount
        elif controller in controllers.split(","):
            # the folder bears the name of all its controllers; most systems have links for each, some have none
            top = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        inside = top / path.lstrip("/")
        folders += [folder for folder in [inside, *inside.parents] if folder == top or top in folder.parents]
    return folders


def _cpu_quota(folder: Path) -> int | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) * MILLI // int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
