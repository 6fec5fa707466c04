"""Bringing the trainer's weights to every replica, with proof that they arrived."""

from xrl_lite.weight_sync.sync import GenerationGate, WeightSource, WeightSync, WeightTarget

__all__ = ["GenerationGate", "WeightSource", "WeightSync", "WeightTarget"]
