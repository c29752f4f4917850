"""Gated DeltaProduct models, registered with transformers' Auto classes."""

from fla_npu.models.auto import register
from fla_npu.models.gated_deltaproduct.configuration_gated_deltaproduct import GatedDeltaProductConfig
from fla_npu.models.gated_deltaproduct.modeling_gated_deltaproduct import (
    GatedDeltaProductForCausalLM,
    GatedDeltaProductModel,
)

register(GatedDeltaProductForCausalLM)

__all__ = ["GatedDeltaProductConfig", "GatedDeltaProductForCausalLM", "GatedDeltaProductModel"]
