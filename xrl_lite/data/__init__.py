"""Rows, rollout states and the sampler. Needs no torch."""

from xrl_lite.data.rollout_state import (
    MultimodalInfo,
    RolloutFunctionCall,
    RolloutState,
    RolloutToolCall,
    SampleParams,
    Status,
    calculate_seq_staleness,
    get_group_status,
    reset_rollout_response,
    update_sample_version,
    update_status_from_finish_reason,
)
from xrl_lite.data.rows import DataConfig, Row, load_rows, parse_row, read_raw_rows
from xrl_lite.data.sampler import EncodePrompt, Sampler, SamplerConfig, SamplerState, each_row_once, make_group

__all__ = [
    "DataConfig",
    "EncodePrompt",
    "MultimodalInfo",
    "RolloutFunctionCall",
    "RolloutState",
    "RolloutToolCall",
    "Row",
    "SampleParams",
    "Sampler",
    "SamplerConfig",
    "SamplerState",
    "Status",
    "calculate_seq_staleness",
    "each_row_once",
    "get_group_status",
    "load_rows",
    "make_group",
    "parse_row",
    "read_raw_rows",
    "reset_rollout_response",
    "update_sample_version",
    "update_status_from_finish_reason",
]
