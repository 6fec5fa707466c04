"""Claims, bundles, accelerators and cores; and what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xrl_lite.actors import Resources
from xrl_lite.actors.ledger import Claim, Ledger
from xrl_lite.actors.machine import (
    neighbours,
    numa_nodes,
    parse_cores,
    usable_memory_bytes,
    usable_milli_cpus,
    visible_accelerators,
    visible_names,
)
from xrl_lite.errors import ResourceError

GIB = 1 << 30


def ledger(cpus: int = 8, accelerators: int = 0, cores: int = 0) -> Ledger:
    names = tuple(map(str, range(accelerators)))
    return Ledger(Claim(cpus * 1000, 16 * GIB, names, tuple(range(cores))))


def test_a_group_is_reserved_as_a_whole_or_not_at_all() -> None:
    books = ledger(cpus=4)
    books.claim("trainer", Resources(num_cpus=2))
    with pytest.raises(ResourceError, match=r"(?s)3 x \(1 CPUs.*trainer +2 .*free +2 "):
        books.reserve(["g[0]", "g[1]", "g[2]"], [Resources()] * 3)
    assert books.held.milli_cpus == 2000
    books.reserve(["g[0]", "g[1]"], [Resources()] * 2)
    assert books.free.milli_cpus == 0


def test_an_actor_in_a_bundle_takes_nothing_from_the_machine() -> None:
    books = ledger(cpus=4)
    books.reserve(["g[0]"], [Resources(num_cpus=2, memory_bytes=GIB)])
    books.claim("a", Resources(num_cpus=1.5, memory_bytes=GIB), bundle="g[0]")
    assert books.held == Claim(2000, GIB)
    with pytest.raises(ResourceError, match=r"(?s)'b' asks for 1 CPUs.*its bundle.*a +1.5.*free +0.5.*g\[0\] +2"):
        books.claim("b", Resources(), bundle="g[0]")
    books.release("a")
    books.claim("b", Resources(num_cpus=2), bundle="g[0]")


def test_an_actor_outlives_the_release_of_its_bundle_and_keeps_its_part() -> None:
    books = ledger(cpus=4)
    books.reserve(["g[0]", "g[1]"], [Resources(num_cpus=2)] * 2)
    books.claim("a", Resources(num_cpus=1), bundle="g[0]")
    books.release_bundles(["g[0]", "g[1]"])
    assert books.held.milli_cpus == 1000
    with pytest.raises(ResourceError, match="has been released"):
        books.claim("b", Resources(), bundle="g[1]")
    books.release("a")
    assert books.held == Claim()


def test_accelerators_are_given_by_name_and_next_to_each_other() -> None:
    books = ledger(accelerators=4)
    assert books.claim("a", Resources(num_accelerators=1)).accelerators == ("0",)
    assert books.claim("b", Resources(num_accelerators=1)).accelerators == ("1",)
    books.release("a")
    assert books.claim("c", Resources(num_accelerators=2)).accelerators == ("2", "3")
    with pytest.raises(ResourceError, match=r"(?s)and 2 accelerators.*accelerators\n.*b .*1\n.*c .*2,3\n.*free .*0\n"):
        books.claim("d", Resources(num_accelerators=2))


def test_the_accelerators_of_a_bundle_are_seen_by_all_actors_in_it() -> None:
    books = ledger(accelerators=2)
    books.reserve(["g[0]"], [Resources(num_cpus=2, num_accelerators=2)])
    for name in ("engine", "rollout"):
        assert books.claim(name, Resources(), bundle="g[0]").accelerators == ("0", "1")
    with pytest.raises(ResourceError, match="bundle"):
        books.claim("more", Resources(num_cpus=0, num_accelerators=3), bundle="g[0]")
    one = Resources(num_cpus=0, accelerators=("1",))
    assert books.claim("one", one, bundle="g[0]").accelerators == ("1",)
    books.release("one")
    with pytest.raises(ResourceError, match="and accelerators 7, which its bundle has not free"):
        books.claim("another's", Resources(num_cpus=0, accelerators=("7",)), bundle="g[0]")
    books.release_bundles(["g[0]"])
    books.release("engine")
    assert books.held.accelerators == ("0", "1")
    books.release("rollout")
    assert books.held == Claim()


def test_pinned_actors_get_cores_of_their_own() -> None:
    books = ledger(cpus=8, cores=4)
    assert books.claim("a", Resources(num_cpus=2, pin_cpus=True)).cores == (0, 1)
    assert books.claim("b", Resources(num_cpus=1, pin_cpus=True)).cores == (2,)
    with pytest.raises(ResourceError, match=r"(?s)2 pinned CPUs.*pinned cores\n.*a .*0,1\n"):
        books.claim("c", Resources(num_cpus=2, pin_cpus=True))
    assert books.claim("c", Resources(num_cpus=2)).cores == ()


def test_a_long_table_shows_the_ends() -> None:
    books = ledger(cpus=100)
    for number in range(100):
        books.claim(f"judger/{number}", Resources())
    with pytest.raises(ResourceError) as caught:
        books.claim("more", Resources())
    lines = str(caught.value).splitlines()
    assert len(lines) < 50
    assert any("more" in line and line.strip().startswith("...") for line in lines)
    assert "total" in lines[-2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_cpus": -1},
        {"num_cpus": 0.0001},
        {"memory_bytes": 0},
        {"num_accelerators": -1},
        {"num_cpus": 0.5, "pin_cpus": True},
        {"num_cpus": 1.5, "pin_cpus": True},
    ],
)
def test_resources_refuse_nonsense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Resources(**wrong)  # pyright: ignore[reportArgumentType]


class LedgerMachine(RuleBasedStateMachine):
    """No sequence of claims, groups and releases holds more than there is, or forgets to give back."""

    def __init__(self) -> None:
        super().__init__()
        self.books = ledger(cpus=4, accelerators=2, cores=2)
        self.actors: list[str] = []
        self.groups: list[list[str]] = []
        self.count = 0

    @rule(cpus=st.sampled_from([0.5, 1, 2]), accelerators=st.integers(0, 1), pin=st.booleans(), data=st.data())
    def claim(self, cpus: float, accelerators: int, pin: bool, data: st.DataObject) -> None:
        bundles = [name for group in self.groups for name in group]
        bundle = data.draw(st.sampled_from(["", *bundles]))
        self.count += 1
        wanted = Resources(num_cpus=cpus, num_accelerators=accelerators, pin_cpus=pin and cpus >= 1)
        try:
            self.books.claim(f"a{self.count}", wanted, bundle=bundle)
        except ResourceError:
            return
        self.actors.append(f"a{self.count}")

    @rule(size=st.integers(1, 3), accelerators=st.integers(0, 1))
    def reserve(self, size: int, accelerators: int) -> None:
        self.count += 1
        names = [f"g{self.count}[{index}]" for index in range(size)]
        try:
            self.books.reserve(names, [Resources(num_accelerators=accelerators)] * size)
        except ResourceError:
            return
        self.groups.append(names)

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def end_actor(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.actors))
        self.actors.remove(name)
        self.books.release(name)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def end_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        self.groups.remove(group)
        self.books.release_bundles(group)

    @invariant()
    def holds_no_more_than_there_is(self) -> None:
        free = self.books.free
        assert free.milli_cpus >= 0
        assert free.memory_bytes >= 0
        assert self.books.held.milli_cpus + free.milli_cpus == 4000
        assert {*free.accelerators, *self.books.held.accelerators} == {"0", "1"}

    @invariant()
    def nothing_is_held_by_nobody(self) -> None:
        if not self.actors and not self.groups:
            assert self.books.held == Claim()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_cores_come_from_one_node_if_they_can() -> None:
    order = tuple(range(8))
    nodes = [frozenset(range(4)), frozenset(range(4, 8))]
    assert neighbours((3, 4, 5, 6), 2, order, nodes) == (4, 5)
    assert neighbours((2, 3, 4), 3, order, nodes) == (2, 3, 4)
    assert neighbours((0, 2, 4), 2, order, nodes) == (0, 2)


@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_neighbours_are_distinct_and_free(free: set[int], wanted: int) -> None:
    chosen = neighbours(sorted(free), wanted, range(31))
    assert len(set(chosen)) == len(chosen) == min(wanted, len(free))
    assert set(chosen) <= free


def test_lists_of_cores_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    assert parse_cores("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cores("") == ()
    for number, cores in enumerate(("0-1", "2-3")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    assert numa_nodes(tmp_path) == [{0, 1}, {2, 3}]


def fake_root(tmp_path: Path, own_cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": own_cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("own_cgroup", "files", "milli_cpus"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 500),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "25000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 250),
        ("0::/docker/x", {"sys/fs/cgroup/cpu.max": "75000 100000"}, 750),  # a container: its own is the root it sees
        ("3:cpu,cpuacct:/x", {"sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                              "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, 500),
        ("3:cpu:/x", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "10000",
                      "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 100),
        ("3:cpu:/x", {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
                      "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {}, None),
    ],
)  # fmt: skip
def test_the_quota_of_a_cgroup_counts(
    tmp_path: Path, own_cgroup: str, files: dict[str, str], milli_cpus: int | None
) -> None:
    all_cores = len(os.sched_getaffinity(0)) * 1000
    assert usable_milli_cpus(fake_root(tmp_path, own_cgroup, files)) == min(milli_cpus or all_cores, all_cores)


@pytest.mark.parametrize(
    ("own_cgroup", "files"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": str(GIB), "sys/fs/cgroup/a/b/memory.max": "max"}),
        ("4:memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(GIB)}),
        ("4:memory:/x\n0::/", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712",
                               "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB)}),
    ],
)  # fmt: skip
def test_the_memory_limit_of_a_cgroup_counts(tmp_path: Path, own_cgroup: str, files: dict[str, str]) -> None:
    assert usable_memory_bytes(fake_root(tmp_path, own_cgroup, files)) == GIB


def test_fewer_cores_by_affinity_are_fewer_cpus(tmp_path: Path) -> None:
    all_cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(all_cores)})
        assert usable_milli_cpus(tmp_path) == 1000
    finally:
        os.sched_setaffinity(0, all_cores)


def test_accelerators_are_found_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_accelerators(tmp_path).names == ()
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (tmp_path / "dev" / name).touch()
    assert visible_accelerators(tmp_path).names == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_accelerators(tmp_path).names == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_accelerators(tmp_path).names == ()


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("2, 0", ("2", "0")),
        ("0,-1,1", ("0",)),
        ("0,7,1", ("0",)),
        ("GPU-5f3c,MIG-1", ("GPU-5f3c", "MIG-1")),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str | None, names: tuple[str, ...]) -> None:
    assert visible_names(value, 3) == names
