"""The models' tensor-parallel plan for transformers, whose style is `fla_npu.distributed.HeadParallel`."""

from typing import Any

import torch
import torch.nn as nn

STYLE = "fla_npu_heads"


def base_model_tp_plan() -> dict[str, str] | None:
    """The plan of a configuration, whose style is then known to transformers.

    None where torch has no DTensors, or transformers is too old for plans on them.
    """
    if not torch.distributed.is_available():
        return None
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

        from fla_npu.distributed.tensor_parallel import HeadParallel, blocks_of
    except ImportError:
        return None
    if not hasattr(TensorParallelLayer, "install_forward"):
        return None

    class Heads(TensorParallelLayer):
        """The whole layer at once: names in a plan cannot tell `f_proj.0` from `f_proj.1`, which differ."""

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            if names := blocks_of(module):
                # It would look for them in the checkpoint under the names that they get, and not find them.
                raise ValueError(
                    f"transformers cannot load {type(module).__name__} onto several devices, since {', '.join(names)} "
                    "are cut in blocks of rows: load the model without a tensor-parallel plan, then call "
                    "fla_npu.distributed.parallelize(model, mesh)"
                )
            return HeadParallel()._apply(module, mesh)

    style: Any = Heads()
    ALL_PARALLEL_STYLES.register(STYLE, style)
    return {"layers.*.attn": STYLE, "layers.*.mlp": STYLE}
