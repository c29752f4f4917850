# mypy: allow-untyped-defs, allow-incomplete-defs
"""The stages of one chunk of the delta rule as jitted tile functions, for the kernels of every op.

Where a tile lives is decided here; `layouts.TILES` is the same as a table, and `docs/kernels.md` shows it. On A2 and A3
the cube (matrix) core and the vector cores of an AI core exchange tiles only through global memory, and every exchange
costs a synchronisation. What follows from that, measured on what the vendor's compiler makes of it:

* A vector tile is stored once per `dot` that reads it, a result of the cube once in all, however often it is read.
  So a vector tile that several dots need goes through the cube first: `through_cube` multiplies it by an identity.
* A result that goes on as an operand never visits a vector core, a cast to 16 bits included. Scaling by rows would:
  diagonal matrices do it on the cube instead, made by the vector cores ahead of time, off the chain of the state.
* The state is such a result from chunk to chunk, and the chain from state to state runs on the cube alone:
  `R = V - decayed K S`, `u = T R`, `S' = diag(decay) S + K^T diag(beta, decayed to the end) u`.
* Vectors of flags that scale rows are loaded from a constant table: made of `arange`, they cost the split of the tile
  over the two vector cores.

Symbols as in `docs/kernels.md`: C tokens, c cumulative log decays, L the decayed scores of k below the diagonal,
`A = L diag(beta)`, `T = (I + A)^-1`, P the decayed scores of q. u is that of `docs/dataflow.md` over beta.
"""

import triton
import triton.language as tl

from fla_npu.ops.common.ascend import INTERPRETED

BLOCK = tl.constexpr(8)
"""Width of the diagonal blocks that the solve inverts by doubling. The powers in it grow at most like C(7, 3) = 35,
which costs five bits where 64-wide doubling overflows (equal keys, `beta` near 1)."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b):
    """Product on the cube with operands as they are: float32 is not rounded to fewer bits."""
    if _INTERPRETED:
        # The interpreter multiplies the bit patterns of bfloat16.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """`acc + a b`, accumulated where acc already is."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def through_cube(x, eye):
    """x as a result of the cube: readable by any number of dots for one store. Exact: each sum has one term."""
    return dot(eye, x).to(x.dtype)


@triton.jit
def unit_lower_inverse(inner, outer, eye, C: tl.constexpr):
    """`(I - inner - outer)^-1` of `[C, C]`: inner strictly lower within blocks of `BLOCK`, outer below these blocks.

    `(I - X)^-1 = (I + X)(I + X^2)(I + X^4)..` twice over: for the diagonal blocks, whose eighth power is zero, then,
    with W their inverse and `N = W outer`, as `(I - N)^-1 W`, where N is nilpotent in blocks. Every product stays on
    the cube. `dot_add(.., dot(x, eye))` puts x back into the accumulator that a sum needs.
    """
    x = through_cube(inner, eye)
    # In this order: a product of constants alone would be moved out of the loop and could not be accumulated upon.
    W = dot_add(eye, eye, dot(eye, x)).to(eye.dtype)
    for _ in tl.static_range(2):
        x = dot(x, x).to(eye.dtype)
        W = dot_add(W, x, dot(W, eye)).to(eye.dtype)
    N1 = dot(W, outer).to(eye.dtype)
    if C > 2 * BLOCK:
        N2 = dot(N1, N1).to(eye.dtype)
        if C > 4 * BLOCK:
            N4 = dot(N2, N2).to(eye.dtype)
            W = dot_add(N4, W, dot(eye, W)).to(eye.dtype)
        W = dot_add(N2, W, dot(eye, W)).to(eye.dtype)
    return dot_add(N1, W, dot(eye, W)).to(eye.dtype)


@triton.jit
def solve(A, eye, C: tl.constexpr):
    """`(I + A)^-1` of a strictly lower A (a vector tile; what else it holds is masked here)."""
    i = tl.arange(0, C).to(tl.float32)
    block = tl.floor(i / BLOCK)
    inner = (block[:, None] == block[None, :]) & (i[:, None] > i[None, :])
    outer = block[:, None] > block[None, :]
    inner = tl.where(inner, -A, 0.0).to(eye.dtype)
    outer = tl.where(outer, -A, 0.0).to(eye.dtype)
    return unit_lower_inverse(inner, outer, eye, C)


@triton.jit
def diagonal(x, N: tl.constexpr):
    """diag(x) of x `[N]`. The cube scales rows by it: `dot(diagonal(x), y)`."""
    i = tl.arange(0, N).to(tl.float32)
    return tl.where(i[:, None] == i[None, :], x[:, None], 0.0)


@triton.jit
def load_rows(base, token, left, stride, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, first):
    """Rows `token ..` of a head, columns `first .. first + BD`: `[C, BD]`, zero from row `left` and column D on."""
    i = tl.arange(0, C)
    d = first + tl.arange(0, BD)
    at = base + tl.cast(token, tl.int64) * stride + i[:, None] * stride + d[None, :]
    return tl.load(at, mask=(i < left)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(x, base, token, left, stride, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, first):
    """The inverse of `load_rows`."""
    i = tl.arange(0, C)
    d = first + tl.arange(0, BD)
    at = base + tl.cast(token, tl.int64) * stride + i[:, None] * stride + d[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(i < left)[:, None] & (d < D)[None, :])


@triton.jit
def load_eye(eye, EYE: tl.constexpr, N: tl.constexpr):
    """The identity `[N, N]`, from a table of `[EYE, EYE]`: the cube loads it by itself."""
    i = tl.arange(0, N)
    return tl.load(eye + i[:, None] * EYE + i[None, :])


@triton.jit
def load_state(
    h,
    eye,
    channel,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """Rows `channel ..`, columns `first ..` of a state as a result of the cube, `[BK, BV]`."""
    d = channel + tl.arange(0, BK)
    e = first + tl.arange(0, BV)
    if V_FIRST:
        x = tl.load(h + e[:, None] * K + d[None, :], mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
        return dot(eye, tl.trans(x))
    else:
        x = tl.load(h + d[:, None] * V + e[None, :], mask=(d < K)[:, None] & (e < V)[None, :], other=0.0)
        return dot(eye, x)


@triton.jit
def store_state(
    S,
    h,
    eye,
    channel,
    first,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """The inverse. By a product: the cube writes to global memory, but only what it computed here."""
    d = channel + tl.arange(0, BK)
    e = first + tl.arange(0, BV)
    if V_FIRST:
        tl.store(h + e[:, None] * K + d[None, :], dot(tl.trans(S), eye), mask=(e < V)[:, None] & (d < K)[None, :])
    else:
        tl.store(h + d[:, None] * V + e[None, :], dot(eye, S), mask=(d < K)[:, None] & (e < V)[None, :])


@triton.jit
def reference_rows(c, marks, s: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Per row of a chunk, c at the middle of its block of s rows, `[C, BK]` or `[1, BK]`. marks: block membership.

    Sums over the few blocks, each 0 or 1 times a row, are exact; a gather would run row by row.
    """
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    r = tl.load(c + (s // 2 - 1 if s > 1 else 0) * KP + d, mask=d < K, other=0.0)[None, :]
    if s < C:
        r = r * tl.load(marks + i)[:, None]
        for b in tl.static_range(1, C // s):
            row = tl.load(c + (s * b + s // 2 - 1) * KP + d, mask=d < K, other=0.0)
            r += row[None, :] * tl.load(marks + b * C + i)[:, None]
    return r
