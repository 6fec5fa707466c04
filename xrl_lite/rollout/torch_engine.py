"""The embedded engine: transformers' model with a KV cache, in float32 exact against the trainer. For CPU and CI.

Requests are generated in waves: all that wait, up to `max_batch_size`, are prefilled together (each distinct prompt
once, however many attempts it gets) and decoded until every one has ended; rows that end are taken out on the way.

Waits for    the compute thread, a wave at a time
Is woken by  its end; it ends by itself, since every response has a longest length

B rows of the wave, L positions so far (padding included), V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from xrl_lite.algorithms.digest import weights_digest
from xrl_lite.errors import RolloutError, WeightSyncError
from xrl_lite.log import get_logger
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplica
from xrl_lite.rollout.sampling import keep_top_k, keep_top_p, sample_tokens, uniform

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPACT_BELOW = 0.75
"""Rows that have ended are taken out of the batch once fewer than this share is left."""


@dataclass
class _Sequence:
    """One response while it is generated."""

    request: GenerateRequest
    max_tokens: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    aborted: bool = False


class TorchReplica(RolloutReplica):
    """Generates with transformers on the CPU."""

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        super().__init__(config=config, model_path=model_path, replica=replica)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=DTYPES[config.dtype], attn_implementation="sdpa"
        ).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._stop_ids = _end_of_sequence_ids(self._model, self._tokenizer)
        self._max_model_len = config.max_model_len or self._model.config.max_position_embeddings
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._compute = anyio.Lock()
        self._runner: asyncio.Task[None] | None = None

    def admit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            try:
                sequence = self._make_sequence(request)
            except RolloutError as error:
                self.deliver(request.request_id, error)
                continue
            self._running[request.request_id] = sequence
            self._waiting.append(sequence)
        if self._waiting and (self._runner is None or self._runner.done()):
            self._runner = asyncio.create_task(self._run_waves(), name="waves")

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running[request_id].aborted = True

    async def update_weights(self, version: int, weights: dict[str, Tensor]) -> str:
        async with self._compute:
            own = dict(self._model.named_parameters())
            _check_fit(own, weights, self.replica)
            with torch.no_grad():
                for name, tensor in weights.items():
                    own[name].copy_(tensor)
            self.policy_version = version
            return weights_digest(own)

    def _make_sequence(self, request: GenerateRequest) -> _Sequence:
        params = request.sample_params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            raise RolloutError("The torch engine has no repetition, presence or frequency penalty. Leave them unset.")
        room = self._max_model_len - len(request.prompt_ids)
        if room <= 0 or not request.prompt_ids:
            raise RolloutError(
                f"A prompt must have 1 to {self._max_model_len - 1} tokens for this model, "
                f"got {len(request.prompt_ids)}. Set max_prompt_tokens of the sampler."
            )
        return _Sequence(request=request, max_tokens=min(params.max_tokens, room))

    async def _run_waves(self) -> None:
        loop = asyncio.get_running_loop()

        def finish(ended: list[_Sequence]) -> None:
            loop.call_soon_threadsafe(self._finish, ended)

        while self._waiting:
            async with self._compute:
                size = min(len(self._waiting), self.config.max_batch_size)
                wave = [self._waiting.popleft() for _ in range(size)]
                try:
                    await anyio.to_thread.run_sync(self._generate, wave, finish)
                except Exception as error:  # noqa: BLE001 - reported to everyone who waits for this wave
                    self._fail(wave, error)

    def _finish(self, ended: list[_Sequence]) -> None:
        for sequence in ended:
            del self._running[sequence.request.request_id]
            result = GenerateResult(
                token_ids=sequence.token_ids,
                logprobs=sequence.logprobs,
                finish_reason=sequence.finish_reason or "abort",
                policy_versions=[self.policy_version] * len(sequence.token_ids),
            )
            self.deliver(sequence.request.request_id, result)

    def _fail(self, wave: list[_Sequence], error: Exception) -> None:
        logger.error("a wave of %d requests failed", len(wave), exc_info=error)
        for sequence in wave:
            if self._running.pop(sequence.request.request_id, None) is not None:
                self.deliver(sequence.request.request_id, RolloutError(f"{type(error).__name__}: {error}"))

    @torch.inference_mode()
    def _generate(self, wave: list[_Sequence], finish: Callable[[list[_Sequence]], None]) -> None:
        rows = wave
        cache, mask, positions, logits = self._prefill(rows)
        step = 0
        while True:
            tokens = self._sample(rows, logits, step)
            step += 1
            ended = [sequence for sequence in rows if sequence.finish_reason is None and self._has_ended(sequence)]
            if ended:
                finish(ended)
            alive = [i for i, sequence in enumerate(rows) if sequence.finish_reason is None]
            if not alive:
                return
            if len(alive) < COMPACT_BELOW * len(rows):
                keep = torch.tensor(alive)
                cache.batch_select_indices(keep)
                rows, tokens, mask, positions = [rows[i] for i in alive], tokens[keep], mask[keep], positions[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions + 1
            logits = self._forward(tokens.unsqueeze(1), mask[:, None, None, :], positions.unsqueeze(1), cache)

    def _prefill(self, rows: list[_Sequence]) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        """Return the cache, which positions are real (B, L) bool, the last position (B,) and next logits (B, V)."""
        prompts = list(dict.fromkeys(tuple(sequence.request.prompt_ids) for sequence in rows))
        length = max(map(len, prompts))
        ids = torch.zeros(len(prompts), length, dtype=torch.int64)
        real = torch.zeros(len(prompts), length, dtype=torch.bool)
        for number, prompt in enumerate(prompts):
            ids[number, length - len(prompt) :] = torch.tensor(prompt)
            real[number, length - len(prompt) :] = True
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
        # padding attends to itself alone: a row without any visible position would be NaN
        visible = (real.unsqueeze(1) & torch.ones(length, length, dtype=torch.bool).tril()) | torch.eye(
            length, dtype=torch.bool
        )
        cache = DynamicCache()
        logits = self._forward(ids, visible.unsqueeze(1), positions, cache)
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        spread = torch.tensor([number_of[tuple(sequence.request.prompt_ids)] for sequence in rows])
        cache.batch_select_indices(spread)
        return cache, real[spread], positions[spread, -1], logits[spread]

    def _forward(self, ids: Tensor, visible: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _sample(self, rows: list[_Sequence], logits: Tensor, step: int) -> Tensor:
        """Sample a token per row, note it in each row that has not ended, and return the tokens (B,)."""
        for number, sequence in enumerate(rows):
            params = sequence.request.sample_params
            if step < params.min_tokens:
                logits[number, list(self._stop_ids)] = -torch.inf
            if params.top_k > 0:
                logits[number] = keep_top_k(logits[number : number + 1], params.top_k)
            if params.top_p < 1.0:
                logits[number] = keep_top_p(logits[number : number + 1], params.top_p, params.temperature)
        seeds = torch.tensor([sequence.request.seed for sequence in rows])
        temperature = torch.tensor([sequence.request.sample_params.temperature for sequence in rows])
        tokens, logprobs = sample_tokens(logits, uniform(seeds, torch.full_like(seeds, step)), temperature)
        for sequence, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if sequence.finish_reason is None:
                sequence.token_ids.append(token)
                sequence.logprobs.append(logprob)
        return tokens

    def _has_ended(self, sequence: _Sequence) -> bool:
        params = sequence.request.sample_params
        stop_ids = self._stop_ids.union(params.stop_token_ids)
        if sequence.aborted:
            sequence.finish_reason = "abort"
        elif sequence.token_ids[-1] in stop_ids or self._has_stop_text(sequence):
            sequence.finish_reason = "stop"
        elif len(sequence.token_ids) >= sequence.max_tokens:
            sequence.finish_reason = "length"
        return sequence.finish_reason is not None

    def _has_stop_text(self, sequence: _Sequence) -> bool:
        stops = sequence.request.sample_params.stops
        return bool(stops) and any(stop in self._tokenizer.decode(sequence.token_ids) for stop in stops)


def _end_of_sequence_ids(model: Any, tokenizer: Any) -> set[int]:
    ids = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id
    ids.update(configured if isinstance(configured, list) else [configured])
    return {token for token in ids if token is not None}


def _check_fit(own: dict[str, Tensor], weights: dict[str, Tensor], replica: int) -> None:
    for name in sorted(own.keys() ^ weights.keys()):
        raise WeightSyncError(
            f"rollout/{replica}: weight {name!r} {'was not sent' if name in own else 'is not in the model'}. "
            f"Trainer and rollout engine must load the same model."
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise WeightSyncError(
                f"rollout/{replica}: weight {name!r} has shape {tuple(tensor.shape)}, "
                f"the model's has {tuple(own[name].shape)}."
            )
