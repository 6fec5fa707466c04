# pyright: basic, reportMissingImports=false
"""What runs inside vLLM's worker processes: taking new weights. vLLM mixes this class into its own worker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xrl_lite.algorithms.weights import WeightBucket, devices_of, tensor_checksum


class WeightsExtension:
    """Methods that `collective_rpc` reaches by name. `model_runner` and `rank` are the worker's."""

    model_runner: Any
    rank: int
    """Of this worker within its engine."""

    def xrl_devices(self) -> list[str]:
        """Return where the weights are."""
        return devices_of(self.model_runner.get_model().parameters())

    def xrl_load(self, pickled: bytes, first: bool) -> tuple[dict[str, str], str | None]:
        """Load the tensors of a bucket; return the checksums of what arrived, and what went wrong.

        An error is returned: of several that are raised vLLM takes one, and the others for answers to later calls.

        vLLM keeps weights fused and packed, so there is nothing to compare after loading; that log-probs agree with the
        trainer's afterwards is checked by the run.
        """
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        model = self.model_runner.get_model()
        bucket: WeightBucket = pickle.loads(pickled)
        checksums: dict[str, str] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in bucket.tensors(self.rank):
                checksums[name] = tensor_checksum(tensor)
                # a layer is loaded when all of its weights are there, which may be in a later bucket
                yield name, tensor.clone()

        try:
            if first:
                initialize_layerwise_reload(model)
            with torch.inference_mode():
                model.load_weights(noted())
        except Exception as error:  # noqa: BLE001 - raised again by the replica
            return checksums, f"{type(error).__name__}: {error}"
        return checksums, None

    def xrl_finish(self) -> None:
        """Bring the loaded weights into the form that vLLM computes with."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with torch.inference_mode():
            finalize_layerwise_reload(model, self.model_runner.model_config)
            _repack_heads(model)


def _repack_heads(model: Any) -> None:
    """Pack the output head anew where it is tied to the embedding.

    On a CPU vLLM packs the head when the model is loaded. A head that is tied is skipped by every later load, and would
    silently stay what it was.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and not module.weight.is_meta:
            module.quant_method.process_weights_after_loading(module)
