"""How fast calls to actors are, beside what else there is.

Run: ``python examples/benchmarks/actors.py [--quick] [--runs 5] [--json FILE] [--only NAME ...]``

Every contender runs once in each round, one after the other, so that the ratios hold also on a shared machine; each
number is the median over the rounds. What is not installed is skipped with a note. The gates at the end say which of
the layer's promises hold here. A gate whose contender was skipped says so; one about the rate of calls says what the
least that Python can do would reach. Beside the rates stand the CPU times of driver and child for each call: the longer
one is the limit of the rate, however many cores there are.

All cores are kept awake meanwhile. Waking one takes longer than a call does; and on a virtual machine the kernel takes
a sleeping core for one that it was not given, and has caller and called share the other. The garbage collector of this
process, in which all callers are, looks as rarely as that of a run does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xrl_lite.actors import ActorSystem
from xrl_lite.errors import ActorDiedError
from xrl_lite.run import collect_rarely

Numbers = dict[str, float]

PAYLOADS = {"1 KB": {"response": "x" * 1000, "label": "42"}, "10 KB": {"response": "x" * 10_000, "label": "42"}}
LARGE_BYTES = {"16 MB": 16 << 20, "256 MB": 256 << 20}
IN_FLIGHT = 1000

P50 = "round trip, 1 KB, p50 (us)"
SPAWN = "spawn to first reply (ms)"
UP, DOWN = "50 actors up (ms)", "50 actors down (ms)"
LEFT = "left behind (processes + descriptors)"
PSS, PSS_TORCH = "idle worker PSS (MB)", "idle worker PSS, torch loaded (MB)"
CANCEL, CANCEL_KEEP = "cancelled, serving again (ms)", "the same, state kept (ms)"
DEATH = "SIGKILL noticed (ms)"
COPIES = "bytes of 256 MB copied by the receiver"
IMPORT = "import (ms)"
DRIVER_CPU, CHILD_CPU = "1 KB: CPU of the driver a call (us)", "1 KB: CPU of the child a call (us)"


def rate(size: str) -> str:
    """Name of the number of calls per second."""
    return f"calls/s, {IN_FLIGHT} in flight, {size}"


def large(size: str) -> str:
    """Name of the time of a large array there and back."""
    return f"array of {size} and back (ms)"


@dataclass(frozen=True)
class Effort:
    """How often everything is repeated within one round."""

    num_round_trips: int
    num_waves: int
    """Of `IN_FLIGHT` calls each."""

    num_large: int


FULL = Effort(num_round_trips=2000, num_waves=5, num_large=7)
QUICK = Effort(num_round_trips=300, num_waves=1, num_large=5)


def noop(_payload: Any) -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


class Body:
    """The actor that is called."""

    def noop(self, payload: Any) -> None:
        """Do nothing."""

    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    def copied_bytes(self, value: Any) -> int:
        """Return how much of an array lies in memory of its own, rather than in what it arrived in."""
        return int(value.nbytes) if getattr(getattr(value, "flags", None), "owndata", True) else 0

    def cpu_s(self, _value: Any = None) -> float:
        """Return the CPU time of this process."""
        return time.process_time()

    def spin(self) -> None:
        """Compute for ever."""
        while True:
            pass


# ---------------------------------------------------------------- contenders


def bare_socket(effort: Effort, *, uvloop: bool) -> Numbers:
    """The floor: one kilobyte to another process over a Unix socket, a few bytes back; no pickling, no bookkeeping."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).resolve()), "--pong", str(theirs.fileno()), *(["--uvloop"] * uvloop)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child, theirs:
        theirs.close()
        with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
            p50 = runner.run(_ping(ours, effort.num_round_trips))
        child.wait(10)
    return {P50: p50 * 1e6}


async def _ping(sock: socket.socket, count: int) -> float:
    message = pickle.dumps(("noop", PAYLOADS["1 KB"]))
    line = _Line(len(_PONG))
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: line, sock=sock)

    async def call() -> None:
        arrived = line.expect()
        transport.write(len(message).to_bytes(4, "little") + message)
        await arrived

    await _time_async(call, 100)
    times = await _time_async(call, count)
    transport.close()
    return statistics.median(times)


_PONG = b"p" * 16


class _Line(asyncio.Protocol):
    """Waits for answers of a fixed size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._received = 0
        self._arrived: asyncio.Future[None] | None = None

    def expect(self) -> asyncio.Future[None]:
        self._arrived = asyncio.get_running_loop().create_future()
        return self._arrived

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received >= self._size and self._arrived is not None:
            self._received -= self._size
            self._arrived.set_result(None)


class _Pong(asyncio.Protocol):
    """Answers every message, whose length stands before it."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self._transport: Any = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4 and len(self._buffer) >= 4 + int.from_bytes(self._buffer[:4], "little"):
            del self._buffer[: 4 + int.from_bytes(self._buffer[:4], "little")]
            self._transport.write(_PONG)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def pong(fd: int) -> None:
    """Be the other side of the bare socket."""
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(_Pong, sock=socket.socket(fileno=fd))
    await protocol.closed


def least_python(effort: Effort, *, uvloop: bool) -> Numbers:
    """The least that an actor in Python does: pickle a call, run the method, one future a call, written once a turn.

    It knows no limits, no cancellation, no deaths, no descriptors, no other thread. What it takes more than the bare
    socket is the price of Python, and no layer with a contract can be faster.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).resolve()), "--least", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child, theirs:
        theirs.close()
        with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
            numbers = runner.run(_least_python(ours, effort))
        child.wait(10)
    return numbers


async def _least_python(sock: socket.socket, effort: Effort) -> Numbers:
    caller = _LeastCaller()
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: caller, sock=sock)
    small = PAYLOADS["1 KB"]
    await _time_async(lambda: caller.call("noop", small), 100)
    times = await _time_async(lambda: caller.call("noop", small), effort.num_round_trips)
    numbers = {P50: statistics.median(times) * 1e6}
    for size, payload in PAYLOADS.items():
        numbers[rate(size)] = await _calls_per_second(
            lambda value: caller.call("noop", value), payload, effort.num_waves
        )
    numbers |= await _cpu_of_calls(caller.call, small, effort.num_waves)
    transport.close()
    return numbers


_LEAST_HEADER = struct.Struct("<II")  # length of what follows, number of the call


def _cut_frames(data: bytes | bytearray) -> tuple[list[tuple[int, bytes]], int]:
    """Return number and body of each complete frame, and where the next one begins."""
    frames: list[tuple[int, bytes]] = []
    at = 0
    while len(data) - at >= _LEAST_HEADER.size:
        length, number = _LEAST_HEADER.unpack_from(data, at)
        begin = at + _LEAST_HEADER.size
        if len(data) - begin < length:
            break
        at = begin + length
        frames.append((number, bytes(data[begin:at])))
    return frames, at


class _LeastCaller(asyncio.Protocol):
    """Sends calls, and ends their futures with what comes back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._sent = 0
        self._out: list[bytes] = []
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def call(self, method: str, value: Any) -> asyncio.Future[Any]:
        """Send one call with all others of this turn of the loop."""
        self._sent += 1
        body = pickle.dumps((method, (value,), {}), 5)
        future = self._futures[self._sent] = self._loop.create_future()
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += (_LEAST_HEADER.pack(len(body), self._sent), body)
        return future

    def _flush(self) -> None:
        self._transport.writelines(self._out)
        self._out = []

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        frames, end = _cut_frames(self._buffer)
        self._buffer = self._buffer[end:]
        for number, body in frames:
            self._futures.pop(number).set_result(pickle.loads(body))


def serve_least(fd: int) -> None:
    """Be the other side of `least_python`."""
    body, buffer = Body(), bytearray()
    with socket.socket(fileno=fd) as sock:
        while data := sock.recv(1 << 18):
            buffer += data
            frames, end = _cut_frames(buffer)
            del buffer[:end]
            for number, message in frames:
                method, args, kwargs = pickle.loads(message)
                reply = pickle.dumps(getattr(body, method)(*args, **kwargs), 5)
                sock.sendall(_LEAST_HEADER.pack(len(reply), number) + reply)


def executor(effort: Effort) -> Numbers:
    """The standard library's ProcessPoolExecutor, started by spawn."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return _measure_futures(effort, begin, lambda function, value: pool.submit(function, value))


def loky(effort: Effort) -> Numbers:
    """The executor of joblib."""
    from loky import ProcessPoolExecutor as LokyExecutor

    begin = time.perf_counter()
    with LokyExecutor(1) as pool:
        return _measure_futures(effort, begin, lambda function, value: pool.submit(function, value))


def _measure_futures(
    effort: Effort, begin: float, submit: Callable[[Callable[[Any], Any], Any], Future[Any]]
) -> Numbers:
    return _measure_blocking(
        effort,
        begin,
        submit,
        wait=lambda future: future.result(),
        wait_all=lambda all_: [each.result() for each in all_],
    )


def pool(effort: Effort) -> Numbers:
    """The standard library's multiprocessing.Pool, started by spawn."""
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return _measure_blocking(
            effort,
            begin,
            lambda function, value: pool.apply_async(function, (value,)),
            wait=lambda result: result.get(),
            wait_all=lambda results: [result.get() for result in results],
        )


def ray(effort: Effort) -> Numbers:
    """A Ray actor on a Ray of this machine."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        remote_body = ray.remote(Body)
        warm = remote_body.remote()
        ray.get(warm.noop.remote(None))
        begin = time.perf_counter()
        body = remote_body.remote()
        methods = {noop: body.noop, echo: body.echo}
        return _measure_blocking(
            effort,
            begin,
            lambda function, value: methods[function].remote(value),
            wait=ray.get,
            wait_all=ray.get,
            num_large=effort.num_large,
        )
    finally:
        ray.shutdown()


def _measure_blocking(
    effort: Effort,
    begin: float,
    send: Callable[[Callable[[Any], Any], Any], Any],
    *,
    wait: Callable[[Any], Any],
    wait_all: Callable[[list[Any]], Any],
    num_large: int = 1,
) -> Numbers:
    """Measure something that is called from a thread and waited for.

    Those whose large arrays take seconds send them only once: they keep no memory from one time to the next.
    """
    wait(send(noop, None))
    numbers = {SPAWN: (time.perf_counter() - begin) * 1e3}
    times = _time(lambda: wait(send(noop, PAYLOADS["1 KB"])), effort.num_round_trips // 4)
    numbers[P50] = statistics.median(times) * 1e6
    for size, payload in PAYLOADS.items():
        waves = max(1, effort.num_waves // 2)
        seconds = sum(_time(lambda payload=payload: wait_all([send(noop, payload) for _ in range(IN_FLIGHT)]), waves))
        numbers[rate(size)] = waves * IN_FLIGHT / seconds
    for size, num_bytes in LARGE_BYTES.items():
        data = _large(num_bytes)
        times = _time(lambda data=data: wait(send(echo, data)), num_large)
        numbers[large(size)] = statistics.median(times) * 1e3
    return numbers


def ours(effort: Effort, *, uvloop: bool) -> Numbers:
    """Our actors, called from an asyncio or a uvloop loop."""
    before = _alive()
    with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
        numbers = runner.run(_ours(effort))
    numbers[LEFT] = float(max(0, _alive() - before))
    return numbers


async def _ours(effort: Effort) -> Numbers:
    numbers: Numbers = {}
    async with ActorSystem(num_cpus=64) as system:
        await system.spawn(Body).ready()
        begin = time.perf_counter()
        body: Any = system.spawn(Body)
        await body.noop.remote(None)
        numbers[SPAWN] = (time.perf_counter() - begin) * 1e3
        small = PAYLOADS["1 KB"]
        times = await _time_async(lambda: body.noop.remote(small), effort.num_round_trips)
        numbers[P50] = statistics.median(times) * 1e6
        for size, payload in PAYLOADS.items():
            numbers[rate(size)] = await _calls_per_second(body.noop.remote, payload, effort.num_waves)
        numbers |= await _cpu_of_calls(
            lambda method, value: getattr(body, method).remote(value), small, effort.num_waves
        )
        for size, num_bytes in LARGE_BYTES.items():
            data = _large(num_bytes)
            times = await _time_async(lambda data=data: body.echo.remote(data), effort.num_large)
            numbers[large(size)] = statistics.median(times) * 1e3
            numbers[COPIES] = float(await body.copied_bytes.remote(data))
        await body.stop()
        numbers[CANCEL] = await _cancel(system.spawn(Body))
        numbers[CANCEL_KEEP] = await _cancel(system.spawn(Body, on_cancel="interrupt"))
        numbers[DEATH] = await _kill(system.spawn(Body))
        numbers |= await _fifty(system)
        if importlib.util.find_spec("torch"):
            numbers[PSS_TORCH] = await _pss_with_torch(system)
    return numbers


async def _calls_per_second(call: Callable[[Any], Awaitable[Any]], payload: Any, num_waves: int) -> float:
    async def caller() -> None:
        for _ in range(num_waves):
            await call(payload)

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return num_waves * IN_FLIGHT / (time.perf_counter() - begin)


async def _cpu_of_calls(call: Callable[[str, Any], Awaitable[Any]], payload: Any, num_waves: int) -> Numbers:
    child_before, before = await call("cpu_s", None), time.process_time()
    await _calls_per_second(lambda value: call("noop", value), payload, num_waves)
    driver, child = time.process_time() - before, await call("cpu_s", None) - child_before
    return {name: spent * 1e6 / (num_waves * IN_FLIGHT) for name, spent in ((DRIVER_CPU, driver), (CHILD_CPU, child))}


async def _cancel(body: Any) -> float:
    await body.noop.remote(None)
    spinning = asyncio.ensure_future(body.spin.remote())
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    spinning.cancel()
    await body.noop.remote(None)
    return (time.perf_counter() - begin) * 1e3


async def _kill(body: Any) -> float:
    await body.noop.remote(None)
    dying = body.spin.remote()
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    os.kill(body.pid, signal.SIGKILL)
    try:
        await dying
    except ActorDiedError:
        return (time.perf_counter() - begin) * 1e3
    raise AssertionError("it should have died")


async def _fifty(system: ActorSystem) -> Numbers:
    begin = time.perf_counter()
    handles: list[Any] = [system.spawn(Body, num_cpus=0.5) for _ in range(50)]
    await asyncio.gather(*(handle.noop.remote(None) for handle in handles))
    up = time.perf_counter()
    pss = statistics.median(_pss_bytes(handle.pid) for handle in handles)
    stopping = time.perf_counter()
    await asyncio.gather(*(handle.stop() for handle in handles))
    down = time.perf_counter() - stopping
    return {UP: (up - begin) * 1e3, DOWN: down * 1e3, PSS: pss / 2**20}


async def _pss_with_torch(system: ActorSystem) -> float:
    handles: list[Any] = [system.spawn(Body, preload=["torch"]) for _ in range(5)]
    await asyncio.gather(*(handle.noop.remote(None) for handle in handles))
    pss = statistics.median(_pss_bytes(handle.pid) for handle in handles)
    await asyncio.gather(*(handle.stop() for handle in handles))
    return pss / 2**20


def importing(_effort: Effort) -> Numbers:
    """The import of `ActorSystem`, which brings the layer, in a fresh interpreter; compiled before, as if installed."""
    code = (
        "import time; t = time.perf_counter(); from xrl_lite.actors import ActorSystem; print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", code]
        runs = [subprocess.run(command, capture_output=True, check=True, env=environment) for _ in range(4)]
    return {IMPORT: statistics.median(float(run.stdout) for run in runs[1:]) * 1e3}


# ---------------------------------------------------------------- gates


@dataclass(frozen=True)
class Gate:
    """One promise: a number and its bound. `value` is None where a contender was skipped."""

    name: str
    value: float | None
    bound: float
    at_least: bool
    least: float | None = None
    """What the least that Python can do would reach in the place of ours."""

    @property
    def verdict(self) -> str:
        """Whether it holds."""
        if self.value is None:
            return "skipped"
        return "holds" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "MISSED"


def gates(table: dict[str, Numbers]) -> list[Gate]:
    """Return every promise with what was measured. Ours is the best loop that is installed."""
    own = table.get("ours, uvloop") or table.get("ours, asyncio") or {}
    bare = table.get("bare socket, uvloop", {}).get(P50)
    least = table.get("least in Python, uvloop", {})
    ppe, ray_ = table.get("ProcessPoolExecutor", {}), table.get("ray", {})

    def times_faster(number: str, other: Numbers, *, is_rate: bool = False) -> float | None:
        if number not in own or number not in other:
            return None
        return own[number] / other[number] if is_rate else other[number] / own[number]

    def at_most(number: str, bound: float, source: Numbers = own) -> Gate:
        return Gate(number, source.get(number), bound, at_least=False)

    found = [
        Gate(
            "round trip / bare uvloop socket (or 15 us above it)",
            own[P50] / bare if bare and P50 in own else None,
            max(1.4, 1 + 15 / bare) if bare else 1.4,
            at_least=False,
        ),
        Gate("round trip / the least in Python", own[P50] / least[P50] if least and P50 in own else None, 1.4, False),
        Gate("round trip, times faster than Ray", times_faster(P50, ray_), 10, at_least=True),
        Gate("round trip, times faster than ProcessPoolExecutor", times_faster(P50, ppe), 2.5, at_least=True),
    ]
    for size, other_name, other, bound in (
        ("1 KB", "Ray", ray_, 20),
        ("1 KB", "ProcessPoolExecutor", ppe, 10),
        ("10 KB", "Ray", ray_, 12),
    ):
        name = rate(size)
        value = times_faster(name, other, is_rate=True)
        limit = least[name] / other[name] if name in least and name in other else None
        found.append(Gate(f"calls/s of {size}, times {other_name}", value, bound, at_least=True, least=limit))
    for size in LARGE_BYTES:
        found.append(Gate(f"{size}, times faster than ProcessPoolExecutor", times_faster(large(size), ppe), 10, True))
        found.append(Gate(f"{size}, times faster than Ray", times_faster(large(size), ray_), 1, at_least=True))
    limits = {COPIES: 0, SPAWN: 30, LEFT: 0, PSS: 10, PSS_TORCH: 40, DEATH: 50, CANCEL: 20}
    found += [at_most(number, bound) for number, bound in limits.items()]
    return [*found, at_most(IMPORT, 150, table.get("import", {}))]


# ---------------------------------------------------------------- the run


def _alive() -> int:
    """Processes below this one, and descriptors of this one but for the blocks of memory that it will use again."""
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ends in this moment
            children += (task / "children").read_text().split()
    return len(children) + sum("memfd:xrl-lite" not in descriptor for descriptor in descriptors)


def _pss_bytes(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _large(num_bytes: int) -> Any:
    if importlib.util.find_spec("numpy") is None:
        return bytes(num_bytes)
    import numpy as np

    return np.ones(num_bytes // 8)


def _time(call: Callable[[], Any], count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


async def _time_async(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begin)
    return times


def _loop_factory(uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if not uvloop:
        return asyncio.new_event_loop
    import uvloop as module

    return module.new_event_loop


CONTENDERS: dict[str, tuple[Callable[[Effort], Numbers], str]] = {
    "bare socket, asyncio": (lambda effort: bare_socket(effort, uvloop=False), "asyncio"),
    "bare socket, uvloop": (lambda effort: bare_socket(effort, uvloop=True), "uvloop"),
    "least in Python, asyncio": (lambda effort: least_python(effort, uvloop=False), "asyncio"),
    "least in Python, uvloop": (lambda effort: least_python(effort, uvloop=True), "uvloop"),
    "ours, asyncio": (lambda effort: ours(effort, uvloop=False), "asyncio"),
    "ours, uvloop": (lambda effort: ours(effort, uvloop=True), "uvloop"),
    "ProcessPoolExecutor": (executor, "concurrent"),
    "multiprocessing.Pool": (pool, "multiprocessing"),
    "loky": (loky, "loky"),
    "ray": (ray, "ray"),
    "import": (importing, "xrl_lite"),
}
"""Name -> what measures it, and the module that has to be installed."""


def choose(only: list[str]) -> dict[str, Callable[[Effort], Numbers]]:
    """Return the contenders that are installed and wanted; say which are not."""
    chosen: dict[str, Callable[[Effort], Numbers]] = {}
    for name, (run, module) in CONTENDERS.items():
        if only and not any(word in name for word in only):
            continue
        if importlib.util.find_spec(module) is None:
            print(f"{name}: skipped, {module} is not installed")
        else:
            chosen[name] = run
    return chosen


_SPIN = """
import os
os.sched_setaffinity(0, {{{core}}})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == {parent}:
    pass
"""


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Have a process that gives way to all others turn on every core."""
    spinners = [
        subprocess.Popen([sys.executable, "-c", _SPIN.format(core=core, parent=os.getpid())])
        for core in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def measure(contenders: dict[str, Callable[[Effort], Numbers]], effort: Effort, runs: int) -> dict[str, list[Numbers]]:
    """Run all contenders `runs` times, one after the other in each round."""
    results: dict[str, list[Numbers]] = {name: [] for name in contenders}
    for number in range(runs):
        for name, run in contenders.items():
            begin = time.perf_counter()
            results[name].append(run(effort))
            print(f"round {number + 1} of {runs}: {name}, {time.perf_counter() - begin:.1f} s", flush=True)
    return results


def print_table(table: dict[str, Numbers]) -> None:
    """Print every number, and in brackets how it compares with ours (times as long, or times as many)."""
    own = table.get("ours, uvloop") or table.get("ours, asyncio") or {}
    names = [name for name in table if name != "import"]
    rows = list(dict.fromkeys(row for numbers in table.values() for row in numbers))
    print(f"\n{'':42}" + "".join(f"{name:>26}" for name in names))
    for row in rows:
        cells = [_cell(table[name].get(row), own.get(row)) for name in names]
        if any(cell != "-" for cell in cells):
            print(f"{row:42}" + "".join(f"{cell:>26}" for cell in cells))


def _cell(value: float | None, own: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" + (f" ({value / own:.2f}x)" if own else "")


def main() -> None:
    """Measure all contenders, print a table and the gates, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--runs", type=int, help="rounds; 5, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="one round with few repetitions: does it run at all?")
    parser.add_argument("--only", nargs="*", default=[], help="contenders whose name contains one of these words")
    parser.add_argument("--let-sleep", action="store_true", help="do not keep the cores awake")
    parser.add_argument("--pong", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--least", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--uvloop", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pong is not None:
        with asyncio.Runner(loop_factory=_loop_factory(options.uvloop)) as runner:
            runner.run(pong(options.pong))
        return
    if options.least is not None:
        serve_least(options.least)
        return
    effort = QUICK if options.quick else FULL
    runs = options.runs or (1 if options.quick else 5)
    collect_rarely()
    with contextlib.nullcontext() if options.let_sleep else cores_awake():
        results = measure(choose(options.only), effort, runs)
    table = {
        name: {row: statistics.median(numbers[row] for numbers in rounds) for row in rounds[0]}
        for name, rounds in results.items()
    }
    print_table(table)
    load, cpus = os.getloadavg()[1], len(os.sched_getaffinity(0))
    if load > (2 if options.let_sleep else 3) * cpus:  # we ourselves keep about two of them busy, and all of them awake
        print(f"\nThe load average is {load:.1f} on {cpus} CPUs: others work here, and the numbers are theirs as well.")
    verdicts = gates(table)
    print()
    for gate in verdicts:
        value = "-" if gate.value is None else f"{gate.value:,.2f}"
        limit = "" if gate.least is None else f" (the least in Python: {gate.least:,.2f})"
        print(
            f"{gate.name:56} {value:>10}  {'>=' if gate.at_least else '<='} {gate.bound:<8,.2f} {gate.verdict}{limit}"
        )
    if options.json:
        machine = {
            "cpus": cpus,
            "load_average": load,
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        judged = [{**vars(gate), "verdict": gate.verdict} for gate in verdicts]
        report = {"machine": machine, "runs": runs, "median": table, "rounds": results, "gates": judged}
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
