"""Sinkhorn normalisation of square matrices, under FLA's names."""

from fla_npu.ops.utils.sinkhorn.naive import naive_sinkhorn
from fla_npu.ops.utils.sinkhorn.ops import sinkhorn

__all__ = ["naive_sinkhorn", "sinkhorn"]
