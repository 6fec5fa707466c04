"""Where a process has no descriptors left, or the kernel carries no more of them, no call is lost without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import bodies
from xrl_lite.actors import ActorSystem, RestartPolicy
from xrl_lite.errors import ActorDiedError

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
FORGIVING = RestartPolicy(max_restarts=100, backoff_s=0.0)

MANY_UNDER_WAY = """
import ctypes, resource
from tests.processes.bodies import Victim
from xrl_lite.actors import ActorSystem, share

def be_like_any_user():
    # root may have any number of descriptors under way: give up CAP_SYS_ADMIN and CAP_SYS_RESOURCE
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 21 | 1 << 24)
    assert libc.capset(header, sets) == 0

system = ActorSystem(num_cpus=8)
actors = [system.spawn(Victim) for _ in range(3)]
for actor in actors:
    actor.ready().result({limit_s})
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
be_like_any_user()
value = share(bytes(100_000))
blockers = [actor.sleep.remote(0.5) for actor in actors]
calls = [actor.take.remote(value) for actor in actors for _ in range(200)]
print(sum(call.result({limit_s}) for call in calls))
system.shutdown_now()
"""


def test_calls_wait_while_the_kernel_carries_no_more_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY_UNDER_WAY.format(limit_s=LIMIT_S)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    assert done.stdout == "600\n", done.stderr


@pytest.mark.parametrize("kind", [bodies.Victim, bodies.Mixed])
async def test_an_actor_without_descriptors_ends_and_says_why(system: ActorSystem, kind: type) -> None:
    handle = system.spawn(kind, restart=FORGIVING)
    errors: list[ActorDiedError] = []
    handle.on_death(errors.append)
    await handle.use_up_descriptors.remote()
    assert await handle.echo.remote(bytes(100_000)) == bytes(100_000), "its successor serves the call"
    assert "no descriptors left" in str(errors[0])
    await handle.stop(0.0)
