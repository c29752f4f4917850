"""Older path of `fla_npu.modules.norm.l2norm`."""

from fla_npu.modules.norm.l2norm import L2Norm, l2_norm, l2norm, l2norm_bwd, l2norm_fwd

__all__ = ["L2Norm", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd"]
