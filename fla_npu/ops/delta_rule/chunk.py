"""`chunk_delta_rule`: DeltaNet over whole sequences, with gradients."""

from typing import Any

import torch

from fla_npu.ops.entry import call


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule, chunk by chunk, on any device by the portable path.

    Per value head, with a state `S` of `K x V` (DeltaNet, arXiv 2406.06484):

        u = beta_t (v_t - S^T k_t);  S = S + k_t u^T;  o_t = scale * S^T q_t

    Args:
        q, k: `[B, T, H, K]`, float16, bfloat16 or float32. Any strides.
        v: `[B, T, HV, V]` with HV a multiple of H; value head j reads query/key head `j // (HV // H)`.
        beta: `[B, T, HV]`, step size in [0, 1] (or [0, 2]).
        scale: factor of q; `K ** -0.5` when None.
        initial_state: `[N, HV, K, V]`, one per sequence; zeros when None. Not written to.
        output_final_state: also return the final state.
        use_qk_l2norm_in_kernel: normalise q and k over K, `x / sqrt(sum x^2 + 1e-6)`.
        cu_seqlens: bounds `[N + 1]` of N sequences packed along T, integers `0, ..., T`; B must be 1 then.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_size: 16, 32 or 64. It changes rounding only.
        kwargs: names that the op does not have give a warning.

    FLA's op takes neither float32 nor grouped value heads.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32 (None unless asked for). Gradients exist for
        q, k, v, beta and initial_state.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. See `fla_npu.ops.checks`.
    """
    return call(
        "chunk_delta_rule",
        q=q,
        k=k,
        v=v,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        **kwargs,
    )[:2]
