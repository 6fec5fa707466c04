# pyright: basic
"""The embedded engine: transformers' model under continuous batching, in float32 exact against the trainer.

For the CPU and CI; needs torch and transformers only.

Waits for    the compute thread, some steps at a time
Is woken by  the end of these steps: soon after a request comes, is dropped, or weights arrive
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from xrl_lite.actors.machine import usable_memory_bytes
from xrl_lite.algorithms.weights import adapted_layer, adapter_scaling
from xrl_lite.errors import ConfigError, RolloutError
from xrl_lite.log import get_logger
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.continuous_batch import ContinuousBatch, Sequence, StepResult
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplica, copy_tensors

if TYPE_CHECKING:
    from xrl_lite.algorithms.weights import WeightBucket

logger = get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""How far log-probs of the engine may be from those of the model's own forward pass, in nats."""
STEPS_FOR_S = 0.05
"""The compute thread looks up after so long."""


class TorchReplica(RolloutReplica):
    """Generates with transformers on the CPU.

    A LoRA adapter that is sent by itself is merged into the weights.

    Options (`RolloutConfig.engine_options`):
        kv_cache_bytes: Limit of keys and values; a quarter of the memory by default. Beyond it requests wait, and
            running ones are computed anew later.
    """

    takes_adapters = True

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        super().__init__(config=config, model_path=model_path, replica=replica)
        options = config.options_of("torch", kv_cache_bytes=usable_memory_bytes() // 4)
        transformers_logging.disable_progress_bar()  # it would fill the replica's log
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=DTYPES[config.dtype], attn_implementation="sdpa"
        ).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self._own = dict(self._model.named_parameters())
        self._unadapted: dict[str, Tensor] = {}
        """Weights as they are without the adapter that is merged into them."""
        self._stop_ids = _end_of_sequence_ids(self._model, self._tokenizer)
        self._max_model_len = config.max_model_len or self._model.config.max_position_embeddings
        self._batch = ContinuousBatch(
            self._model,
            decode=self._tokenizer.decode,
            max_batch_size=config.max_batch_size,
            kv_cache_bytes=options["kv_cache_bytes"],
        )
        self._sequences: dict[str, Sequence] = {}
        self._arriving: list[Sequence] = []
        self._look_up = False
        self._open = anyio.Event()
        self._open.set()
        self._compute = anyio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._check_agreement()

    def admit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            try:
                sequence = self._make_sequence(request)
            except RolloutError as error:
                self.deliver(request.request_id, error)
                continue
            self._sequences[request.request_id] = sequence
            self._arriving.append(sequence)
        self._look_up = True
        if self._arriving and (self._runner is None or self._runner.done()):
            self._runner = asyncio.create_task(self._run(), name="generate")

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._sequences[request_id].aborted = True
        if not self._open.is_set():  # nobody computes: they end here
            self._end([self._sequences[request_id] for request_id in request_ids])
        self._look_up = True

    def partial(self, request_id: str) -> GenerateResult:
        sequence = self._sequences[request_id]
        # the compute thread may be appending: versions come last, so as many of all three are there
        number = len(sequence.policy_versions)
        return GenerateResult(
            token_ids=sequence.token_ids[:number],
            logprobs=sequence.logprobs[:number],
            policy_versions=sequence.policy_versions[:number],
        )

    async def pause(self) -> None:
        if self._open.is_set():
            self._open = anyio.Event()
        self._look_up = True
        async with self._compute:  # the steps that run have ended
            pass

    async def resume(self) -> None:
        self._open.set()

    async def load_tensors(self, bucket: WeightBucket) -> dict[str, str]:
        async with self._compute:
            self._unadapted.clear()
            return await anyio.to_thread.run_sync(copy_tensors, bucket, self._own)

    async def apply_adapter(self, adapter: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
        async with self._compute:
            await anyio.to_thread.run_sync(self._merge, adapter, settings)

    async def drop_caches(self) -> None:
        async with self._compute:
            self._batch.start_over()

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._own.items()}

    def _merge(self, adapter: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
        """``W + scaling B A``, summed in float32: products of matrices as narrow as A and B would not be exact."""
        scaling = adapter_scaling(settings)
        sides: dict[str, dict[str, Tensor]] = {}
        for name, tensor in adapter.items():
            layer, side = adapted_layer(name)
            sides.setdefault(f"{layer}.weight", {})[side] = tensor.float()
        with torch.no_grad():
            for name, side in sides.items():
                own = self._own[name]
                before = self._unadapted.setdefault(name, own.detach().clone())
                change = (side["B"] @ side["A"]) * scaling
                own.copy_(before.float() + (change.T if settings.get("fan_in_fan_out") else change))

    def _make_sequence(self, request: GenerateRequest) -> Sequence:
        params = request.sample_params
        room = self._max_model_len - len(request.prompt_ids)
        if room <= 0 or not request.prompt_ids:
            raise RolloutError(
                f"A prompt must have 1 to {self._max_model_len - 1} tokens for this model, "
                f"got {len(request.prompt_ids)}. Set max_prompt_tokens of the sampler."
            )
        vocabulary = self._model.config.vocab_size
        wrong = next((token for token in request.prompt_ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise RolloutError(f"The prompt holds token {wrong}, the model's vocabulary has {vocabulary} tokens.")
        wrong = next((token for token in params.stop_token_ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise RolloutError(f"stop_token_ids holds token {wrong}, the model's vocabulary has {vocabulary} tokens.")
        if not -(2**63) <= request.seed < 2**63:
            raise RolloutError(f"sampling_seed must be a number of 64 bits, -2**63 to 2**63 - 1, got {request.seed}.")
        return Sequence(
            request=request,
            max_tokens=min(params.max_tokens, room),
            stop_ids=self._stop_ids.union(params.stop_token_ids),
        )

    async def _run(self) -> None:
        """Compute as long as there is work."""
        loop = asyncio.get_running_loop()

        def report(result: StepResult) -> None:
            loop.call_soon_threadsafe(self._take, result)

        while True:
            await self._open.wait()
            async with self._compute:
                for sequence in self._arriving:
                    self._batch.add(sequence)
                self._arriving.clear()
                if not self._open.is_set():
                    continue
                if not self._batch.has_work:
                    return
                self._batch.policy_version = self.policy_version
                self._look_up = False
                try:
                    await anyio.to_thread.run_sync(self._steps, report)
                except Exception as error:  # noqa: BLE001 - reported to everyone who waits for a response
                    self._fail(error)

    def _steps(self, report: Any) -> None:
        until = time.monotonic() + STEPS_FOR_S
        while self._batch.has_work:
            report(self._batch.step())
            if self._look_up or time.monotonic() > until:
                return

    def _take(self, result: StepResult) -> None:
        self._end(result.ended)
        if result.advanced:
            self.advanced([sequence.request.request_id for sequence in result.advanced])

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._sequences.pop(sequence.request.request_id, None) is not None:
                result = GenerateResult(
                    token_ids=sequence.token_ids,
                    logprobs=sequence.logprobs,
                    policy_versions=sequence.policy_versions,
                    finish_reason=sequence.finish_reason or "abort",
                )
                self.deliver(sequence.request.request_id, result)

    def _fail(self, error: Exception) -> None:
        logger.error("generation of %d requests failed", len(self._sequences), exc_info=error)
        self._batch.start_over()
        self._batch.waiting.clear()
        for request_id in list(self._sequences):
            del self._sequences[request_id]
            self.deliver(request_id, RolloutError(f"{type(error).__name__}: {error}"))

    def _check_agreement(self) -> None:
        """Generate a little, and compare with the model's own forward pass and with generating it alone."""
        together = self._try_out([[1] * 3, [2, 1], [1, 2]])
        alone = self._try_out([[2, 1]])
        gap = max(self._gap_to_model(sequence) for sequence in together)
        if not gap <= TOLERANCE[self.config.dtype]:
            raise ConfigError(
                f"The torch engine does not know the architecture of {self.model_path} "
                f"({self._model.config.model_type}): its log-probs are {gap:.3g} nats off the model's own. "
                f"Use rollout.engine=vllm for this model."
            )
        if self.config.dtype == "float32" and together[1].logprobs != alone[0].logprobs:
            logger.warning(
                "matrix products on this machine round a row differently in batches of different sizes: samples "
                "depend on what else is generated in the last bits of their log-probs"
            )

    def _try_out(self, prompts: list[list[int]]) -> list[Sequence]:
        from xrl_lite.data import SampleParams

        sequences = [
            Sequence(
                request=GenerateRequest(
                    request_id="", prompt_ids=prompt, sample_params=SampleParams(temperature=1.0), seed=len(prompt)
                ),
                max_tokens=3,
                stop_ids=frozenset(),
            )
            for prompt in prompts
        ]
        for sequence in sequences:
            self._batch.add(sequence)
        while self._batch.has_work:
            self._batch.step()
        return sequences

    @torch.inference_mode()
    def _gap_to_model(self, sequence: Sequence) -> float:
        config, prompt = self._model.config, list(sequence.prefix)
        ours, config._attn_implementation = config._attn_implementation, "sdpa"
        try:
            logits = self._model(torch.tensor([prompt + sequence.token_ids]), use_cache=False).logits[0].float()
        finally:
            config._attn_implementation = ours
        theirs = logits[len(prompt) - 1 : -1].log_softmax(dim=1)
        wanted = theirs.gather(1, torch.tensor(sequence.token_ids).unsqueeze(1)).squeeze(1)
        return (wanted - torch.tensor(sequence.logprobs)).abs().max().item()


def _end_of_sequence_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id
    ids.update(configured if isinstance(configured, list) else [configured])
    return frozenset(token for token in ids if token is not None and token < model.config.vocab_size)
