"""The driver's side of the fork server: starts it when the first child is wanted, asks it for children.

Waiting:
    a request waits for    the fork server to have imported its modules
    and is woken by        its first message; or by its end, which fails all requests
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xrl_lite.actors.hub import Hub
from xrl_lite.actors.logs import ActorLog
from xrl_lite.actors.orphans import FAMILY_VARIABLE, end_family
from xrl_lite.actors.surroundings import module_path
from xrl_lite.actors.wire import hang_up
from xrl_lite.actors.zygote import THREAD_VARIABLES, Exited, Forked, ForkRequest, NotForked, Ready
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """Whom to tell about one child."""

    request: ForkRequest
    fds: tuple[int, ...]
    on_forked: Callable[[int, int], None]
    """Called with process id and pidfd, which the receiver owns."""

    on_exited: Callable[[int | None, str], None]
    """Called with the wait status, or None and what happened to the fork server."""


class ForkServer:
    """One fork server process and its set of preloaded modules. Lives in the hub's thread."""

    def __init__(self, hub: Hub, preload: Sequence[str], *, log_dir: Path | None, seed: int) -> None:
        self.preload = tuple(preload)
        self.alive = True
        self.process_id = 0
        self._hub = hub
        self._family = uuid.uuid4().hex
        self._log = ActorLog(log_dir, "fork-server" + "".join(f"+{name}" for name in preload))
        self._ready = False
        self._waiting: deque[Birth] = deque()
        self._births: dict[int, Birth] = {}
        self._on_end: list[Callable[[], None]] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._execute(theirs, seed)
        self.process_id = self._process.pid
        self._pidfd = os.pidfd_open(self.process_id)
        self._control.setblocking(False)
        self._control.send(json.dumps(_setup(self.preload)).encode())
        hub.loop.add_reader(self._control, self._receive)
        hub.loop.add_reader(self._pidfd, self._ended)

    def fork(self, birth: Birth) -> None:
        """Ask for a child."""
        if not self.alive:
            birth.on_exited(None, self._obituary())
            return
        self._births[birth.request.token] = birth
        self._waiting.append(birth)
        if self._ready:
            self._send()

    def withdraw(self, birth: Birth) -> None:
        """Ask for a child no more, if it was not asked for yet; what it is told then is that the child has ended."""
        if birth in self._waiting:
            self._waiting.remove(birth)
            del self._births[birth.request.token]
            for fd in birth.fds:
                os.close(fd)
            self._hub.post(birth.on_exited, None, "")

    def close(self, on_end: Callable[[], None]) -> None:
        """Let it end all its children and itself; `on_end` is called when it is gone."""
        if not self.alive:
            on_end()
            return
        self._on_end.append(on_end)
        if self._ready:
            self._stop_listening()
        else:  # it has no children, and does not listen while it imports
            self.kill()

    def kill(self) -> None:
        """End it at once. Its children die with it, by order of the kernel."""
        if self.alive:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _execute(self, theirs: socket.socket, seed: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, "1"),  # no library may start a thread before the fork
            "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads that spin slow everybody down on a full machine
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # keeps torch from initialising CUDA, which does not survive a fork
            "PYTHONPATH": os.pathsep.join(module_path()),
            FAMILY_VARIABLE: self._family,
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(seed % 2**32)),
        }
        return subprocess.Popen(
            # -P: the folder where it is started is no place to look for modules, unless the driver does so
            [sys.executable, "-P", "-m", "xrl_lite.actors.zygote", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log.fd,
            stderr=self._log.fd,
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )

    def _receive(self) -> None:
        while self.alive:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                data, fds = b"", []
            if not data:  # its end is reported by the pidfd
                self._hub.loop.remove_reader(self._control)
                return
            self._take(pickle.loads(data), fds)

    def _take(self, message: Ready | Forked | NotForked | Exited, fds: list[int]) -> None:
        if isinstance(message, Ready):
            for name, error in message.failed_imports.items():
                logger.warning("the fork server cannot preload %s, children import it themselves:\n%s", name, error)
            self._ready = True
            self._send()
        elif isinstance(message, Forked):
            self._births[message.token].on_forked(message.pid, fds[0])
        elif isinstance(message, NotForked):
            self._births.pop(message.token).on_exited(None, f"its process cannot be started: {message.reason}")
        else:
            self._births.pop(message.token).on_exited(message.status, "")

    def _send(self) -> None:
        while self._waiting and self.alive:
            birth = self._waiting[0]
            try:
                request_fd = _write_down(birth.request)
            except OSError as error:  # no descriptors left
                del self._births[birth.request.token]
                self._hub.post(birth.on_exited, None, f"its process cannot be started: {error}")
            else:
                try:
                    socket.send_fds(self._control, [b"fork"], [request_fd, *birth.fds])
                except BlockingIOError:
                    self._hub.loop.add_writer(self._control, self._send)
                    return
                except OSError:  # it is dying; the pidfd tells
                    return
                finally:
                    os.close(request_fd)
            self._waiting.popleft()
            for fd in birth.fds:
                os.close(fd)
        if self.alive:
            self._hub.loop.remove_writer(self._control)

    def _ended(self) -> None:
        self.alive = False
        self._hub.loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._drain()
        self._stop_listening()
        if self._process.wait() != 0:  # it has not ended what was below it
            end_family(self._family)
        births, self._births = self._births, {}
        for birth in self._waiting:
            for fd in birth.fds:
                os.close(fd)
        self._waiting.clear()
        if births and not self._on_end:
            logger.error("%s", self._obituary())
        for birth in births.values():
            self._hub.post(birth.on_exited, None, self._obituary())
        for callback in self._on_end:
            self._hub.post(callback)
        self._log.close()

    def _drain(self) -> None:
        """Take the reports it made before it ended."""
        self.alive = True
        if self._control.fileno() >= 0:
            self._receive()
        self.alive = False

    def _stop_listening(self) -> None:
        if self._control.fileno() >= 0:
            self._hub.loop.remove_reader(self._control)
            self._hub.loop.remove_writer(self._control)
            hang_up(self._control)

    def _obituary(self) -> str:
        code = self._process.returncode
        how = f"with {signal.Signals(-code).name}" if code and code < 0 else f"with code {code}"
        tail = self._log.tail() if self._log.fd >= 0 else ""
        return f"the fork server (pid {self.process_id}) ended {how}" + (f":\n{tail}" if tail else "")


def _setup(preload: Sequence[str]) -> Mapping[str, object]:
    return {"driver_pid": os.getpid(), "module_path": module_path(), "preload": list(preload)}


def _write_down(request: ForkRequest) -> int:
    """Return a file with the request: an environment may be larger than a message."""
    fd = os.memfd_create("xrl-lite-request")
    os.write(fd, pickle.dumps(request))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
