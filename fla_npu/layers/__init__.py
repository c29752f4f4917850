"""Token-mixing layers, under FLA's names."""

from fla_npu.layers.attn import Attention
from fla_npu.layers.delta_net import DeltaNet
from fla_npu.layers.gated_deltanet import GatedDeltaNet
from fla_npu.layers.gated_deltaproduct import GatedDeltaProduct
from fla_npu.layers.gdn2 import GatedDeltaNet2
from fla_npu.layers.gla import GatedLinearAttention
from fla_npu.layers.kda import KimiDeltaAttention
from fla_npu.layers.mamba2 import Mamba2
from fla_npu.layers.multiscale_retention import MultiScaleRetention
from fla_npu.layers.simple_gla import SimpleGatedLinearAttention

__all__ = [
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "Mamba2",
    "MultiScaleRetention",
    "SimpleGatedLinearAttention",
]
