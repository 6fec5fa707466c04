"""How torch CPU tensors are pickled: as plain buffers instead of through ``torch.save``, which is 50 times slower.

torch is optional: nothing here imports it unless the process already has.
"""

from __future__ import annotations

import copyreg
import ctypes
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

Reducer = Callable[[Any], Any]


def tensor_reducers() -> dict[type, Reducer]:
    """Return the reducers of tensor types, empty while torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    parameter: Any = sys.modules.get("torch.nn.parameter")
    if parameter is None or not hasattr(torch, "Tensor") or not hasattr(parameter, "Parameter"):
        return {}
    return {torch.Tensor: _reduce_tensor, parameter.Parameter: _reduce_parameter}


class DispatchTable(dict[type, Reducer]):
    """A pickler's table of reducers that falls back to what was registered with `copyreg`."""

    def __missing__(self, key: type) -> Reducer:
        return copyreg.dispatch_table[key]


def _reduce_tensor(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        if not plain or tensor.is_quantized:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        tensor_data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    else:
        tensor_data = tensor.detach()
    return _build_tensor, (_buffer_of(tensor_data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _reduce_parameter(parameter: Any) -> Any:
    return _build_parameter, (parameter.detach(), parameter.requires_grad)


def _buffer_of(tensor: Any) -> pickle.PickleBuffer | None:
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return None
    memory: Any = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # keeps the memory alive for as long as anybody looks at the buffer
    return pickle.PickleBuffer(memory)


def _build_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    torch: Any = importlib.import_module("torch")
    if buffer is None:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _build_parameter(tensor: Any, requires_grad: bool) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.nn.Parameter(tensor, requires_grad=requires_grad)
