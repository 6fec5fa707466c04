"""Which rank computes what, and in which micro-batches.

Groups go to the rank that has least to do, the costliest first, so ranks differ by at most the cost of one group. On a
rank, rows of a micro-batch are hardly longer than its longest group and are filled up with shorter ones: next to no
padding, and no attention over many more tokens than a group has. Every rank gets the same number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from xrl_lite.algorithms.packing import PackedGroup

MicroBatch = list[list[PackedGroup]]
"""Rows, each a list of groups."""

_MAX_EXTRA = 6
"""Sixteenths of its longest group by which the rows of a micro-batch may be longer, where that leaves less padding."""

_QUADRATIC_FROM = 6144
"""Tokens in a row from which attention costs more than the rest: six times the width of a model of about 1B."""


def plan_micro_batches(groups: Sequence[PackedGroup], *, max_tokens: int, num_ranks: int = 1) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank; all ranks have the same number, the last of some may be empty.

    The same on every rank that calls it with the same arguments.

    Args:
        groups: What is to be computed.
        max_tokens: Limit of a micro-batch, padding included; a single longer group is a micro-batch of its own.
        num_ranks: Ranks.
    """
    shares = [_fill(share, max_tokens) for share in _balance(groups, num_ranks)]
    number = max(map(len, shares))
    for share in shares:
        _split_until(share, number)
        share += [[] for _ in range(number - len(share))]
    return shares


def cost(num_tokens: int) -> float:
    """Work for a group of so many tokens, in tokens of a short row."""
    return num_tokens + num_tokens**2 / _QUADRATIC_FROM


_Sized = tuple[int, PackedGroup]
"""A group and its number of tokens."""


def _balance(groups: Sequence[PackedGroup], num_ranks: int) -> list[list[_Sized]]:
    """Longest first, within each rank too."""
    shares: list[list[_Sized]] = [[] for _ in range(num_ranks)]
    load = [(0.0, rank) for rank in range(num_ranks)]
    for length, group in sorted(((group.num_tokens, group) for group in groups), key=lambda sized: -sized[0]):
        total, rank = heapq.heappop(load)
        shares[rank].append((length, group))
        heapq.heappush(load, (total + cost(length), rank))
    return shares


def _fill(groups: list[_Sized], max_tokens: int) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    waiting = groups
    while waiting:
        longest = waiting[0][0]
        tries = [
            _first_fit(waiting, capacity=longest + longest * extra // 16, max_tokens=max_tokens)
            for extra in range(_MAX_EXTRA + 1)
        ]
        best = max(tries, key=lambda attempt: attempt.filled)  # the shortest rows of those that are equally full
        batches.append(best.rows)
        waiting = best.left
    return batches


@dataclass(frozen=True)
class _Filling:
    rows: MicroBatch
    left: list[_Sized]
    filled: float
    """Share of the rows that is not padding."""


def _first_fit(groups: list[_Sized], *, capacity: int, max_tokens: int) -> _Filling:
    """Put each group into the first row with room for it, as long as there are groups and rows."""
    max_rows = max(1, max_tokens // capacity)
    rows: MicroBatch = []
    free: list[int] = []
    left: list[_Sized] = []
    shortest = groups[-1][0]
    for place, (length, group) in enumerate(groups):
        room = max(free) if len(rows) == max_rows else capacity
        if room < shortest:
            left += groups[place:]
            break
        if room < length:
            left.append((length, group))
            continue
        row = next((number for number, space in enumerate(free) if space >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(group)
        free[row] -= length
    used = [capacity - space for space in free]
    return _Filling(rows, left, sum(used) / (len(used) * max(used)))


def _split_until(batches: list[MicroBatch], number: int) -> None:
    """Halve the largest micro-batches until there are `number`, or none has two rows."""
    while len(batches) < number:
        place = max(range(len(batches)), key=lambda place: len(batches[place]), default=None)
        if place is None or len(batches[place]) < 2:
            return
        rows = batches[place]
        batches[place : place + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
