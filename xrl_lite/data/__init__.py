"""Rows, rollout states and the sampler. Needs no torch."""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.data.rollout_state import (
        MultimodalInfo,
        RolloutFunctionCall,
        RolloutState,
        RolloutToolCall,
        SampleParams,
        Status,
        calculate_seq_staleness,
        failed,
        find_uneven,
        get_group_status,
        reset_rollout_response,
        split_sessions,
        update_sample_version,
        update_status_from_finish_reason,
    )
    from xrl_lite.data.rows import DataConfig, Row, load_rows, parse_row, read_raw_rows
    from xrl_lite.data.sampler import EncodeRow, Sampler, SamplerConfig, SamplerState, each_row_once, make_group
    from xrl_lite.data.staleness import (
        calculate_group_effective_response_masks,
        discard_rollout_state,
        expire_stale_states,
        refresh_seq_staleness,
        stale_threshold,
        version_range,
    )

__all__ = [
    "DataConfig",
    "EncodeRow",
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
    "calculate_group_effective_response_masks",
    "calculate_seq_staleness",
    "discard_rollout_state",
    "each_row_once",
    "expire_stale_states",
    "failed",
    "find_uneven",
    "get_group_status",
    "load_rows",
    "make_group",
    "parse_row",
    "read_raw_rows",
    "refresh_seq_staleness",
    "reset_rollout_response",
    "split_sessions",
    "stale_threshold",
    "update_sample_version",
    "update_status_from_finish_reason",
    "version_range",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
