"""Bringing the trainer's weights to every replica, with proof that they arrived."""

from xrl_lite.weight_sync.local import LocalWeights
from xrl_lite.weight_sync.sync import GenerationGate, SyncReport, WeightSource, WeightSync, WeightTarget
from xrl_lite.weight_sync.transports import Transport, choose_transport, make_transport

__all__ = [
    "GenerationGate",
    "LocalWeights",
    "SyncReport",
    "Transport",
    "WeightSource",
    "WeightSync",
    "WeightTarget",
    "choose_transport",
    "make_transport",
]
