"""Whatever workers, clocks and trainers do: groups come out once, in order, in time, and only under a valid lease."""

from __future__ import annotations

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.build import make_state
from xrl_lite.data import Status
from xrl_lite.errors import LeaseError
from xrl_lite.replay_buffer import (
    GroupStatus,
    Lease,
    ReplayBuffer,
    ReplayBufferConfig,
    build_replay_buffer,
    max_admitted,
)

BATCH = 2
TIMEOUT_S = 10.0


class BufferMachine(RuleBasedStateMachine):
    """Drives a buffer as a producer that paces, workers that may be late or die, and a trainer do."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.step, self.version = 1, 0
        self.num_admitted = 0
        self.taken: list[str] = []
        self.failed: set[str] = set()
        self.valid: dict[str, Lease] = {}
        self.deadlines: dict[str, float] = {}
        self.refills = 0

    def setup(self, threshold: int, stragglers: str) -> None:
        settings = ReplayBufferConfig(max_off_policy_threshold=threshold, stragglers=stragglers)  # type: ignore[arg-type]
        self.threshold = threshold
        self.buffer: ReplayBuffer = build_replay_buffer(settings, trainer_mode="separate_async")
        self.buffer.configure(settings, clock=lambda: self.now)
        self.buffer.refill_fn = self.refill

    def refill(self, count: int) -> None:
        self.refills += count

    def run(self, coroutine: object) -> object:
        """Step a coroutine that has nothing to wait for."""
        try:
            coroutine.send(None)  # type: ignore[attr-defined]
        except StopIteration as ended:
            return ended.value
        coroutine.close()  # type: ignore[attr-defined]
        return None

    def expire(self) -> None:
        for uid, lease in list(self.valid.items()):
            if lease.deadline is not None and self.now >= lease.deadline:
                del self.valid[uid]
                self.failed.add(uid)

    @precondition(lambda self: not hasattr(self, "buffer"))
    @rule(threshold=st.integers(1, 3), stragglers=st.sampled_from(["wait", "pass"]))
    def begin(self, threshold: int, stragglers: str) -> None:
        self.setup(threshold, stragglers)

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule()
    def admit(self) -> None:
        room = max_admitted(
            batch_size=BATCH,
            max_off_policy_threshold=self.threshold,
            policy_version=self.version,
            next_step=self.step,
        )
        for _ in range(room - self.buffer.num_waiting("train")):
            group = self.buffer.new_group(
                str(self.num_admitted), partition_id="train", global_steps=self.version + 1, task_name="t"
            )
            self.buffer.admit_all([group])
            self.num_admitted += 1

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule(target=leases, data=st.data())
    def start(self, data: st.DataObject) -> Lease:
        waiting = [g.uid for g in self.buffer.table if g.status in (GroupStatus.PENDING, GroupStatus.ABORTED)]
        if not waiting:
            return Lease("none", 1, "nobody", None)
        uid = data.draw(st.sampled_from(waiting))
        worker = data.draw(st.sampled_from(["w0", "w1"]))
        lease = self.buffer.start(uid, worker=worker, timeout_s=TIMEOUT_S)
        self.expire()
        self.valid[uid] = lease
        return lease

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule(lease=consumes(leases), outcome=st.sampled_from(["finish", "nothing", "fail", "abort", "put_back"]))
    def end(self, lease: Lease, outcome: str) -> None:
        self.expire()
        holds = self.valid.get(lease.uid) == lease
        if outcome == "put_back":
            self.buffer.put_back(lease)
            if holds:
                del self.valid[lease.uid]
            return
        version = self.version
        good = make_state(response_model_steps=[version, version])
        bad = make_state(status=Status.FAILED, error_msg="no")
        calls = {
            "finish": lambda: self.buffer.finish(lease, [good, bad]),
            "nothing": lambda: self.buffer.finish(lease, [bad]),
            "fail": lambda: self.buffer.fail(lease, "worker said so"),
            "abort": lambda: self.buffer.abort(lease, [make_state(status=Status.ABORTED)]),
        }
        before = self.buffer.table.get(lease.uid)
        status = before.status if before else None
        try:
            self.run(calls[outcome]())
        except LeaseError:
            assert not holds
            after = self.buffer.table.get(lease.uid)
            assert (after.status if after else None) in (status, GroupStatus.FAILURE)
            return
        assert holds
        del self.valid[lease.uid]
        if outcome in ("nothing", "fail"):
            self.failed.add(lease.uid)

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule(seconds=st.sampled_from([1.0, 9.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule(worker=st.sampled_from(["w0", "w1"]))
    def worker_dies(self, worker: str) -> None:
        self.expire()
        self.buffer.end_overdue_leases()
        held = {uid for uid, lease in self.valid.items() if lease.worker == worker}
        assert set(self.buffer.fail_worker(worker, "SIGKILL")) == held
        for uid in held:
            del self.valid[uid]
            self.failed.add(uid)

    @precondition(lambda self: hasattr(self, "buffer"))
    @rule(hand_over=st.booleans())
    def train(self, hand_over: bool) -> None:
        result = self.run(self.buffer.sample(self.step, "train", BATCH))
        self.expire()
        if result is None:
            return
        groups, metrics = result  # type: ignore[misc]
        assert len(groups) == BATCH
        assert metrics["training/off_policy/evicted_samples"] == 0, "pacing leaves nothing to drop"
        for group in groups:
            assert group.uid not in self.failed
            assert self.step - group.global_steps + 1 <= self.threshold
            assert group.num_rows == 1
        if self.buffer.policy.stragglers == "wait":
            alive = [int(g.uid) for g in self.buffer.table if g.status is not GroupStatus.FAILURE]
            assert all(int(group.uid) < min(alive, default=self.num_admitted) for group in groups)
        self.taken += [group.uid for group in groups]
        self.version = self.step  # hand over after every step
        self.step += 1

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert len(set(self.taken)) == len(self.taken), "trained twice"
        here = {group.uid for group in self.buffer.table}
        assert not here & set(self.taken)
        gone = {str(n) for n in range(self.num_admitted)} - here - set(self.taken)
        self.expire()
        assert gone <= self.failed, "lost"
        assert self.refills == len(gone), "each evicted group is replaced once"

    @invariant()
    def the_indexes_agree_with_the_groups(self) -> None:
        if not hasattr(self, "buffer"):
            return
        partition = self.buffer.table.partition("train")
        groups = list(self.buffer.table)
        for status in GroupStatus:
            count = sum(group.status is status for group in groups)
            assert partition.by_status[status] == count == len(self.buffer.table.pool("train", "t", status))
        assert sum(partition.ages.values()) == len(groups)
        assert [g.ordinal for g in partition.order.values()] == sorted(g.ordinal for g in groups)


async def test_buffer_machine() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(BufferMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
    await anyio.lowlevel.checkpoint()
