"""`chunk_gdn2`: Gated DeltaNet-2 over whole sequences, with gradients."""

from typing import Any

import torch

from fla_npu.ops.entry import call


def chunk_gdn2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gated DeltaNet-2, chunk by chunk, on any device by the portable path.

    Per value head, with a state `S` of `K x V`:

        S  = diag(exp(g_t)) S;  u = w_t * v_t - S^T (b_t * k_t);  S = S + k_t u^T;  o_t = scale * S^T q_t

    `b = w = beta` gives Kimi Delta Attention. The arguments are those of `chunk_kda`, except:

    Args:
        b: `[B, T, HV, K]`, erase gate in [0, 1] (or [0, 2] for negative eigenvalues).
        w: `[B, T, HV, V]`, write gate in [0, 1].
        chunk_size: 64, as in FLA.

    Value heads may be grouped (HV a multiple of H), which FLA's chunk op does not have.

    Returns:
        o `[B, T, HV, V]` in q's dtype, the final state in float32 (None unless asked for), and with
        `return_intermediate_states` the state at the start of every chunk, `[B, NT, HV, K, V]` in k's dtype. Gradients
        exist for q, k, v, g, b, w, initial_state, A_log and dt_bias.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    o, state, between = call(
        "chunk_gdn2",
        q=q,
        k=k,
        v=v,
        g=g,
        b=b,
        w=w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first,
        cp_context=cp_context,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        **kwargs,
    )
    return (o, state, between) if return_intermediate_states else (o, state)
