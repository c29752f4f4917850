"""`HeadParallel` as a style of transformers' tensor-parallel plans, for the models of `fla_npu.models`."""

from typing import Any

import torch.nn as nn

STYLE = "fla_npu_heads"


def base_model_tp_plan() -> dict[str, str] | None:
    """The plan of a model's configuration, whose style is then known to transformers; None where transformers is too
    old for plans on DTensors, or torch has no `torch.distributed`."""
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

        from fla_npu.distributed.tensor_parallel import HeadParallel
    except ImportError:
        return None
    if not hasattr(TensorParallelLayer, "install_forward"):
        return None

    class Heads(TensorParallelLayer):
        """Cuts a layer whole when its turn comes, and loads parameters by the layouts that they have then."""

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            return HeadParallel()._apply(module, mesh)

    style: Any = Heads()
    ALL_PARALLEL_STYLES.register(STYLE, style)
    return {"layers.*.attn": STYLE, "layers.*.mlp": STYLE}
