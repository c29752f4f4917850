"""Older path of `fla_npu.modules.norm.layernorm`."""

from fla_npu.modules.norm.layernorm import (
    GroupNorm,
    GroupNormLinear,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
    group_norm,
    group_norm_linear,
    layer_norm,
    layer_norm_linear,
    rms_norm,
    rms_norm_linear,
)

__all__ = [
    "GroupNorm",
    "GroupNormLinear",
    "LayerNorm",
    "LayerNormLinear",
    "RMSNorm",
    "RMSNormLinear",
    "group_norm",
    "group_norm_linear",
    "layer_norm",
    "layer_norm_linear",
    "rms_norm",
    "rms_norm_linear",
]
