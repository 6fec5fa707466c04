"""The fork server: a small process with one thread that starts children by ``fork`` and outlives none of them.

It is executed fresh, so it holds none of the driver's threads, locks and memory. It imports what it is told to, and
from then on a child costs milliseconds. It is a subreaper: whatever a child leaves behind becomes its own child, also a
process that made itself a session of its own, so it can end all of them without knowing their names.

Waiting:
    waits for    a request of the driver, or the end of a child
    is woken by  the control socket, SIGCHLD; the socket closes when the driver ends, however it ends
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, NoReturn

from xrl_lite.actors.orphans import FAMILY_VARIABLE

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20
_LOOK_FOR_DRIVER_S = 2.0
_END_WITHIN_S = 5.0

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a child write the stacks of all its threads to its log."""

INTERRUPT_SIGNAL = signal.SIGUSR2
"""Makes a child look whether the call that it runs is to be cancelled."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

CORES_VARIABLE = "XRL_LITE_CORES"
"""Names the cores on which a child is to run, ``4,5,6``. Taken out of its environment when that has been done."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What a child is to be like. Its descriptors come along: socket, pipe for replies, slot page, log."""

    token: int
    """Chosen by the driver; names this request in the answers."""

    name: str
    incarnation: int
    num_slots: int
    max_concurrency: int
    num_threads: int
    background: bool
    environment: dict[str, str]
    working_directory: str
    module_path: list[str]
    seed: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The fork server takes requests now."""

    pid: int
    failed_imports: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Forked:
    """A child runs. Its pidfd comes along."""

    token: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotForked:
    """There will be no child."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child ended. `status` is that of ``waitpid``."""

    token: int
    status: int


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def main(control_fd: int) -> None:
    """Be a fork server. The driver's process id, module path and preload list are the first message."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [DUMP_SIGNAL])  # for a child that is asked before it can answer
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    setup: dict[str, Any] = json.loads(control.recv(_MESSAGE_BYTES))
    sys.path[:] = setup["module_path"]
    ready = Ready(os.getpid(), _preload(setup["preload"]))
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and thereby copying, the pages that children share
    control.send(pickle.dumps(ready))
    _Zygote(control, setup["driver_pid"]).run()


def _preload(names: list[str]) -> dict[str, str]:
    failed: dict[str, str] = {}
    for name in ["xrl_lite.actors.worker", *names]:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 a module may raise anything; the child that needs it will say so again
            failed[name] = traceback.format_exc(limit=-3)
    return failed


class _Zygote:
    def __init__(self, control: socket.socket, driver_pid: int) -> None:
        self._control = control
        self._driver_pid = driver_pid
        self._children: dict[int, int] = {}
        self._wakeup, wakeup_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_in = wakeup_in
        signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._on_term)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_LOOK_FOR_DRIVER_S * 1000)}
            if self._wakeup in ready:
                self._reap()
            if self._control.fileno() in ready:
                self._take_request()
            if os.getppid() != self._driver_pid:  # the socket may have been inherited by somebody who lives on
                self._end_all()

    def _take_request(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 16, 5, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            message, fds = b"", []
        if not message:
            self._end_all()
        # the request lies in a memfd: an environment may be larger than a message
        with open(fds.pop(0), "rb") as file:
            request: ForkRequest = pickle.load(file)
        try:
            self._fork(request, fds)
        except OSError as error:  # too many processes, or no memory: that is about this child and about no other
            self._report(NotForked(request.token, str(error)), [])
        for fd in fds:
            os.close(fd)

    def _fork(self, request: ForkRequest, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_child(request, fds)
        self._children[pid] = request.token
        pidfd = os.pidfd_open(pid)  # before the child can be reaped, so it is certainly this process
        self._report(Forked(request.token, pid), [pidfd])
        os.close(pidfd)

    def _become_child(self, request: ForkRequest, fds: list[int]) -> NoReturn:
        try:
            zygote_pid = os.getppid()
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote_pid or zygote_pid == 1:
                os._exit(1)
            self._let_go()
            become_actor(request, *fds)
        except BaseException:  # noqa: BLE001 nothing may return into the fork server's loop
            traceback.print_exc()
        finally:
            os._exit(70)

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._control.close()
        os.close(self._wakeup)
        os.close(self._wakeup_in)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = True
            token = self._children.pop(pid, None)
            if token is not None:
                self._report(Exited(token, status), [])
        if ended:
            # every child is a subreaper itself, so what is ours now and is no child of ours has lost its actor
            for orphan in children_of(os.getpid()) - self._children.keys():
                _kill(orphan)

    def _report(self, message: object, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [pickle.dumps(message)], fds)
        except OSError:  # the driver is gone; the next poll says so
            return

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        self._end_all()

    def _end_all(self) -> NoReturn:
        deadline = time.monotonic() + _END_WITHIN_S
        while time.monotonic() < deadline:
            for pid in children_of(os.getpid()):
                _kill(pid)
            try:
                while os.waitpid(-1, 0)[0]:  # killed processes end at once; theirs become ours, and the loop goes on
                    break
            except ChildProcessError:
                break
        os._exit(0)


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    """Do nothing, other than SIG_IGN: that wakes no loop, and goes on to the programs that are started."""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def children_of(parent: int) -> set[int]:
    """Return the process ids whose parent is `parent`."""
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and parent_of(int(entry)) == parent:
            found.add(int(entry))
    return found


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def become_actor(request: ForkRequest, socket_fd: int, replies_fd: int, page_fd: int, log_fd: int) -> NoReturn:
    """Turn a freshly forked process into an actor."""
    from xrl_lite.actors.slots import SlotPage
    from xrl_lite.actors.worker import serve
    from xrl_lite.log import log_to_stderr

    os.setpgid(0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # background processes of this actor stay below it until it ends
    signal.signal(signal.SIGINT, _ignore)  # Ctrl-C belongs to the driver; a handler, which programs do not inherit
    _redirect_output(log_fd)
    log_to_stderr()
    _volunteer_for_the_oom_killer()
    faulthandler.enable(file=2)
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [DUMP_SIGNAL])
    family = os.environ[FAMILY_VARIABLE]
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ[FAMILY_VARIABLE] = family
    sys.path[:] = request.module_path
    if os.path.isdir(request.working_directory):
        os.chdir(request.working_directory)
    gc.enable()
    _pin_to_cores(os.environ.pop(CORES_VARIABLE, ""))
    if request.background:
        _let_others_run()
    _limit_threads(request.num_threads)
    seed_generators(f"{request.seed}:{request.name}:{request.incarnation}")
    page = SlotPage(page_fd, request.num_slots)
    serve(socket.socket(fileno=socket_fd), replies_fd, page, max_concurrency=request.max_concurrency)


def _redirect_output(log_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _volunteer_for_the_oom_killer() -> None:
    # when memory runs out the kernel is to end an actor, which is replaced, and not the driver
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _pin_to_cores(cores: str) -> None:
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


def _let_others_run() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # what the user has chosen for the whole stays
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _limit_threads(count: int) -> None:
    # the variables are too late for libraries that the fork server has loaded already, so those are told directly
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
        with contextlib.suppress(RuntimeError):  # a preloaded module has set it
            torch.set_num_interop_threads(1)


def seed_generators(text: str) -> None:
    """Seed the random generators of Python, numpy and torch with a number made from `text`.

    Those of modules that are not loaded yet are seeded when they are.
    """
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    random.seed(seed)
    seeders: dict[str, Callable[[Any], object]] = {
        "numpy.random": lambda module: module.seed(seed),
        "torch": lambda module: module.manual_seed(seed),
    }
    for name in list(seeders):
        if (module := sys.modules.get(name)) is not None:
            seeders.pop(name)(module)
    sys.meta_path.insert(0, _SeedWhenLoaded(seeders))


class _SeedWhenLoaded(importlib.abc.MetaPathFinder):
    """Finds nothing itself; sees to it that certain modules are seeded once they have been executed."""

    def __init__(self, seeders: dict[str, Callable[[Any], object]]) -> None:
        self._seeders = seeders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._seeders:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute_and_seed, fullname, spec.loader.exec_module)
        return spec

    def _execute_and_seed(self, name: str, execute: Callable[[ModuleType], object], module: ModuleType) -> None:
        execute(module)
        if (seed := self._seeders.pop(name, None)) is not None:  # not when it is loaded anew
            seed(module)


if __name__ == "__main__":
    # under its own name, since the driver names its classes so
    from xrl_lite.actors import zygote

    zygote.main(int(sys.argv[1]))
