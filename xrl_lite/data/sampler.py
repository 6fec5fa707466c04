"""Draws prompts, epoch after epoch, as groups of attempts. Its whole state is three numbers, and what they count in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NotRequired, TypedDict

from pydantic import Field

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.data.rows import DataConfig, Row, copy_containers, hash_rows
from xrl_lite.errors import DataError
from xrl_lite.log import get_logger
from xrl_lite.settings import Settings

logger = get_logger(__name__)

EncodeRow = Callable[[Row], list[int]]
"""A row -> the tokens of its prompt, with the generation prompt, and with the tools that its agent shows the model."""


def naming_rows(encode: EncodeRow, *, task_name: str | None) -> EncodeRow:
    """Return what encodes rows in the same way, and raises a DataError with task and row where that fails."""

    def encode_row(row: Row) -> list[int]:
        try:
            return encode(row)
        except Exception as error:
            raise DataError(
                f"Task {task_name}: no tokens can be made of the prompt of row {row.index}, {repr(row.prompt)[:200]}: "
                f"{str(error).rstrip('.')}. Repair the row or drop it."
            ) from error

    return encode_row


class SamplerConfig(Settings):
    """Which rows are drawn, in what order, and how many attempts each gets."""

    data: DataConfig
    """The rows."""

    prompt_repeat_k: int = Field(default=8, gt=0)
    """Attempts per prompt: the group size."""

    shuffle: bool = True
    """Draw each epoch in an order of its own (from the run's seed); False keeps the order of the rows."""

    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Prompts longer than this are left out, and counted in the log; None takes all. Schemas of tools count."""


class Drawn(TypedDict):
    """What a sampler draws from: with anything else its position means nothing."""

    num_rows: int
    seed: int
    shuffle: bool
    rows: str
    """Hash of prompts, right answers and data sources, in their order."""


class SamplerState(TypedDict):
    """Everything that is needed to go on exactly."""

    epoch: int
    position: int
    num_groups: int
    drawn: NotRequired[Drawn]
    """What is drawn from; not there in the record of a run, which is repeated without its rows."""


class Sampler:
    """Endless groups of INIT states. Same rows, seed and state: same groups.

    Args:
        rows: The rows.
        encode: Renders and encodes the prompt of a row.
        group_size: Attempts per prompt.
        seed: Seed of the order.
        shuffle: New order each epoch.
        max_prompt_tokens: Longer prompts are left out.
        task_name: Stamped on every state.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        encode: EncodeRow,
        group_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_prompt_tokens: int | None = None,
        task_name: str | None = None,
    ) -> None:
        if not rows:
            raise DataError("A sampler needs at least one row.")
        self._rows = rows
        self._encode = encode
        self._group_size = group_size
        self._seed = seed
        self._shuffle = shuffle
        self._max_prompt_tokens = max_prompt_tokens
        self._task_name = task_name
        self._epoch = 0
        self._position = 0
        self._num_groups = 0
        self._order: list[int] = self._epoch_order()
        self._left_out: set[int] = set()

    def sample(self) -> list[RolloutState]:
        """Return the next group.

        Raises:
            DataError: every prompt is longer than the limit.
        """
        while True:
            row = self._next_row()
            prompt_ids = self._encode(row)
            if self._max_prompt_tokens is None or len(prompt_ids) <= self._max_prompt_tokens:
                group = make_group(row, prompt_ids, self._num_groups, self._group_size, task_name=self._task_name)
                self._num_groups += 1
                return group
            self._leave_out(row, len(prompt_ids))

    def again(self, *, row: int, group_id: int) -> list[RolloutState]:
        """Return a group that was drawn before, as it was then.

        Raises:
            DataError: there is no such row.
        """
        found = next((candidate for candidate in self._rows if candidate.index == row), None)
        if found is None:
            raise DataError(
                f"Row {row} of task {self._task_name} was drawn before, and is not among the {len(self._rows)} rows "
                f"any more. Go on with the rows that the run began with."
            )
        return make_group(found, self._encode(found), group_id, self._group_size, task_name=self._task_name)

    def state_dict(self) -> SamplerState:
        """Return the position, as values that JSON can hold."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_groups": self._num_groups,
            "drawn": self._drawn,
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on from a position saved before.

        Raises:
            DataError: it is a position in other rows, or in another order of them.
        """
        then: Drawn = state.get("drawn", self._drawn)
        if then != self._drawn:
            raise DataError(
                f"Task {self._task_name} cannot go on with other data: {_difference(then, self._drawn)}. Prompts would "
                f"be drawn twice or never. Go on with the rows, the seed and the order that the run began with, or "
                f"start a new run under another name."
            )
        self._epoch, self._position, self._num_groups = state["epoch"], state["position"], state["num_groups"]
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """How often all rows have been drawn."""
        return self._epoch

    @cached_property
    def _drawn(self) -> Drawn:
        return {
            "num_rows": len(self._rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": hash_rows(self._rows),
        }

    def _next_row(self) -> Row:
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        row = self._rows[self._order[self._position]]
        self._position += 1
        return row

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def _leave_out(self, row: Row, num_tokens: int) -> None:
        self._left_out.add(row.index)
        if len(self._left_out) == 1:
            logger.warning(
                "row %d is left out: its prompt has %d tokens, max_prompt_tokens is %s (further rows: at debug level)",
                row.index,
                num_tokens,
                self._max_prompt_tokens,
            )
        if len(self._left_out) == len(self._rows):
            raise DataError(
                f"All {len(self._rows)} prompts are longer than max_prompt_tokens={self._max_prompt_tokens}. Raise it."
            )


def _difference(then: Drawn, now: Drawn) -> str:
    for name in ("num_rows", "seed", "shuffle"):
        if then[name] != now[name]:
            return f"{name} was {then[name]} and is {now[name]}"
    return f"there are {now['num_rows']} rows as before, but not the same ones, or in another order"


def make_group(
    row: Row, prompt_ids: list[int], group_id: int, group_size: int, *, task_name: str | None = None
) -> list[RolloutState]:
    """Return `group_size` fresh attempts at one row; ids count up with the group.

    Each has containers of its own: what is done to one of them reaches neither its siblings nor the row.
    """
    return [
        RolloutState(
            message=copy_containers(row.prompt),
            group_id=group_id,
            rollout_id=group_id * group_size + index,
            prompt_ids=list(prompt_ids),
            num_tokens=len(prompt_ids),
            data_source=row.data_source,
            reward_model={"ground_truth": copy_containers(row.ground_truth)},
            task_name=task_name,
            extra_fields={**copy_containers(row.extra_info), "row": row.index},
        )
        for index in range(group_size)
    ]


def each_row_once(
    rows: Sequence[Row], *, encode: EncodeRow, group_size: int = 1, task_name: str | None = None
) -> Iterator[list[RolloutState]]:
    """Yield a group per row, in order: what evaluation runs on."""
    for position, row in enumerate(rows):
        yield make_group(row, encode(row), position, group_size, task_name=task_name)
