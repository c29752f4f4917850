"""Older path of `fla_npu.modules.causal_conv1d`."""

from fla_npu.modules.causal_conv1d.ops import (
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
    causal_conv1d_update_states,
)

__all__ = [
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
]
