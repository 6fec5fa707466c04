"""An engine of your own, outside of xrl-lite: it samples from a table of bigrams, which the trainer's weights replace.

    XRL_LITE_USE_EXTERNAL_MODULES=bigram_engine PYTHONPATH=examples xrl-lite train my.yaml rollout.engine=bigram

The variable has this module imported in every process before settings are checked, so the name is known everywhere.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from xrl_lite.rollout.adapter import SERVER_ADAPTERS, ServerAdapter
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import (
    GenerateRequest,
    GenerateResult,
    RolloutReplica,
    RolloutReplicaRegistry,
    copy_tensors,
)

if TYPE_CHECKING:
    from xrl_lite.algorithms.weights import WeightBucket

TABLE = "bigrams.weight"


class BigramReplica(RolloutReplica):
    """Draws the next token from a row of logits that the last token chooses.

    Options (`RolloutConfig.engine_options`):
        vocab_size: Tokens there are.
        end_token: Ends a response.
    """

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        import torch

        super().__init__(config=config, model_path=model_path, replica=replica)
        options = config.options_of("bigram", vocab_size=16, end_token=0)
        self._end_token: int = options["end_token"]
        self._own = {TABLE: torch.zeros(options["vocab_size"], options["vocab_size"])}
        self._results: dict[str, GenerateResult] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._may_compute = asyncio.Event()
        self._may_compute.set()

    def admit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._results[request.request_id] = GenerateResult()
            self._tasks[request.request_id] = asyncio.create_task(self._generate(request))

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._tasks[request_id].cancel()
            self._finish(request_id, "abort")

    def partial(self, request_id: str) -> GenerateResult:
        return self._results[request_id]

    async def pause(self) -> None:
        self._may_compute.clear()

    async def resume(self) -> None:
        self._may_compute.set()

    async def load_tensors(self, bucket: WeightBucket) -> dict[str, str]:
        return copy_tensors(bucket, self._own)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._own.items()}

    async def _generate(self, request: GenerateRequest) -> None:
        params, result = request.sample_params, self._results[request.request_id]
        last = request.prompt_ids[-1]
        while len(result.token_ids) < params.max_tokens:
            await self._may_compute.wait()
            logits = self._own[TABLE][last] / (params.temperature or 1.0)
            # a generator for each token, so that a response which was cut off goes on as if it had not been
            draw = random.Random(f"{request.seed}/{request.num_sampled + len(result.token_ids)}")
            weights = logits.softmax(0).tolist() if params.temperature else (logits == logits.max()).tolist()
            last = draw.choices(range(len(logits)), weights=weights)[0]
            result.token_ids.append(last)
            result.logprobs.append(logits.log_softmax(0)[last].item())
            result.policy_versions.append(self.policy_version)
            self.advanced([request.request_id])
            if last == self._end_token or last in params.stop_token_ids:
                return self._finish(request.request_id, "stop")
            await asyncio.sleep(0)  # let the others have a token too
        return self._finish(request.request_id, "length")

    def _finish(self, request_id: str, reason: str) -> None:
        result = self._results.pop(request_id)
        del self._tasks[request_id]
        result.finish_reason = reason
        self.deliver(request_id, result)


class BigramAdapter(ServerAdapter):
    """Takes weights on every way; listed here to show where an engine says which it can."""

    transports = ("shared_memory", "folder")


RolloutReplicaRegistry.register("bigram", lambda: BigramReplica)
SERVER_ADAPTERS.register("bigram")(BigramAdapter)
