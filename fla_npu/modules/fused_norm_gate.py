"""Older path of `fla_npu.modules.norm.fused_norm_gate`."""

from fla_npu.modules.norm.fused_norm_gate import FusedRMSNormGated, FusedRMSNormSwishGate, rms_norm_gated

__all__ = ["FusedRMSNormGated", "FusedRMSNormSwishGate", "rms_norm_gated"]
