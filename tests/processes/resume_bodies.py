"""A run in a process of its own, over the scripted engine, that is killed at some turn of its event loop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from tests.fake_run import fit, make_trainer, rows
from xrl_lite.actors import ActorSystem
from xrl_lite.agent_loop import AsyncProduceStrategyConfig
from xrl_lite.replay_buffer import SQLiteStore
from xrl_lite.trainer.checkpoint import find_checkpoint
from xrl_lite.trainer.run_folder import BUFFER, RunFolder

TOKENS = (2, 3, 9, 2)
"""Responses have so many tokens."""


class Life:
    """One life of a run."""

    async def live(self, folder: Path, mode: str, num_steps: int, turns: int | None) -> int:
        """Go on with the run in a folder; return how many turns of the event loop it took to its end.

        Args:
            folder: Of the run.
            mode: Of the trainer.
            num_steps: Of the whole run.
            turns: Turns of the event loop after which this process ends without a word; None for never.
        """
        self._turns = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._count, turns)
            await self._run(folder, mode, num_steps)
            tasks.cancel_scope.cancel()
        return self._turns

    async def _count(self, turns: int | None) -> None:
        while self._turns != turns:
            self._turns += 1
            await anyio.lowlevel.checkpoint()
        os.kill(os.getpid(), signal.SIGKILL)

    async def _run(self, path: Path, mode: str, num_steps: int) -> None:
        folder = RunFolder(path)
        checkpoint = find_checkpoint("auto", folder.checkpoints)
        if checkpoint is None:
            folder.start_over()
        options: dict[str, Any] = {}
        if mode != "sync":
            options["strategy"] = AsyncProduceStrategyConfig(
                enable_partial_rollout=True,
                max_staleness=2,
                over_sample_threshold=0.5 if mode == "colocate_async" else 0.0,
            )
        async with ActorSystem(num_cpus=4, backend="inline") as system:
            trainer = make_trainer(
                system,
                folder,
                mode=mode,
                group_size=4,
                rollout={
                    "engine_options": {
                        "responses": [[65 + number % 2] * length for number, length in enumerate(TOKENS)],
                        "seconds_per_token": 0.001,
                    },
                    "partial_rollout": True,
                    "max_batch_size": 12,
                },
                rows=rows(512),
                store=SQLiteStore(path / BUFFER),
                trainer={"num_steps": num_steps},
                evaluation={"every_steps": 0, "at_start": False},
                checkpoint={"every_steps": 3},
                **options,
            )
            await fit(trainer, checkpoint)
        folder.close()
