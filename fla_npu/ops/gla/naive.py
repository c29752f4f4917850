"""FLA's reference name for gated linear attention, over the definition in `fla_npu.ops.common`."""

import torch

from fla_npu.ops.common.recurrence import delta_recurrence


def naive_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token, with q scaled by `K ** -0.5`.

    Args:
        q, k: `[B,T,H,K]`; v: `[B,T,HV,V]`; gk: log decays `[B,T,HV,K]`.
        initial_state: `[B,HV,K,V]` or None for zeros. Not written to.

    Returns:
        `(o, final_state)`: `[B,T,HV,V]` in the dtype of q, and `[B,HV,K,V]` float32 or None.
    """
    o, state = delta_recurrence(q, k, v, gk=gk, initial_state=initial_state, delta=False)
    return o.to(q.dtype), state if output_final_state else None
