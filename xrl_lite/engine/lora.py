# pyright: basic
"""LoRA adapters of peft inside a model: they are trained, the weights around them are not.

peft puts a layer of its own in the place of each linear layer it adapts, so the weights get longer names::

    q_proj.weight  ->  q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight

Outside of the engine they have the names of Hugging Face, or those that peft gives adapters in files.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from xrl_lite.algorithms.weights import ADAPTER_PREFIX
from xrl_lite.engine.config import LoraConfig
from xrl_lite.errors import ConfigError
from xrl_lite.log import get_logger

logger = get_logger(__name__)

_NAME = "default"
"""Of the adapter among those that peft could hold."""
_BASE = ".base_layer."


class Adapter:
    """The adapter of a model.

    Args:
        model: A model of transformers, all of it still on this rank. It is changed in place: from now on only the
            adapter requires a gradient. Its weights are float32, whatever the model's are.
        config: Its settings.
        model_path: What the model was loaded from, for those who get the adapter.

    Raises:
        ConfigError: peft is missing, or there are no such layers or no such adapter.
    """

    def __init__(self, model: Any, config: LoraConfig, *, model_path: str) -> None:
        try:
            import peft
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise ConfigError("LoRA needs peft. Install it with: pip install 'xrl-lite[lora]'") from error
        self._config = _settings(config, model)
        try:
            peft.inject_adapter_in_model(self._config, model)
        except ValueError as error:
            raise ConfigError(f"engine.lora does not fit {model_path}: {error}") from error
        self._config.base_model_name_or_path = model_path
        self._layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        for name, layer in self._layers.items():
            if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
                raise ConfigError(
                    f"engine.lora: {name} is a {type(layer.get_base_layer()).__name__}, only linear layers can be "
                    f"adapted. Choose other target_modules."
                )
        if config.path is not None:
            _load(model, config.path)
        for parameter in self._own(model.named_parameters()).values():
            parameter.data = parameter.data.float()  # bfloat16 would swallow the small updates
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        everything = sum(parameter.numel() for parameter in model.parameters())
        logger.info("LoRA: %d of %d weights of %s are trained", trained, everything, model_path)

    @property
    def peft_config(self) -> dict[str, Any]:
        """What peft (and vLLM) need to know of the adapter; it can be written as JSON."""
        settings: dict[str, Any] = self._config.to_dict()
        return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}

    @contextmanager
    def disabled(self) -> Generator[None]:
        """Compute without it while inside."""
        try:
            self._switch(off=True)
            yield
        finally:
            self._switch(off=False)

    def own(self, parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the adapter among those of the model."""
        yield from self._own(parameters).items()

    def base(self, parameters: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all other weights of the model."""
        for name, parameter in parameters:
            if not _is_adapter(name):
                yield name, parameter

    def merged(self, name: str, weight: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        """Return a whole weight with the adapter's change in it, as a copy; one that is not adapted as it is.

        ``W + scaling B A``, summed in float32.

        Args:
            name: Of the weight in the model.
            weight: The weight.
            adapter: The adapter's whole weights.
        """
        layer_name, separator, kind = name.rpartition(_BASE)
        layer = self._layers.get(layer_name)
        if not separator or kind != "weight" or layer is None:
            return weight
        low, high = (adapter[f"{layer_name}.lora_{side}.{_NAME}.weight"].float() for side in "AB")
        change = (high @ low) * layer.scaling[_NAME]
        change = change.T if layer.fan_in_fan_out else change
        return (weight.float() + change.to(weight.device)).to(weight.dtype)

    def save(self, folder: Path, adapter: Mapping[str, Tensor]) -> None:
        """Write the adapter as peft does, to be loaded with ``PeftModel.from_pretrained``."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {file_name(name): tensor.detach().cpu().contiguous() for name, tensor in adapter.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self._config.save_pretrained(str(folder))

    def _own(self, parameters: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in parameters if _is_adapter(name)}

    def _switch(self, *, off: bool) -> None:
        # not enable_adapters(): it turns requires_grad off and on too, which FSDP reads only once
        for layer in self._layers.values():
            layer._disable_adapters = off


def hf_name(name: str) -> str:
    """Return the name that a weight has in a model without adapter."""
    return name.replace(_BASE, ".")


def file_name(name: str) -> str:
    """Return the name that a weight of the adapter has in peft's files."""
    return ADAPTER_PREFIX + name.replace(f".{_NAME}.", ".")


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _settings(config: LoraConfig, model: Any) -> Any:
    import peft

    if config.path is None:
        return peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # a ratio of it is all that is used
            use_rslora=config.use_rslora,
            target_modules=config.target_modules,
            task_type="SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM",  # which head is left alone
        )
    try:
        loaded = peft.PeftConfig.from_pretrained(config.path)
    except ValueError as error:
        raise ConfigError(f"engine.lora.path={config.path} is no adapter: {error}") from error
    if not isinstance(loaded, peft.LoraConfig) or loaded.use_dora or loaded.bias != "none" or loaded.modules_to_save:
        raise ConfigError(
            f"engine.lora.path={config.path} is no plain LoRA adapter (type {loaded.peft_type}): DoRA, trained biases "
            f"and modules_to_save are not supported."
        )
    if loaded.r != config.rank:
        raise ConfigError(
            f"The adapter engine.lora.path={config.path} has rank {loaded.r}, engine.lora.rank is {config.rank}. "
            f"Set it to {loaded.r}."
        )
    loaded.inference_mode = False
    loaded.lora_dropout = 0.0  # log-probs of a policy are compared, so it has to be the same each time
    return loaded


def _load(model: Any, path: str) -> None:
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    outcome = set_peft_model_state_dict(model, load_peft_weights(path, device="cpu"))
    missing = [name for name in outcome.missing_keys if _is_adapter(name)]
    if missing or outcome.unexpected_keys:
        raise ConfigError(
            f"engine.lora.path={path} does not fit the model: it lacks {missing[:3]}, and has "
            f"{list(outcome.unexpected_keys)[:3]} that the model has no place for."
        )
