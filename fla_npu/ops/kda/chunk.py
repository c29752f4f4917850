"""`chunk_kda`: Kimi Delta Attention over whole sequences, with gradients."""

from typing import Any

import torch

from fla_npu.ops.entry import call


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Kimi Delta Attention, chunk by chunk.

    Per value head, with a state `S` of `K x V` (Kimi Linear, arXiv 2510.26692):

        S  = diag(exp(g_t)) S;  u = beta_t (v_t - S^T k_t);  S = S + k_t u^T;  o_t = scale * S^T q_t

    The arguments are those of `chunk_gated_delta_rule`, except:

    Args:
        g: `[B, T, HV, K]`, natural log decay per key channel, at most 0; with `use_gate_in_kernel` logits. Decays of
            any strength are fine: none can overflow, and a factor of a decay below 2^-50 counts as zero.
        initial_state: must be float32; with float64 inputs it may be float64.
        use_gate_in_kernel: `g = -exp(A_log) softplus(g + dt_bias)`, or with `lower_bound` set
            `g = lower_bound sigmoid(exp(A_log) (g + dt_bias))`.
        A_log: `[HV]`; may be None with `lower_bound`, and counts as 0 then.
        dt_bias: `[HV * K]` or None.
        safe_gate: promises log decays in [-5, 0]; with the gate it needs `lower_bound` in [-5, 0). Nothing here depends
            on the promise.
        lower_bound: see `use_gate_in_kernel`.
        disable_recompute: keep the state before every chunk for the backward pass, which otherwise recomputes it.
        return_intermediate_states: also return the state before every chunk; in `torch.inference_mode` only.
        use_graph, max_num_seqs: capture with a padded `cu_seqlens`; no effect on a CPU.
        chunk_size: 32 or 64. It changes rounding only.
        cu_seq_lens_q: the name under which transformers hands over `cu_seqlens`; counts when that is None.

    Returns:
        o `[B, T, HV, V]` in q's dtype and the final state in float32 (None unless asked for); with
        `return_intermediate_states` also `[B, NT, HV, K, V]` (or V-first) in k's dtype, NT chunks in all.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. See `fla_npu.ops.checks`.
    """
    results = call(
        "chunk_kda",
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
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context,
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        **kwargs,
    )
    return results if return_intermediate_states else results[:2]
