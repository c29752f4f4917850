"""FLA's reference names for Gated DeltaNet, over the definitions in `fla_npu.ops.common`.

Unlike FLA's they accept grouped value heads and, in both forms, any T. Results are float32; nothing is written to.
"""

import torch

from fla_npu.ops.common.chunk_form import delta_chunk_form
from fla_npu.ops.common.recurrence import delta_recurrence


def naive_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token. FLA's order: beta comes before g here, and after it in the chunked form.

    Args:
        q, k: `[B,T,H,K]`; v: `[B,T,HV,V]`; beta, g: `[B,T,HV]`, g a log decay.
        scale: factor of q, `K ** -0.5` when None.
        initial_state: `[B,HV,K,V]` or None for zeros.

    Returns:
        `(o, final_state)`: `[B,T,HV,V]` float32, and `[B,HV,K,V]` float32 or None.
    """
    o, state = delta_recurrence(q, k, v, beta=beta, g=g, scale=scale, initial_state=initial_state)
    return o, state if output_final_state else None


def naive_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunk by chunk. Arguments and results as in `naive_recurrent_gated_delta_rule`, in another order."""
    o, state = delta_chunk_form(
        q, k, v, beta=beta, g=g, scale=scale, initial_state=initial_state, chunk_size=chunk_size
    )
    return o, state if output_final_state else None
