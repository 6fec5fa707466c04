"""How fast calls to actors are, beside what else there is. Run: ``python examples/benchmarks/actors.py [--json FILE]``.

Every contender runs in the same process, one after the other, so that the ratios hold also on a shared machine; each
number is the median of several runs. What is not installed is skipped with a note.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import pickle
import signal
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from xrl_lite.actors import ActorSystem
from xrl_lite.errors import ActorDiedError

RUNS = 5
PAYLOADS = {"1 KB": {"response": "x" * 1000, "label": "42"}, "10 KB": {"response": "x" * 10_000, "label": "42"}}
LARGE_BYTES = {"16 MB": 16 << 20, "256 MB": 256 << 20}


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

    def spin(self) -> None:
        """Compute for ever."""
        while True:
            pass


def socket_pair() -> dict[str, float]:
    """The floor: blocking ping-pong of a pickled dict with a forked child over a Unix socket."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        while data := theirs.recv(1 << 16):
            pickle.loads(data)
            theirs.send(pickle.dumps(None))
        os._exit(0)
    theirs.close()

    def call() -> None:
        ours.send(pickle.dumps(("noop", PAYLOADS["1 KB"])))
        pickle.loads(ours.recv(1 << 16))

    p50 = statistics.median(_time(call, 2000))
    ours.close()
    os.waitpid(pid, 0)
    return {"round trip p50 (us)": p50 * 1e6}


def executor() -> dict[str, float]:
    """The standard library's ProcessPoolExecutor, started by spawn."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(noop, None).result()
        numbers = {
            "round trip p50 (us)": statistics.median(_time(lambda: pool.submit(noop, PAYLOADS["1 KB"]).result(), 300))
            * 1e6
        }
        for size, payload in PAYLOADS.items():
            begin = time.perf_counter()
            for future in [pool.submit(noop, payload) for _ in range(2000)]:
                future.result()
            numbers[f"calls/s {size}"] = 2000 / (time.perf_counter() - begin)
        for size, num_bytes in LARGE_BYTES.items():
            data = _large(num_bytes)
            numbers[f"echo {size} (ms)"] = _time(lambda data=data: pool.submit(echo, data).result(), 1)[0] * 1e3
    return numbers


def ours(uvloop: bool) -> dict[str, float]:
    """Our actors, called from an asyncio or a uvloop loop."""
    with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
        return runner.run(_ours())


async def _ours() -> dict[str, float]:
    numbers: dict[str, float] = {}
    async with ActorSystem(num_cpus=64) as system:
        warm = system.spawn(Body)
        await warm.ready()
        begin = time.perf_counter()
        body = system.spawn(Body)
        await body.noop.remote(None)
        numbers["spawn to first reply, warm (ms)"] = (time.perf_counter() - begin) * 1e3
        small = PAYLOADS["1 KB"]
        times = await _time_async(lambda: body.noop.remote(small), 2000)
        numbers["round trip p50 (us)"] = statistics.median(times) * 1e6
        for size, payload in PAYLOADS.items():
            numbers[f"calls/s {size}"] = await _calls_per_second(body, payload)
        for size, num_bytes in LARGE_BYTES.items():
            data = _large(num_bytes)
            times = await _time_async(lambda data=data: body.echo.remote(data), 3)
            numbers[f"echo {size} (ms)"] = statistics.median(times) * 1e3
        numbers |= await _endings(body)
        numbers |= await _fifty(system)
    return numbers


async def _calls_per_second(body: Any, payload: Any) -> float:
    async def caller() -> None:
        for _ in range(5):
            await body.noop.remote(payload)

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(1000)))
    return 5000 / (time.perf_counter() - begin)


async def _endings(body: Any) -> dict[str, float]:
    spinning = asyncio.ensure_future(body.spin.remote())
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    spinning.cancel()
    await body.noop.remote(None)
    cancelled = time.perf_counter() - begin
    dying = body.spin.remote()
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    os.kill(body.pid, signal.SIGKILL)
    try:
        await dying
    except ActorDiedError:
        died = time.perf_counter() - begin
    else:
        raise AssertionError("it should have died")
    return {"cancelled, and serving again (ms)": cancelled * 1e3, "death noticed (ms)": died * 1e3}


async def _fifty(system: ActorSystem) -> dict[str, float]:
    begin = time.perf_counter()
    handles = [system.spawn(Body, num_cpus=0.5) for _ in range(50)]
    await asyncio.gather(*(handle.noop.remote(None) for handle in handles))
    up = time.perf_counter()
    pss = [_pss_bytes(handle.pid) for handle in handles]
    await asyncio.gather(*(handle.stop() for handle in handles))
    return {
        "50 actors up (ms)": (up - begin) * 1e3,
        "50 actors down (ms)": (time.perf_counter() - up) * 1e3,
        "idle actor PSS (MB)": statistics.median(pss) / 2**20,
    }


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


def measure(run: Callable[[], dict[str, float]], runs: int) -> dict[str, float]:
    """Return the median of every number over `runs` runs."""
    results = [run() for _ in range(runs)]
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def main() -> None:
    """Measure all contenders, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    contenders: dict[str, Callable[[], dict[str, float]]] = {"socket pair": socket_pair}
    contenders["ours, asyncio"] = lambda: ours(uvloop=False)
    if importlib.util.find_spec("uvloop"):
        contenders["ours, uvloop"] = lambda: ours(uvloop=True)
    else:
        print("uvloop is not installed: skipped")
    contenders["ProcessPoolExecutor"] = executor
    table = {name: measure(run, options.runs) for name, run in contenders.items()}
    rows = list(dict.fromkeys(row for numbers in table.values() for row in numbers))
    print(f"{'':36}" + "".join(f"{name:>22}" for name in table))
    for row in rows:
        cells = (f"{numbers[row]:,.1f}" if row in numbers else "-" for numbers in table.values())
        print(f"{row:36}" + "".join(f"{cell:>22}" for cell in cells))
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
