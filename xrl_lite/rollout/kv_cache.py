"""Keys and values of running sequences on the CPU, and attention over them.

Sequences of similar room share a pool: one tensor per layer in which every sequence has a row. Rows in use are the
first ones of a pool, so attention reads them where they lie. A sequence that outgrows its pool moves to a larger one.

What attention computes for a sequence has a shape that depends on this sequence alone (its pool's capacity, its
prompt's length), and stands in a batch dimension of its own. So the result does not depend on what else is running.
Positions count from the left: what lies behind a sequence's end is masked, and adds exact zeros.

P pools, n rows in use, C positions of a pool, H query heads, K key heads, G = H / K, D size of a head, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from xrl_lite.rollout.continuous_batch import Sequence

SMALLEST_CAPACITY = 64
"""Less saves little arithmetic, and every further capacity that is in use costs a pass of its own in each layer."""
QUERIES_AT_ONCE = 256
"""Scores of so many prompt positions are held at a time."""


def capacity_for(num_positions: int) -> int:
    """Return the smallest capacity that holds so many positions: 64, 128, 192, 256, 384, 512, 768, ..."""
    size = SMALLEST_CAPACITY
    while size < num_positions:
        if size > SMALLEST_CAPACITY and num_positions <= size + size // 2:
            return size + size // 2
        size *= 2
    return size


class KVPool:
    """Keys and values of sequences with one capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        """The sequence of each row in use."""
        self._num_rows = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def size_bytes(self) -> int:
        """Bytes held, rows that are free included."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    @property
    def num_positions(self) -> int:
        """Positions held, rows that are free included."""
        return self._num_rows * self.capacity

    def add(self, sequences: list[Sequence], *, room: int) -> slice:
        """Give sequences rows and return these, which are neighbours.

        Args:
            sequences: They get a row each.
            room: Positions that the pool may take beyond those it holds, to have some for sequences to come.
        """
        first = len(self.sequences)
        self.sequences += sequences
        for row, sequence in enumerate(sequences, start=first):
            sequence.pool, sequence.row = self, row
        if len(self.sequences) > self._num_rows:
            spare = min(2 * self._num_rows, self._num_rows + room // self.capacity)
            self._resize(max(spare, len(self.sequences)))
        return slice(first, len(self.sequences))

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out; the last ones move into the gaps."""
        for sequence in sequences:
            sequence.pool = None
        if len(sequences) == len(self.sequences):  # nobody is left: give the memory back
            self.sequences, self._layers, self._num_rows = [], {}, 0
            return
        gone = {sequence.row for sequence in sequences}
        left = len(self.sequences) - len(gone)
        gaps = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, len(self.sequences)) if row not in gone]
        if gaps:
            to, source = torch.tensor(gaps), torch.tensor(movers)
            for keys, values in self._layers.values():
                keys[to], values[to] = keys[source], values[source]
            for gap, mover in zip(gaps, movers, strict=True):
                self.sequences[gap] = self.sequences[mover]
                self.sequences[gap].row = gap
        del self.sequences[left:]

    def take_out(self, sequences: list[Sequence]) -> dict[int, tuple[Tensor, Tensor]]:
        """Take sequences out and return their keys and values, both (n, K, C, D), by layer."""
        rows = torch.tensor([sequence.row for sequence in sequences])
        taken = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._layers.items()}
        self.remove(sequences)
        return taken

    def trim(self) -> None:
        """Give the memory of free rows back."""
        if len(self.sequences) < self._num_rows:
            self._resize(len(self.sequences))

    def write_prompts(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Put keys and values, both (n, K, T, D), at the beginning of rows."""
        own_keys, own_values = self._store(layer, keys, values)
        own_keys[rows, :, : keys.shape[2]], own_values[rows, :, : keys.shape[2]] = keys, values

    def write_tokens(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values (n, K, D) of one position of the first n rows; return those of all positions.

        Args:
            layer: Number of the layer.
            places: (n * K,) int64, see `Decoding.places`.
            keys: The keys.
            values: The values.
        """
        own_keys, own_values = self._layers[layer]
        for own, new in ((own_keys, keys), (own_values, values)):
            own.view(-1, own.shape[3]).index_copy_(0, places, new.reshape(-1, own.shape[3]))
        return own_keys[: len(keys)], own_values[: len(keys)]

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a layer; made when it is first written to, since only then its shape is known."""
        if layer not in self._layers:
            self._layers[layer] = (
                keys.new_zeros(self._num_rows, keys.shape[1], self.capacity, keys.shape[3]),
                values.new_zeros(self._num_rows, values.shape[1], self.capacity, values.shape[3]),
            )
        return self._layers[layer]

    def _resize(self, num_rows: int) -> None:
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (_with_rows(keys, num_rows), _with_rows(values, num_rows))
        self._num_rows = num_rows


class KVCache:
    """All pools.

    Args:
        limit: Positions that they hold together, unless rows in use alone need more. While rows are copied from one
            place to another, both are there.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pools: dict[int, KVPool] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes held."""
        return sum(pool.size_bytes for pool in self._pools.values())

    @property
    def max_positions(self) -> int:
        """Positions of all rows in use, if each of them had to move to the next larger pool."""
        return sum(len(pool) * capacity_for(pool.capacity + 1) for pool in self._pools.values())

    def pools(self) -> Iterator[KVPool]:
        """Yield the pools that hold sequences, smallest first."""
        for capacity in sorted(self._pools):
            if len(self._pools[capacity]):
                yield self._pools[capacity]

    def add(self, sequences: list[Sequence]) -> list[tuple[KVPool, list[int], slice]]:
        """Give sequences rows: per pool, which of `sequences` got which rows."""
        by_capacity: dict[int, list[int]] = {}
        for number, sequence in enumerate(sequences):
            by_capacity.setdefault(capacity_for(sequence.reserved), []).append(number)
        return [
            (self._pool(capacity), numbers, self._add([sequences[number] for number in numbers], capacity))
            for capacity, numbers in by_capacity.items()
        ]

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out."""
        by_pool: dict[KVPool, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.pool is not None:
                by_pool.setdefault(sequence.pool, []).append(sequence)
        for pool, members in by_pool.items():
            pool.remove(members)

    def make_room(self) -> None:
        """Move every sequence whose next position would not fit into a larger pool."""
        for pool in reversed(list(self.pools())):  # the largest first: what moves out of it leaves room
            full = [sequence for sequence in pool.sequences if sequence.num_tokens > pool.capacity]
            if full:
                capacity = capacity_for(pool.capacity + 1)
                taken = pool.take_out(full)
                rows = self._add(full, capacity)
                for layer, (keys, values) in taken.items():
                    self._pool(capacity).write_prompts(layer, rows, keys, values)

    def _add(self, sequences: list[Sequence], capacity: int) -> slice:
        pool = self._pool(capacity)
        needed = (len(pool) + len(sequences)) * capacity - pool.num_positions
        if self._num_positions + needed > self._limit:
            for other in self._pools.values():
                if other is not pool:
                    other.trim()
        return pool.add(sequences, room=self._limit - self._num_positions)

    @property
    def _num_positions(self) -> int:
        return sum(pool.num_positions for pool in self._pools.values())

    def _pool(self, capacity: int) -> KVPool:
        if capacity not in self._pools:
            self._pools[capacity] = KVPool(capacity)
        return self._pools[capacity]


@dataclass(kw_only=True)
class Prompts:
    """Prompts of one length, neighbours among the tokens of a forward pass."""

    start: int
    """Number of the first token."""
    num_prompts: int
    length: int
    """Tokens of each prompt."""
    rows: list[tuple[KVPool, slice, Tensor]] = field(default_factory=list[tuple[KVPool, slice, Tensor]])
    """Pool, rows in it, and which of the prompts each row holds."""
    _hidden: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict[Any, Tensor])

    def hidden(self, start: int, stop: int, window: int | None) -> Tensor:
        """Which positions before `stop` each position from `start` on does not see. The same in most layers."""
        key = (start, stop, window)
        if key not in self._hidden:
            self._hidden[key] = ~_visible(torch.arange(start, stop), stop, window)
        return self._hidden[key]

    @property
    def stop(self) -> int:
        """Number of the first token behind."""
        return self.start + self.num_prompts * self.length


class Decoding:
    """One new token of every sequence of a pool, neighbours among the tokens of a forward pass.

    Args:
        pool: The pool.
        start: Number of the first token.
        positions: Where the new tokens stand in their sequences, row by row.
    """

    def __init__(self, *, pool: KVPool, start: int, positions: list[int]) -> None:
        self.pool = pool
        self.start = start
        self.stop = start + len(positions)
        self._positions = torch.tensor(positions)
        # the same in most layers
        self._bias: dict[tuple[int, int | None], Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def bias(self, key_heads: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to scores, (n * K, 1, C): 0 where a position is seen, else -inf."""
        key = (key_heads, window)
        if key not in self._bias:
            seen = _visible(self._positions.repeat_interleave(key_heads), self.pool.capacity, window)
            self._bias[key] = torch.where(seen, 0.0, -torch.inf).to(dtype).unsqueeze(1)
        return self._bias[key]

    def places(self, key_heads: int) -> Tensor:
        """Which rows the new tokens are of a layer's keys, taken as (rows * K * C, D): (n * K,) int64."""
        if key_heads not in self._places:
            first = torch.arange(len(self._positions) * key_heads) * self.pool.capacity
            self._places[key_heads] = first + self._positions.repeat_interleave(key_heads)
        return self._places[key_heads]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the tokens of one forward pass are."""

    prompts: list[Prompts]
    decoding: list[Decoding]


def attend(
    layout: Layout,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """Attention of the tokens of a pass over their own sequences; new keys and values go into the cache.

    Args:
        layout: What the tokens are.
        layer: Number of the layer.
        query: (H, T, D).
        key: (K, T, D).
        value: (K, T, D).
        scaling: Factor of the scores.
        sliding_window: Positions that a token sees, itself included; None for all.

    Returns:
        (T, H, D); zeros for tokens that belong to no sequence.
    """
    output = value.new_zeros(query.shape[1], query.shape[0], value.shape[2])
    for part in layout.prompts:
        shape = (-1, part.num_prompts, part.length, key.shape[2])
        q, k, v = (
            tensor[:, part.start : part.stop].view(*shape[:3], tensor.shape[2]).transpose(0, 1)
            for tensor in (query, key, value)
        )
        for pool, rows, prompt in part.rows:
            pool.write_prompts(layer, rows, k[prompt], v[prompt])
        mixed = _attend_prompts(part, q, k, v, scaling, sliding_window)
        output[part.start : part.stop] = mixed.transpose(1, 2).flatten(0, 1)
    for part in layout.decoding:
        q, k, v = (tensor[:, part.start : part.stop].transpose(0, 1) for tensor in (query, key, value))
        keys, values = part.pool.write_tokens(layer, part.places(key.shape[0]), k, v)
        bias = part.bias(key.shape[0], sliding_window, query.dtype)
        output[part.start : part.stop] = _attend_cache(q, keys, values, bias, scaling)
    return output


def _attend_prompts(
    part: Prompts, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Causal attention within each prompt: (n, H, t, D), (n, K, t, D) twice -> (n, H, t, D)."""
    num_prompts, num_heads, length, _ = query.shape
    groups = num_heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    keys, values, queries = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1), query.flatten(0, 1)
    parts: list[Tensor] = []
    for start in range(0, length, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, length)
        scores = torch.bmm(queries[:, start:stop], keys[:, :, :stop]).mul_(scaling)
        scores.masked_fill_(part.hidden(start, stop, window), -torch.inf)
        parts.append(torch.bmm(scores.softmax(dim=-1), values[:, :stop]))
    return torch.cat(parts, dim=1).view(num_prompts, num_heads, length, value.shape[3])


def _attend_cache(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Attention of one token per row: (n, H, D), (n, K, C, D) twice, (n * K, 1, C) -> (n, H, D).

    The query heads that share a key head stand side by side as if they were positions, so nothing is repeated.
    """
    num_rows, num_heads, _ = query.shape
    key_heads = keys.shape[1]
    queries = query.reshape(num_rows * key_heads, num_heads // key_heads, -1)
    scores = torch.baddbmm(bias, queries, keys.flatten(0, 1).transpose(1, 2), alpha=scaling)
    return torch.bmm(scores.softmax(dim=-1), values.flatten(0, 1)).view(num_rows, num_heads, -1)


def _visible(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Which of the first `num_keys` positions each position sees: (n,) -> (n, num_keys) bool."""
    keys = torch.arange(num_keys)
    seen = keys <= positions.unsqueeze(1)
    return seen if window is None else seen & (keys > positions.unsqueeze(1) - window)


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    resized = tensor.new_zeros(num_rows, *tensor.shape[1:])
    kept = tensor[:num_rows]
    resized[: len(kept)] = kept
    return resized
