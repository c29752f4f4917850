"""`chunk_gated_delta_product`: Gated DeltaProduct over whole sequences, with gradients."""

import torch

from fla_npu.ops.entry import call


def chunk_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaProduct, chunk by chunk, on any device by the portable path.

    Per value head, with a state `S` of `K x V` (DeltaProduct, arXiv 2502.10297):

        S = exp(g_t) S
        for i in 1 .. num_householder:  u = beta_ti (v_ti - S^T k_ti);  S = S + k_ti u^T
        o_t = scale * S^T q_t

    Args:
        q: `[B, T, H, K]`, float16, bfloat16 or float32. Any strides.
        k: `[B, T * num_householder, H, K]`, the rows of a token one after the other.
        v: `[B, T * num_householder, HV, V]` with HV a multiple of H; value head j reads head `j // (HV // H)` of q, k.
        g: `[B, T, HV]`, natural log decay, at most 0; None for none.
        beta: `[B, T * num_householder, HV]`, step size in [0, 1] (or [0, 2]).
        num_householder: updates of the state per token.
        scale: factor of q; `K ** -0.5` when None.
        initial_state: `[N, HV, K, V]`, one per sequence; zeros when None. Not written to.
        output_final_state: also return the final state.
        use_qk_l2norm_in_kernel: normalise q and k over K, `x / sqrt(sum x^2 + 1e-6)`.
        cu_seqlens: bounds `[N + 1]` of N sequences packed along T, counted in tokens; B must be 1 then.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        cp_context: context parallelism is not supported; must be None.

    FLA's op takes neither float32 nor grouped value heads.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32 (None unless asked for). Gradients exist for
        q, k, v, g, beta and initial_state.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    return call(
        "chunk_delta_product",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        num_householder=num_householder,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
    )[:2]
