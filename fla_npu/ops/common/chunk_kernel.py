# mypy: allow-untyped-defs, allow-incomplete-defs
"""The persistent kernel of the chunked delta rule: one launch, one program per AI core, whole heads per program.

A program takes its share of the (sequence, value head) units and walks over their chunks in order; the state stays
with it. `tiles.py` has the stages, `planner.schedule` the shares, `gate_kernel.py` the form in which gates arrive,
`launch.py` the call. The two kinds of decay differ in `scalar_chunk` and `channel_chunk` only.
"""

import triton
import triton.language as tl

from fla_npu.ops.common.gate_kernel import first_row, sequence
from fla_npu.ops.common.tiles import (
    diagonal,
    dot,
    dot_add,
    load_eye,
    load_rows,
    load_state,
    reference_rows,
    solve,
    store_rows,
    store_state,
    through_cube,
)


@triton.jit
def scalar_chunk(
    S,
    S_op,
    S2,
    S2_op,
    q,
    k,
    v,
    c,
    beta,
    norms,
    o,
    E,
    I_K,
    I_V,
    I_D,
    token,
    left,
    first,
    q_token,
    k_token,
    v_token,
    o_token,
    rest,
    norm_rest,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    L2NORM: tl.constexpr,
    SECOND: tl.constexpr,
    OP: tl.constexpr,
):
    """One chunk with a decay per head: writes o, returns the next state and, with `SECOND`, that of its second half.

    q, k and v go to the cube only, what the vectors see are scores. So the L2 norms of q and k are factors of rows and
    columns of what is there anyhow.
    """
    i = tl.arange(0, C)
    b_k = load_rows(k, token, left, k_token, C, K, BK, 0)
    b_q = load_rows(q, token, left, q_token, C, K, BK, 0)
    kk = dot(b_k, tl.trans(b_k))
    qk = dot(b_q, tl.trans(b_k))
    if SECOND:
        b_k2 = load_rows(k + BK, token, left, k_token, C, K - BK, BK, 0)
        b_q2 = load_rows(q + BK, token, left, q_token, C, K - BK, BK, 0)
        kk = dot_add(b_k2, tl.trans(b_k2), kk)
        qk = dot_add(b_q2, tl.trans(b_k2), qk)
    # The cube computes no columns of rows that are not there; they hold what was there before, NaN included.
    inside = (i < left)[None, :]
    kk = tl.where(inside, kk, 0.0)
    qk = tl.where(inside, qk, 0.0)
    if OP != b_k.dtype:  # noqa: SIM300 - a constant has to come first
        # Not to round the state in K S takes float32 keys; the cube converts them.
        b_k = dot(b_k, I_K)
        b_q = dot(b_q, I_K)
        if SECOND:
            b_k2 = dot(b_k2, I_K)
            b_q2 = dot(b_q2, I_K)
    kS = dot(b_k, S_op)
    qS = dot(b_q, S_op)
    if SECOND:
        kS = dot_add(b_k2, S2_op, kS)
        qS = dot_add(b_q2, S2_op, qS)
    kS = kS.to(OP)
    qS = qS.to(OP)

    # Sums of log decays are multiples of 2^-8 plus a rest: differences are exact however strong the decays before.
    hi = tl.load(c + i)
    lo = tl.load(c + rest + i)
    b = tl.load(beta + i)
    row_k = tl.exp(hi + lo)
    row_q = row_k * scale
    if L2NORM:
        r_k = tl.load(norms + i)
        r_q = tl.load(norms + norm_rest + i)
        b = b * r_k
        row_k = row_k * r_k
        row_q = row_q * r_q
    fi = i.to(tl.float32)
    causal = fi[:, None] >= fi[None, :]
    D = tl.exp(tl.where(causal, (hi[:, None] - hi[None, :]) + (lo[:, None] - lo[None, :]), -1e30)) * b[None, :]
    if L2NORM:
        A = kk * D * r_k[:, None]
        P = (qk * D * (r_q * scale)[:, None]).to(OP)
    else:
        A = kk * D
        P = (qk * D * scale).to(OP)
    T = solve(A, E, C)
    b_v = load_rows(v, token, left, v_token, C, V, BV, first)
    R = dot_add(diagonal(-row_k, C).to(OP), kS, dot(b_v, I_V)).to(OP)
    u = dot(T, R).to(OP)
    b_o = dot_add(P, u, dot(diagonal(row_q, C).to(OP), qS))
    e = tl.arange(0, BV)
    to_end = (tl.load(c + C - 1 + 0 * i) - hi) + (tl.load(c + rest + C - 1 + 0 * i) - lo)
    u = dot(diagonal(tl.exp(to_end) * b, C).to(OP), u).to(OP)
    # A decay that all channels share can come from the right, where its matrix is as narrow as the tile.
    last = diagonal(tl.exp(tl.load(c + C - 1 + 0 * e) + tl.load(c + rest + C - 1 + 0 * e)), BV)
    if SECOND:
        last = through_cube(last, I_D)
        S2 = dot_add(tl.trans(b_k2), u, dot(S2, last))
    S = dot_add(tl.trans(b_k), u, dot(S, last))
    store_rows(b_o, o, token, left, o_token, C, V, BV, first)
    return S, S2


@triton.jit
def square(
    scores,
    c,
    marks,
    b_k,
    b_q,
    b_c,
    s: tl.constexpr,
    KP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
):
    """Add the scores between the halves of every block of s rows.

    With c at the last row of the lower half as reference, the exponents of both sides are at most 0. One product gives
    both kinds: `k_i . k_j` where i is in the upper half and j in the lower, and where i is in the lower and j in the
    upper `k_i . q_j`, the scores of q transposed.
    """
    i = tl.arange(0, C)
    fi = i.to(tl.float32)
    half = tl.floor(fi / (s // 2))
    block = tl.floor(fi / s)
    sign = tl.load(marks + i)[:, None]
    f = tl.exp((b_c - reference_rows(c, marks + C, s, C, KP, K, BK)) * sign)
    x = (b_k * f).to(OP)
    y = (f * tl.where(sign > 0.0, b_q, b_k)).to(OP)
    between = (block[:, None] == block[None, :]) & (half[:, None] != half[None, :])
    return scores + tl.where(between, dot(x, tl.trans(y)), 0.0)


@triton.jit
def piece(
    scores,
    c,
    marks,
    b_k,
    b_q,
    b_c,
    eye,
    s: tl.constexpr,
    KP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    OP: tl.constexpr,
):
    """Add the scores within every block of s rows, with the middle as reference: only if s / 2 rows decay mildly.

    eye has the dtype that the operands are rounded to: it takes the range of `exp(MILD)`, which float16 has not.
    """
    fi = tl.arange(0, C).to(tl.float32)
    block = tl.floor(fi / s)
    same = block[:, None] == block[None, :]
    if s == 1:
        qk = dot(b_k.to(OP), tl.trans(b_q.to(OP)))
    else:
        d = b_c - reference_rows(c, marks + C, s, C, KP, K, BK)
        right = through_cube((b_k * tl.exp(-d)).to(eye.dtype), eye)
        f = tl.exp(d)
        kk = dot((b_k * f).to(eye.dtype), tl.trans(right))
        qk = dot(right, tl.trans((b_q * f).to(eye.dtype)))
        scores += tl.where(same & (fi[:, None] > fi[None, :]), kk, 0.0)
    return scores + tl.where(same & (fi[:, None] <= fi[None, :]), qk, 0.0)


@triton.jit
def channel_scores(
    scores,
    c,
    marks,
    b_k,
    b_q,
    b_c,
    eye,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    OP: tl.constexpr,
):
    """Add the scores of BK channels: below the diagonal those of k, on and above it those of q, transposed."""
    for level in tl.static_range(7):
        if (C >> level) > PIECE:
            scores = square(scores, c, marks + level * (C + 1) * C, b_k, b_q, b_c, C >> level, KP, K, BK, C, OP)
        elif (C >> level) == PIECE:
            scores = piece(scores, c, marks + level * (C + 1) * C, b_k, b_q, b_c, eye, C >> level, KP, K, BK, C, OP)
    return scores


@triton.jit
def channel_rows(
    q,
    k,
    c,
    norms,
    token,
    left,
    q_token,
    k_token,
    norm_rest,
    K: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """q, k and c of BK channels of a chunk, float32, and the last row of c."""
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    b_k = load_rows(k, token, left, k_token, C, K, BK, 0).to(tl.float32)
    b_q = load_rows(q, token, left, q_token, C, K, BK, 0).to(tl.float32)
    if L2NORM:
        b_k = b_k * tl.load(norms + i)[:, None]
        b_q = b_q * tl.load(norms + norm_rest + i)[:, None]
    b_c = tl.load(c + i[:, None] * KP + d[None, :], mask=(d < K)[None, :], other=0.0)
    last = tl.load(c + (C - 1) * KP + d, mask=d < K, other=0.0)
    return b_q, b_k, b_c, last


@triton.jit
def channel_chunk(
    S,
    S_op,
    S2,
    S2_op,
    q,
    k,
    v,
    c,
    beta,
    norms,
    o,
    E,
    E_piece,
    I_V,
    marks,
    token,
    left,
    first,
    q_token,
    k_token,
    v_token,
    o_token,
    norm_rest,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    L2NORM: tl.constexpr,
    SECOND: tl.constexpr,
    OP: tl.constexpr,
):
    """One chunk with a decay per key channel: writes o, returns the next state and, with `SECOND`, its second half.

    q, k and their decays go to the vectors only, v to the cube only. On-core memory is full: what was read last can
    be written over, so the order of the statements counts.
    """
    i = tl.arange(0, C)
    b_q, b_k, b_c, last = channel_rows(
        q, k, c, norms, token, left, q_token, k_token, norm_rest, K, KP, BK, C, L2NORM
    )  # fmt: skip
    b = tl.load(beta + i)
    # The same in rows of [C, BK]: were it one value with b, the two ways to split it would cost the split of all tiles.
    b_rows = tl.load(beta + tl.minimum(token, 0) + i)
    b_o = dot((b_q * (tl.exp(b_c) * scale)).to(OP), S_op)
    if not SECOND:
        decayed = dot(diagonal(tl.exp(last), BK), S)
    to_end = (b_k * (tl.exp(last[None, :] - b_c) * b_rows[:, None])).to(OP)
    scores = tl.zeros([C, C], tl.float32)
    scores = channel_scores(scores, c, marks, b_k, b_q, b_c, E_piece, K, KP, BK, C, PIECE, OP)
    b_v = load_rows(v, token, left, v_token, C, V, BV, first)
    R = dot_add((b_k * -tl.exp(b_c)).to(OP), S_op, dot(b_v, I_V))
    if SECOND:
        # Two states scaled ahead of time would not fit into the accumulators.
        last1 = last
        b_q, b_k, b_c, last = channel_rows(
            q + BK, k + BK, c + BK, norms, token, left, q_token, k_token, norm_rest, K - BK, KP, BK, C, L2NORM
        )
        b_o = dot_add((b_q * (tl.exp(b_c) * scale)).to(OP), S2_op, b_o)
        to_end2 = (b_k * (tl.exp(last[None, :] - b_c) * b_rows[:, None])).to(OP)
        scores = channel_scores(scores, c + BK, marks, b_k, b_q, b_c, E_piece, K - BK, KP, BK, C, PIECE, OP)
        R = dot_add((b_k * -tl.exp(b_c)).to(OP), S2_op, R)
    R = R.to(OP)
    T = solve(scores * b[None, :], E, C)
    u = dot(T, R).to(OP)
    fi = i.to(tl.float32)
    P = tl.where(fi[:, None] <= fi[None, :], scores * (b * scale)[:, None], 0.0).to(OP)
    b_o = dot_add(tl.trans(P), u, b_o)
    if SECOND:
        decayed = dot(diagonal(tl.exp(last1), BK), S)
        S2 = dot_add(tl.trans(to_end2), u, dot(diagonal(tl.exp(last), BK), S2))
    S = dot_add(tl.trans(to_end), u, decayed)
    store_rows(b_o, o, token, left, o_token, C, V, BV, first)
    return S, S2


@triton.jit
def walk(
    q,
    k,
    v,
    c,
    beta,
    is_strong,
    norms,
    h0,
    o,
    ht,
    E,
    E_piece,
    E_strong,
    I_K,
    I_V,
    I_D,
    I_S,
    marks,
    marks_strong,
    cu_seqlens,
    unit,
    first,
    T,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    o_batch,
    rows,
    rest,
    norm_rest,
    scale,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    PART: tl.constexpr,
    DECAY: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST: tl.constexpr,
    MAY_BE_STRONG: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_HT: tl.constexpr,
    V_FIRST: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Columns `first .. first + BV` of a (sequence, value head): all its chunks."""
    OP: tl.constexpr = q.dtype.element_ty if FAST else tl.float32
    SECOND: tl.constexpr = K > BK
    n = unit // HV
    head = unit % HV
    bos, length = sequence(cu_seqlens, n, T, VARLEN)
    row = first_row(n, bos, head, rows, HV, C, VARLEN)
    batch = 0 if VARLEN else tl.cast(n, tl.int64)
    token = bos if VARLEN else bos * 0
    hk = tl.cast(head // GROUP, tl.int64)
    q += batch * q_batch + token * q_token + hk * q_head
    k += batch * k_batch + token * k_token + hk * k_head
    v += batch * v_batch + token * v_token + tl.cast(head, tl.int64) * v_head
    o_token = HV * V
    o += batch * o_batch + token * o_token + tl.cast(head, tl.int64) * V
    if L2NORM:
        norms += first_row(n, bos, head // GROUP, rows, HV // GROUP, C, VARLEN)
    state = tl.cast(unit, tl.int64) * K * V
    S = load_state(h0 + state if HAS_H0 else h0, I_S, 0, first, K, V, BK, BV, V_FIRST)
    # Not carried from chunk to chunk unless there is a second half: the names that are, are assigned below.
    S2 = S
    if SECOND:
        S2 = load_state(h0 + state if HAS_H0 else h0, I_S, BK, first, K, V, BK, BV, V_FIRST)
    # Where chunks may be strong, every chunk is STEPS steps: its parts if it is, else all of it in the first.
    STEPS: tl.constexpr = C // PART if MAY_BE_STRONG else 1
    steps = (length + C - 1) // C * STEPS
    for step in range(0, steps):  # noqa: PIE808 - jitted
        t = step // STEPS * C
        at = row + t
        # Cast on the way out of the cube, which only a product made here can be.
        S_op = dot(I_S, S).to(OP) if FAST else S
        S2_op = S_op
        if SECOND:
            S2_op = dot(I_S, S2).to(OP) if FAST else S2
        if DECAY == "scalar":
            S, new2 = scalar_chunk(
                S, S_op, S2, S2_op, q, k, v, c + at, beta + at, norms + t if L2NORM else norms, o, E, I_K, I_V, I_D, t,
                length - t, first, q_token, k_token, v_token, o_token, rest, norm_rest, scale, K, V, BK, BV, C, L2NORM,
                SECOND, OP,
            )  # fmt: skip
        elif MAY_BE_STRONG:
            new2 = S2
            r = step % STEPS * PART
            # An if and no loops of zero or one round: what a loop made on the cube cannot be read after it.
            if (tl.load(is_strong + at // C) > 0) & (t + r < length):
                S, new2 = channel_chunk(
                    S, S_op, S2, S2_op, q, k, v, c + (at + r) * KP, beta + at + r, norms + t + r if L2NORM else norms,
                    o, E_strong, E_strong, I_V, marks_strong, t + r, length - t - r, first, q_token, k_token, v_token,
                    o_token, norm_rest, scale, K, V, KP, BK, BV, PART, 1, L2NORM, SECOND, OP,
                )  # fmt: skip
            elif r == 0:
                S, new2 = channel_chunk(
                    S, S_op, S2, S2_op, q, k, v, c + at * KP, beta + at, norms + t if L2NORM else norms, o, E, E_piece,
                    I_V, marks, t, length - t, first, q_token, k_token, v_token, o_token, norm_rest, scale, K, V, KP,
                    BK, BV, C, PIECE, L2NORM, SECOND, OP,
                )  # fmt: skip
        else:
            S, new2 = channel_chunk(
                S, S_op, S2, S2_op, q, k, v, c + at * KP, beta + at, norms + t if L2NORM else norms, o, E, E_piece, I_V,
                marks, t, length - t, first, q_token, k_token, v_token, o_token, norm_rest, scale, K, V, KP, BK, BV, C,
                PIECE, L2NORM, SECOND, OP,
            )  # fmt: skip
        if SECOND:
            S2 = new2
        if HAS_HT:  # noqa: SIM102 - constant and not
            # Likewise: after the loop the compiler would copy S by an instruction that cannot read where S is.
            if step + 1 == steps:
                store_state(S, ht + state, I_S, 0, first, K, V, BK, BV, V_FIRST)
                if SECOND:
                    store_state(S2, ht + state, I_S, BK, first, K, V, BK, BV, V_FIRST)


@triton.jit(
    do_not_specialize=[
        "T", "units", "whole", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "o_batch", "rows", "rest", "norm_rest", "scale",
    ]
)  # fmt: skip
def delta_rule_kernel(
    q,
    k,
    v,
    c,
    beta,
    is_strong,
    norms,
    h0,
    o,
    ht,
    eye_in,
    eye,
    marks,
    marks_strong,
    cu_seqlens,
    bounds,
    ids,
    units,
    whole,
    T,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    o_batch,
    rows,
    rest,
    norm_rest,
    scale,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TABLE: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    PART: tl.constexpr,
    EYE: tl.constexpr,
    DECAY: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST: tl.constexpr,
    MAY_BE_STRONG: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_HT: tl.constexpr,
    V_FIRST: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Chunks of the delta rule over sequences and heads.

    Args:
        q, k: `[B, T, H, K]`, v: `[B, T, HV, V]`, last axis contiguous, others by `*_batch`, `*_token`, `*_head`.
        c: scalar decay: two arrays like beta, `rest` elements apart; channel decay `[.., rows, KP]`. See `gate_kernel`.
        beta: `[B, HV, rows]`.
        is_strong: `[B, HV, rows / C]` int32: 1 where a chunk decays too much for pieces. Only with `MAY_BE_STRONG`.
        norms: `[2, B, H, rows]` reciprocal L2 norms of k and, `norm_rest` elements on, of q. Only with `L2NORM`.
        h0, ht: `[N, HV, K, V]` (or V first), contiguous float32. h0 is one state of zeros unless `HAS_H0`.
        o: `[B, T, HV, V]` contiguous.
        eye_in, eye: identities `[EYE, EYE]` in the dtype of q and in float32. marks, marks_strong: `launch.flags`.
        PIECE, PART: rows of a piece (`configs.piece_size`), of a part of a strong chunk.
        units, whole, PARTS, BLOCKS, BV (width), TILE: `schedule.Split`; TABLE: its order is given by `bounds`, `ids`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if TABLE:
        start = tl.load(bounds + 2 * program)
        stop = tl.load(bounds + 2 * program + 1)
        step = 1
    else:
        start = program
        stop = whole
        step = programs
    # Constants of the cube, which stay with it. Scores of pieces take the range of float32.
    WIDE: tl.constexpr = not FAST or q.dtype.element_ty == tl.float16
    E = load_eye(eye_in if FAST else eye, EYE, C)
    E_piece = load_eye(eye, EYE, C) if WIDE else E
    E_strong = load_eye(eye_in if FAST else eye, EYE, PART) if MAY_BE_STRONG else E
    I_S = load_eye(eye, EYE, BK)
    I_V = load_eye(eye_in, EYE, BV)
    I_K = load_eye(eye_in, EYE, BK) if DECAY == "scalar" else I_V
    I_D = load_eye(eye, EYE, BV) if DECAY == "scalar" else I_S
    for j in range(start, stop, step):
        unit = tl.load(ids + j) if TABLE else j
        walk(
            q, k, v, c, beta, is_strong, norms, h0, o, ht, E, E_piece, E_strong, I_K, I_V, I_D, I_S, marks,
            marks_strong, cu_seqlens, unit // BLOCKS, unit % BLOCKS * BV, T,
            q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, rows, rest,
            norm_rest, scale,
            HV, GROUP, K, V, KP, BK, BV, C, PIECE, PART, DECAY, L2NORM, FAST, MAY_BE_STRONG, HAS_H0, HAS_HT, V_FIRST,
            VARLEN,
        )  # fmt: skip
    if PARTS > 1:
        I_V = load_eye(eye_in, EYE, TILE)
        I_D = load_eye(eye, EYE, TILE) if DECAY == "scalar" else I_S
        if TABLE:
            start = stop
            stop = tl.load(bounds + 2 * program + 2)
        else:
            start = whole * PARTS + program
            stop = units * PARTS
        for j in range(start, stop, step):
            part = tl.load(ids + j) if TABLE else j
            unit = part // PARTS
            walk(
                q, k, v, c, beta, is_strong, norms, h0, o, ht, E, E_piece, E_strong, I_K, I_V, I_D, I_S, marks,
                marks_strong, cu_seqlens, unit // BLOCKS, unit % BLOCKS * BV + part % PARTS * TILE, T,
                q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, rows, rest,
                norm_rest, scale, HV, GROUP, K, V, KP, BK, TILE, C, PIECE, PART, DECAY, L2NORM, FAST, MAY_BE_STRONG,
                HAS_H0, HAS_HT, V_FIRST, VARLEN,
            )  # fmt: skip
