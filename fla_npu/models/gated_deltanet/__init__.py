"""Gated DeltaNet models, registered with transformers' Auto classes."""

from fla_npu.models.auto import register
from fla_npu.models.gated_deltanet.configuration_gated_deltanet import GatedDeltaNetConfig
from fla_npu.models.gated_deltanet.modeling_gated_deltanet import GatedDeltaNetForCausalLM, GatedDeltaNetModel

register(GatedDeltaNetForCausalLM)

__all__ = ["GatedDeltaNetConfig", "GatedDeltaNetForCausalLM", "GatedDeltaNetModel"]
