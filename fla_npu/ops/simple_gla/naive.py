"""FLA's reference names for simple GLA, over the definitions in `fla_npu.ops.common`.

Unlike FLA's they accept grouped value heads and, for g, None. Nothing is written to.
"""

import torch

from fla_npu.ops.common.chunk_form import delta_chunk_form, pair_scores
from fla_npu.ops.common.recurrence import delta_recurrence


def naive_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token.

    Args:
        q, k: `[B,T,H,K]`; v: `[B,T,HV,V]`; g: log decays `[B,T,HV]`.
        scale: factor of q, `K ** -0.5` when None.
        initial_state: `[B,HV,K,V]` or None for zeros.

    Returns:
        `(o, final_state)`: `[B,T,HV,V]` in the dtype of q, and `[B,HV,K,V]` float32 or None.
    """
    o, state = delta_recurrence(q, k, v, g=g, scale=scale, initial_state=initial_state, delta=False)
    return o.to(q.dtype), state if output_final_state else None


def naive_chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunk by chunk. Arguments as in `naive_recurrent_simple_gla`, in another order; o is float32."""
    o, state = delta_chunk_form(
        q, k, v, g=g, scale=scale, initial_state=initial_state, delta=False, chunk_size=chunk_size
    )
    return o, state if output_final_state else None


def naive_parallel_simple_gla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the scores of all pairs of tokens. Arguments as in `naive_recurrent_simple_gla`.

    Returns:
        `(o, scores)`, both float32: `[B,T,HV,V]` and `[B,HV,T,T]`.
    """
    scores = pair_scores(q, k, v.shape[2], g=g, scale=scale)
    return (scores @ v.float().transpose(1, 2)).transpose(1, 2), scores
