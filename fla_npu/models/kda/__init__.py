"""Kimi Delta Attention models, registered with transformers' Auto classes."""

from fla_npu.models.auto import register
from fla_npu.models.kda.configuration_kda import KDAConfig
from fla_npu.models.kda.modeling_kda import KDAForCausalLM, KDAModel

register(KDAForCausalLM)

__all__ = ["KDAConfig", "KDAForCausalLM", "KDAModel"]
