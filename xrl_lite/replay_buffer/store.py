"""Where a replay buffer keeps what must outlive the process: an interface, and a store that keeps nothing.

The buffer tells its store everything that happens, in order, and never waits for it but in one place: what was
generated is on the disk before it counts. A store therefore writes in the order it is told, and what it holds after a
kill is what was true at some moment shortly before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xrl_lite.data import RolloutState
from xrl_lite.replay_buffer.groups import GroupStatus, PromptGroup


@dataclass(kw_only=True)
class StoredGroups:
    """What a store holds of the run so far."""

    groups: list[PromptGroup] = field(default_factory=list[PromptGroup])
    """Groups to go on with, in admission order; attempts that were generated are only on the disk (`is_spilled`)."""
    next_ordinal: int = 0
    """Place of the next group in the order of admission."""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What was noted along with the admissions, for example how far the samplers are."""


class GroupStore(Protocol):
    """Keeps groups."""

    is_durable: bool
    """Whether what is written can be read again; the buffer may then forget the attempts of waiting groups."""

    def admit(self, groups: Sequence[PromptGroup], notes: dict[str, Any]) -> None:
        """Note new groups with their prompts, and values that belong to this very moment."""
        ...

    def update(self, group: PromptGroup) -> None:
        """Note status, reason and steps of a group."""
        ...

    def write_states(self, group: PromptGroup) -> None:
        """Keep the attempts of a group, in place of those it had."""
        ...

    def take(self, groups: Sequence[PromptGroup], step: int) -> None:
        """Note that a step trains on groups."""
        ...

    def drop(self, groups: Sequence[PromptGroup], reason: str, step: int) -> None:
        """Note that groups leave untrained while a step is sampled for."""
        ...

    def forget(self, step: int) -> None:
        """Delete what was trained on, or dropped, up to a step: no checkpoint will go back before it."""
        ...

    async def flush(self) -> None:
        """Wait until everything noted so far would survive a kill.

        Raises:
            StorageError: it cannot be written; says why.
        """
        ...

    def refusal(self, group: PromptGroup) -> str | None:
        """Return why the attempts of a group could not be kept, once; None if they are. Known after `flush`.

        The group is a failure on the disk then: one bad sample must not end the run.
        """
        ...

    async def load_states(self, groups: Sequence[PromptGroup]) -> list[list[RolloutState]]:
        """Return the attempts of groups."""
        ...

    async def read_notes(self) -> dict[str, Any]:
        """Return what was noted along with the admissions."""
        ...

    async def rewind(self, step: int, *, keep_newer: bool) -> StoredGroups:
        """Go back to the end of a step, and return what waits there.

        Args:
            step: Last step that stays trained.
            keep_newer: Go on with groups that were admitted since; otherwise everything that was not trained by then
                is deleted, because it will be drawn and generated again, to the same bits.
        """
        ...

    async def close(self) -> None:
        """Write what is left and end."""
        ...


class MemoryStore:
    """Keeps nothing: for tests, and for runs that need no resume."""

    is_durable = False

    def admit(self, groups: Sequence[PromptGroup], notes: dict[str, Any]) -> None: ...

    def update(self, group: PromptGroup) -> None: ...

    def write_states(self, group: PromptGroup) -> None: ...

    def take(self, groups: Sequence[PromptGroup], step: int) -> None: ...

    def drop(self, groups: Sequence[PromptGroup], reason: str, step: int) -> None: ...

    def forget(self, step: int) -> None: ...

    async def flush(self) -> None: ...

    def refusal(self, group: PromptGroup) -> str | None: ...

    async def load_states(self, groups: Sequence[PromptGroup]) -> list[list[RolloutState]]:
        return [group.states for group in groups]

    async def read_notes(self) -> dict[str, Any]:
        return {}

    async def rewind(self, step: int, *, keep_newer: bool) -> StoredGroups:
        return StoredGroups()

    async def close(self) -> None: ...


IN_PROGRESS = (GroupStatus.PENDING, GroupStatus.RUNNING, GroupStatus.ABORTED, GroupStatus.EXPIRED)
"""What a restarted run has to dispatch again."""
