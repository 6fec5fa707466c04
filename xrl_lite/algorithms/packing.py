"""Rows for the model out of trajectories: without padding between them, and a shared prompt computed once.

The attempts at one prompt stand behind a single copy of it, and several such groups may stand in one row::

    tokens       p0 p1 p2 | a0 a1 | b0 b1 b2 || q0 q1 | c0
    positions     0  1  2 |  3  4 |  3  4  5 ||  0  1 |  2
    a1 attends to p0 p1 p2 a0 a1, and b1 to p0 p1 p2 b0 b1; c0 to q0 q1 c0: attempts and groups do not see each other

so each attempt has exactly the log-probs it has in a row of its own. Only trained tokens (mask 1) get an output.
B rows, L tokens in the longest, T trained tokens of all trajectories in the order they were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedGroup:
    """A prompt and some attempts at it."""

    prompt_ids: list[int]
    """Tokens of the prompt."""
    responses: list[list[int]]
    """Tokens of each attempt."""
    masks: list[list[int]]
    """1 for each token of an attempt that is trained on."""
    trajectories: list[int]
    """Which trajectory each attempt is."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row."""
        return len(self.prompt_ids) + sum(map(len, self.responses))


Row = Sequence[PackedGroup]
"""Groups that stand in one row, one behind the other."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """What the model gets, and where in its output the trained tokens are predicted.

    A batch without rows has one token of padding and T = 0: a rank with nothing left to compute goes through the model
    with it, so that it takes part in what the ranks do together.
    """

    input_ids: Tensor
    """(B, L) int64, padded with 0."""
    position_ids: Tensor
    """(B, L) int64."""
    attention_mask: Tensor
    """(B, 1, L, L) bool, True where row position attends to column position."""
    predicted_at: Tensor
    """(T,) int64 into the flattened (B * L): the position whose output predicts each trained token."""
    targets: Tensor
    """(T,) int64: the trained tokens."""
    trajectories: list[int]
    """Which trajectory each run of trained tokens is, in the order of `targets`."""
    num_tokens: int
    """Tokens without the padding."""
    candidates: Tensor | None = None
    """(T, k) int64: other tokens whose log-probs are asked for at each position."""
    ref_logprobs: Tensor | None = None
    """(T,) log-probs of the targets under the initial policy, where the loss needs them."""
    teacher_logprobs: Tensor | None = None
    """Log-probs that a teacher gives the candidates, (T, k), or the targets, (T,), where the loss needs them."""


def pack_groups(
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    *,
    max_tokens_per_row: int,
    masks: Sequence[list[int]] | None = None,
) -> list[PackedGroup]:
    """Put neighbouring attempts at equal prompts behind one copy of it, as long as they stay within the limit.

    Args:
        prompts: Prompt tokens of each trajectory.
        responses: Response tokens of each trajectory.
        max_tokens_per_row: Limit of a group; a single longer trajectory is a group of its own.
        masks: 1 for each response token that is trained on; all when not given.
    """
    groups: list[PackedGroup] = []
    num_tokens = 0  # of the last group
    masks = masks if masks is not None else [[1] * len(response) for response in responses]
    for index, (prompt, response, mask) in enumerate(zip(prompts, responses, masks, strict=True)):
        last = groups[-1] if groups else None
        if last and last.prompt_ids == prompt and num_tokens + len(response) <= max_tokens_per_row:
            num_tokens += len(response)
            last.responses.append(response)
            last.masks.append(mask)
            last.trajectories.append(index)
        else:
            num_tokens = len(prompt) + len(response)
            groups.append(PackedGroup(prompt_ids=prompt, responses=[response], masks=[mask], trajectories=[index]))
    return groups


def collate(rows: Sequence[Row]) -> PackedBatch:
    """Lay out rows, pad them to one length and build the mask."""
    length = max((sum(group.num_tokens for group in row) for row in rows), default=1)
    layout = _Layout()
    for number, row in enumerate(rows):
        layout.begin_row(number * length)
        for group in row:
            layout.add(group)
    shape = (max(len(rows), 1), length)
    input_ids, position_ids = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    # each prompt and each attempt is a segment; padding gets a segment each, so that it sees nothing but itself
    segments = torch.arange(-1, -length - 1, -1).repeat(shape[0], 1)
    parents = segments.clone()
    places, layers = layout.per_token()
    for tensor, values in zip((input_ids, position_ids, segments, parents), layers, strict=True):
        tensor.view(-1).index_copy_(0, places, values)
    visible = segments.unsqueeze(2) == segments.unsqueeze(1)
    visible |= parents.unsqueeze(2) == segments.unsqueeze(1)
    visible &= torch.ones(length, length, dtype=torch.bool).tril()
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=visible.unsqueeze(1),
        predicted_at=torch.tensor(layout.predicted_at, dtype=torch.int64),
        targets=torch.tensor(layout.targets, dtype=torch.int64),
        trajectories=[index for row in rows for group in row for index in group.trajectories],
        num_tokens=len(layout.tokens),
    )


class _Layout:
    """Segments of all rows while they are laid out: each a prompt or an attempt, `place` in the flattened rows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.predicted_at: list[int] = []
        self.targets: list[int] = []
        self._lengths: list[int] = []
        self._first_positions: list[int] = []
        self._parents: list[int] = []
        self._places: list[int] = []
        self._end = 0

    def begin_row(self, place: int) -> None:
        self._end = place

    def add(self, group: PackedGroup) -> None:
        start, prompt = len(group.prompt_ids), len(self._lengths)
        self._append(group.prompt_ids, first_position=0, parent=prompt)
        last_of_prompt = self._end - 1
        for response, mask in zip(group.responses, group.masks, strict=True):
            begin = self._end
            self._append(response, first_position=start, parent=prompt)
            if all(mask):
                trained, targets = range(len(mask)), response
            else:
                trained = [place for place, bit in enumerate(mask) if bit]
                targets = [response[place] for place in trained]
            if trained and trained[0] == 0:
                self.predicted_at.append(last_of_prompt)
                trained = trained[1:]
            self.predicted_at += [begin + place - 1 for place in trained]
            self.targets += targets

    def per_token(self) -> tuple[Tensor, list[Tensor]]:
        """Places of all tokens; then the tokens, their positions, segments and the segments of their prompts, (N,)."""
        lengths = torch.tensor(self._lengths, dtype=torch.int64)
        ordinal = torch.arange(len(self.tokens)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)

        def spread(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).repeat_interleave(lengths)

        segments = torch.arange(len(lengths)).repeat_interleave(lengths)
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        positions = spread(self._first_positions) + ordinal
        return spread(self._places) + ordinal, [tokens, positions, segments, spread(self._parents)]

    def _append(self, tokens: list[int], *, first_position: int, parent: int) -> None:
        self.tokens += tokens
        self._lengths.append(len(tokens))
        self._first_positions.append(first_position)
        self._parents.append(parent)
        self._places.append(self._end)
        self._end += len(tokens)
