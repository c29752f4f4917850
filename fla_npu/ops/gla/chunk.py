"""`chunk_gla`: gated linear attention over whole sequences, with gradients."""

import torch

from fla_npu.ops.entry import call


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention, chunk by chunk, on any device by the portable path.

    Per value head, with a state `S` of `K x V` (Gated Linear Attention, arXiv 2312.06635):

        S = diag(exp(g_t)) S + k_t v_t^T;  o_t = scale * S^T q_t

    Args:
        q, k: `[B, T, H, K]`, float16, bfloat16 or float32. Any strides.
        v: `[B, T, HV, V]` with HV a multiple of H; value head j reads query/key head `j // (HV // H)`.
        g: `[B, T, HV, K]`, natural log decay, at most 0.
        scale: factor of q; `K ** -0.5` when None.
        initial_state: `[N, HV, K, V]` float32, one per sequence; zeros when None. Not written to.
        output_final_state: also return the final state.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: bounds `[N + 1]` of N sequences packed along T, integers `0, ..., T`; B must be 1 then.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    FLA's op has no grouped value heads.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32 (None unless asked for). Gradients exist for
        q, k, v, g and initial_state.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. See `fla_npu.ops.checks`.
    """
    return call(
        "chunk_gla",
        q=q,
        k=k,
        v=v,
        g=g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )[:2]
