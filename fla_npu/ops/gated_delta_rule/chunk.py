"""`chunk_gated_delta_rule`: Gated DeltaNet over whole sequences, with gradients."""

from typing import Any

import torch

from fla_npu.ops.entry import call


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Gated delta rule, chunk by chunk.

    Per value head, with a state `S` of `K x V` (Gated Delta Networks, arXiv 2412.06464):

        S  = exp(g_t) S;  u = beta_t (v_t - S^T k_t);  S = S + k_t u^T;  o_t = scale * S^T q_t

    Args:
        q, k: `[B, T, H, K]`, float16, bfloat16 or float32. Any strides.
        v: `[B, T, HV, V]` with HV a multiple of H; value head j reads query/key head `j // (HV // H)`.
        g: `[B, T, HV]`, natural log decay, at most 0; with `use_gate_in_kernel` the gate's logits.
        beta: `[B, T, HV]`, step size in [0, 1] (or [0, 2]); with `use_beta_sigmoid_in_kernel` its logits.
        scale: factor of q; `K ** -0.5` when None.
        initial_state: `[N, HV, K, V]`, one per sequence; zeros when None. Not written to.
        output_final_state: also return the final state.
        use_qk_l2norm_in_kernel: normalise q and k over K, `x / sqrt(sum x^2 + 1e-6)`.
        use_beta_sigmoid_in_kernel: `beta = sigmoid(beta)`, twice that with `allow_neg_eigval`.
        allow_neg_eigval: see above; needs `use_beta_sigmoid_in_kernel`.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: bounds `[N + 1]` of N sequences packed along T, integers `0, ..., T`; B must be 1 then.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_indices: precomputed (sequence, chunk) pairs; checked, not needed.
        cp_context: context parallelism is not supported; must be None.
        use_gate_in_kernel: `g = -exp(A_log) * softplus(g + dt_bias)`.
        A_log, dt_bias: `[HV]`, parameters of the gate.
        chunk_size: 16, 32 or 64. It changes rounding only.
        kwargs: `transpose_state_layout`, the deprecated name of `state_v_first`. Other names give a warning.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32 (None unless asked for). Gradients exist for
        q, k, v, g, beta, initial_state, A_log and dt_bias.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. See `fla_npu.ops.checks`.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 100, 2, 64).unbind()
        >>> v = torch.randn(1, 100, 4, 64)
        >>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 64, 64]))
    """
    return call(
        "chunk_gdn",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices,
        cp_context=cp_context,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        **kwargs,
    )[:2]


chunk_gdn = chunk_gated_delta_rule
