"""How much a sandboxed program may use."""

from __future__ import annotations

from pydantic import Field

from xrl_lite.settings import Settings

MIB = 1 << 20


class SandboxLimits(Settings):
    """What one run of a program may use, its children included unless said otherwise."""

    wall_time_s: float = Field(default=10.0, gt=0)
    """Seconds until everything is ended."""

    cpu_time_s: int = Field(default=5, gt=0)
    """Seconds of CPU for each process; whole ones."""

    memory_bytes: int = Field(default=512 * MIB, ge=64 * MIB)
    """Address space of each process. More makes allocations fail (MemoryError in Python)."""

    max_processes: int = Field(default=16, gt=0)
    """Processes and threads at the same time."""

    max_file_bytes: int = Field(default=16 * MIB, ge=0)
    """Size of a file that is written."""

    max_disk_bytes: int = Field(default=64 * MIB, gt=0)
    """All files together, where the working folder can be one in memory."""

    max_open_files: int = Field(default=64, ge=8)
    """Open files of each process."""

    max_output_bytes: int = Field(default=MIB, gt=0)
    """Standard output, and standard error; more than that ends the program."""

    may_use_network: bool = False
    """Whether a machine that can close the network neither by namespaces nor by system call filters is good enough."""
