"""Older path of `fla_npu.modules.causal_conv1d` and `fla_npu.modules.long_conv`."""

# Loaded first: a submodule binds its name in its package, and `conv.causal_conv1d` must stay the function.
import fla_npu.modules.conv.causal_conv1d  # noqa: F401
from fla_npu.modules.causal_conv1d.ops import (
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
    causal_conv1d_update_states,
)
from fla_npu.modules.long_conv import ImplicitLongConvolution, LongConvolution, PositionalEmbedding, fft_conv

__all__ = [
    "ImplicitLongConvolution",
    "LongConvolution",
    "PositionalEmbedding",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
    "fft_conv",
]
