"""Older path of `fla_npu.modules.norm.layernorm_gated`."""

from fla_npu.modules.norm.layernorm_gated import RMSNormGated

__all__ = ["RMSNormGated"]
