"""Whether trainer and rollout engine hold the same model: both are asked about the same tokens.

The first look comes after the first weight sync, before anything is trained. Later every step compares the two on those
of its samples that the present weights made; where there are none for many steps, a few tokens are sampled for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from xrl_lite.data import RolloutState, SampleParams, Status
from xrl_lite.engine.batch import TrainBatch
from xrl_lite.engine.controller import TrainingController
from xrl_lite.errors import RunError, errors_as_themselves
from xrl_lite.rollout.controller import RolloutController

NUM_PROMPTS = 4
NUM_TOKENS = 16
"""Sampled behind each prompt."""
LIMITS = {"float32": 1e-3, "bfloat16": 0.2}
"""Mean difference of log-probs, in nats, by the coarser type of the two. Usual are 1e-6 to 1e-5, and 0.02 to 0.05."""


class AgreementCheck:
    """Samples a few tokens and compares their log-probs.

    Args:
        rollout: Samples.
        engine: Computes the log-probs anew.
        prompts: Token ids; the shortest are used.
        temperature: Of the task.
        dtypes: Types in which the two compute, by the name of the setting.
    """

    def __init__(
        self,
        rollout: RolloutController,
        engine: TrainingController,
        *,
        prompts: Sequence[list[int]],
        temperature: float,
        dtypes: dict[str, str],
    ) -> None:
        self._rollout = rollout
        self._engine = engine
        self._prompts = sorted(prompts, key=len)[:NUM_PROMPTS]
        self._temperature = temperature or 1.0
        self._dtypes = dtypes
        self._limit = max(LIMITS[dtype] for dtype in dtypes.values())

    async def run(self) -> str:
        """Return a sentence about how far the two are apart.

        Raises:
            RunError: too far; names the usual causes.
        """
        states = await self._sample()
        for state in states:
            if state.status is not Status.COMPLETED:
                raise RunError(f"The rollout engine cannot continue a prompt of the task: {state.error_msg}")
        mean, num_tokens = await self._compare(states)
        return f"log-probs of trainer and rollout engine agree to {mean:.1e} (mean of {num_tokens} tokens)"

    async def run_again(self) -> float | None:
        """Return how far the two are apart now, in nats; None if the replicas have no time for it.

        Both must hold the same weights.

        Raises:
            RunError: too far.
        """
        states = [state for state in await self._sample() if state.status is Status.COMPLETED]
        return (await self._compare(states))[0] if states else None

    async def _compare(self, states: Sequence[RolloutState]) -> tuple[float, int]:
        batch = _batch_of(states, self._temperature)
        (ours,) = (await self._engine.measure(batch, ["old_logprobs"])).values()
        gaps = [
            abs(mine - theirs)
            for row, other in zip(ours, batch.rollout_logprobs, strict=True)
            for mine, theirs in zip(row, other, strict=True)
        ]
        mean = sum(gaps) / len(gaps)
        if not mean <= self._limit:  # NaN is no agreement either
            raise RunError(self._disagreement(mean))
        return mean, len(gaps)

    async def _sample(self) -> list[RolloutState]:
        params = SampleParams(temperature=self._temperature, max_tokens=NUM_TOKENS)
        states = [
            RolloutState(
                message=[], prompt_ids=prompt, rollout_id=number, task_name="agreement_check", sample_params=params
            )
            for number, prompt in enumerate(self._prompts)
        ]
        with errors_as_themselves():
            async with anyio.create_task_group() as tasks:
                for state in states:
                    tasks.start_soon(self._rollout.generate, state)
        return states

    def _disagreement(self, mean: float) -> str:
        types = ", ".join(f"{name}={dtype}" for name, dtype in self._dtypes.items())
        return (
            f"Right after a weight sync, trainer and rollout engine give the same tokens log-probs that differ "
            f"by {mean:.3g} nats on average; with {types} at most {self._limit:g} is normal. What was sampled would "
            f"be trained on as if another policy had sampled it. Usual causes: weights that the engine took and does "
            f"not use (a tied output head, a quantised copy), an architecture that the engine computes otherwise (rope "
            f"scaling, sliding window, soft caps), other types than the settings say, log-probs from before the "
            f"temperature."
        )


def _batch_of(states: Sequence[RolloutState], temperature: float) -> TrainBatch:
    responses = [state.response_ids or [] for state in states]
    return TrainBatch(
        prompts=[state.prompt_ids or [] for state in states],
        responses=responses,
        response_masks=[[1] * len(response) for response in responses],
        rollout_logprobs=[state.logprobs or [] for state in states],
        groups=list(range(len(states))),
        sessions=list(range(len(states))),
        advantages=[[0.0] * len(response) for response in responses],
        temperature=temperature,
    )
