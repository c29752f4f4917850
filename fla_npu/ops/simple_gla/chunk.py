"""`chunk_simple_gla`: linear attention with a decay per head over whole sequences, with gradients."""

from typing import Any

import torch

from fla_npu.ops.checks import constant_decay
from fla_npu.ops.entry import call


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention with a decay per head, chunk by chunk, on any device by the portable path.

    Per value head, with a state `S` of `K x V` (Mamba-2, arXiv 2405.21060):

        S = exp(g_t) S + k_t v_t^T;  o_t = scale * S^T q_t

    Args:
        q, k: `[B, T, H, K]`, float16, bfloat16 or float32. Any strides.
        v: `[B, T, HV, V]` with HV a multiple of H; value head j reads query/key head `j // (HV // H)`.
        g: `[B, T, HV]`, natural log decay, at most 0.
        g_gamma: `[HV]`, the same for all tokens, in place of g. With neither there is no decay.
        scale: factor of q; `K ** -0.5` when None.
        initial_state: `[N, HV, K, V]`, one per sequence; zeros when None. Not written to.
        output_final_state: also return the final state.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: bounds `[N + 1]` of N sequences packed along T, integers `0, ..., T`; B must be 1 then.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_size: a power of 2, or None for 64, beyond which it has no effect. It changes rounding only.
        kwargs: `transpose_state_layout`, the deprecated name of `state_v_first`. Other names give a warning.

    FLA's op has no grouped value heads and hands no gradient to `g_gamma`.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32 (None unless asked for). Gradients exist for
        q, k, v, g, g_gamma and initial_state.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it. See `fla_npu.ops.checks`.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 100, 2, 64).unbind()
        >>> o, state = chunk_simple_gla(q, k, v, g=-torch.rand(1, 100, 2), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    return call(
        "chunk_simple_gla",
        q=q,
        k=k,
        v=v,
        g=constant_decay(q, k, v, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        **kwargs,
    )[:2]
