"""Simple GLA: linear attention with one decay per head, as in RetNet and Mamba-2."""

from fla_npu.ops.simple_gla.chunk import chunk_simple_gla
from fla_npu.ops.simple_gla.fused_chunk import fused_chunk_simple_gla
from fla_npu.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla
from fla_npu.ops.simple_gla.parallel import parallel_simple_gla

__all__ = ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"]
