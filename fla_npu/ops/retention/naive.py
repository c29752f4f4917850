"""FLA's reference name for retention, over the definition in `fla_npu.ops.common`."""

import torch

from fla_npu.ops.common.recurrence import delta_recurrence
from fla_npu.ops.retention.decay import retention_decay


def naive_retention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Token by token, with q scaled by `K ** -0.5`. Heads come before tokens here, unlike in the ops.

    Args:
        q, k: `[B,H,T,K]`; v: `[B,HV,T,V]`.

    Returns:
        `[B,HV,T,V]` in the dtype of q.
    """
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
    g = retention_decay(v.shape[1], q).expand(q.shape[0], q.shape[2], -1)
    o, _ = delta_recurrence(*tokens_first, g=g, delta=False)
    return o.transpose(1, 2).to(q.dtype)
