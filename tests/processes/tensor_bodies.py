"""Actors that hold weights."""

from __future__ import annotations

from typing import Any

import torch

from xrl_lite.actors import SharedValue, share
from xrl_lite.algorithms.weights import WeightBucket, tensor_checksum

NUM_TENSORS = 50


class Weights:
    def __init__(self, num_parameters: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = num_parameters // NUM_TENSORS
        self._weights = {f"p{index}": torch.randn(size, generator=generator) for index in range(NUM_TENSORS)}

    def weights(self) -> dict[str, Any]:
        return self._weights

    def shared_weights(self) -> SharedValue:
        return share(self._weights)

    def load(self, weights: dict[str, Any]) -> None:
        for name, tensor in weights.items():
            self._weights[name].copy_(tensor)

    def load_shared(self, shared: SharedValue) -> None:
        self.load(shared.get())

    def step(self) -> None:
        for tensor in self._weights.values():
            tensor.mul_(0.5)

    def digest(self) -> float:
        return float(sum(tensor.double().sum() for tensor in self._weights.values()))

    def num_threads(self) -> int:
        return torch.get_num_threads()


class Worker:
    """One process of a replica that has several."""

    def __init__(self, number: int) -> None:
        self._number = number

    def load(self, bucket: WeightBucket) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in bucket.tensors(self._number)}
