# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gates of a chunked call, brought once to the form in which a chunk kernel reads them.

Gates arrive as logits or log decays of any floating dtype in `[B, T, HV]` or `[B, T, HV, K]`. A kernel that owns a head
and walks over its chunks wants the time axis contiguous (a strided read of a chunk costs the vendor's compiler five
times the buffer space), float32, and sums instead of summands. This launch applies the formulas of `gate.py` and sums
the log decays within each chunk, along axis 0 of a tile, where the vector unit can.

**Slots.** Row `t` of the results is not token `t`: every chunk has a slot of C rows, so that all reads and writes are
whole and aligned, and no tail of one chunk touches another's. In a batch the slots of a sequence follow one another in
its own `[HV, rows]`. In a pack, sequence n that starts at token `bos` has slots from `bos // C + n` on. That needs no
prefix sum and never overlaps: with l tokens, `(bos + l) // C + 1 >= bos // C + cdiv(l, C)`. `first_row` computes both.
Rows behind the last token repeat its sum, and have beta 0: they are tokens that change nothing. So the decay of a whole
chunk is always its row `C - 1`. Slots that no sequence has are not written.

**What float32 sums cost.** A decay is `exp(c_i - c_j)`. Were c one float32 number, each of the `i - j` additions in
between would round to half a unit in the last place of `c_i`: the exponent would be off by up to
`(i - j) 2^-24 |c_i|` (rounded up to a power of two), and as much is the relative error of the decay: 1e-6 for
`|c_i| <= 10`, 3e-5 per step after tokens of `g = -20` (`|c| = 640`). Scalar sums are therefore kept as two numbers, as
on the CPU (`stages.cumulative`): the sum of multiples of `2^-8`, which is exact below `2^16`, and that of the rests,
below `C 2^-9`. Channel sums, C x K of them, are one number: what they lose is as above. Log decays
below `FORGET` are raised to it: `exp(FORGET)` is zero in float32 already, so no result changes, but `-inf` could not
be subtracted, and `|c|` stays below 104 C.

**Strong chunks.** The scores of channel decays need references from which half a piece decays by less than
`configs.MILD`. Where the log decays of any `STRONG / 2` rows of a chunk sum to more, the chunk is marked as strong, and
its sums start anew every `STRONG` rows, which is as far as they are needed: they stay small, that is, accurate.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common.ascend import launch_options, vector_core_count
from fla_npu.ops.common.configs import MILD, STRONG, pad, tile_size
from fla_npu.ops.problem import Options

FORGET = -104.0
"""Smallest log decay of a token: `exp(-104)` rounds to zero in float32, denormal numbers included."""

_FORGET = tl.constexpr(FORGET)

# Tiles of consecutive tasks are independent: copies of the next overlap the arithmetic of this one.
OPTIONS = {"multibuffer": True}

_MILD = tl.constexpr(MILD)
_EPSILON = tl.constexpr(1e-6)

# Heads (scalar decay, beta) or key channels per tile: 8 KiB in float32 with 64 tokens, and about ten tiles are alive.
BLOCK_HEADS = 32
BLOCK_KEYS = 32


@triton.jit
def log_decay(x, a, lower_bound, GATE: tl.constexpr):
    """`gate.gate_forward`: log decays of logits with the bias added. a is `exp(A_log)`."""
    if GATE == "softplus":
        # max(x, 0) + log1p(y); log1p by a logarithm of u = 1 + y and what u lacks, y - (u - 1), which is exact.
        y = tl.exp(-tl.abs(x))
        u = y + 1.0
        return -a * (tl.maximum(x, 0.0) + (tl.log(u) + (y - (u - 1.0)) / u))
    elif GATE == "bounded":
        return lower_bound / (1.0 + tl.exp(-(a * x)))
    else:
        return x


@triton.jit
def step_size(x, beta_scale, SIGMOID: tl.constexpr):
    """beta of what the caller passed."""
    if SIGMOID:
        return beta_scale / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def bounded(g, inside):
    """Log decays, not below `FORGET`, and zero where there is no token."""
    # Not tl.maximum, which takes the number of a number and NaN.
    return tl.where(inside, tl.where(g < _FORGET, _FORGET, g), 0.0)


@triton.jit
def channel_decay(
    g,
    dt_bias,
    a,
    lower_bound,
    first,
    left,
    g_token,
    r,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Log decays of C rows of a chunk from row r on, and BK channels from `first` on: `[C, BK]`."""
    t = r + tl.arange(0, C)
    k = first + tl.arange(0, BK)
    mask = (t < left)[:, None] & (k < K)[None, :]
    x = tl.load(g + t[:, None] * g_token + k[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = x + tl.load(dt_bias + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return bounded(log_decay(x, a, lower_bound, GATE), mask)


@triton.jit
def sequence(cu_seqlens, n, T, VARLEN: tl.constexpr):
    """First token of sequence n among all tokens (int64) and its number of tokens (int32)."""
    if VARLEN:
        bos = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = tl.cast(n, tl.int64) * T
        length = T
    return bos, length


@triton.jit
def first_row(n, bos, head, rows, HV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr):
    """Row of the first token of sequence n and a value head in the results flattened to `[B*HV*rows]`; int64."""
    if VARLEN:
        return tl.cast(head, tl.int64) * rows + (bos // C + n) * C
    else:
        return (tl.cast(n, tl.int64) * HV + head) * rows


@triton.jit(do_not_specialize=["N", "T", "g_batch", "g_token", "beta_batch", "beta_token", "rows", "rest"])
def gates_kernel(
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    c_out,
    beta_out,
    strong_out,
    N,
    T,
    g_batch,
    g_token,
    beta_batch,
    beta_token,
    rows,
    rest,
    lower_bound,
    beta_scale,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_A: tl.constexpr,
    SIGMOID: tl.constexpr,
    VARLEN: tl.constexpr,
    WINDOW: tl.constexpr,
    STRONG_ROWS: tl.constexpr,
    MAY_BE_STRONG: tl.constexpr,
):
    """A task is a chunk of a block of heads (scalar decay) or of one head (channel decay).

    rows: of the results per head and batch entry. rest: elements between the two parts of scalar sums. KP: K rounded
    up, the row length of channel sums.
    """
    HEAD_BLOCKS: tl.constexpr = (HV + BH - 1) // BH
    TASKS: tl.constexpr = HV if DECAY == "channel" else HEAD_BLOCKS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    t = tl.arange(0, C)
    h = tl.arange(0, BH)
    before = 0
    for n in range(N):
        bos, length = sequence(cu_seqlens, n, T, VARLEN)
        if DECAY != "none":
            g_sequence = g + (bos * g_token if VARLEN else tl.cast(n, tl.int64) * g_batch)
        beta_sequence = beta + (bos * beta_token if VARLEN else tl.cast(n, tl.int64) * beta_batch)
        tasks = (length + C - 1) // C * TASKS
        # Programs take tasks in turn, over the borders of sequences.
        for task in range((program + programs - before % programs) % programs, tasks, programs):
            chunk = task // TASKS
            part = task % TASKS
            token = tl.cast(chunk, tl.int64) * C
            left = length - chunk * C
            # A comparison of integers would run element by element on older compilers.
            inside = (t.to(tl.float32) < left.to(tl.float32))[:, None]

            if part % BH == 0 if DECAY == "channel" else True:
                head = part if DECAY == "channel" else part * BH
                row = first_row(n, bos, head, rows, HV, C, VARLEN) + token
                mask = (t < left)[:, None] & (h < HV - head)[None, :]
                at = beta_sequence + token * beta_token + head + t[:, None] * beta_token + h[None, :]
                x = step_size(tl.load(at, mask=mask, other=0.0).to(tl.float32), beta_scale, SIGMOID)
                at = beta_out + row + h[:, None] * rows + t[None, :]
                tl.store(at, tl.trans(tl.where(inside, x, 0.0)), mask=(h < HV - head)[:, None])

            if DECAY == "scalar":
                head = part * BH
                row = first_row(n, bos, head, rows, HV, C, VARLEN) + token
                some = h < HV - head
                at = g_sequence + token * g_token + head + t[:, None] * g_token + h[None, :]
                x = tl.load(at, mask=(t < left)[:, None] & some[None, :], other=0.0).to(tl.float32)
                if HAS_BIAS:
                    x = x + tl.load(dt_bias + head + h, mask=some, other=0.0).to(tl.float32)[None, :]
                a = 1.0
                if HAS_A:
                    a = tl.exp(tl.load(A_log + head + h, mask=some, other=0.0).to(tl.float32))[None, :]
                x = bounded(log_decay(x, a, lower_bound, GATE), inside)
                coarse = tl.floor(x * 256.0 + 0.5) * (1.0 / 256.0)
                at = c_out + row + h[:, None] * rows + t[None, :]
                tl.store(at, tl.trans(tl.cumsum(coarse, 0)), mask=some[:, None])
                tl.store(at + rest, tl.trans(tl.cumsum(x - coarse, 0)), mask=some[:, None])

            if DECAY == "channel":
                row = first_row(n, bos, part, rows, HV, C, VARLEN) + token
                a = 1.0
                if HAS_A:
                    a = tl.exp(tl.load(A_log + part).to(tl.float32))
                strong = 0
                if MAY_BE_STRONG:
                    strongest = tl.zeros([BK], tl.float32)
                    for first in range(0, KP, BK):
                        x = channel_decay(
                            g_sequence + token * g_token + part * K, dt_bias + part * K if HAS_BIAS else dt_bias, a,
                            lower_bound, first, left, g_token, 0, K, BK, C, GATE, HAS_BIAS,
                        )  # fmt: skip
                        for w in tl.static_range(C // WINDOW):
                            some = ((t >= w * WINDOW) & (t < (w + 1) * WINDOW))[:, None]
                            strongest = tl.minimum(strongest, tl.sum(tl.where(some, x, 0.0), 0))
                    strong = (tl.min(strongest, 0) < -_MILD).to(tl.int32)
                    tl.store(strong_out + row // C, strong)
                for first in range(0, KP, BK):
                    k = first + tl.arange(0, BK)
                    for _ in range(1 - strong):
                        x = channel_decay(
                            g_sequence + token * g_token + part * K, dt_bias + part * K if HAS_BIAS else dt_bias, a,
                            lower_bound, first, left, g_token, 0, K, BK, C, GATE, HAS_BIAS,
                        )  # fmt: skip
                        at = c_out + row * KP + t[:, None] * KP + k[None, :]
                        tl.store(at, tl.cumsum(x, 0), mask=(k < KP)[None, :])
                    s = tl.arange(0, STRONG_ROWS)
                    for j in range(strong * (C // STRONG_ROWS)):
                        r = j * STRONG_ROWS
                        x = channel_decay(
                            g_sequence + token * g_token + part * K, dt_bias + part * K if HAS_BIAS else dt_bias, a,
                            lower_bound, first, left, g_token, r, K, BK, STRONG_ROWS, GATE, HAS_BIAS,
                        )  # fmt: skip
                        at = c_out + (row + r) * KP + s[:, None] * KP + k[None, :]
                        tl.store(at, tl.cumsum(x, 0), mask=(k < KP)[None, :])
        before += tasks


class Gates(NamedTuple):
    """What a chunk kernel reads, float32 and contiguous; see the module for what a row is."""

    c: torch.Tensor | None
    """Sums of log decays within chunks: `[2, B, HV, rows]`, the two parts of a sum, or `[B, HV, rows, KP]` per key
    channel, whose channels from K on are unspecified but finite; None without decay."""
    beta: torch.Tensor
    """`[B, HV, rows]`."""
    strong: torch.Tensor | None
    """`[B, HV, rows / C]` int32: 1 where a chunk is strong; None where the decay cannot be."""


def launch_gates(
    g: torch.Tensor | None,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    options: Options,
    cu_seqlens: torch.Tensor | None,
    chunk: int,
    cores: int | None = None,
) -> Gates:
    """Run `gates_kernel` on checked arguments.

    Args:
        g: `[B, T, HV]` or `[B, T, HV, K]`, or None without decay. Copied unless its last axes are contiguous.
        beta: `[B, T, HV]`, likewise.
        A_log, dt_bias: `[HV]`; dt_bias `[HV*K]` per channel.
        options: `decay`, `gate`, `lower_bound`, `beta_sigmoid`, `beta_scale` count.
        cu_seqlens: `[N + 1]` on the device. B is then 1. Its values are not read here.
        chunk: C.
        cores: programs, those of the device by default.
    """
    B, T, HV = beta.shape
    C = chunk
    K = g.shape[3] if g is not None and options.decay == "channel" else 1
    KP = pad(K)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    rows = slots(T, N, cu_seqlens is not None, C) * C
    beta = beta if beta.stride(2) == 1 else beta.contiguous()
    result = Gates(None, torch.empty(B, HV, rows, dtype=torch.float32, device=beta.device), None)
    if g is not None:
        g = g if g.stride(-1) == 1 and g.stride(2) == g.shape[3:].numel() else g.contiguous()
        shape = (B, HV, rows, KP) if options.decay == "channel" else (2, B, HV, rows)
        result = result._replace(c=torch.empty(shape, dtype=torch.float32, device=g.device))
    if options.decay == "channel" and options.gate != "bounded":
        result = result._replace(strong=torch.empty(B, HV, rows // C, dtype=torch.int32, device=beta.device))
    if T == 0 or B == 0:
        return result
    gates_kernel[(cores or vector_core_count(beta.device),)](
        g,
        beta,
        *(None if x is None else x.contiguous() for x in (A_log, dt_bias, cu_seqlens)),
        *result,
        N,
        T,
        0 if g is None else g.stride(0),
        0 if g is None else g.stride(1),
        beta.stride(0),
        beta.stride(1),
        rows,
        result.beta.numel(),
        options.lower_bound or 0.0,
        options.beta_scale,
        **constants("none" if g is None else options.decay, options.gate, HV, K, C),
        HAS_BIAS=dt_bias is not None,
        HAS_A=A_log is not None,
        SIGMOID=options.beta_sigmoid,
        VARLEN=cu_seqlens is not None,
        **launch_options(**OPTIONS),
    )
    return result


@triton.jit(
    do_not_specialize=["N", "T", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "rows", "rest"]
)
def norms_kernel(
    q,
    k,
    cu_seqlens,
    out,
    N,
    T,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    rows,
    rest,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """`1 / sqrt(|x|^2 + EPSILON)` of every row of k and, `rest` elements on, of q. A task is a chunk of a head."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    t = tl.arange(0, C)
    d = tl.arange(0, BK)
    before = 0
    for n in range(N):
        bos, length = sequence(cu_seqlens, n, T, VARLEN)
        batch = 0 if VARLEN else tl.cast(n, tl.int64)
        start = bos if VARLEN else bos * 0
        tasks = (length + C - 1) // C * H
        for task in range((program + programs - before % programs) % programs, tasks, programs):
            token = tl.cast(task // H, tl.int64) * C
            head = task % H
            mask = (t < length - task // H * C)[:, None] & (d < K)[None, :]
            at = k + batch * k_batch + (start + token) * k_token + tl.cast(head, tl.int64) * k_head
            x = tl.load(at + t[:, None] * k_token + d[None, :], mask=mask, other=0.0).to(tl.float32)
            row = out + first_row(n, bos, head, rows, H, C, VARLEN) + token
            tl.store(row + t, tl.rsqrt(tl.sum(x * x, 1) + _EPSILON))
            at = q + batch * q_batch + (start + token) * q_token + tl.cast(head, tl.int64) * q_head
            x = tl.load(at + t[:, None] * q_token + d[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(row + rest + t, tl.rsqrt(tl.sum(x * x, 1) + _EPSILON))
        before += tasks


def launch_norms(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None, chunk: int, cores: int | None = None
) -> torch.Tensor:
    """Run `norms_kernel` on `[B, T, H, K]` tensors whose last axis is contiguous.

    Returns:
        `[2, B, H, rows]` float32, k first, with the rows of `launch_gates`.
    """
    B, T, H, K = k.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    rows = slots(T, N, cu_seqlens is not None, chunk) * chunk
    out = torch.empty(2, B, H, rows, dtype=torch.float32, device=k.device)
    if T > 0 and B > 0:
        norms_kernel[(cores or vector_core_count(k.device),)](
            q, k, cu_seqlens, out, N, T, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            rows, B * H * rows, H=H, K=K, BK=tile_size(K), C=chunk, VARLEN=cu_seqlens is not None,
            **launch_options(**OPTIONS),
        )  # fmt: skip
    return out


def slots(T: int, N: int, packed: bool, chunk: int) -> int:
    """Chunks that a head has room for, see the module."""
    return T // chunk + N if packed else -(-T // chunk)


def constants(decay: str, gate: str, HV: int, K: int, C: int) -> dict[str, int | str]:
    """The compile-time arguments that shapes decide."""
    return {
        "HV": HV,
        "K": K,
        "KP": pad(K),
        "C": C,
        "BH": min(BLOCK_HEADS, max(8, triton.next_power_of_2(HV))),
        "BK": min(BLOCK_KEYS, max(8, triton.next_power_of_2(K))),
        "DECAY": decay,
        "GATE": gate,
        "WINDOW": STRONG // 2,
        "STRONG_ROWS": STRONG,
        "MAY_BE_STRONG": decay == "channel" and gate != "bounded",
    }


def builds() -> list[KernelBuild]:
    """What the compile test covers."""
    pointers = {"g": "*{}", "beta": "*{}", "A_log": "*fp32", "dt_bias": "*fp32", "cu_seqlens": "*i64"}
    results = {"c_out": "*fp32", "beta_out": "*fp32", "strong_out": "*i32"}
    numbers = dict.fromkeys(("N", "T", "g_batch", "g_token", "beta_batch", "beta_token", "rows", "rest"), "i32")
    floats = {"lower_bound": "fp32", "beta_scale": "fp32"}
    found = []
    for decay, gate, dtype, HV, K, C, packed in (
        ("scalar", "softplus", "bf16", 32, 1, 64, True),
        ("scalar", "softplus", "fp16", 16, 1, 64, False),
        ("scalar", "none", "fp32", 96, 1, 32, False),
        ("scalar", "bounded", "bf16", 8, 1, 16, True),
        ("channel", "bounded", "bf16", 32, 128, 64, True),
        ("channel", "softplus", "bf16", 16, 128, 64, False),
        ("channel", "none", "fp32", 4, 100, 32, False),
        ("channel", "none", "fp32", 8, 256, 16, True),
        ("none", "none", "bf16", 16, 1, 64, True),
    ):
        raw = gate != "none"
        signature = {name: kind.format(dtype) for name, kind in pointers.items()} | results | numbers | floats
        fixed: dict[str, int | float | bool | str | None] = {
            **constants(decay, gate, HV, K, C),
            "HAS_BIAS": raw,
            "HAS_A": raw,
            "SIGMOID": raw,
            "VARLEN": packed,
        }
        absent = {"g", "c_out"} if decay == "none" else set()
        absent |= set() if decay == "channel" and gate != "bounded" else {"strong_out"}
        absent |= set() if raw else {"A_log", "dt_bias"}
        absent |= set() if packed else {"cu_seqlens"}
        found.append(
            KernelBuild(
                name=f"gates-{decay}-{gate}-{dtype}-HV{HV}-K{K}-C{C}{'-packed' if packed else ''}",
                kernel=f"{__name__}:gates_kernel",
                signature={name: kind for name, kind in signature.items() if name not in absent},
                constants=fixed | dict.fromkeys(absent),
                options=OPTIONS,
            )
        )
    return found


def norms_builds() -> list[KernelBuild]:
    """What the compile test covers of `norms_kernel`."""
    found = []
    for dtype, H, K, C, packed in (
        ("bf16", 16, 128, 64, True),
        ("fp16", 8, 256, 32, False),
        ("fp32", 4, 96, 64, False),
    ):
        numbers = ("N", "T", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "rows", "rest")
        signature = {"q": f"*{dtype}", "k": f"*{dtype}", "out": "*fp32", **dict.fromkeys(numbers, "i32")}
        fixed: dict[str, int | float | bool | str | None] = {"H": H, "K": K, "BK": tile_size(K), "C": C}
        found.append(
            KernelBuild(
                name=f"norms-{dtype}-H{H}-K{K}-C{C}{'-packed' if packed else ''}",
                kernel=f"{__name__}:norms_kernel",
                signature=signature | ({"cu_seqlens": "*i64"} if packed else {}),
                constants=fixed | {"VARLEN": packed} | ({} if packed else {"cu_seqlens": None}),
                options=OPTIONS,
            )
        )
    return found
