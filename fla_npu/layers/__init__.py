"""Token-mixing layers, under FLA's names."""

from fla_npu.layers.gated_deltanet import GatedDeltaNet
from fla_npu.layers.kda import KimiDeltaAttention

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]
