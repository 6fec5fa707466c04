"""`JudgerPool`: several replicas of one judger, used in turn."""

from __future__ import annotations

from collections.abc import Sequence
from types import CoroutineType
from typing import Any

import anyio

from xrl_lite.data.rollout_state import RolloutState
from xrl_lite.judger.base import Judger, JudgerOutput, JudgerOutputBatch, JudgerPayload, JudgerPayloadBatch
from xrl_lite.judger.dispatch import Dispatcher
from xrl_lite.judger.ledger import Statistics
from xrl_lite.judger.outcome import JudgementPolicy
from xrl_lite.judger.quarantine import with_quarantine
from xrl_lite.judger.remote import RemoteJudger
from xrl_lite.judger.stopwatch import Item


class JudgerPool(Judger):
    """Hands payloads to replicas, in rotation from replica 0.

    ::

        judge_payload --> next replica in turn that has a place --> output, as each one ends
          waits for    a place at any replica, first come first served
          is woken by  the next judgement that ends anywhere

    A replica that is busy with an endless judgement is passed over, so others do not wait behind it. One without a
    worker left is not used again.

    Args:
        replicas: At least one; all of them score alike.
        judger_name: Name in messages and metrics.
        policy: What happens to a sample without a score.
    """

    limits_itself = True

    def __init__(self, replicas: list[Judger], judger_name: str, *, policy: JudgementPolicy | None = None) -> None:
        super().__init__(judger_name)
        if not replicas:
            raise ValueError("JudgerPool requires at least one replica.")
        self.replicas = replicas
        self.policy = policy or replicas[0].policy
        self._dispatcher = Dispatcher(
            judger_name, [replica if isinstance(replica, RemoteJudger) else _Local(replica) for replica in replicas]
        )
        if self._judges_as(JudgerPool):
            self._company = self._dispatcher

    def preprocess(self, rollout_state: RolloutState) -> JudgerPayload:
        """Make the payload, as the first replica does."""
        return self.replicas[0].preprocess(rollout_state)

    def postprocess(self, rollout_state: RolloutState, output: JudgerOutput) -> RolloutState:
        """Write the output, as the first replica does."""
        return self.replicas[0].postprocess(rollout_state, output)

    @property
    def code_file(self) -> str | None:
        """The file of the reward function, where it is known."""
        return self.replicas[0].code_file

    def gold_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return what the first replica says."""
        return self.replicas[0].gold_response(rollout_state, label)

    def wrong_response(self, rollout_state: RolloutState, label: Any) -> str | None:
        """Return what the first replica says."""
        return self.replicas[0].wrong_response(rollout_state, label)

    def gold_guess(self, label: Any) -> str | None:
        """Return what the first replica says."""
        return self.replicas[0].gold_guess(label)

    def judge_payload(self, payload: JudgerPayloadBatch) -> CoroutineType[Any, Any, JudgerOutputBatch]:
        """Score at the next replica that has a place; a list goes to one replica as a whole.

        Raises:
            JudgerError: no replica has a worker left.
            Exception: what the replica raised.
        """
        return self._dispatcher.run(payload)

    def statistics(self, *, reset: bool = False) -> Statistics:
        """Return counts and times, and how many payloads are in quarantine."""
        return with_quarantine(super().statistics(reset=reset), self._dispatcher.quarantine)

    def get_worker_status(self) -> dict[str, int]:
        """Return what is in flight at each replica."""
        return {f"{self.get_judger_name()}[{index}]": load for index, load in enumerate(self._dispatcher.loads)}

    async def aclose(self) -> None:
        """End all workers, and wait until they are gone."""
        async with anyio.create_task_group() as closing:
            for replica in self.replicas:
                closing.start_soon(replica.aclose)
        await super().aclose()

    def close(self) -> None:
        """End all workers at once."""
        for replica in self.replicas:
            replica.close()
        super().close()


class _Local:
    """A replica that is not in a worker."""

    max_concurrency: int | None = None
    can_take_many = False
    runs_many = False

    def __init__(self, judger: Judger) -> None:
        self._judger = judger

    async def send(self, payload: Any, *, num_deaths: int = 0) -> Any:
        return await self._judger.judge_payload(payload)

    async def send_many(self, payloads: Sequence[Any], *, limit_s: float) -> list[Item]:
        raise NotImplementedError
