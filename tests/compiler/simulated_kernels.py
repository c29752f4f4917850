"""Small kernels for the simulator, each with something that the compiler handles in its own way."""

import triton
import triton.language as tl


@triton.jit
def scores(q, k, o, n, C: tl.constexpr, K: tl.constexpr):
    """`2 q k^T`, tile by tile: a product, its hand-over to the vector cores, and back to memory."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        a = tl.load(q + t * C * K + i[:, None] * K + d[None, :])
        b = tl.load(k + t * C * K + i[:, None] * K + d[None, :])
        s = tl.dot(a, tl.trans(b), input_precision="ieee") * 2.0
        tl.store(o + t * C * C + i[:, None] * C + i[None, :], s)


@triton.jit
def tail(x, y, o, n, C: tl.constexpr, K: tl.constexpr):
    """`silu(x) y^T` of `[n, K]` arrays, cut in row blocks of C, the last one short; 16-bit results too."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for t in range(tl.program_id(0) * C, n, tl.num_programs(0) * C):
        rows = t + i < n
        a = tl.load(x + (t + i[:, None]) * K + d[None, :], mask=rows[:, None], other=0.0)
        a = a / (1.0 + tl.exp(-a))
        b = tl.load(y + i[:, None] * K + d[None, :])
        s = tl.dot(a, tl.trans(b), input_precision="ieee")
        tl.store(o + (t + i[:, None]) * C + i[None, :], s.to(o.dtype.element_ty), mask=rows[:, None])


@triton.jit
def vectors(x, o, sums, tops, n, C: tl.constexpr, K: tl.constexpr):
    """Column sums, row maxima, running sums down the columns and a comparison, on the vector cores alone."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    for t in range(tl.program_id(0), n, tl.num_programs(0)):
        a = tl.load(x + t * C * K + i[:, None] * K + d[None, :]).to(tl.float32)
        tl.store(sums + t * K + d, tl.sum(a, 0))
        tl.store(tops + t * C + i, tl.max(a, 1))
        running = tl.cumsum(a, 0)
        kept = tl.where(i[:, None] >= d[None, :], running, -1.0)
        tl.store(o + t * C * K + i[:, None] * K + d[None, :], kept)


@triton.jit
def state(k, v, o, n, C: tl.constexpr, K: tl.constexpr):
    """A state that each step reads and adds to: `o = k S`, `S = S / 2 + k^T v`."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    s = tl.zeros([K, K], tl.float32)
    for t in range(n):
        a = tl.load(k + t * C * K + i[:, None] * K + d[None, :])
        b = tl.load(v + t * C * K + i[:, None] * K + d[None, :])
        r = tl.dot(a, s.to(a.dtype), input_precision="ieee")
        s = s * 0.5 + tl.dot(tl.trans(a), b, input_precision="ieee")
        tl.store(o + t * C * K + i[:, None] * K + d[None, :], r)


@triton.jit
def turned(x, o, C: tl.constexpr, K: tl.constexpr):
    """A transposition on the vector core."""
    i, d = tl.arange(0, C), tl.arange(0, K)
    a = tl.load(x + i[:, None] * K + d[None, :])
    tl.store(o + d[:, None] * C + i[None, :], tl.trans(a))


@triton.jit
def prefix(x, o, n, C: tl.constexpr):
    """Running sums of a vector, which the compiler makes a scalar loop of."""
    i = tl.arange(0, C)
    mask = i < n
    a = tl.load(x + i, mask=mask, other=0.0)
    tl.store(o + i, tl.cumsum(a, 0) + tl.sum(a, 0), mask=mask)
