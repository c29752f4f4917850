"""fla_npu: the Flash Linear Attention API for Huawei Ascend NPUs, and fast on any CPU."""

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

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "recurrent_gated_delta_rule",
]
