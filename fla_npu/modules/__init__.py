"""Modules of FLA's layers and models, under FLA's import paths."""

from fla_npu.modules.causal_conv1d import ShortConvolution
from fla_npu.modules.mlp import GatedMLP
from fla_npu.modules.norm import FusedRMSNormGated, FusedRMSNormSwishGate, L2Norm, RMSNorm

__all__ = ["FusedRMSNormGated", "FusedRMSNormSwishGate", "GatedMLP", "L2Norm", "RMSNorm", "ShortConvolution"]
