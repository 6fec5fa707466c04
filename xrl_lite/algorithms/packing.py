"""Rows for the model out of trajectories, without computing a shared prompt more than once.

The attempts at one prompt stand in one row behind a single copy of it::

    tokens       p0 p1 p2 | a0 a1 | b0 b1 b2
    positions     0  1  2 |  3  4 |  3  4  5
    a1 attends to p0 p1 p2 a0 a1, and b1 to p0 p1 p2 b0 b1: attempts do not see each other

so each attempt has exactly the log-probs it has in a row of its own. Rows of a micro-batch are padded to the longest.
B rows, L tokens in the longest, T response tokens of all trajectories in the order they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedGroup:
    """A prompt and some attempts at it: one row."""

    prompt_ids: list[int]
    """Tokens of the prompt."""
    responses: list[list[int]]
    """Tokens of each attempt."""
    trajectories: list[int]
    """Which trajectory each attempt is."""

    @property
    def num_tokens(self) -> int:
        """Length of the row."""
        return len(self.prompt_ids) + sum(map(len, self.responses))


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """What the model gets, and where in its output the response tokens are predicted."""

    input_ids: Tensor
    """(B, L) int64, padded with 0."""
    position_ids: Tensor
    """(B, L) int64."""
    attention_mask: Tensor
    """(B, 1, L, L) bool, True where row position attends to column position."""
    predicted_at: Tensor
    """(T,) int64 into the flattened (B * L): the position whose output predicts each response token."""
    targets: Tensor
    """(T,) int64: the response tokens."""
    trajectories: list[int]
    """Which trajectory each run of response tokens is, in the order of `targets`."""


def pack_groups(
    prompts: Sequence[list[int]], responses: Sequence[list[int]], *, max_tokens_per_row: int
) -> list[PackedGroup]:
    """Put attempts with equal neighbouring prompts into one row, as long as the row stays within the limit.

    Args:
        prompts: Prompt tokens of each trajectory.
        responses: Response tokens of each trajectory.
        max_tokens_per_row: Limit of a row; a single longer trajectory gets a row of its own.
    """
    rows: list[PackedGroup] = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        last = rows[-1] if rows else None
        if last and last.prompt_ids == prompt and last.num_tokens + len(response) <= max_tokens_per_row:
            last.responses.append(response)
            last.trajectories.append(index)
        else:
            rows.append(PackedGroup(prompt_ids=prompt, responses=[response], trajectories=[index]))
    return rows


def micro_batches(rows: Sequence[PackedGroup], *, max_tokens: int) -> Iterator[PackedBatch]:
    """Yield batches of rows of similar length; no batch holds more than `max_tokens` with its padding, or one row."""
    batch: list[PackedGroup] = []
    for row in sorted(rows, key=lambda row: row.num_tokens):  # stable: equal lengths keep their order
        if batch and row.num_tokens * (len(batch) + 1) > max_tokens:
            yield collate(batch)
            batch = []
        batch.append(row)
    if batch:
        yield collate(batch)


def collate(rows: Sequence[PackedGroup]) -> PackedBatch:
    """Pad rows to one length and build the mask."""
    num_rows, length = len(rows), max(row.num_tokens for row in rows)
    input_ids = torch.zeros(num_rows, length, dtype=torch.int64)
    position_ids = torch.zeros(num_rows, length, dtype=torch.int64)
    # segment 0 is the prompt, 1.. the attempts; padding gets a segment each, so that it sees nothing but itself
    segments = torch.arange(-1, -length - 1, -1).repeat(num_rows, 1)
    predicted_at: list[int] = []
    targets: list[int] = []
    for number, row in enumerate(rows):
        start = len(row.prompt_ids)
        tokens, positions, segment = list(row.prompt_ids), list(range(start)), [0] * start
        for attempt, response in enumerate(row.responses, start=1):
            begin = number * length + len(tokens)
            if response:
                predicted_at += [number * length + start - 1, *range(begin, begin + len(response) - 1)]
            targets += response
            tokens += response
            positions += range(start, start + len(response))
            segment += [attempt] * len(response)
        input_ids[number, : len(tokens)] = torch.tensor(tokens)
        position_ids[number, : len(tokens)] = torch.tensor(positions)
        segments[number, : len(tokens)] = torch.tensor(segment)
    same = segments.unsqueeze(2) == segments.unsqueeze(1)
    to_prompt = (segments == 0).unsqueeze(1) & (segments > 0).unsqueeze(2)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=((same | to_prompt) & causal).unsqueeze(1),
        predicted_at=torch.tensor(predicted_at, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        trajectories=[index for row in rows for index in row.trajectories],
    )
