"""Every way in which a child can end, or fail to: each has its typed ending, and the actor serves again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import bodies, fork_limits
from xrl_lite.actors import ActorHandle, ActorSystem, RestartPolicy
from xrl_lite.actors.zygote import parent_of
from xrl_lite.errors import (
    ActorDiedError,
    ActorTaskError,
    ActorTimeoutError,
    ActorUnavailableError,
)

LIMIT_S = 30.0
FORGIVING = RestartPolicy(max_restarts=100, backoff_s=0.0)


@pytest.fixture
def victim(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(bodies.Victim, restart=FORGIVING)
    yield handle
    handle.stop(0.0).result(LIMIT_S)


@pytest.fixture
def keeper(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(bodies.Keeper, on_cancel="interrupt")
    yield handle
    handle.stop(0.0).result(LIMIT_S)


@pytest.fixture
def mixed(system: ActorSystem) -> Iterator[ActorHandle]:
    handle = system.spawn(bodies.Mixed, max_concurrency=4, restart=FORGIVING)
    yield handle
    handle.stop(0.0).result(LIMIT_S)


async def until(condition: Any) -> None:
    """Wait until `condition` holds; it always does within the limit, or the test fails."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 it is about files and processes, which tell nobody
            await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def exists(pid: int | None) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("end_hard", (3,), r"exited with code 3 while it ran end_hard\(\)(?s:.*)last words"),
        ("segfault", (), r"killed by SIGSEGV while it ran segfault\(\)(?s:.*)in segfault"),
        ("kill_itself", (), r"killed by SIGKILL"),
        ("close_descriptors", (), r"closed its connection"),
    ],
)
async def test_a_crash_names_its_cause_and_the_actor_serves_again(
    victim: ActorHandle, log_dir: Path, method: str, args: tuple[Any, ...], message: str
) -> None:
    call = victim.method_named(method).remote(*args)
    behind = [victim.ping.remote() for _ in range(5)]
    with pytest.raises(ActorDiedError, match=message) as caught:
        await call
    assert f"'{victim.name}'" in str(caught.value)
    assert str(log_dir / f"{victim.name}.log") in str(caught.value)
    assert await asyncio.gather(*behind) == ["pong"] * 5
    assert victim.restarts == 1


async def test_a_crash_of_an_async_method_is_told_to_all_calls_that_ran(mixed: ActorHandle) -> None:
    running = [mixed.sleep.remote(600) for _ in range(2)]
    assert await mixed.ping.remote() == "pong"
    with pytest.raises(ActorDiedError, match="code 4"):
        await mixed.end_hard.remote(4)
    for call in running:
        with pytest.raises(ActorDiedError, match="code 4"):
            await call
    assert await mixed.ping.remote() == "pong"


async def test_sigkill_from_outside_fails_the_running_call_and_serves_the_waiting_ones(
    victim: ActorHandle, tmp_path: Path
) -> None:
    marker = tmp_path / "begun"
    running = victim.mark_and_sleep.remote(str(marker), 600)
    waiting = [victim.ping.remote() for _ in range(4)]
    await until(marker.exists)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=r"SIGKILL.* while it ran mark_and_sleep\(\)"):
        await running
    assert await asyncio.gather(*waiting) == ["pong"] * 4


@pytest.mark.parametrize("method", ["hang_in_python", "hang_in_regex", "hang_and_swallow"])
async def test_a_hang_ends_at_its_limit_and_the_child_is_replaced(victim: ActorHandle, method: str) -> None:
    before = await victim.process_id.remote()
    with pytest.raises(ActorTimeoutError, match=rf"(?s){method}\(\) of actor.*It was here.* in {method}"):
        await victim.method_named(method).options(timeout_s=0.2).remote()
    after = await victim.process_id.remote()
    assert after != before
    assert not exists(before)


async def test_where_it_hung_is_told_also_by_a_child_that_is_slow_to_say_so(
    victim: ActorHandle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("xrl_lite.actors.process_actor._DUMP_WITHIN_S", LIMIT_S)
    pid, marker = await victim.process_id.remote(), tmp_path / "begun"
    call = victim.mark_and_sleep.options(timeout_s=2.0).remote(str(marker), 600)
    await until(marker.exists)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: victim._actor._expiring)  # type: ignore[attr-defined]
    await asyncio.sleep(0.05)  # as on a machine that is busy with others
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(ActorTimeoutError, match=r"(?s)It was here.* in mark_and_sleep"):
        await call


async def test_a_kill_that_comes_too_late_is_not_taken_for_the_cause(system: ActorSystem, victim: ActorHandle) -> None:
    pid = await victim.process_id.remote()
    server, child = parent_of(pid), victim._actor._child  # type: ignore[attr-defined]
    os.kill(server, signal.SIGSTOP)  # it is the one that tells how a child ended
    try:
        call = victim.end_hard.remote(3)
        await until(lambda: child._has_vanished)
        system._hub.post(child.kill, "it took too long")
    finally:
        os.kill(server, signal.SIGCONT)
    with pytest.raises(ActorDiedError, match="exited with code 3"):
        await call


async def test_the_limit_counts_from_when_a_call_begins(victim: ActorHandle) -> None:
    first = victim.sleep.remote(2.5)
    behind = [victim.ping.options(timeout_s=2.0).remote() for _ in range(5)]
    assert await asyncio.gather(*behind) == ["pong"] * 5
    assert first.done()
    assert victim.restarts == 0


async def test_cancelling_a_running_sync_call_replaces_the_child(victim: ActorHandle, tmp_path: Path) -> None:
    before = await victim.process_id.remote()
    marker = tmp_path / "begun"

    async def wait_for_it() -> None:
        await victim.mark_and_sleep.remote(str(marker), 600)

    task = asyncio.create_task(wait_for_it())
    await until(marker.exists)
    behind = victim.process_id.remote()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await behind != before
    assert victim.statistics()["num_cancelled"] == 1


async def test_an_interrupted_call_leaves_state_and_process_alone(
    keeper: ActorHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrl_lite.actors.process_actor._INTERRUPT_GRACE_S", LIMIT_S)
    assert await keeper.add.remote() == 1
    before = await keeper.process_id.remote()
    for method in ("sleep", "hang_in_python"):
        args = (600,) if method == "sleep" else ()
        with pytest.raises(ActorTimeoutError):
            await keeper.method_named(method).options(timeout_s=0.1).remote(*args)
    assert await keeper.add.remote() == 2
    assert await keeper.process_id.remote() == before


async def test_an_interrupt_waits_until_the_arguments_are_there(keeper: ActorHandle, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    call = keeper.echo.remote(bodies.SlowToRebuild(str(begun)))
    await until(begun.exists)
    call.cancel()
    seen = await keeper.evaluate.remote("SlowToRebuild.rebuilt")
    assert seen == ["begun", "done"]
    assert keeper.restarts == 0


async def test_what_a_sync_method_returns_to_be_awaited_waits_for_no_sync_method(mixed: ActorHandle) -> None:
    first = mixed.ping_by_sync.remote()
    for _ in range(2):
        mixed.sleep_sync.remote(600.0)
    assert await first == "pong"


async def test_a_sync_wrapper_of_an_async_function_runs_in_the_main_thread(mixed: ActorHandle) -> None:
    assert await mixed.ping_in_a_loop_of_its_own.remote() == "pong"


async def test_a_call_that_cannot_be_interrupted_is_ended_with_its_process(keeper: ActorHandle) -> None:
    assert await keeper.add.remote() == 1
    with pytest.raises(ActorTimeoutError):
        await keeper.hang_and_swallow.options(timeout_s=0.1).remote()
    assert await keeper.add.remote() == 1
    assert keeper.restarts == 1


async def test_a_sync_method_does_not_hold_up_async_ones(mixed: ActorHandle) -> None:
    slow = mixed.sleep_sync.remote(600)
    async with asyncio.timeout(LIMIT_S):
        while not await mixed.sync_has_begun.remote():
            pass
    assert await mixed.ping.remote() == "pong"
    slow.cancel()
    assert await mixed.ping.remote() == "pong"


async def test_an_async_method_that_blocks_its_loop_is_ended_at_its_limit(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrl_lite.actors.process_actor._ASYNC_GRACE_S", 0.1)
    handle = system.spawn(bodies.Mixed)
    with pytest.raises(ActorTimeoutError):
        await handle.block_the_loop.options(timeout_s=0.1).remote()
    assert await handle.ping.remote() == "pong"
    assert handle.restarts == 1
    await handle.stop()


async def test_a_blocked_loop_is_noticed_without_a_limit() -> None:
    async with ActorSystem(num_cpus=2, heartbeat_timeout_s=2.0) as system:
        handle = system.spawn(bodies.Mixed, restart=FORGIVING)
        with pytest.raises(ActorDiedError, match="event loop"):
            await handle.block_the_loop.remote()
        assert await handle.sleep_sync.remote(2.5) == 2.5  # long, but not stuck
        assert handle.restarts == 1


async def test_a_large_result_arrives(victim: ActorHandle) -> None:
    assert len(await victim.large_result.remote(200_000_000)) == 200_000_000


async def test_ten_megabytes_of_output_block_nobody(victim: ActorHandle, log_dir: Path) -> None:
    await victim.print_much.remote(10_000_000)
    assert (log_dir / f"{victim.name}.log").stat().st_size >= 10_000_000


async def test_output_goes_to_the_log_of_the_actor_at_once(system: ActorSystem, log_dir: Path) -> None:
    handle = system.spawn(bodies.Victim, name="judger/0")
    await handle.say.remote("hello")
    assert (log_dir / "judger" / "0.log").read_text() == "hello\nerr hello\n"
    await handle.stop()


async def test_only_the_last_lines_are_quoted(victim: ActorHandle) -> None:
    for number in range(60):
        victim.say.remote(f"line {number}")
    with pytest.raises(ActorDiedError) as caught:
        await victim.end_hard.remote(1)
    assert "line 59" in str(caught.value)
    assert "line 30" not in str(caught.value)


OVER_MEMORY = r"MB of memory, with what it started, and its limit \(memory_bytes\) is 200 MB"


@pytest.mark.parametrize("method", ["use_memory", "use_memory_below"], ids=["itself", "what it starts"])
async def test_a_child_over_its_memory_ceiling_is_ended_and_the_error_says_so(system: ActorSystem, method: str) -> None:
    handle = system.spawn(bodies.Victim, memory_bytes=200 << 20, restart=FORGIVING)
    with pytest.raises(ActorDiedError, match=OVER_MEMORY):
        await handle.method_named(method).remote(400 << 20)
    assert await handle.ping.remote() == "pong"
    await handle.stop()


FORKING = """
import os
from xrl_lite.actors.machine import tree_bytes

hog = bytearray(b"x") * (100 << 20)
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(writes)
    os.read(reads, 1)  # until the parent has ended
    os._exit(0)
print(*(tree_bytes(os.getpid(), exact_above=above) >> 20 for above in (0, 1 << 40)))
"""


def test_memory_that_forks_share_counts_once_where_it_matters() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=True, timeout=30)
    exact, rough = map(int, ended.stdout.split())
    assert 100 <= exact < 150
    assert rough >= 200


async def test_signal_based_limits_of_user_code_work(victim: ActorHandle) -> None:
    assert await victim.signal_limit.remote() == "alarm"


async def test_a_constructor_that_hangs_is_ended(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stubborn, "hang", start_timeout_s=0.2)
    call = handle.ping.remote()
    with pytest.raises(ActorTimeoutError, match=r"__init__\(\) of actor .* 0.2 s"):
        await handle.ready()
    with pytest.raises(ActorTimeoutError):
        await call


async def test_a_fork_server_that_hangs_while_it_imports_holds_no_name_and_no_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs_when_imported.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    async with ActorSystem(num_cpus=2) as system:
        hanging = system.spawn(
            bodies.Victim, name="a", num_cpus=2, preload=["hangs_when_imported"], start_timeout_s=0.5
        )
        with pytest.raises(ActorTimeoutError, match=r"'a' has no process after 5 s(?s:.*)hangs_when_imported"):
            await hanging.ready()
        await hanging.stop()
        stopped = system.spawn(bodies.Victim, name="a", num_cpus=2, preload=["hangs_when_imported"])
        await stopped.stop(0.0)
        assert await system.spawn(bodies.Victim, name="a", num_cpus=2).ping.remote() == "pong"


@pytest.mark.parametrize(("how", "code"), [("die", 7), ("exit", 8)])
async def test_a_constructor_that_ends_the_process_is_told(system: ActorSystem, how: str, code: int) -> None:
    handle = system.spawn(bodies.Stubborn, how)
    with pytest.raises(ActorDiedError, match=rf"code {code} while it ran __init__\(\)"):
        await handle.ready()


async def test_a_constructor_that_always_dies_uses_up_its_restarts(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stubborn, "die", restart=RestartPolicy(max_restarts=2, backoff_s=0.0))
    with pytest.raises(ActorDiedError):
        await handle.ready()
    assert handle.restarts == 2


async def test_a_constructor_that_raises_no_exception_proper_is_described(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Stubborn, "base")
    with pytest.raises(ActorTaskError, match="KeyboardInterrupt"):
        await handle.ready()


async def test_a_hundred_samples_with_one_that_never_ends(system: ActorSystem) -> None:
    handles = [system.spawn(bodies.Victim) for _ in range(2)]

    async def judge(number: int) -> str:
        handle = handles[number % 2]
        call = handle.ping.options(timeout_s=LIMIT_S) if number else handle.hang_in_python.options(timeout_s=0.5)
        try:
            return await call.remote()
        except ActorTimeoutError:
            return "timeout"

    outcomes = await asyncio.gather(*map(judge, range(100)))
    assert outcomes == ["timeout"] + ["pong"] * 99
    assert await asyncio.gather(*map(judge, range(1, 21))) == ["pong"] * 20
    for handle in handles:
        await handle.stop()


async def test_stop_lets_running_calls_end(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Victim)
    calls = [handle.sleep.remote(0.05) for _ in range(3)]
    await handle.stop()
    assert [await call for call in calls] == [None] * 3


async def test_stop_ends_by_force_what_does_not_end(system: ActorSystem, tmp_path: Path) -> None:
    handle = system.spawn(bodies.Victim)
    marker = tmp_path / "begun"
    call = handle.mark_and_sleep.remote(str(marker), 600)
    await until(marker.exists)
    pid = handle.pid
    await handle.stop(0.1)
    with pytest.raises(ActorUnavailableError, match="stopped"):
        await call
    assert not exists(pid)


async def test_what_an_actor_started_ends_with_it(victim: ActorHandle) -> None:
    grandchildren = await victim.start_grandchildren.remote()
    assert all(map(exists, grandchildren))
    with pytest.raises(ActorDiedError):
        await victim.end_hard.remote(1)
    await until(lambda: not any(map(exists, grandchildren)))


async def test_programs_that_an_actor_starts_can_be_interrupted(victim: ActorHandle) -> None:
    assert await victim.interrupt_a_program.remote() == -signal.SIGINT


async def test_a_fork_that_fails_is_the_end_of_one_actor_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    monkeypatch.setenv(fork_limits.NO_FORKS_WHILE, str(full))
    async with ActorSystem(num_cpus=4) as system:
        old = system.spawn(bodies.Victim, preload=[fork_limits.__name__])
        await old.ready()
        full.touch()
        unborn = system.spawn(bodies.Victim, preload=[fork_limits.__name__])
        with pytest.raises(ActorDiedError, match=r"cannot be started: .*Resource temporarily unavailable"):
            await unborn.ready()
        assert await old.ping.remote() == "pong"
        assert old.restarts == 0
        full.unlink()
        young = system.spawn(bodies.Victim, preload=[fork_limits.__name__])
        assert await young.ping.remote() == "pong"


async def test_the_death_of_the_fork_server_ends_what_its_actors_had_started() -> None:
    async with ActorSystem(num_cpus=2) as system:
        handle = system.spawn(bodies.Victim, restart=FORGIVING)
        below = await handle.start_grandchildren.remote()
        assert handle.pid is not None
        os.kill(parent_of(handle.pid), signal.SIGKILL)
        await until(lambda: not any(map(is_alive, below)))
        assert await handle.ping.remote() == "pong"


async def test_a_dump_harms_no_child_that_is_starting(system: ActorSystem) -> None:
    for _ in range(10):
        handle = system.spawn(bodies.Victim)
        async with asyncio.timeout(LIMIT_S):
            while handle.pid is None:  # noqa: ASYNC110 nobody tells, and it is to be asked at once
                await asyncio.sleep(0)
        await system.dump()
        assert await handle.ping.remote() == "pong"
        await handle.stop(0.0)


async def test_background_processes_of_a_living_actor_survive_the_death_of_another(system: ActorSystem) -> None:
    keeps, dies = system.spawn(bodies.Victim), system.spawn(bodies.Victim, restart=FORGIVING)
    grandchildren = await keeps.start_grandchildren.remote()
    with pytest.raises(ActorDiedError):
        await dies.end_hard.remote(1)
    assert await dies.ping.remote() == "pong"
    assert all(map(exists, grandchildren))
    await keeps.stop()
    await dies.stop()
    await until(lambda: not any(map(exists, grandchildren)))


async def test_no_descriptor_is_left_after_any_ending(victim: ActorHandle) -> None:
    async def round_trip() -> None:
        await victim.large_result.remote(1_000_000)
        with pytest.raises(ActorTimeoutError):
            await victim.sleep.options(timeout_s=0.02).remote(600)
        with pytest.raises(ActorDiedError):
            await victim.end_hard.remote(1)
        victim.large_result.remote(1_000_000).cancel()
        assert await victim.ping.remote() == "pong"

    await round_trip()
    here, there = len(os.listdir("/proc/self/fd")), await victim.open_descriptors.remote()
    for _ in range(5):
        await round_trip()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= here)  # a thread of the system closes them
    async with asyncio.timeout(LIMIT_S):
        while await victim.open_descriptors.remote() > there:  # memory that was lent comes back
            pass


async def test_the_environment_and_threads_of_a_child(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Victim, num_cpus=2.5, env={"MINE": "yes"})
    assert await handle.environment.remote("MINE") == "yes"
    assert await handle.environment.remote("OMP_NUM_THREADS") == "2"
    assert await handle.environment.remote("OMP_WAIT_POLICY") == "PASSIVE"
    assert await handle.environment.remote("PATH") == os.environ["PATH"]
    assert await handle.environment.remote("PYTHONPATH") == os.environ.get("PYTHONPATH")
    await handle.stop()


async def test_memory_that_nobody_reads_is_used_again(victim: ActorHandle, tmp_path: Path) -> None:
    data = bytes(100_000)

    async def use_memory(number: int) -> None:
        may_end = tmp_path / str(number)
        blocker = victim.wait_for.remote(str(may_end))
        cancelled = [victim.echo.remote(data) for _ in range(20)]
        for call in cancelled:
            call.cancel()
        await until(lambda: victim.statistics()["num_cancelled"] == 20 * (number + 1))  # none of them begins
        may_end.touch()
        await blocker
        unread = [victim.large_result.remote(100_000) for _ in range(20)]
        await victim.ping.remote()
        del call, cancelled, unread

    for number in range(2):
        await use_memory(number)
    here, there = len(os.listdir("/proc/self/fd")), await victim.open_descriptors.remote()
    for number in range(2, 4):
        await use_memory(number)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= here)  # a thread of the system closes them
    async with asyncio.timeout(LIMIT_S):
        while await victim.open_descriptors.remote() > there:
            pass
    assert victim.restarts == 0


async def test_every_incarnation_has_the_surroundings_in_which_it_was_spawned(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[ActorHandle] = []
    for rank in range(4):
        (folder := tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        handles.append(system.spawn(bodies.Victim, restart=FORGIVING))
    where = "(__import__('os').environ['RANK'], __import__('os').getcwd(), __import__('sys').path[0])"
    expected = [(str(rank), str(tmp_path / str(rank)), str(tmp_path / str(rank))) for rank in range(4)]
    assert [await handle.evaluate.remote(where) for handle in handles] == expected
    with pytest.raises(ActorDiedError):
        await handles[0].end_hard.remote(3)
    assert await handles[0].evaluate.remote(where) == expected[0]
    for handle in handles:
        await handle.stop(0.0)


async def test_the_folder_of_the_driver_is_no_place_to_look_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    async with ActorSystem(num_cpus=1) as system:
        assert await system.spawn(bodies.Victim).ping.remote() == "pong"


async def test_children_are_seeded_by_name_and_incarnation(system: ActorSystem) -> None:
    draws: list[float] = []
    for _ in range(2):
        handle = system.spawn(bodies.Victim, name="seeded")
        draws.append(await handle.evaluate.remote("__import__('random').random()"))
        await handle.stop()
    other = system.spawn(bodies.Victim, name="other")
    draws.append(await other.evaluate.remote("__import__('random').random()"))
    await other.stop()
    assert draws[0] == draws[1] != draws[2]


async def test_generators_of_libraries_that_are_loaded_later_are_seeded(system: ActorSystem) -> None:
    draws: list[tuple[float, float]] = []
    for name in ("seeded", "seeded", "other"):
        handle = system.spawn(bodies.Victim, name=name)
        numpys = await handle.evaluate.remote("__import__('numpy').random.rand()")
        torchs = 0.0 if name == "other" else await handle.evaluate.remote("__import__('torch').rand(1).item()")
        draws.append((numpys, torchs))
        await handle.stop()
    assert draws[0] == draws[1]
    assert draws[1][0] != draws[2][0]


async def test_dump_shows_the_stack_of_every_child(system: ActorSystem, victim: ActorHandle, tmp_path: Path) -> None:
    marker = tmp_path / "begun"
    call = victim.mark_and_sleep.remote(str(marker), 600)
    await until(marker.exists)
    stacks = await system.dump()
    assert f"== {victim.name}: up, pid {victim.pid}, 1 calls; mark_and_sleep() runs for" in stacks
    assert "in mark_and_sleep" in stacks
    call.cancel()


async def test_sigusr1_shows_the_stacks_of_the_driver_and_of_every_child(
    system: ActorSystem, victim: ActorHandle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker, written = tmp_path / "begun", ""
    call = victim.mark_and_sleep.remote(str(marker), 600)
    await until(marker.exists)
    before = signal.getsignal(signal.SIGUSR1)
    with system.dump_on_signal():
        os.kill(os.getpid(), signal.SIGUSR1)

        def complete() -> bool:
            nonlocal written
            written += capfd.readouterr().err
            return "in mark_and_sleep" in written

        await until(complete)
    assert f"== {victim.name}: up" in written
    assert "test_sigusr1_shows_the_stacks" in written
    assert signal.getsignal(signal.SIGUSR1) is before
    call.cancel()


async def test_output_is_copied_to_the_log_of_the_driver_under_the_name_of_the_actor(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xrl_lite.output")
    talker = system.spawn(bodies.Victim, name="talker")
    await talker.evaluate.remote("print('one\\ntwo')")
    await until(
        lambda: (
            [r.getMessage() for r in caplog.records if r.name == "xrl_lite.output"] == ["[talker] one", "[talker] two"]
        )
    )
    await talker.evaluate.remote("print('three', end='', flush=True)")
    await talker.stop()
    assert "[talker] three" in [record.getMessage() for record in caplog.records]


async def test_a_flood_of_output_is_cut_short_in_the_log_of_the_driver(
    system: ActorSystem, log_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xrl_lite.output")
    talker = system.spawn(bodies.Victim, name="flood")
    await talker.evaluate.remote("[print(number) for number in range(200_000)]")
    await talker.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "xrl_lite.output"]
    assert len(lines) < 20_000
    assert any("bytes more, see" in line for line in lines)
    assert (log_dir / "flood.log").read_text().splitlines()[-1] == "199999"


async def test_a_death_is_noticed_although_the_loop_of_the_driver_is_blocked(victim: ActorHandle) -> None:
    await victim.ping.remote()
    deaths: list[ActorDiedError] = []
    victim.on_death(deaths.append)
    call = victim.end_hard.remote(5)
    deadline = time.monotonic() + LIMIT_S
    while not deaths and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: ASYNC251 the point of the test
    assert call.done()
    with pytest.raises(ActorDiedError):
        await call


async def test_a_log_that_cannot_be_written_is_an_error_and_no_hang(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with ActorSystem(num_cpus=2, log_dir=tmp_path / "file") as system:
        handle = system.spawn(bodies.Victim)
        with pytest.raises(ActorUnavailableError, match="cannot be started"):
            await handle.ready()
        with pytest.raises(ActorUnavailableError, match="cannot be started"):
            await handle.ping.remote()


@pytest.mark.parametrize("size", [60_000, 200_000])
async def test_many_large_messages_in_both_directions_at_once_block_nobody(victim: ActorHandle, size: int) -> None:
    payloads = [bytes([number % 256]) * size for number in range(600)]
    results = await asyncio.gather(*(victim.echo.remote(payload) for payload in payloads))
    assert results == payloads


async def test_a_log_that_somebody_has_cut_does_not_keep_an_actor_from_being_restarted(tmp_path: Path) -> None:
    async with ActorSystem(log_dir=tmp_path) as system:
        handle = system.spawn(bodies.Victim, name="victim", restart=FORGIVING)
        await handle.print_much.remote(50_000)
        running = handle.mark_and_sleep.remote(str(tmp_path / "mark"), 60.0)
        await until((tmp_path / "mark").exists)
        os.truncate(tmp_path / "victim.log", 0)
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            await asyncio.wait_for(running, LIMIT_S)
        assert await handle.ping.remote() == "pong"


def test_without_descriptors_an_actor_is_down_and_the_system_goes_on_and_ends() -> None:
    program = """
import asyncio, os, resource
from tests.processes import bodies
from xrl_lite.actors import ActorSystem
from xrl_lite.errors import ActorError

async def main():
    async with ActorSystem(num_cpus=64) as system:
        first = system.spawn(bodies.Victim)
        await first.ready()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        failed = 0
        for room in range(12):
            taken = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken + room, hard))
            handle = system.spawn(bodies.Victim)
            try:
                await asyncio.wait_for(handle.ready(), 30)
            except ActorError:
                failed += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await asyncio.wait_for(handle.stop(), 30)
        last = system.spawn(bodies.Victim)
        print(failed > 3, await first.ping.remote(), await last.ping.remote())

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "True pong pong\n", done.stderr


async def test_the_limit_of_a_sync_method_counts_what_it_leaves_to_be_awaited(mixed: ActorHandle) -> None:
    with pytest.raises(ActorTimeoutError):
        await mixed.sleep_then_wait.options(timeout_s=1.0).remote(0.8, 600.0)
    assert mixed.statistics()["num_timeout"] == 1


async def test_a_reply_in_pieces_is_not_lost_with_its_process(system: ActorSystem) -> None:
    handle = system.spawn(bodies.Shares, restart=FORGIVING)
    await handle.ready()
    reply, end = handle.value_and_text.remote(60_000), handle.end_hard.remote(3)
    pid = handle.pid
    assert pid is not None
    while exists(pid):  # this loop reads nothing meanwhile
        time.sleep(0.01)  # noqa: ASYNC251 the point of it
    shared, text = await asyncio.wait_for(reply, LIMIT_S)
    assert (len(shared.get()), len(text)) == (100_000, 60_000)
    with pytest.raises(ActorDiedError):
        await end
    await handle.stop(0.0)
