"""Every cell of the eviction matrix, pacing, and the order of taking."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrl_lite.replay_buffer.eviction import (
    EvictionPolicy,
    GroupFacts,
    Reason,
    Waiting,
    classify,
    max_admitted,
    refills,
    select,
    span,
)

STALE, UNIFORM, FAILED = Reason.STALE, Reason.UNIFORM, Reason.FAILED
ASYNC = ("colocate_async", "separate_async")

MATRIX: list[tuple[str, str, bool, str, set[Reason]]] = [
    # mode, strategy, refill failed, kind of group, reasons
    ("sync", "drop", False, "stale", set()),
    ("sync", "drop", True, "stale", set()),
    ("sync", "wait", True, "stale", set()),
    ("sync", "drop", False, "uniform", {UNIFORM}),
    ("sync", "drop", True, "uniform", {UNIFORM}),
    ("sync", "drop", False, "failed", set()),
    ("sync", "drop", True, "failed", {FAILED}),
    ("sync", "drop", False, "failed with rows", set()),
    ("sync", "drop", True, "failed with rows", set()),
    ("sync", "drop", True, "stale and uniform", {UNIFORM}),
    ("sync", "drop", True, "uniform failure", {FAILED}),
    *(
        (mode, strategy, refill, kind, reasons)
        for mode, refill in product(ASYNC, (False, True))
        for strategy, kind, reasons in (
            ("drop", "stale", {STALE}),
            ("wait", "stale", set()),
            ("drop", "just in time", set()),
            ("drop", "uniform", {UNIFORM}),
            ("wait", "uniform", {UNIFORM}),
            ("drop", "stale and uniform", {STALE, UNIFORM}),
            ("wait", "stale and uniform", {UNIFORM}),
            ("drop", "failed", {FAILED}),
            ("drop", "failed with rows", {FAILED}),
            ("drop", "stale failure", {FAILED}),
            ("drop", "uniform failure", {FAILED}),
        )
    ),
]
KINDS: dict[str, dict[str, Any]] = {
    "stale": {"global_steps": 1},
    "just in time": {"global_steps": 2},
    "uniform": {"uniform": True},
    "failed": {"finished": False, "num_rows": 0},
    "failed with rows": {"finished": False, "num_rows": 3},
    "stale and uniform": {"global_steps": 1, "uniform": True},
    "stale failure": {"global_steps": 1, "finished": False, "num_rows": 0},
    "uniform failure": {"finished": False, "num_rows": 0, "uniform": True},
}


def facts(kind: str) -> GroupFacts:
    return GroupFacts(**{"global_steps": 4, "finished": True, "num_rows": 4, "uniform": False} | KINDS[kind])


def policy(mode: str, **options: Any) -> EvictionPolicy:
    return EvictionPolicy(**{"mode": mode, "max_off_policy_threshold": 3, "filter_metric": "score"} | options)


@pytest.mark.parametrize(("mode", "strategy", "refill", "kind", "reasons"), MATRIX)
def test_cell_of_the_matrix(mode: str, strategy: str, refill: bool, kind: str, reasons: set[Reason]) -> None:
    rules = policy(mode, max_off_policy_strategy=strategy, sync_refill_failed_groups=refill)
    assert classify(facts(kind), global_steps=4, partition_id="train", policy=rules) == reasons


@pytest.mark.parametrize(("mode", "kind"), list(product(("sync", *ASYNC), KINDS)))
def test_val_is_never_evicted_from(mode: str, kind: str) -> None:
    assert classify(facts(kind), global_steps=9, partition_id="val", policy=policy(mode)) == frozenset()


def test_without_a_metric_nothing_is_filtered() -> None:
    rules = policy("sync", filter_metric=None)
    assert classify(facts("uniform"), global_steps=4, partition_id="train", policy=rules) == frozenset()


@pytest.mark.parametrize(
    ("mode", "evicted", "count"),
    [
        ("sync", [{UNIFORM}, {UNIFORM}, {UNIFORM}], 6),
        ("sync", [{FAILED}, {FAILED}], 2),
        ("sync", [{UNIFORM}, {FAILED}], 3),
        ("colocate_async", [{STALE, UNIFORM}, {FAILED}], 2),
        ("separate_async", [{UNIFORM}], 1),
        ("sync", [], 0),
    ],
)
def test_a_group_is_refilled_once_and_twice_when_filtered_in_sync(
    mode: str, evicted: list[set[Reason]], count: int
) -> None:
    assert refills({str(n): frozenset(reasons) for n, reasons in enumerate(evicted)}, policy(mode)) == count


def test_the_span_of_the_same_step_is_one() -> None:
    assert (span(3, 3), span(5, 3)) == (1, 3)


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        policy("sync", max_off_policy_threshold=0)


# --- order


def choose(order: str, batch_size: int, *, step: int = 1, stragglers: str = "wait", threshold: int = 2) -> str | None:
    """Groups are written as ready (upper case) or not, all dispatched for step 1."""
    waiting = [Waiting(name.lower(), 1, name.isupper()) for name in order]
    rules = policy("separate_async", stragglers=stragglers, max_off_policy_threshold=threshold)
    ages = Counter(group.global_steps for group in waiting)
    taken = select(waiting, batch_size=batch_size, global_steps=step, ages=ages, policy=rules)
    return None if taken is None else "".join(taken)


def test_the_oldest_are_taken_and_waited_for() -> None:
    assert choose("ABC", 2) == "ab"
    assert choose("aBC", 2) is None
    assert choose("A", 2) is None


def test_an_unfinished_group_is_passed_over_only_while_it_has_time() -> None:
    assert choose("aBC", 1, stragglers="pass", threshold=3) == "b"
    assert choose("aBC", 1, stragglers="pass", threshold=2) is None, "then a and c would both be due in step 2"
    assert choose("aB", 1, stragglers="pass", threshold=2) == "b"
    assert choose("aB", 1, stragglers="pass", threshold=1) is None
    assert choose("aBC", 2, stragglers="pass", threshold=2) == "bc"


@settings(deadline=None)
@given(random=st.randoms(use_true_random=True))  # thousands of choices: drawn one by one they would take seconds
def test_no_schedule_trains_on_a_group_that_is_too_old(random: Random) -> None:
    """Pacing by `max_admitted`, any order of completion, weights handed over every few steps: the bound holds."""
    batch_size = random.randint(1, 3)
    interval = random.randint(1, 3)
    threshold = random.randint(1, 3) * interval
    rules = policy(
        "separate_async",
        max_off_policy_threshold=threshold,
        stragglers=random.choice(["wait", "pass"]),
    )
    order: dict[int, tuple[int, bool]] = {}
    next_uid, step, version = 0, 1, 0
    for _ in range(40):
        room = max_admitted(
            batch_size=batch_size, max_off_policy_threshold=threshold, policy_version=version, next_step=step
        )
        for _ in range(random.randint(0, max(0, room - len(order)))):
            order[next_uid] = (version + 1, False)
            next_uid += 1
        for uid in random.sample(sorted(order), k=min(random.randint(0, 3), len(order))):
            order[uid] = (order[uid][0], True)
        waiting = [Waiting(str(uid), steps, ready) for uid, (steps, ready) in order.items()]
        ages = Counter(group.global_steps for group in waiting)
        taken = select(waiting, batch_size=batch_size, global_steps=step, ages=ages, policy=rules)
        for uid in taken or ():
            assert span(step, order.pop(int(uid))[0]) <= threshold
        if taken:
            version = step if step % interval == 0 else version
            step += 1
    # nothing is stuck either: once all is ready, every batch can be taken
    waiting = [Waiting(str(uid), steps, True) for uid, (steps, _) in order.items()]
    while len(waiting) >= batch_size:
        ages = Counter(group.global_steps for group in waiting)
        taken = select(waiting, batch_size=batch_size, global_steps=step, ages=ages, policy=rules)
        assert taken is not None
        assert all(span(step, group.global_steps) <= threshold for group in waiting[:batch_size])
        waiting, step = waiting[batch_size:], step + 1


def test_pacing_is_the_usual_capacity_when_every_step_hands_over() -> None:
    # while step 5 is trained (version 4), one batch may be ahead with a staleness of 1
    assert max_admitted(batch_size=8, max_off_policy_threshold=2, policy_version=4, next_step=6) == 8
    assert max_admitted(batch_size=8, max_off_policy_threshold=2, policy_version=5, next_step=6) == 16
    assert max_admitted(batch_size=8, max_off_policy_threshold=1, policy_version=4, next_step=6) == 0
