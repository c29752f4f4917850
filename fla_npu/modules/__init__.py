"""Modules of FLA's layers and models, under FLA's import paths."""

from fla_npu.modules.causal_conv1d import ShortConvolution
from fla_npu.modules.fused_bitlinear import BitLinear, FusedBitLinear
from fla_npu.modules.fused_cross_entropy import FusedCrossEntropyLoss
from fla_npu.modules.fused_kl_div import FusedKLDivLoss
from fla_npu.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from fla_npu.modules.long_conv import ImplicitLongConvolution, LongConvolution
from fla_npu.modules.mlp import GatedMLP
from fla_npu.modules.norm import (
    FusedLayerNormGated,
    FusedLayerNormSwishGate,
    FusedLayerNormSwishGateLinear,
    FusedRMSNormGated,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
    GroupNorm,
    GroupNormLinear,
    L2Norm,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
)
from fla_npu.modules.rotary import RotaryEmbedding
from fla_npu.modules.token_shift import TokenShift

__all__ = [
    "BitLinear",
    "FusedBitLinear",
    "FusedCrossEntropyLoss",
    "FusedKLDivLoss",
    "FusedLayerNormGated",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedLinearCrossEntropyLoss",
    "FusedRMSNormGated",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
    "GatedMLP",
    "GroupNorm",
    "GroupNormLinear",
    "ImplicitLongConvolution",
    "L2Norm",
    "LayerNorm",
    "LayerNormLinear",
    "LongConvolution",
    "RMSNorm",
    "RMSNormLinear",
    "RotaryEmbedding",
    "ShortConvolution",
    "TokenShift",
]
