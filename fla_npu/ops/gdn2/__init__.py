"""Gated DeltaNet-2 (GDN-2): the delta rule with a decay, an erase gate and a write gate per channel."""

from fla_npu.ops.gdn2.chunk import chunk_gdn2
from fla_npu.ops.gdn2.fused_recurrent import fused_recurrent_gdn2
from fla_npu.ops.gdn2.naive import naive_chunk_gdn2, naive_recurrent_gdn2

__all__ = ["chunk_gdn2", "fused_recurrent_gdn2", "naive_chunk_gdn2", "naive_recurrent_gdn2"]
