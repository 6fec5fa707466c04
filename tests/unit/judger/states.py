"""States and stand-ins with only what matters to a judger."""

from __future__ import annotations

from typing import Any

from xrl_lite.data import RolloutState, Status


def make_state(response: str | None = "72", label: Any = "72", **fields: Any) -> RolloutState:
    defaults: dict[str, Any] = {
        "message": [{"role": "user", "content": "How many?"}],
        "reward_model": {"ground_truth": label},
        "status": Status.COMPLETED,
    }
    return RolloutState(response=response, **{**defaults, **fields})


class FakeActor:
    """A handle whose `judge_payload.remote` notes what it is sent and answers by `answer`."""

    def __init__(self, answer: Any) -> None:
        self.payloads: list[Any] = []
        self._answer = answer

    @property
    def judge_payload(self) -> FakeActor:
        return self

    async def remote(self, payload: Any) -> Any:
        self.payloads.append(payload)
        result = self._answer(payload)
        if isinstance(result, Exception):
            raise result
        return result


def exact(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": 1.0 if response.strip() == str(label).strip() else 0.0}
