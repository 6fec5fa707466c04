"""Repeats a run from its ``events.jsonl``: no model, no process, no disk, the same events in the same order.

::

    recorded events --> Script --lets the next one happen--> stand-ins: groups end, steps train, weights are synced
                          ^                                       |
                          '--- must be the next recorded one ---- the real producer, buffer and trainer decide

What came from outside is taken from the record, when its turn comes: answers, rewards, deaths, training steps. What the
run decided upon it is decided again, by the real code: whom to admit, evict, refill, sample. So a run that went wrong
after hours can be watched in a debugger in a second, and one that decides otherwise now is told where.

Waits for    its turn: everything recorded before it has happened
Is woken by  the script, at every event; the clock is virtual, so that a wait nothing can end is found at once
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.actors.clock import VirtualClock
from xrl_lite.agent_loop import ProduceLimits, Producer, ProducerTask, TaskSpecConfig
from xrl_lite.agent_loop.manager import GroupTasks
from xrl_lite.data import RolloutState, Status
from xrl_lite.data.sampler import SamplerState
from xrl_lite.errors import ConfigError, RunError, errors_as_themselves
from xrl_lite.replay_buffer import (
    GroupStatus,
    Lease,
    MemoryStore,
    PromptGroup,
    ReplayBuffer,
    ReplayBufferConfig,
    build_replay_buffer,
)
from xrl_lite.replay_buffer.events import Event, Events
from xrl_lite.replay_buffer.store import StoredGroups
from xrl_lite.trainer.base import RLTrainer, TrainerParts, TrainerSettings
from xrl_lite.trainer.checkpoint import STATE, CheckpointCallback, CheckpointStore, WriteEngines
from xrl_lite.trainer.randomness import random_state
from xrl_lite.trainer.stop import StopRequest

if TYPE_CHECKING:
    from xrl_lite.engine.batch import TrainBatch
    from xrl_lite.trainer.report import Reporter
    from xrl_lite.trainer.run_folder import RunFolder

PATIENCE_S = 24 * 3600.0
"""Virtual seconds without an event after which nothing more can happen."""

_NOT_REPEATED = ("n", "t", "metrics", "state", "notes")
"""Fields that a replay need not have the same."""


class Script(Events):
    """Lets recorded events happen one after the other, and nothing else.

    Args:
        recorded: What happened.
        break_at: Number of an event before which a debugger is entered.
    """

    listens = True

    def __init__(self, recorded: Sequence[Event], *, break_at: int | None = None) -> None:
        self._recorded = recorded
        self._place = 0
        self._break_at = break_at
        self._given_back: Counter[str] = Counter()
        self._moved = anyio.Event()

    @property
    def due(self) -> Event | None:
        """The event that comes next; None at the end."""
        return self._recorded[self._place] if self._place < len(self._recorded) else None

    @property
    def num_repeated(self) -> int:
        """Events that have happened again."""
        return self._place

    def record(self, event: str, **fields: Any) -> None:
        """Compare an event with the recorded one.

        Raises:
            RunError: it is another.
        """
        due = self.due
        if due is None:
            return  # the record ends here: the run was killed
        now: Event = {"event": event, **json.loads(json.dumps(fields, default=str))}
        if _without(now) != _without(due):
            raise RunError(
                f"The replay differs from the record at event {due.get('n')}. Recorded: {_without(due)}. "
                f"Now: {_without(now)}."
            )
        self._place += 1
        following = self.due
        if self._break_at is not None and following is not None and following.get("n") == self._break_at:
            breakpoint()
        self._moved.set()
        self._moved = anyio.Event()

    async def turn(self, *events: str, **fields: Any) -> None:
        while not self.is_due(*events, **fields):
            await self._moved.wait()

    def is_due(self, *events: str, **fields: Any) -> bool:
        """Whether the next event is one of these, with these fields."""
        due = self.due
        return due is not None and due["event"] in events and fields.items() <= due.items()

    def next_of(self, *events: str) -> str | None:
        """Return which of these events comes first from here on; None if none does."""
        return next((event["event"] for event in self._recorded[self._place :] if event["event"] in events), None)

    async def end(self) -> None:
        """Wait until everything has happened.

        Raises:
            RunError: nothing more happens, and there should.
        """
        while self.due is not None:
            moved = self._moved
            with anyio.move_on_after(PATIENCE_S) as patience:
                await moved.wait()
            if patience.cancelled_caught:
                raise RunError(
                    f"The replay stands still before event {self.due.get('n')}: {_without(self.due)} was recorded, and "
                    f"nothing leads to it now."
                )


class RecordedGroups(GroupTasks):
    """Runs groups as they were run: takes the place of the `AgentLoopManager`.

    Args:
        script: The record.
        replay_buffer: Where groups go.
    """

    def __init__(self, script: Script, replay_buffer: ReplayBuffer) -> None:
        self._script = script
        self._buffer = replay_buffer
        self._num_running = 0

    def generate_sequences(self, prompts: Sequence[PromptGroup]) -> None:
        """Begin groups; each ends when it did."""
        assert self._tasks is not None, "it is running"
        for group in prompts:
            lease = self._buffer.start(group.uid, worker=self._worker_of(group.uid), global_steps=group.global_steps)
            self._num_running += 1
            self._tasks.start_soon(partial(self._run, group, lease))

    async def pause(self) -> float:
        """Wait until everything that ran has ended as it did."""
        while self._num_running:
            await self._buffer.changed()
        return 0.0

    async def evaluate(self, groups: Sequence[list[RolloutState]], **kwargs: Any) -> list[list[RolloutState]]:
        """Return greedy attempts, of one state each, with the scores that they had."""
        await self._script.turn("baselines")
        due = self._script.due
        assert due is not None, "it is their turn"
        for (state,), score in zip(groups, due["scores"], strict=True):
            state.status = Status.FAILED if score is None else Status.COMPLETED
            state.reward = None if score is None else {"score": score}
        return list(groups)

    def _worker_of(self, uid: str) -> str:
        due = self._script.due
        return due["worker"] if due and due["event"] == "started" and due["group"] == uid else "driver"

    async def _run(self, group: PromptGroup, lease: Lease) -> None:
        buffer, script = self._buffer, self._script
        try:
            await script.turn("ended", "failed", "given_back", group=group.uid)
            due = script.due
            assert due is not None, "it is this group's turn"
            if due["event"] == "failed":
                buffer.revoke(group.uid, due["reason"])
            if due["event"] == "given_back":
                group.states = states_of(due["attempts"], group.states)
            if due["event"] != "ended":
                return
            states = states_of(due["attempts"], group.states)
            if due["status"] == GroupStatus.FINISHED.value:
                await buffer.finish(lease, states)
            elif due["status"] == GroupStatus.ABORTED.value:
                await buffer.abort(lease, states)
            else:
                await buffer.fail(lease, due["reason"], states)
        finally:
            self._num_running -= 1
            buffer.put_back(lease)
            buffer.wake()


class RecordedEngine:
    """Updates nothing, when updates were made.

    Args:
        script: The record.
    """

    def __init__(self, script: Script) -> None:
        self._script = script

    async def measure(
        self, batch: TrainBatch, names: list[str], *, kept_policy: bool = False
    ) -> dict[str, list[list[float]]]:
        """Return what the engine sampled with, whatever is asked for."""
        return dict.fromkeys(names, batch.rollout_logprobs)

    async def keep_policy(self) -> None:
        """Keep nothing: there are no weights."""

    async def release_memory(self) -> None:
        """Release nothing."""

    async def load_checkpoint(self, folder: Path) -> None:
        """Load nothing."""

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Wait for the end of the step."""
        await self._script.turn("trained", step=batch.step, part=batch.part)
        return {"loss": 0.0, "grad_norm": 0.0, "logprob_gap/mean": 0.0}


class RecordedCritic:
    """Values every state at 0, and updates nothing."""

    async def values(self, batch: TrainBatch) -> list[list[float]]:
        """Return zeros."""
        return [[0.0] * len(response) for response in batch.responses]

    async def release_memory(self) -> None:
        """Release nothing."""

    async def load_checkpoint(self, folder: Path) -> None:
        """Load nothing."""

    async def train_batch(self, batch: TrainBatch) -> dict[str, float]:
        """Update nothing."""
        return {}


class RecordedSync:
    """Brings no weights, when weights were brought.

    Args:
        script: The record.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.policy_version = -1

    async def sync(self, version: int) -> None:
        """Wait until replicas have a version."""
        await self._script.turn("synced", version=version)
        self.policy_version = version
        self._script.record("synced", version=version)


class RecordedEvaluator:
    """Answers nothing, and returns what was measured.

    Args:
        script: The record.
    """

    def __init__(self, script: Script) -> None:
        self._script = script

    async def evaluate(self) -> dict[str, float]:
        """Wait for the end of the evaluation."""
        await self._script.turn("evaluated")
        due = self._script.due
        return due["metrics"] if due else {}


class RecordedSampler:
    """Draws groups without content, numbered as they were.

    Args:
        task: The task.
        rows: Row of the data set by the name of the group.
    """

    def __init__(self, task: TaskSpecConfig, rows: Mapping[str, Any]) -> None:
        self._task = task
        self._rows = rows
        self._state: SamplerState = {"epoch": 0, "position": 0, "num_groups": 0}

    def sample(self) -> list[RolloutState]:
        """Return the next group."""
        number = self._state["num_groups"]
        self._state["num_groups"] = number + 1
        return self._group(number)

    def again(self, *, row: int | None, group_id: int) -> list[RolloutState]:
        """Return a group that was drawn before."""
        return self._group(group_id)

    def state_dict(self) -> SamplerState:
        """Return how far it is."""
        return self._state.copy()

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on from there."""
        self._state = state.copy()

    def _group(self, number: int) -> list[RolloutState]:
        size, name = self._task.sampler_config.prompt_repeat_k, self._task.task_name
        return [
            RolloutState(
                message=[{"role": "user", "content": ""}],
                group_id=number,
                rollout_id=number * size + place,
                prompt_ids=[0],
                task_name=name,
                extra_fields={"row": self._rows.get(f"{name}-{number}")},
            )
            for place in range(size)
        ]


class RecordedStore(MemoryStore):
    """Finds what the recorded run found when it began, and keeps what could be kept then.

    Args:
        script: The record.
        restored: The event that says what was found; None if it is not in the record.
        earlier: What happened before: how the groups ended that were found.
    """

    def __init__(self, script: Script, restored: Event | None, earlier: Sequence[Event]) -> None:
        self._script = script
        self._restored = restored
        self._attempts = {event["group"]: event["attempts"] for event in earlier if event["event"] == "ended"}

    def refusal(self, group: PromptGroup) -> str | None:
        due = self._script.due
        return due.get("reason") if due and due["event"] == "stored" else None

    async def rewind(self, step: int, *, keep_newer: bool) -> StoredGroups:
        if self._restored is None:
            return StoredGroups()
        groups = [self._group(ordinal, found) for ordinal, found in enumerate(self._restored["groups"])]
        return StoredGroups(groups=groups, next_ordinal=len(groups), notes=self._restored["notes"])

    def _group(self, ordinal: int, found: Mapping[str, Any]) -> PromptGroup:
        group = PromptGroup(
            uid=found["group"],
            partition_id=found["partition"],
            global_steps=found["step"],
            task_name=found["task"],
            ordinal=ordinal,
            row=found["row"],
            status=GroupStatus(found["status"]),
            reason=found["reason"],
        )
        drawn = [RolloutState(message=[{"role": "user", "content": ""}], prompt_ids=[0], task_name=group.task_name)]
        group.states = states_of(self._attempts.get(group.uid, []), drawn)
        group.num_rows = sum(state.status is Status.COMPLETED for state in group.states)
        group.measure()
        return group


class RecordedStop(StopRequest):
    """Was asked to stop when the recorded run was.

    Args:
        script: The record.
    """

    def __init__(self, script: Script) -> None:
        self._script = script

    @property
    def requested(self) -> bool:  # type: ignore[override]
        """Whether nothing is trained or evaluated any more before the run stops."""
        return self._script.next_of("stopped", "sampled", "trained", "evaluated") == "stopped"

    @property
    def cancel(self) -> None:  # type: ignore[override]
        """There is no start-up to be cancelled."""

    @cancel.setter
    def cancel(self, cancel: object) -> None: ...  # type: ignore[override]


class NoCheckpoints(CheckpointStore):
    """Saves nothing: weights that were not trained need not be kept."""

    def __init__(self) -> None:
        super().__init__(Path(), keep=1)

    async def save(self, step: int, state: dict[str, Any], write_engines: WriteEngines) -> Path:
        return Path(f"step_{step:06d}")

    def oldest_step(self) -> int:
        return 0

    def forget_after(self, step: int) -> list[Path]:
        return []


class Awake:
    """Gives no memory back, and needs none."""

    async def sleep(self, level: int = 1) -> None:
        """Stay awake."""

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        """Be awake."""


class NoJudgements:
    """Judged nothing."""

    def statistics(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return nothing."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What a replay takes from the settings of the recorded run."""

    trainer: TrainerSettings
    """Settings of the loop."""
    tasks: Sequence[TaskSpecConfig]
    """What was trained on."""
    replay_buffer: ReplayBufferConfig
    """Settings of the buffer."""
    limits: ProduceLimits
    """When producing gave up."""


def replay(
    recorded: Sequence[Event],
    trainer_class: type[RLTrainer],
    settings: ReplaySettings,
    *,
    folder: RunFolder,
    reporter: Reporter,
    break_at: int | None = None,
) -> int:
    """Repeat a run on a virtual clock; return how many events were repeated.

    Args:
        recorded: Its events. Of a run that was resumed, those since then are repeated.
        trainer_class: Trainer of its mode.
        settings: Its settings.
        folder: Where the metrics of the replay go.
        reporter: Is told what happens.
        break_at: Number of an event before which a debugger is entered.

    Raises:
        ConfigError: there is no event to repeat.
        RunError: an event is another than the recorded one, or nothing leads to it.
        XrlLiteError: whatever ended the recorded run.
    """
    last = max((place for place, event in enumerate(recorded) if event["event"] == "began"), default=None)
    if last is None:
        raise ConfigError("There is nothing to repeat: the record has no event `began`.")
    if last > 0:
        reporter.note(
            f"the run was resumed after step {recorded[last]['step']}: the {len(recorded) - last} events since "
            f"then are repeated, the {last} before are not"
        )
    script = Script(recorded[last:], break_at=break_at)
    clock = VirtualClock()

    async def run() -> None:
        trainer = _trainer(script, recorded, last, trainer_class, settings, folder, reporter)
        with errors_as_themselves():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trainer.fit, _checkpoint(recorded[last], folder.path))
                await script.end()
                await anyio.sleep(1.0)  # virtual: until nothing is left to do
                tasks.cancel_scope.cancel()

    clock.run(run())
    return script.num_repeated


def _trainer(
    script: Script,
    recorded: Sequence[Event],
    began: int,
    trainer_class: type[RLTrainer],
    settings: ReplaySettings,
    folder: RunFolder,
    reporter: Reporter,
) -> RLTrainer:
    restored = next((event for event in recorded[began:] if event["event"] == "restored"), None)
    buffer = build_replay_buffer(
        settings.replay_buffer,
        trainer_mode=settings.trainer.trainer.layout,
        trainer_config=settings.trainer.trainer,
        store=RecordedStore(script, restored, recorded[:began]),
        max_failed_groups=settings.limits.max_failed_groups,
        events=script,
    )
    manager = RecordedGroups(script, buffer)
    rows = {event["group"]: event.get("row") for event in recorded if event["event"] == "admitted"}
    tasks = [
        ProducerTask(
            name=task.task_name,
            weight=task.weight,
            strategy=task.produce_strategy_config,
            sampler=RecordedSampler(task, rows),
        )
        for task in settings.tasks
    ]
    producer = Producer(
        tasks,
        manager=manager,
        replay_buffer=buffer,
        limits=settings.limits,
        sync_weights_interval=settings.trainer.trainer.sync_weights_interval,
        num_warmup_batches=settings.trainer.trainer.num_warmup_batches,
    )
    parts: dict[str, Any] = {
        "engine": RecordedEngine(script),
        "critic": RecordedCritic() if "values" in settings.trainer.algorithm.requirements() else None,
        "weight_sync": RecordedSync(script),
        "manager": manager,
        "rollout": Awake(),
        "evaluator": RecordedEvaluator(script) if any(event["event"] == "evaluated" for event in recorded) else None,
    }
    return trainer_class(
        TrainerParts(
            producer=producer,
            replay_buffer=buffer,
            judger=NoJudgements(),
            folder=folder,
            store=NoCheckpoints(),
            callback=CheckpointCallback(None),
            reporter=reporter,
            **parts,
        ),
        settings.trainer,
        RecordedStop(script),
    )


def _checkpoint(began: Event, folder: Path) -> Path | None:
    """Write the driver's part of the checkpoint that the recorded run went on from."""
    if began["state"] is None:
        return None
    checkpoint = folder / "went_on_from"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / STATE).write_text(json.dumps(began["state"] | {"random": random_state()}), encoding="utf-8")
    return checkpoint


def states_of(attempts: Sequence[dict[str, Any]], drawn: Sequence[RolloutState]) -> list[RolloutState]:
    """Return attempts as they are recorded: right in status, reward, length and versions, without content."""
    states: list[RolloutState] = []
    for place, attempt in enumerate(attempts):
        state = drawn[min(place, len(drawn) - 1)].model_copy()
        tokens, versions = attempt["tokens"], attempt["versions"]
        state.status = Status(attempt["status"])
        state.reward = attempt["reward"] or None
        state.response, state.response_ids = "", [0] * tokens
        state.logprobs, state.response_mask = [0.0] * tokens, [1] * tokens
        state.response_model_steps = [versions[0], *[versions[1]] * (tokens - 1)] if versions else []
        state.finish_reason = "abort" if state.status is Status.ABORTED else "stop"
        states.append(state)
    return states


def _without(event: Event) -> Event:
    return {name: value for name, value in event.items() if name not in _NOT_REPEATED}
