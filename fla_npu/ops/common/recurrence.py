"""The definition of every op: one token after the other, in plain differentiable PyTorch.

Per value head, with a state `S` of `K x V` (Gated Delta Networks, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692):

    S  = exp(g_t) * diag(exp(gk_t)) S diag(exp(gv_t))     decay first; each factor is optional
    u  = beta_t * (w_t * v_t - S^T (b_t * k_t))            without the delta rule: beta_t * w_t * v_t
    S  = S + k_t u^T
    o_t = scale * S^T q_t                                  read after the update

Gated DeltaNet has `g`, Kimi Delta Attention has `gk`, DeltaNet has neither; Gated DeltaNet-2 has `gk` and, in place of
beta, `b` per key channel (what is erased) and `w` per value channel (what is written). A token of Gated DeltaProduct
(arXiv 2502.10297) updates the state several times, with a k, v and beta each, between its one decay and its one read.
Gated linear attention, RetNet and Mamba-2 are the same loop with `delta=False`. Everything else in the package is
measured against these functions.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch


def delta_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
    updates: int = 1,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    delta: bool = True,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over a batch of equally long sequences.

    Args:
        q, k: `[B,T,H,K]`. Value head `j` reads query/key head `j // (HV // H)`.
        v: `[B,T,HV,V]` with `HV` a multiple of `H`.
        beta: `[B,T,HV]`, or `[B,T,HV,V]` for one factor per value channel; None means 1.
        g, gk, gv: log decays `[B,T,HV]`, `[B,T,HV,K]` and `[B,T,HV,V]`; None means no decay.
        b, w: factors `[B,T,HV,K]` of k in what is erased and `[B,T,HV,V]` of v in what is written; None means 1.
        updates: per token: k, v, beta, b and w then have `T * updates` rows, those of a token one after the other.
        scale: factor of q, `K ** -0.5` when None.
        initial_state: `[B,HV,K,V]`, or `[B,HV,V,K]` with `state_v_first`; None means zeros. Never written to.
        delta: whether the state's own prediction is taken off v (the delta rule).
        state_v_first: layout of `initial_state` and of the returned state.
        dtype: every input is converted to it and all arithmetic happens in it.

    Returns:
        `(o, final_state)` in `dtype`: `o` is `[B,T,HV,V]`, the state has the layout of `initial_state`.
    """
    batch, length, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // heads
    scale = key_dim**-0.5 if scale is None else scale

    q = (q.to(dtype) * scale).repeat_interleave(group, dim=2)
    k = k.to(dtype).repeat_interleave(group, dim=2)
    v = v.to(dtype)
    if beta is not None:
        beta = beta.to(dtype)
        beta = beta if beta.ndim == 4 else beta[..., None]
    decay, key_decay, value_decay = (None if x is None else x.to(dtype).exp() for x in (g, gk, gv))
    read = k if b is None else k * b.to(dtype)
    written = v if w is None else v * w.to(dtype)

    if initial_state is None:
        state = v.new_zeros(batch, value_heads, key_dim, value_dim)
    else:
        state = initial_state.to(dtype, copy=True)
        state = state.transpose(-1, -2) if state_v_first else state

    outputs = []
    for t in range(length):
        if decay is not None:
            state = state * decay[:, t, :, None, None]
        if key_decay is not None:
            state = state * key_decay[:, t, :, :, None]
        if value_decay is not None:
            state = state * value_decay[:, t, :, None, :]
        for i in range(t * updates, (t + 1) * updates):
            update = written[:, i]
            if delta:
                update = update - (read[:, i, :, None, :] @ state).squeeze(-2)
            if beta is not None:
                update = beta[:, i] * update
            state = state + k[:, i, :, :, None] * update[:, :, None, :]
        outputs.append((q[:, t, :, None, :] @ state).squeeze(-2))

    o = torch.stack(outputs, dim=1) if outputs else v.new_zeros(batch, 0, value_heads, value_dim)
    return o, state.transpose(-1, -2).contiguous() if state_v_first else state


def packed_delta_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: Sequence[int],
    beta: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
    updates: int = 1,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    delta: bool = True,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_recurrence` over N sequences packed along T (B must be 1), each with a state of its own.

    Args:
        cu_seqlens: N + 1 bounds `0, ..., T`. A sequence of no tokens hands its initial state through.
        initial_state: `[N,HV,K,V]` or V-first. The other arguments are those of `delta_recurrence`.

    Returns:
        `(o, final_state)` in `dtype`: `[1,T,HV,V]` and `[N,HV,K,V]` (or V-first).
    """
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(cu_seqlens)):
        rows = slice(start * updates, end * updates)
        cut_g, cut_gk, cut_gv = (None if x is None else x[:, start:end] for x in (g, gk, gv))
        cut_beta, cut_b, cut_w = (None if x is None else x[:, rows] for x in (beta, b, w))
        o, state = delta_recurrence(
            q[:, start:end],
            k[:, rows],
            v[:, rows],
            beta=cut_beta,
            g=cut_g,
            gk=cut_gk,
            gv=cut_gv,
            b=cut_b,
            w=cut_w,
            updates=updates,
            scale=scale,
            initial_state=None if initial_state is None else initial_state[n : n + 1],
            delta=delta,
            state_v_first=state_v_first,
            dtype=dtype,
        )
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states)
