"""Normalisation layers."""

from fla_npu.modules.norm.fused_norm_gate import FusedRMSNormGated, FusedRMSNormSwishGate
from fla_npu.modules.norm.l2norm import L2Norm
from fla_npu.modules.norm.layernorm import RMSNorm
from fla_npu.modules.norm.layernorm_gated import RMSNormGated

__all__ = ["FusedRMSNormGated", "FusedRMSNormSwishGate", "L2Norm", "RMSNorm", "RMSNormGated"]
