"""The delta rule chunk by chunk, as the papers write it: a second definition, independent of the token loop.

Rows r and s are tokens of one chunk, `S` is the state at its start (Gated Delta Networks, arXiv 2412.06464; Kimi
Linear, arXiv 2510.26692); `e = beta b k` is what a token erases by and `x = beta w v` what it writes:

    E_rs = exp(sum of g over tokens s+1 .. r)           s <= r; one factor per key channel if g has one
    A_rs = sum_c e_rc E_rs,c k_sc                       s < r
    W, U = (I + A)^-1 [E_0 e, x]                        E_0: decay since the start of the chunk
    u    = U - W S
    o    = scale (E_0 q S + P u),   P_rs = sum_c q_rc E_rs,c k_sc,   s <= r
    S    = E_0,last S + (E_last k)^T u

Without the delta rule u is x itself.

It is written for reading and for tests: `[chunk, chunk, K]` decays are materialised where g has K channels.
"""

import torch


def delta_chunk_form(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    delta: bool = True,
    chunk_size: int = 64,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `delta_recurrence` computes, by chunks; the last chunk may be short.

    Args:
        q, k: `[B,T,H,K]`; v: `[B,T,HV,V]` with `HV` a multiple of `H`.
        g: log decays `[B,T,HV]` or `[B,T,HV,K]`; -inf is allowed, None means no decay.
        beta, b, w: `[B,T,HV]`, `[B,T,HV,K]` and `[B,T,HV,V]`; None means 1.
        scale: factor of q, `K ** -0.5` when None.
        initial_state: `[B,HV,K,V]` or None for zeros. Never written to.
        delta: whether the state's own prediction is taken off v (the delta rule).
        dtype: of all arithmetic and of the results.

    Returns:
        `(o, final_state)` in `dtype`: `[B,T,HV,V]` and `[B,HV,K,V]`.
    """
    batch, length, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // heads
    scale = key_dim**-0.5 if scale is None else scale

    # [B, T, heads, ...] -> [B, HV, T, ...]
    q, k = (x.to(dtype).repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k))
    v = v.to(dtype).transpose(1, 2)
    beta = v.new_ones(1) if beta is None else beta.to(dtype).transpose(1, 2)[..., None]
    erase = beta * k if b is None else beta * b.to(dtype).transpose(1, 2) * k
    write = beta * v if w is None else beta * w.to(dtype).transpose(1, 2) * v
    g = v.new_zeros(batch, length, value_heads) if g is None else g
    g = (g if g.ndim == 4 else g[..., None]).to(dtype).transpose(1, 2)
    q = q * scale
    if initial_state is None:
        state = v.new_zeros(batch, value_heads, key_dim, value_dim)
    else:
        state = initial_state.to(dtype, copy=True)

    outputs = []
    for start in range(0, length, chunk_size):
        chunk = slice(start, start + chunk_size)
        cq, ck, ce, cx, cg = (x[:, :, chunk] for x in (q, k, erase, write, g))
        tokens = cq.shape[2]
        decay = _pair_decay(cg)
        since_start = cg.cumsum(-2).exp()

        u = cx
        if delta:
            system = torch.eye(tokens, dtype=dtype, device=q.device) + _scores(ce, ck, decay).tril(-1)
            right_sides = torch.cat([since_start * ce, cx], dim=-1)
            solution = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
            by_state, u = solution.split([key_dim, value_dim], dim=-1)
            u = u - by_state @ state
        outputs.append((since_start * cq) @ state + _scores(cq, ck, decay) @ u)
        state = since_start[:, :, -1, :, None] * state + (decay[:, :, -1] * ck).mT @ u

    o = torch.cat(outputs, dim=2) if outputs else torch.zeros_like(v)
    return o.transpose(1, 2), state


def pair_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    value_heads: int,
    *,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """P of whole sequences as one chunk, `[B,HV,T,T]` in `dtype`. The arguments are those of `delta_chunk_form`."""
    batch, length, heads, key_dim = q.shape
    q, k = (x.to(dtype).repeat_interleave(value_heads // heads, dim=2).transpose(1, 2) for x in (q, k))
    g = q.new_zeros(batch, length, value_heads) if g is None else g
    g = (g if g.ndim == 4 else g[..., None]).to(dtype).transpose(1, 2)
    return _scores(q * (key_dim**-0.5 if scale is None else scale), k, _pair_decay(g))


def _pair_decay(g: torch.Tensor) -> torch.Tensor:
    """`E_rs` of a chunk, `[..., r, s, c]`, zero for s > r, from its log decays `[..., C, c]`.

    The sums are taken from each s on: as differences of sums from the start of the chunk they would lose digits, and be
    NaN after a decay of -inf.
    """
    tokens = g.shape[-2]
    after = torch.ones(tokens, tokens, dtype=torch.bool, device=g.device).tril(-1)[..., None]
    log_decay = torch.where(after, g.unsqueeze(-2), 0.0).cumsum(-3)
    return torch.where(after.transpose(-2, -3), 0.0, log_decay.exp())


def _scores(x: torch.Tensor, y: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """`sum_c x_rc E_rs,c y_sc`, `[..., r, s]`."""
    if decay.shape[-1] == 1:
        return (x @ y.mT) * decay[..., 0]
    return torch.einsum("bhrc,bhrsc,bhsc->bhrs", x, decay, y)
