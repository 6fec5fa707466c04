"""A driver that the tests end in every way. Prints the ids of its processes, then waits in a call.

Usage: python -m tests.processes.driver_program how
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from tests.conftest import children_of
from tests.processes import bodies
from xrl_lite.actors import ActorSystem, default_system


async def start(system: ActorSystem) -> list[Any]:
    handles = [system.spawn(bodies.Victim, num_cpus=0.1) for _ in range(2)]
    handles.append(system.spawn(bodies.Mixed, num_cpus=0.1))
    await handles[0].start_grandchildren.remote()
    for handle in handles:
        await handle.ready()
    sys.stdout.write(" ".join(map(str, children_of(os.getpid()))) + "\n")
    sys.stdout.flush()
    return handles


async def wait_in_calls(how: str) -> None:
    async with ActorSystem() as system:
        handles = await start(system)
        if how == "raise":
            raise RuntimeError("the driver failed")
        await asyncio.gather(handles[0].hang_in_python.remote(), handles[1].sleep.remote(600))


async def leave_open() -> None:
    handles = await start(default_system())
    handles[0].hang_in_python.remote()


async def interrupted_twice() -> None:
    system = ActorSystem()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, system.kill_all)
    handles = await start(system)
    handles[0].hang_in_python.remote()
    await system.shutdown(grace_s=600)


def main() -> None:
    how = sys.argv[1]
    if how == "leave_open":
        asyncio.run(leave_open())
    elif how == "interrupted_twice":
        asyncio.run(interrupted_twice())
    else:
        asyncio.run(wait_in_calls(how))


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a parent that ignores it (nohup) hands that down
    main()
