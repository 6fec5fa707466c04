"""A scripted engine: no model, no arithmetic. Ships for tests of everything above the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from xrl_lite.errors import RolloutError
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplica, copy_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.weights import WeightBucket


class FakeReplica(RolloutReplica):
    """Answers from a list of token sequences, chosen by the request's seed.

    Options (`RolloutConfig.engine_options`):
        responses: Token sequences to answer with; the default is one token, 0.
        fail_prompts: First tokens of prompts that fail with a RolloutError.
        hang_prompts: First tokens of prompts that get `hang_tokens` tokens, and no more until they are aborted.
        hang_tokens: How many; 0 by default.
        seconds_per_token: Time that each token takes; `max_batch_size` requests get tokens at the same time, the others
            wait for their turn. 0 by default: answers come at once.
        exit_prompts: First tokens of prompts that end the process.
        weights: Shapes of the weights that must come, by name; not checked by default.
        exit_at_load: Replica that ends its process when weights are loaded.
        hang_at_prepare: Replica that never gets ready for weights.
    """

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        super().__init__(config=config, model_path=model_path, replica=replica)
        self._options: dict[str, Any] = config.options_of(
            "fake",
            responses=[[0]],
            fail_prompts=[],
            hang_prompts=[],
            hang_tokens=0,
            seconds_per_token=0.0,
            exit_prompts=[],
            weights=None,
            exit_at_load=None,
            hang_at_prepare=None,
        )
        self._unfinished: dict[str, GenerateResult] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(config.max_batch_size)
        self._may_compute = asyncio.Event()
        self._may_compute.set()
        self._paused: list[GenerateRequest] | None = None
        self.held: dict[str, Tensor] = {}

    def admit(self, requests: list[GenerateRequest]) -> None:
        if self._paused is not None:
            self._paused += requests
            return
        for request in requests:
            first = request.prompt_ids[0]
            if first in self._options["exit_prompts"]:
                raise SystemExit(f"scripted end by prompt {request.prompt_ids}")
            if first in self._options["fail_prompts"]:
                self.deliver(request.request_id, RolloutError(f"scripted failure of prompt {request.prompt_ids}"))
            elif first in self._options["hang_prompts"]:
                answer = self._answer(request).token_ids[: self._options["hang_tokens"]]
                self._unfinished[request.request_id] = self._result(answer, None)
                self.advanced([request.request_id])
            elif self._options["seconds_per_token"]:
                self._unfinished[request.request_id] = GenerateResult()
                self._tasks[request.request_id] = asyncio.create_task(self._generate(request), name="generate")
            else:
                self.deliver(request.request_id, self._answer(request))

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (task := self._tasks.pop(request_id, None)) is not None:
                task.cancel()
            result = self._unfinished.pop(request_id, GenerateResult())
            result.finish_reason = "abort"
            self.deliver(request_id, result)
        if self._paused is not None:
            self._paused = [request for request in self._paused if request.request_id not in request_ids]

    def partial(self, request_id: str) -> GenerateResult:
        return self._unfinished.get(request_id, GenerateResult())

    async def pause(self) -> None:
        if self._options["hang_at_prepare"] == self.replica:
            await anyio.sleep_forever()
        self._may_compute.clear()
        if self._paused is None:
            self._paused = []

    async def resume(self) -> None:
        self._may_compute.set()
        waiting, self._paused = self._paused or [], None
        self.admit(waiting)

    async def load_tensors(self, bucket: WeightBucket) -> dict[str, str]:
        import torch

        if self._options["exit_at_load"] == self.replica:
            raise SystemExit("scripted end while weights are loaded")
        for spec in self._manifest.tensors if self._manifest else ():
            held = self.held.get(spec.name)
            if held is None or (tuple(held.shape), str(held.dtype)) != (spec.shape, f"torch.{spec.dtype}"):
                self.held[spec.name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        return copy_tensors(bucket, self.held)

    def expected_tensors(self) -> dict[str, tuple[int, ...]] | None:
        weights = self._options["weights"]
        return None if weights is None else {name: tuple(shape) for name, shape in weights.items()}

    async def _generate(self, request: GenerateRequest) -> None:
        answer, result = self._answer(request), self._unfinished[request.request_id]
        async with self._slots:
            for number in range(len(answer.token_ids)):
                await asyncio.sleep(self._options["seconds_per_token"])
                await self._may_compute.wait()
                result.extend(self._result([answer.token_ids[number]], None))
                self.advanced([request.request_id])
        result.finish_reason = answer.finish_reason
        del self._unfinished[request.request_id], self._tasks[request.request_id]
        self.deliver(request.request_id, result)

    def _answer(self, request: GenerateRequest) -> GenerateResult:
        responses = self._options["responses"]
        whole = responses[request.seed % len(responses)][request.num_sampled :]
        tokens = whole[: request.sample_params.max_tokens]
        return self._result(tokens, "stop" if len(tokens) == len(whole) else "length")

    def _result(self, tokens: list[int], finish_reason: str | None) -> GenerateResult:
        return GenerateResult(
            token_ids=list(tokens),
            logprobs=[-0.5] * len(tokens),
            policy_versions=[self.policy_version] * len(tokens),
            finish_reason=finish_reason,
        )
