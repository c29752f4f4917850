"""Kernels for the compiler's tests: a fused forward with known figures, a packed one, and one per diagnostic.

Read as a file by the process that compiles; no test module imports it.
"""

import triton
import triton.language as tl


@triton.jit
def fused_gdn(
    q,
    k,
    v,
    g,
    beta,
    o,
    ht,
    n_task,
    T,
    H,
    scale,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Gated delta rule, state in UB, gates `[H, T]` already summed within chunks, inverse by doubling, unrolled."""
    i = tl.arange(0, C)
    ik = tl.arange(0, K)
    iv = tl.arange(0, BV)
    lower = i[:, None] > i[None, :]
    lower_eq = i[:, None] >= i[None, :]
    eye = (i[:, None] == i[None, :]).to(tl.float32)
    for task in range(tl.program_id(0), n_task, tl.num_programs(0)):
        h = task // (V // BV)
        jv = task % (V // BV)
        S = tl.zeros([K, BV], dtype=tl.float32)
        for t in range(0, T, C):
            row = (t + i)[:, None]
            ok = row < T
            bk = tl.load(k + (row * H + h) * K + ik[None, :], mask=ok, other=0.0)
            bq = tl.load(q + (row * H + h) * K + ik[None, :], mask=ok, other=0.0)
            bv = tl.load(v + (row * H + h) * V + jv * BV + iv[None, :], mask=ok, other=0.0)
            bg = tl.load(g + h * T + t + i, mask=t + i < T, other=0.0)
            bb = tl.load(beta + h * T + t + i, mask=t + i < T, other=0.0)
            last = tl.load(g + h * T + tl.minimum(t + C, T) - 1)
            kk = tl.dot(bk, tl.trans(bk), input_precision="ieee")
            D = tl.exp(tl.where(lower_eq, bg[:, None] - bg[None, :], 0.0))
            N = tl.where(lower, -kk * D * bb[:, None], 0.0)
            Tm = eye + N
            Nb = N.to(bk.dtype)
            for _ in tl.static_range(STEPS):
                Nb = tl.dot(Nb, Nb, input_precision="ieee").to(bk.dtype)
                Tm = tl.dot(Tm.to(bk.dtype), Nb, Tm, input_precision="ieee")
            Sb = S.to(bk.dtype)
            e = tl.exp(bg)[:, None]
            kS = tl.dot(bk, Sb, input_precision="ieee")
            u = tl.dot(Tm.to(bk.dtype), (bb[:, None] * (bv - e * kS)).to(bk.dtype), input_precision="ieee")
            qS = tl.dot(bq, Sb, input_precision="ieee")
            qk = tl.dot(bq, tl.trans(bk), input_precision="ieee")
            P = tl.where(lower_eq, qk * D, 0.0)
            out = (e * qS + tl.dot(P.to(bk.dtype), u.to(bk.dtype), input_precision="ieee")) * scale
            tl.store(o + (row * H + h) * V + jv * BV + iv[None, :], out.to(o.dtype.element_ty), mask=ok)
            ud = (tl.exp(last - bg)[:, None] * u).to(bk.dtype)
            S = S * tl.exp(last) + tl.dot(tl.trans(bk), ud, input_precision="ieee")
        tl.store(ht + h * K * V + ik[:, None] * V + jv * BV + iv[None, :], S)


@triton.jit
def packed(x, o, cu, N, H, C: tl.constexpr, K: tl.constexpr):
    """Walks sequences of different lengths: bounds come from memory, tails are short, empty sequences are skipped."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for task in range(tl.program_id(0), N * H, tl.num_programs(0)):
        n = task // H
        h = task % H
        start = tl.load(cu + n)
        end = tl.load(cu + n + 1)
        for t in range(start, end, C):
            row = (t + i)[:, None]
            a = tl.load(x + (row * H + h) * K + d[None, :], mask=row < end, other=0.0)
            s = tl.dot(a, tl.trans(a), input_precision="ieee") * 2.0
            tl.store(o + (row * H + h) * C + i[None, :], s, mask=row < end)


@triton.jit
def packed_while(x, o, cu, N, C: tl.constexpr):
    """As `packed`, on the vector cores, with a `while` loop."""
    i = tl.arange(0, C)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        t = tl.load(cu + n)
        end = tl.load(cu + n + 1)
        while t < end:
            a = tl.load(x + t + i, mask=t + i < end, other=0.0)
            tl.store(o + t + i, tl.exp(a), mask=t + i < end)
            t += C


@triton.jit
def data_dependent(x, o, gate, n, C: tl.constexpr):
    """Branches on a number that only the device has."""
    i = tl.arange(0, C)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        if tl.load(gate + t) > 0.5:
            tl.store(o + t * C + i, tl.exp(tl.load(x + t * C + i)))


@triton.jit
def gram(q, k, o, n, C: tl.constexpr, K: tl.constexpr):
    """The smallest kernel with both kinds of core. Pipelined four deep, the default, it loses the split."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        a = tl.load(q + t * C * K + i[:, None] * K + d[None, :])
        b = tl.load(k + t * C * K + i[:, None] * K + d[None, :])
        s = tl.dot(a, tl.trans(b), input_precision="ieee") * 2.0
        tl.store(o + t * C * C + i[:, None] * C + i[None, :], s)


@triton.jit
def transposed_load(q, k, o, n, C: tl.constexpr, K: tl.constexpr):
    """Loses the split: the operand is transposed by its addresses instead of by the product."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        a = tl.load(q + t * C * K + i[:, None] * K + d[None, :])
        b = tl.load(k + t * C * K + i[None, :] * K + d[:, None])
        tl.store(o + t * C * C + i[:, None] * C + i[None, :], tl.dot(a, b, input_precision="ieee") * 2.0)


@triton.jit
def scalar_sum(x, o, n, C: tl.constexpr):
    """A sum along the innermost axis, which the compiler does one element at a time."""
    i = tl.arange(0, C)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(o + t * C + i, tl.cumsum(tl.load(x + t * C + i), 0))


@triton.jit
def wide(x, y, o, n, C: tl.constexpr):
    """Vector work on `C` elements at a time: C decides whether it fits twice, once or not at all."""
    i = tl.arange(0, C)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        a = tl.load(x + t * C + i)
        tl.store(o + t * C + i, tl.exp(a) * tl.load(y + t * C + i) + a)


@triton.jit
def crashing(q, k, o, n, C: tl.constexpr, K: tl.constexpr):
    """Puts a constant into the result of a product; the compiler dies of it."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        a = tl.load(q + t * C * K + i[:, None] * K + d[None, :])
        b = tl.load(k + t * C * K + i[:, None] * K + d[None, :])
        s = tl.dot(a, tl.trans(b), input_precision="ieee")
        s = tl.insert_slice(s, tl.zeros([16, 16], tl.float32), [0, 0], [16, 16], [1, 1])
        tl.store(o + t * C * C + i[:, None] * C + i[None, :], s)
