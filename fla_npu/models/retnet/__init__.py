"""RetNet models, registered with transformers' Auto classes."""

from fla_npu.models.auto import register
from fla_npu.models.retnet.configuration_retnet import RetNetConfig
from fla_npu.models.retnet.modeling_retnet import RetNetForCausalLM, RetNetModel

register(RetNetForCausalLM)

__all__ = ["RetNetConfig", "RetNetForCausalLM", "RetNetModel"]
