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

**What float32 sums cost.** The sums are kept as one float32 number `c`, and decays are `exp(c_i - c_j)`. Each of the
`i - j` additions between them rounds to half a unit in the last place of `c_i`: the exponent is off by at most
`(i - j) 2^-24 |c_i|` (rounded up to a power of two), and as much is the relative error of the decay. For the decays of
trained models, `|c_i| <= 10`, that is 1e-6 at worst; after tokens of `g = -20` (`|c| = 640`) 3e-5 per step. Log decays
below `FORGET` are raised to it: `exp(FORGET)` is zero in float32 already, so no result changes, but `-inf` could not
be subtracted, and `|c|` stays below 104 C. The CPU code splits its sums into two parts instead (`stages.cumulative`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common.ascend import launch_options, vector_core_count
from fla_npu.ops.problem import Options

FORGET = -104.0
"""Smallest log decay of a token: `exp(-104)` rounds to zero in float32, denormal numbers included."""

_FORGET = tl.constexpr(FORGET)

# Tiles of consecutive tasks are independent: copies of the next overlap the arithmetic of this one.
OPTIONS = {"multibuffer": True}

# Elements of 32 bytes of float32. The device's copies are whole lines: rows that are not, may reach into the next.
LINE = 8

# Heads (scalar decay, beta) or key channels per tile: with 64 tokens 16 KiB in float32, about ten of which are alive.
BLOCK_HEADS = 32
BLOCK_KEYS = 64


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
def chunk_sum(g, inside):
    """Log decays `[C, N]`, bounded and zero outside the sequence, summed from the start of the chunk."""
    # Not tl.maximum, which takes the number of a number and NaN.
    g = tl.where(g < _FORGET, _FORGET, g)
    return tl.cumsum(tl.where(inside, g, 0.0), 0)


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


@triton.jit(do_not_specialize=["N", "T", "g_batch", "g_token", "beta_batch", "beta_token", "rows"])
def gates_kernel(
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    c_out,
    beta_out,
    N,
    T,
    g_batch,
    g_token,
    beta_batch,
    beta_token,
    rows,
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
):
    """A task is a chunk of a block of heads (scalar decay) or of one head (channel decay).

    rows: of the results per head and batch entry. KP: K rounded up, the row length of channel sums.
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
                c = chunk_sum(log_decay(x, a, lower_bound, GATE), inside)
                tl.store(c_out + row + h[:, None] * rows + t[None, :], tl.trans(c), mask=some[:, None])

            if DECAY == "channel":
                row = first_row(n, bos, part, rows, HV, C, VARLEN) + token
                a = 1.0
                if HAS_A:
                    a = tl.exp(tl.load(A_log + part).to(tl.float32))
                for first in range(0, KP, BK):
                    k = first + tl.arange(0, BK)
                    at = g_sequence + token * g_token + part * K + t[:, None] * g_token + k[None, :]
                    x = tl.load(at, mask=(t < left)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
                    if HAS_BIAS:
                        x = x + tl.load(dt_bias + part * K + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
                    c = chunk_sum(log_decay(x, a, lower_bound, GATE), inside)
                    tl.store(c_out + row * KP + t[:, None] * KP + k[None, :], c, mask=(k < KP)[None, :])
        before += tasks


class Gates(NamedTuple):
    """What a chunk kernel reads, float32 and contiguous; see the module for what a row is."""

    c: torch.Tensor | None
    """Sums of log decays within chunks: `[B, HV, rows]`, or `[B, HV, rows, KP]` per key channel, whose channels from K
    on are unspecified but finite; None without decay."""
    beta: torch.Tensor
    """`[B, HV, rows]`."""


def launch_gates(
    g: torch.Tensor | None,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    options: Options,
    cu_seqlens: torch.Tensor | None,
    cores: int | None = None,
) -> Gates:
    """Run `gates_kernel` on checked arguments.

    Args:
        g: `[B, T, HV]` or `[B, T, HV, K]`, or None without decay. Copied unless its last axes are contiguous.
        beta: `[B, T, HV]`, likewise.
        A_log, dt_bias: `[HV]`; dt_bias `[HV*K]` per channel.
        options: `decay`, `gate`, `lower_bound`, `beta_sigmoid`, `beta_scale` and `chunk_size` count.
        cu_seqlens: `[N + 1]` on the device. B is then 1. Its values are not read here.
        cores: programs, those of the device by default.
    """
    B, T, HV = beta.shape
    C = options.chunk_size
    K = g.shape[3] if g is not None and options.decay == "channel" else 1
    KP = -(-K // LINE) * LINE
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    rows = (-(-T // C) if cu_seqlens is None else T // C + N) * C
    beta = beta if beta.stride(2) == 1 else beta.contiguous()
    result = Gates(None, torch.empty(B, HV, rows, dtype=torch.float32, device=beta.device))
    if g is not None:
        g = g if g.stride(-1) == 1 and g.stride(2) == g.shape[3:].numel() else g.contiguous()
        shape = (B, HV, rows, KP) if options.decay == "channel" else (B, HV, rows)
        result = result._replace(c=torch.empty(shape, dtype=torch.float32, device=g.device))
    if T == 0 or B == 0:
        return result
    gates_kernel[(cores or vector_core_count(beta.device),)](
        g,
        beta,
        A_log,
        dt_bias,
        cu_seqlens,
        *result,
        N,
        T,
        0 if g is None else g.stride(0),
        0 if g is None else g.stride(1),
        beta.stride(0),
        beta.stride(1),
        rows,
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


def constants(decay: str, gate: str, HV: int, K: int, C: int) -> dict[str, int | str]:
    """The compile-time arguments that shapes decide."""
    return {
        "HV": HV,
        "K": K,
        "KP": -(-K // LINE) * LINE,
        "C": C,
        "BH": min(BLOCK_HEADS, max(LINE, triton.next_power_of_2(HV))),
        "BK": min(BLOCK_KEYS, max(LINE, triton.next_power_of_2(K))),
        "DECAY": decay,
        "GATE": gate,
    }


def builds() -> list[KernelBuild]:
    """What the compile test covers."""
    pointers = {"g": "*{}", "beta": "*{}", "A_log": "*fp32", "dt_bias": "*fp32", "cu_seqlens": "*i64"}
    results = {"c_out": "*fp32", "beta_out": "*fp32"}
    numbers = dict.fromkeys(("N", "T", "g_batch", "g_token", "beta_batch", "beta_token", "rows"), "i32")
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
