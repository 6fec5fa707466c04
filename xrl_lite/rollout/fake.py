"""A scripted engine: no model, no torch arithmetic. Ships for tests of everything above the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrl_lite.errors import RolloutError
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplica

if TYPE_CHECKING:
    from torch import Tensor


class FakeReplica(RolloutReplica):
    """Answers from a list of token sequences, chosen by the request's seed.

    Options (`RolloutConfig.engine_options`):
        responses: Token sequences to answer with; the default is one token, 0.
        fail_prompts: First tokens of prompts that fail with a RolloutError.
        hang_prompts: First tokens of prompts that are never answered.
    """

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        super().__init__(config=config, model_path=model_path, replica=replica)
        self._responses: list[list[int]] = config.engine_options.get("responses", [[0]])
        self._fail: list[int] = config.engine_options.get("fail_prompts", [])
        self._hang: list[int] = config.engine_options.get("hang_prompts", [])
        self.versions: list[int] = []

    def admit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            if request.prompt_ids[0] in self._fail:
                self.deliver(request.request_id, RolloutError(f"scripted failure of prompt {request.prompt_ids}"))
            elif request.prompt_ids[0] not in self._hang:
                self.deliver(request.request_id, self._answer(request))

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            aborted = GenerateResult(token_ids=[], logprobs=[], finish_reason="abort", policy_versions=[])
            self.deliver(request_id, aborted)

    async def update_weights(self, version: int, weights: dict[str, Tensor]) -> str:
        from xrl_lite.algorithms.digest import weights_digest

        self.versions.append(version)
        self.policy_version = version
        return weights_digest(weights)

    def _answer(self, request: GenerateRequest) -> GenerateResult:
        tokens = self._responses[request.seed % len(self._responses)][: request.sample_params.max_tokens]
        return GenerateResult(
            token_ids=list(tokens),
            logprobs=[-0.5] * len(tokens),
            finish_reason="stop",
            policy_versions=[self.policy_version] * len(tokens),
        )
