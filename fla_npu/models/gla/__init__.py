"""Gated linear attention models, registered with transformers' Auto classes."""

from fla_npu.models.auto import register
from fla_npu.models.gla.configuration_gla import GLAConfig
from fla_npu.models.gla.modeling_gla import GLAForCausalLM, GLAModel

register(GLAForCausalLM)

__all__ = ["GLAConfig", "GLAForCausalLM", "GLAModel"]
