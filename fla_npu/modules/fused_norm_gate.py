"""Older path of `fla_npu.modules.norm.fused_norm_gate`."""

from fla_npu.modules.norm.fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormGatedLinear,
    FusedLayerNormSwishGate,
    FusedLayerNormSwishGateLinear,
    FusedRMSNormGated,
    FusedRMSNormGatedLinear,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
    layer_norm_gated,
    layer_norm_swish_gate_linear,
    rms_norm_gated,
    rms_norm_swish_gate_linear,
)

__all__ = [
    "FusedLayerNormGated",
    "FusedLayerNormGatedLinear",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedRMSNormGated",
    "FusedRMSNormGatedLinear",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
    "layer_norm_gated",
    "layer_norm_swish_gate_linear",
    "rms_norm_gated",
    "rms_norm_swish_gate_linear",
]
