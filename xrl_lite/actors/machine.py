"""What this machine has, as far as this process may use it: affinity and cgroup limits count, not the hardware."""

from __future__ import annotations

import os
import resource
from pathlib import Path

MILLI = 1000
"""CPUs are counted in thousandths, as integers, so that sums of fractions are exact."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT = 1 << 60
_MANY_DESCRIPTORS = 65_536


def milli_cpus(num_cpus: float) -> int:
    """Return a number of CPUs in thousandths."""
    return round(num_cpus * MILLI)


def usable_milli_cpus() -> int:
    """Return the CPUs that this process may use, in thousandths."""
    limits = [len(os.sched_getaffinity(0)) * MILLI]
    limits += [limit for folder in _cgroup_folders("cpu") if (limit := _cpu_quota(folder)) is not None]
    return max(1, min(limits))


def usable_memory_bytes() -> int:
    """Return the memory that this process and its children may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name)
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                limits.append(int(limit))
    return min(limits)


def allow_many_descriptors() -> None:
    """Raise this process's soft limit of open files: every large payload under way holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def private_bytes(pid: int) -> int:
    """Return the memory that a process holds for itself alone; 0 if it is gone. Shared segments do not count."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def _cgroup_folders(controller: str) -> list[Path]:
    """The folders of this process's cgroup and of those above it, version 2 and version 1."""
    folders: list[Path] = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = Path("/sys/fs/cgroup")
        elif controller in controllers.split(","):
            root = Path("/sys/fs/cgroup") / controller
        else:
            continue
        inside = root / path.lstrip("/")
        folders += [folder for folder in [inside, *inside.parents] if folder == root or root in folder.parents]
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
