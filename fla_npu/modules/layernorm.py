"""Older path of `fla_npu.modules.norm.layernorm`."""

from fla_npu.modules.norm.layernorm import RMSNorm, rms_norm

__all__ = ["RMSNorm", "rms_norm"]
