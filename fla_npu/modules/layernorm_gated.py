"""Older path of `fla_npu.modules.norm.layernorm_gated`."""

from fla_npu.modules.norm.layernorm_gated import LayerNormGated, RMSNormGated, layernorm_fn, rmsnorm_fn

__all__ = ["LayerNormGated", "RMSNormGated", "layernorm_fn", "rmsnorm_fn"]
