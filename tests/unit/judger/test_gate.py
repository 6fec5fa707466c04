"""A judger holds a bounded number of judgements; who comes when it is full waits in order, without a payload."""

from __future__ import annotations

import asyncio
import copy
from time import perf_counter
from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit.judger.states import make_state
from xrl_lite.data import RolloutState
from xrl_lite.judger import JudgerConfig, NativeJudger
from xrl_lite.judger.gate import Gate
from xrl_lite.settings import explain


class Slow(NativeJudger):
    """Notes whose payload was made, and scores when it is let go."""

    def __init__(self) -> None:
        super().__init__("slow", reward_handler=self.score)
        self.made: list[Any] = []
        self.let_go = asyncio.Semaphore(0)

    def preprocess(self, rollout_state: RolloutState) -> dict[str, Any]:
        self.made.append(rollout_state.response)
        return super().preprocess(rollout_state)

    async def score(self, response: str, label: Any, extra_info: Any) -> dict[str, Any]:
        await self.let_go.acquire()
        return {"score": 1.0}


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_comes_when_a_judger_is_full_waits_in_order_and_without_a_payload() -> None:
    judger = Slow()
    judger.gate = Gate(2)
    judging = [asyncio.create_task(judger.judge(make_state(response=name))) for name in "abcd"]
    await settled()
    assert judger.made == ["a", "b"]
    judger.let_go.release()
    await settled()
    assert judger.made == ["a", "b", "c"]
    for _ in judging:
        judger.let_go.release()
    assert [(await task).reward for task in judging] == [{"score": 1.0}] * 4
    assert judger.made == ["a", "b", "c", "d"]


async def test_waiting_outside_counts_as_time_in_line() -> None:
    judger = Slow()
    judger.gate = Gate(1)
    judging = [asyncio.create_task(judger.judge(make_state())) for _ in range(2)]
    await settled()
    began = perf_counter()
    await settled()
    waited_s = perf_counter() - began
    judger.let_go.release()
    judger.let_go.release()
    _, second = await asyncio.gather(*judging)
    assert second.extra_fields["judgement"]["queue_s"] >= waited_s


async def test_cancelled_outside_or_in_the_moment_of_entering_leaves_the_place_to_the_next() -> None:
    gate = Gate(1)
    assert gate.enter_now()
    waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    gate.leave()
    waiting[1].cancel()  # it has been given the place, and does not know yet
    await waiting[2]
    assert not gate.enter_now()
    gate.leave()
    assert gate.enter_now()


def test_who_waited_in_a_loop_that_has_ended_is_passed_over() -> None:
    gate = Gate(1)
    assert gate.enter_now()
    ended = asyncio.new_event_loop()
    waiting = gate.enter()
    ended.call_soon(waiting.send, None)
    ended.call_soon(ended.stop)
    ended.run_forever()
    ended.close()
    gate.leave()
    assert gate.enter_now()
    waiting.close()


async def test_a_failed_judgement_leaves_too() -> None:
    judger = JudgerConfig(judger_name="odd", reward_handler=lambda: {}, signature="trl", max_pending=1).build()
    for _ in range(3):
        async with asyncio.timeout(10):
            await judger.judge(make_state())
    assert judger.statistics()["odd"]["raised"] == 3
    assert copy.deepcopy(judger.gate) is not judger.gate


def test_a_bound_is_at_least_one() -> None:
    with pytest.raises(ValidationError) as caught:
        JudgerConfig(judger_name="none", max_pending=0)
    assert "max_pending: input should be greater than 0; got 0" in str(explain(caught.value, JudgerConfig))
