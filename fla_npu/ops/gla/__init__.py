"""Gated linear attention (GLA): one decay per key channel, without the delta rule."""

from fla_npu.ops.gla.chunk import chunk_gla
from fla_npu.ops.gla.fused_chunk import fused_chunk_gla
from fla_npu.ops.gla.fused_recurrent import fused_recurrent_gla

__all__ = ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"]
