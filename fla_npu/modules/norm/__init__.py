"""Normalisation layers."""

from fla_npu.modules.norm.fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormGatedLinear,
    FusedLayerNormSwishGate,
    FusedLayerNormSwishGateLinear,
    FusedRMSNormGated,
    FusedRMSNormGatedLinear,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
)
from fla_npu.modules.norm.l2norm import L2Norm
from fla_npu.modules.norm.layernorm import (
    GroupNorm,
    GroupNormLinear,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
)
from fla_npu.modules.norm.layernorm_gated import LayerNormGated, RMSNormGated

__all__ = [
    "FusedLayerNormGated",
    "FusedLayerNormGatedLinear",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedRMSNormGated",
    "FusedRMSNormGatedLinear",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
    "GroupNorm",
    "GroupNormLinear",
    "L2Norm",
    "LayerNorm",
    "LayerNormGated",
    "LayerNormLinear",
    "RMSNorm",
    "RMSNormGated",
    "RMSNormLinear",
]
