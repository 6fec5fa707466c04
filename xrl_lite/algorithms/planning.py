"""Which rank computes what, and in which micro-batches.

Groups go to the rank that has least to do, the costliest first, so ranks differ by at most the cost of one group. On a
rank, rows of a micro-batch are as long as its longest group and are filled up with shorter ones: next to no padding,
and no attention over more tokens than the longest group has anyway. Every rank gets the same number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from xrl_lite.algorithms.packing import PackedGroup

MicroBatch = list[list[PackedGroup]]
"""Rows, each a list of groups."""

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


def _balance(groups: Sequence[PackedGroup], num_ranks: int) -> list[list[PackedGroup]]:
    shares: list[list[PackedGroup]] = [[] for _ in range(num_ranks)]
    load = [(0.0, rank) for rank in range(num_ranks)]
    for group in sorted(groups, key=lambda group: -group.num_tokens):
        total, rank = heapq.heappop(load)
        shares[rank].append(group)
        heapq.heappush(load, (total + cost(group.num_tokens), rank))
    return shares


def _fill(groups: list[PackedGroup], max_tokens: int) -> list[MicroBatch]:
    """First fit, longest first; `groups` come in that order."""
    batches: list[MicroBatch] = []
    waiting = groups
    while waiting:
        length = waiting[0].num_tokens
        max_rows = max(1, max_tokens // length)
        rows: MicroBatch = []
        free: list[int] = []
        left: list[PackedGroup] = []
        for group in waiting:
            row = next((number for number, space in enumerate(free) if space >= group.num_tokens), None)
            if row is None and len(rows) < max_rows:
                row = len(rows)
                rows.append([])
                free.append(length)
            if row is None:
                left.append(group)
            else:
                rows[row].append(group)
                free[row] -= group.num_tokens
        batches.append(rows)
        waiting = left
    return batches


def _split_until(batches: list[MicroBatch], number: int) -> None:
    """Halve the largest micro-batches until there are `number`, or none has two rows."""
    while len(batches) < number:
        place = max(range(len(batches)), key=lambda place: len(batches[place]), default=None)
        if place is None or len(batches[place]) < 2:
            return
        rows = batches[place]
        batches[place : place + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
