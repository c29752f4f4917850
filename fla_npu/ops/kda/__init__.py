"""Kimi Delta Attention (KDA): the delta rule with one decay per key channel and token."""

from fla_npu.ops.kda.chunk import chunk_kda
from fla_npu.ops.kda.fused_recurrent import fused_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda"]
