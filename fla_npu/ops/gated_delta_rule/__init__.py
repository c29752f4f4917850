"""Gated DeltaNet (GDN): the delta rule with one decay per head and token."""

from fla_npu.ops.gated_delta_rule.chunk import chunk_gated_delta_rule, chunk_gdn
from fla_npu.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from fla_npu.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule

recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
"""The name under which transformers 5.15.0 looks the recurrent op up."""

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "naive_chunk_gated_delta_rule",
    "naive_recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule",
]
