"""Mamba-2 models.

transformers has a model type `mamba2` of its own, with which AutoConfig stays: use the classes here by their names.
Auto models of configurations of this package are models of this package.
"""

from fla_npu.models.auto import register
from fla_npu.models.mamba2.configuration_mamba2 import Mamba2Config
from fla_npu.models.mamba2.modeling_mamba2 import Mamba2ForCausalLM, Mamba2Model

register(Mamba2ForCausalLM)

__all__ = ["Mamba2Config", "Mamba2ForCausalLM", "Mamba2Model"]
