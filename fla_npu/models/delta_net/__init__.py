"""DeltaNet models, registered with transformers' Auto classes."""

from fla_npu.models.auto import register
from fla_npu.models.delta_net.configuration_delta_net import DeltaNetConfig
from fla_npu.models.delta_net.modeling_delta_net import DeltaNetForCausalLM, DeltaNetModel

register(DeltaNetForCausalLM)

__all__ = ["DeltaNetConfig", "DeltaNetForCausalLM", "DeltaNetModel"]
