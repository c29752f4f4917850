"""FLA's reference names for DeltaNet, over the definitions in `fla_npu.ops.common`."""

import torch

from fla_npu.ops.common.chunk_form import delta_chunk_form
from fla_npu.ops.common.recurrence import delta_recurrence


def delta_rule_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token. Heads come before tokens here, unlike in the ops.

    Args:
        q, k: `[B,H,T,K]`; v: `[B,HV,T,V]`; beta: `[B,HV,T]` or `[B,HV,T,V]`. q is scaled by `K ** -0.5`.
        initial_state: `[B,HV,K,V]` or None for zeros. Not written to.

    Returns:
        `(o, final_state)`: `[B,HV,T,V]` in the dtype of q, and `[B,HV,K,V]` float32 or None.
    """
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    o, state = delta_recurrence(*tokens_first, beta=beta.transpose(1, 2), initial_state=initial_state)
    return o.transpose(1, 2).to(q.dtype), state if output_final_state else None


def delta_rule_chunkwise(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, chunk_size: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunk by chunk, for any T. Arguments and results as in `delta_rule_recurrence`; beta is `[B,HV,T]`."""
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    o, state = delta_chunk_form(*tokens_first, beta=beta.transpose(1, 2), chunk_size=chunk_size)
    return o.transpose(1, 2).to(q.dtype), state


def delta_rule_parallel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, BM: int = 128, BN: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the matrix of all pairs of tokens, `o = A (beta * v)`.

    With L and P the scores of keys and of queries up to each token, u solves `(I + beta L) u = beta v` and `o = P u`.

    Args:
        q, k: `[B,H,T,K]`; v: `[B,H,T,V]`; beta: `[B,H,T]`. q is scaled by `K ** -0.5`.
        BM, BN: FLA's sizes of blocks, of which there are none here.

    Returns:
        `(o, A)`: `[B,H,T,V]` in the dtype of q, and `[B,H,T,T]` float32.
    """
    dtype = q.dtype
    q, k, v, beta = (x.float() for x in (q, k, v, beta[..., None]))
    L, P = beta * (k @ k.mT), q.shape[-1] ** -0.5 * q @ k.mT
    # Only what is below the diagonal of L counts: on it, the system has ones.
    A = torch.linalg.solve_triangular(L, P.tril(), upper=False, left=False, unitriangular=True)
    return (A @ (beta * v)).to(dtype), A
