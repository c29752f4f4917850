"""Language models under FLA's names, as models of transformers. Importing this registers them with its Auto classes.

Without transformers only the state cache is there.
"""

from typing import Any

from fla_npu.errors import MissingExtraError

__all__ = [
    "DeltaNetConfig",
    "DeltaNetForCausalLM",
    "DeltaNetModel",
    "GLAConfig",
    "GLAForCausalLM",
    "GLAModel",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetModel",
    "GatedDeltaProductConfig",
    "GatedDeltaProductForCausalLM",
    "GatedDeltaProductModel",
    "KDAConfig",
    "KDAForCausalLM",
    "KDAModel",
    "Mamba2Config",
    "Mamba2ForCausalLM",
    "Mamba2Model",
    "RetNetConfig",
    "RetNetForCausalLM",
    "RetNetModel",
]

try:
    from fla_npu.models.delta_net import DeltaNetConfig, DeltaNetForCausalLM, DeltaNetModel
    from fla_npu.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, GatedDeltaNetModel
    from fla_npu.models.gated_deltaproduct import (
        GatedDeltaProductConfig,
        GatedDeltaProductForCausalLM,
        GatedDeltaProductModel,
    )
    from fla_npu.models.gla import GLAConfig, GLAForCausalLM, GLAModel
    from fla_npu.models.kda import KDAConfig, KDAForCausalLM, KDAModel
    from fla_npu.models.mamba2 import Mamba2Config, Mamba2ForCausalLM, Mamba2Model
    from fla_npu.models.retnet import RetNetConfig, RetNetForCausalLM, RetNetModel
except ImportError as error:
    _reason = error

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise MissingExtraError(
                f"transformers, or a version of it that has what {name} needs,", "transformers"
            ) from _reason
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
