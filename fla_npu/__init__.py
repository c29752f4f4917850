"""fla_npu: the Flash Linear Attention API for Huawei Ascend NPUs, and fast on any CPU."""

import importlib
from typing import TYPE_CHECKING, Any

from fla_npu._version import __version__
from fla_npu.ops import (
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
    recurrent_gated_delta_rule,
)

if TYPE_CHECKING:
    from fla_npu.integrations.hook import disable, enable, enabled

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "disable",
    "enable",
    "enabled",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "recurrent_gated_delta_rule",
]


def __getattr__(name: str) -> Any:
    if name in ("disable", "enable", "enabled"):
        from fla_npu.integrations import hook

        return getattr(hook, name)
    # FLA's root has the layers and models too; they are loaded when asked for.
    for package in ("layers", "models") if name[:1].isupper() else ():
        module = importlib.import_module(f"fla_npu.{package}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
