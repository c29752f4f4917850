# mypy: allow-untyped-defs, allow-incomplete-defs
"""Depthwise causal convolution over time on the vector cores; the definition is in `causal_conv1d/ops.py`.

A task is a block of tokens and of channels, its tile `[BT, BD]` read once per tap at shifted rows: with 16-bit inputs
that is less work than the arithmetic on it. The first W - 1 tokens of a sequence, whose taps reach before its start,
are rows of their own: so no address lies before a sequence, and blocks need no lower bound.
"""

import torch
import triton
import triton.language as tl

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common.ascend import launch_options, vector_core_count
from fla_npu.ops.common.gate_kernel import sequence

# A tile is 16 KiB in float32. About eight are alive, those of loads twice, and wide convolutions have more loads:
# larger tiles lose the double buffering or do not fit.
BLOCK_CHANNELS = 128


def block_tokens(W: int) -> int:
    """Tokens of a tile."""
    return 32 if W <= 4 else 16


# A row of a state takes 32 bytes on core however short it is.
UPDATE_CHANNELS = 256

OPTIONS = {"multibuffer": True}

# States are updated where they are: no load of the next task may pass a store of this one.
UPDATE_OPTIONS = {"multibuffer": False}

_NUMBERS = ["N", "T", "x_batch", "x_token", "residual_batch", "residual_token"]


@triton.jit
def column(x, i):
    """Column i of a tile `[BD, WP]`, as a vector."""
    return tl.sum(tl.where((tl.arange(0, x.shape[1]) == i)[None, :], x, 0.0), 1)


@triton.jit
def activated(x, SILU: tl.constexpr):
    if SILU:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def first_tokens(x, x_token, state, taps, d, inside, token: tl.constexpr, W: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """The sum over taps for a token less than W - 1 behind the start of its sequence, at x: `[BD]`."""
    total = tl.zeros_like(d).to(tl.float32)
    for i in tl.static_range(W):
        source = token - (W - 1) + i
        if source >= 0:
            value = tl.load(x + source * x_token + d, mask=inside, other=0.0).to(tl.float32)
            total += value * column(taps, i)
        elif HAS_INITIAL:
            total += column(state, W + source) * column(taps, i)
    return total


@triton.jit
def last_inputs(x, x_token, length, state, d, D: tl.constexpr, W: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """The state `[BD, WP]` behind the end of a sequence that starts at x."""
    j = tl.arange(0, state.shape[1])
    last = tl.zeros_like(state)
    for i in tl.static_range(W):
        source = length - W + i
        at = x + tl.cast(tl.maximum(source, 0), tl.int64) * x_token + d
        value = tl.load(at, mask=d < tl.where(source >= 0, D, 0), other=0.0).to(tl.float32)
        if HAS_INITIAL:
            # A column from W on is not there, and its sum 0.
            value += column(state, length + i)
        last += tl.where((j == i)[None, :], value[:, None], 0.0)
    return last


@triton.jit(do_not_specialize=_NUMBERS)
def conv_kernel(
    x,
    weight,
    bias,
    residual,
    initial,
    final,
    cu_seqlens,
    y,
    N,
    T,
    x_batch,
    x_token,
    residual_batch,
    residual_token,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """x, residual, y `[B, T, D]`, weight `[D, W]`, states `[N, D, W]`. WP: W as a power of two."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    t = tl.arange(0, BT)
    j = tl.arange(0, WP)
    before = 0
    for n in range(N):
        bos, length = sequence(cu_seqlens, n, T, VARLEN)
        row = tl.cast(n, tl.int64)
        x_sequence = x + (bos * x_token if VARLEN else row * x_batch)
        y_sequence = y + bos * D
        if HAS_RESIDUAL:
            residual_sequence = residual + (bos * residual_token if VARLEN else row * residual_batch)
        # At least one, for the first tokens and the state.
        tasks = tl.maximum((length - (W - 1) + BT - 1) // BT, 1) * BLOCKS
        for task in range((program + programs - before % programs) % programs, tasks, programs):
            block = task // BLOCKS
            d = task % BLOCKS * BD + tl.arange(0, BD)
            inside = d < D
            taps_at = d[:, None] * W + j[None, :]
            taps_inside = inside[:, None] & (j < W)[None, :]
            taps = tl.load(weight + taps_at, mask=taps_inside, other=0.0).to(tl.float32)
            offset = tl.zeros((BD,), tl.float32)
            if HAS_BIAS:
                offset = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)

            first = block * BT
            left = length - (W - 1) - first
            mask = (t < left)[:, None] & inside[None, :]
            acc = tl.zeros((BT, BD), tl.float32) + offset[None, :]
            for i in tl.static_range(W):
                at = x_sequence + tl.cast(first + i, tl.int64) * x_token + t[:, None] * x_token + d[None, :]
                acc += tl.load(at, mask=mask, other=0.0).to(tl.float32) * column(taps, i)[None, :]
            acc = activated(acc, SILU)
            token = tl.cast(first + W - 1, tl.int64)
            if HAS_RESIDUAL:
                at = residual_sequence + token * residual_token + t[:, None] * residual_token + d[None, :]
                acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_sequence + token * D + t[:, None] * D + d[None, :], acc.to(y.dtype.element_ty), mask=mask)

            if block == 0:
                if HAS_INITIAL:
                    state = tl.load(initial + row * (D * W) + taps_at, mask=taps_inside, other=0.0)
                    state = state.to(x.dtype.element_ty).to(tl.float32)
                else:
                    state = taps
                for head in tl.static_range(W - 1):
                    if head < length:
                        one = offset + first_tokens(x_sequence, x_token, state, taps, d, inside, head, W, HAS_INITIAL)
                        one = activated(one, SILU)
                        if HAS_RESIDUAL:
                            value = tl.load(residual_sequence + head * residual_token + d, mask=inside, other=0.0)
                            one += value.to(tl.float32)
                        tl.store(y_sequence + head * D + d, one.to(y.dtype.element_ty), mask=inside)
                if HAS_FINAL:
                    last = last_inputs(x_sequence, x_token, length, state, d, D, W, HAS_INITIAL)
                    tl.store(final + row * (D * W) + taps_at, last.to(final.dtype.element_ty), mask=taps_inside)
        before += tasks


@triton.jit(do_not_specialize=["N", "x_row", "residual_row", "cache_row"])
def update_kernel(
    x,
    weight,
    bias,
    residual,
    cache,
    y,
    N,
    x_row,
    residual_row,
    cache_row,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BD: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One token for each of N sequences: x, residual, y `[N, D]`; cache `[N, D, W]` is updated."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    j = tl.arange(0, WP)
    for task in range(tl.program_id(0), N * BLOCKS, tl.num_programs(0)):
        n = tl.cast(task // BLOCKS, tl.int64)
        d = task % BLOCKS * BD + tl.arange(0, BD)
        inside = d < D
        tile = d[:, None] * W + j[None, :]
        mask = inside[:, None] & (j < W)[None, :]
        new = tl.load(x + n * x_row + d, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(cache + n * cache_row + tile + 1, mask=inside[:, None] & (j < W - 1)[None, :], other=0.0)
        state = old.to(x.dtype.element_ty).to(tl.float32) + tl.where((j == W - 1)[None, :], new[:, None], 0.0)
        tl.store(cache + n * cache_row + tile, state.to(cache.dtype.element_ty), mask=mask)
        out = tl.sum(state * tl.load(weight + tile, mask=mask, other=0.0).to(tl.float32), 1)
        if HAS_BIAS:
            out += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
        out = activated(out, SILU)
        if HAS_RESIDUAL:
            out += tl.load(residual + n * residual_row + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + n * D + d, out.to(y.dtype.element_ty), mask=inside)


def launch_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    output_final_state: bool,
    cores: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`causal_conv1d` on checked arguments, x and residual `[B, T, D]`. Nothing here waits for the device."""
    B, T, D = x.shape
    W = weight.shape[1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    x, residual = _rows(x), None if residual is None else _rows(residual)
    y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    final = torch.empty(N, D, W, dtype=x.dtype, device=x.device) if output_final_state else None
    if N > 0:
        conv_kernel[(cores or vector_core_count(x.device),)](
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            residual,
            None if initial is None else initial.contiguous(),
            final,
            None if cu_seqlens is None else cu_seqlens.contiguous(),
            y,
            N,
            T,
            *x.stride()[:2],
            *((0, 0) if residual is None else residual.stride()[:2]),
            D=D,
            W=W,
            WP=triton.next_power_of_2(W),
            BT=block_tokens(W),
            BD=BLOCK_CHANNELS,
            SILU=activation is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_INITIAL=initial is not None,
            HAS_FINAL=final is not None,
            VARLEN=cu_seqlens is not None,
            **launch_options(**OPTIONS),
        )
    return y, final


def launch_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    cache: torch.Tensor,
    activation: str | None,
    cores: int | None = None,
) -> torch.Tensor:
    """`causal_conv1d_update` on checked arguments, x and residual `[N, D]`; returns y, updates `cache`."""
    N, D = x.shape
    W = weight.shape[1]
    x, residual = _rows(x), None if residual is None else _rows(residual)
    states = cache if cache[:1].is_contiguous() else cache.contiguous()
    y = torch.empty(N, D, dtype=x.dtype, device=x.device)
    if N > 0:
        update_kernel[(cores or vector_core_count(x.device),)](
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            residual,
            states,
            y,
            N,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            states.stride(0),
            D=D,
            W=W,
            WP=triton.next_power_of_2(W),
            BD=UPDATE_CHANNELS,
            SILU=activation is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            **launch_options(**UPDATE_OPTIONS),
        )
    if states is not cache:
        cache.copy_(states)
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with its channels contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def builds() -> list[KernelBuild]:
    """What the compile test covers."""
    found = []
    for dtype, D, W, full, packed in (
        ("bf16", 4096, 4, True, True),
        ("bf16", 2048, 4, False, False),
        ("fp16", 1000, 3, True, False),
        ("fp32", 512, 8, True, True),
        ("fp32", 96, 2, False, False),
    ):
        fixed: dict[str, int | float | bool | str | None] = {"D": D, "W": W, "WP": triton.next_power_of_2(W)}
        fixed |= {"SILU": full, "HAS_BIAS": full, "HAS_RESIDUAL": full}
        tensors = {"x", "weight", "y"} | ({"bias", "residual"} if full else set())
        absent = set() if full else {"bias", "residual"}
        name = f"{dtype}-D{D}-W{W}{'-full' if full else ''}"
        found.append(
            KernelBuild(
                name=f"conv-update-{name}",
                kernel=f"{__name__}:update_kernel",
                signature=dict.fromkeys(tensors | {"cache"}, f"*{dtype}")
                | dict.fromkeys(("N", "x_row", "residual_row", "cache_row"), "i32"),
                constants={**fixed, "BD": UPDATE_CHANNELS, **dict.fromkeys(absent)},
                options=UPDATE_OPTIONS,
            )
        )
        tensors |= {"initial", "final"} if full else set()
        absent |= set() if full else {"initial", "final"}
        fixed |= {"BT": block_tokens(W), "BD": BLOCK_CHANNELS, "HAS_INITIAL": full, "HAS_FINAL": full, "VARLEN": packed}
        found.append(
            KernelBuild(
                name=f"conv-{name}{'-packed' if packed else ''}",
                kernel=f"{__name__}:conv_kernel",
                signature=dict.fromkeys(tensors, f"*{dtype}")
                | ({"cu_seqlens": "*i64"} if packed else {})
                | dict.fromkeys(_NUMBERS, "i32"),
                constants={**fixed, **dict.fromkeys(absent if packed else absent | {"cu_seqlens"})},
                options=OPTIONS,
            )
        )
    return found
