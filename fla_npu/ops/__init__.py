"""The ops, under FLA's names."""

from fla_npu.ops.delta_rule import chunk_delta_rule, fused_chunk_delta_rule, fused_recurrent_delta_rule
from fla_npu.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    recurrent_gated_delta_rule,
)
from fla_npu.ops.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from fla_npu.ops.kda import chunk_kda, fused_recurrent_kda
from fla_npu.ops.retention import (
    chunk_retention,
    fused_chunk_retention,
    fused_recurrent_retention,
    parallel_retention,
)
from fla_npu.ops.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_delta_rule",
    "fused_chunk_gla",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
    "recurrent_gated_delta_rule",
]
