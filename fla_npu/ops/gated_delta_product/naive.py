"""FLA's reference name for Gated DeltaProduct, over the definition in `fla_npu.ops.common`."""

import torch

from fla_npu.ops.checks import sequence_bounds
from fla_npu.ops.common.recurrence import delta_recurrence, packed_delta_recurrence


def naive_recurrent_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    num_householder: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token; shapes as in `chunk_gated_delta_product`.

    Args:
        output_final_state: ignored, as in FLA: the state is always returned.

    Returns:
        `(o, final_state)`: `[B,T,HV,V]` in the dtype of q, and `[N,HV,K,V]` float32.
    """
    if cu_seqlens is None:
        o, state = delta_recurrence(
            q, k, v, beta=beta, g=g, updates=num_householder, scale=scale, initial_state=initial_state
        )
    else:
        o, state = packed_delta_recurrence(
            q,
            k,
            v,
            cu_seqlens=sequence_bounds(cu_seqlens, q.shape[1]),
            beta=beta,
            g=g,
            updates=num_householder,
            scale=scale,
            initial_state=initial_state,
        )
    return o.to(q.dtype), state
