"""What runs between us and the sandboxed program. Started as a script, so it uses nothing but the standard library.

::

    run.py --spec, report pipe--> outer: drops root, enters namespaces
                                    '--> init: process 1 in there, reports how the program ended, takes all down with it
                                           '--> program: limits, no new privileges, system call filter, exec

Each of the three dies with the one above it. SIGTERM to outer or init ends everything, also what the program has put
into the background; where there are no process namespaces, nothing else would.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NEWUSER, _NEWPID, _NEWNET, _NEWNS, _NEWIPC, _NEWUTS = (
    *(0x10000000, 0x20000000, 0x40000000),
    *(0x00020000, 0x08000000, 0x04000000),
)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_INNER_ID = 1000
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the spec, build the sandbox, and leave when the program has ended."""
    spec_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(spec_fd, encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    os.set_inheritable(report_fd, False)
    os.umask(0o022)  # what is built here must be open to whom we become
    try:
        held = _leave_root(spec) if os.getuid() == 0 else []
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        held += _enter_namespaces()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, _end_everything)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            _be_init(spec, report_fd, held)

        def pass_on(*_: object) -> None:
            os.kill(child, signal.SIGTERM)

        signal.signal(signal.SIGTERM, pass_on)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the report is the only place for it
        _report(report_fd, error=repr(error))
        os._exit(1)
    os.close(report_fd)
    for fd in range(3):
        os.close(fd)
    os.waitpid(child, 0)
    os._exit(0)


def _leave_root(spec: dict[str, Any]) -> list[str]:
    """Become nobody. Root's interpreter is often in root's home, which has to be opened for that, or else we stay."""
    held: list[str] = []
    if _libc.unshare(_NEWNS) == 0 and _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None):
        _hide(spec)
        held.append("home")
    elif not spec["anybody_can_run"]:
        return []
    os.chown(spec["folder"], _NOBODY, _NOBODY)
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _prctl(_PR_SET_DUMPABLE, 1)  # otherwise /proc/self stays root's, and the id maps cannot be written
    return [*held, "user"]


def _enter_namespaces() -> list[str]:
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_NEWUSER | _NEWPID | _NEWNET | _NEWNS | _NEWIPC | _NEWUTS) != 0:
        return []
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_ID} {uid} 1"),
        ("gid_map", f"{_INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return ["namespaces"]


def _be_init(spec: dict[str, Any], report_fd: int, held: list[str]) -> None:
    """Start the program, report how it ended, and end; in a process namespace that ends everything in it."""
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if "namespaces" in held:
            held += _close_file_system(spec, is_hidden="home" in held)
        _write_files(spec)
        program = os.fork()
        if program == 0:
            _be_program(spec, report_fd, held)
        for fd in range(3):  # so that its end closes them
            os.close(fd)
        status, usage = _wait_for(program)
        _report(report_fd, status=status, cpu_s=usage.ru_utime + usage.ru_stime)
        _end_descendants()
    except BaseException as error:  # noqa: BLE001 - as above
        _report(report_fd, error=repr(error))
    os._exit(0)


def _close_file_system(spec: dict[str, Any], *, is_hidden: bool) -> list[str]:
    """Hide what is private, make the rest read-only, put a folder in memory in the place of the working folder."""
    held: list[str] = []
    if not _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None):
        return held
    if not is_hidden:
        _hide(spec)
        held.append("home")
    if _make_read_only():
        held.append("files")
    options = f"size={spec['max_disk_bytes']},mode=700,nr_inodes=4096"
    if _mount("tmpfs", spec["folder"], "tmpfs", _MS_NOSUID | _MS_NODEV, options):
        held.append("disk")
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    return held


def _hide(spec: dict[str, Any]) -> None:
    """Put empty folders over private ones, and back into them what the program needs to run.

    Raises:
        OSError: a step failed; the rest would not be what was asked for.
    """
    needed = [path for path in spec["needed"] if any(_is_inside(path, hidden) for hidden in spec["hidden"])]
    kept = [os.open(path, os.O_PATH) for path in needed]  # what is open can be mounted though it is covered
    for path in spec["hidden"]:
        _mount_or_raise("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path, fd in zip(needed, kept, strict=True):
        os.makedirs(path, exist_ok=True)
        _mount_or_raise(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC, None)
        os.close(fd)


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _make_read_only() -> bool:
    attributes = struct.pack("4Q", 0x1 | 0x2, 0, 0, 0)  # set RDONLY and NOSUID
    here, recursive, number = -100, 0x8000, 442  # mount_setattr has the same number everywhere
    return _libc.syscall(number, here, b"/", recursive, attributes, len(attributes)) == 0


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> bool:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    return _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) == 0


def _mount_or_raise(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    if not _mount(source, target, kind, flags, data):
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {source} on {target}: {os.strerror(number)}")


def _write_files(spec: dict[str, Any]) -> None:
    os.chdir(spec["folder"])
    for name, text in spec["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)


def _be_program(spec: dict[str, Any], report_fd: int, held: list[str]) -> None:
    try:
        stdin = _file_with(spec["stdin"].encode())  # before the limits: it is no file that the program writes
        # a namespace counts its own processes only; without one, those that the user has anyway come on top
        others = 2 if "namespaces" in held else _count_tasks_of(os.getuid())
        for name, value in {**spec["limits"], "RLIMIT_NPROC": spec["max_processes"] + others}.items():
            which = getattr(resource, name)
            ceiling = resource.getrlimit(which)[1]
            hard = value + (name == "RLIMIT_CPU")  # SIGXCPU tells what happened; SIGKILL is for who goes on
            if ceiling != resource.RLIM_INFINITY:
                hard = min(hard, ceiling)
            resource.setrlimit(which, (min(value, hard), hard))
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would be inherited
            signal.signal(number, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.closerange(3, report_fd)
        os.closerange(report_fd + 1, 256)
        held = [*held, *_filter_system_calls()]
        if "namespaces" not in held and "calls" not in held and not spec["may_use_network"]:
            raise PermissionError("neither namespaces nor system call filters are allowed here: the network is open")
        _report(report_fd, held=held)
        os.execve(spec["command"][0], spec["command"], spec["environment"])
    except BaseException as error:  # noqa: BLE001 - as above
        _report(report_fd, error=repr(error))
    os._exit(127)


def _file_with(content: bytes) -> int:
    """Return a descriptor of a file in memory with this content, at its beginning."""
    fd, left = os.memfd_create("stdin"), memoryview(content)
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# What a program needs neither for computing nor for its own files and children. socketpair stays: asyncio needs it.
_REFUSED = {
    "x86_64": (0xC000003E, (41, 101, 165, 166, 248, 249, 250, 272, 298, 308, 310, 311, 321, 323, 425)),
    "aarch64": (0xC00000B7, (198, 117, 40, 39, 217, 218, 219, 97, 241, 268, 270, 271, 280, 282, 425)),
}
"""Audit architecture, and the numbers of: socket, ptrace, mount, umount2, add_key, request_key, keyctl, unshare,
perf_event_open, setns, process_vm_readv, process_vm_writev, bpf, userfaultfd, io_uring_setup."""


def _filter_system_calls() -> list[str]:
    """Refuse the calls above with EPERM, and end a program that calls by another architecture's table."""
    known = _REFUSED.get(platform.machine())
    if known is None:
        return []
    architecture, numbers = known
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    tests = [(at_least, 0x40000000), *((equal, number) for number in numbers)]
    for place, (test, value) in enumerate(tests):
        lines.append((test, len(tests) - place, 0, value))
    lines += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    return ["calls"] if _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0) == 0 else []


def _wait_for(program: int) -> tuple[int, resource.struct_rusage]:
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            return status, usage


def _end_everything(*_: object) -> None:
    _end_descendants()
    os._exit(0)


def _end_descendants() -> None:
    """End what the program left running. As a subreaper we are the parent of all of it, sooner or later."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                pids = [int(pid) for pid in file.read().split()]
        except OSError:
            return
        if not pids:
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _count_tasks_of(uid: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def _report(fd: int, **values: Any) -> None:
    os.write(fd, json.dumps(values).encode() + b"\n")


if __name__ == "__main__":
    main()
