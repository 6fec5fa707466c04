"""Modules that a process with a model needs most of its start for."""

MODEL_MODULES = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""The fork server imports them once, for training ranks and rollout replicas alike."""
