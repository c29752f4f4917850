# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMS norm with or without a gate, and L2 norm, on the vector cores; the definitions are in `norm/rms.py` and
`norm/l2norm.py`.

A task is a block of rows and one group of their channels. Groups of up to `BLOCK_CHANNELS` stay on core between the sum
and the scaling; wider ones are read twice, in blocks, because a tile of fewer than 8 rows is one that the vendor's
compiler has summed wrongly.
"""

import torch
import triton
import triton.language as tl

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common.ascend import launch_options, vector_core_count

TILE = 4096
"""Elements of a tile: 16 KiB in float32."""
BLOCK_CHANNELS = 512
MIN_ROWS = 8

OPTIONS = {"multibuffer": True}

_NUMBERS = ["rows", "x_row", "gate_row", "residual_row"]


@triton.jit
def gate_factor(x, SIGMOID: tl.constexpr):
    """`sigmoid(x)`, or `x * sigmoid(x)`."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def summed(x, gate, residual, mask, HAS_RESIDUAL: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr):
    """What is normalised, of tiles at three addresses."""
    s = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    if GATE_FIRST:
        s *= gate_factor(tl.load(gate, mask=mask, other=0.0).to(tl.float32), SIGMOID)
    return s


@triton.jit(do_not_specialize=_NUMBERS)
def norm_kernel(
    x,
    gate,
    residual,
    weight,
    bias,
    y,
    rows,
    x_row,
    gate_row,
    residual_row,
    eps,
    D: tl.constexpr,
    G: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    MEAN: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """x, gate, residual, y `[rows, D]`, weight, bias `[D]`; G: channels of a group. MEAN: divide their power by G."""
    GROUPS: tl.constexpr = D // G
    COLUMNS: tl.constexpr = (G + BC - 1) // BC
    r = tl.arange(0, BR)
    c = tl.arange(0, BC)
    for task in range(tl.program_id(0), (rows + BR - 1) // BR * GROUPS, tl.num_programs(0)):
        block = task // GROUPS * BR
        channel = task % GROUPS * G
        some = (r < rows - block)[:, None]
        row = tl.cast(block, tl.int64)
        x_at = x + row * x_row + channel + r[:, None] * x_row + c[None, :]
        y_at = y + row * D + channel + r[:, None] * D + c[None, :]
        gate_at = x_at
        if HAS_GATE:
            gate_at = gate + row * gate_row + channel + r[:, None] * gate_row + c[None, :]
        residual_at = x_at
        if HAS_RESIDUAL:
            residual_at = residual + row * residual_row + channel + r[:, None] * residual_row + c[None, :]

        # A group that is one block stays on core; it is the `s` of this loop.
        power = tl.zeros((BR,), tl.float32)
        s = tl.zeros((BR, BC), tl.float32)
        for k in range(COLUMNS):
            mask = some & (c < G - k * BC)[None, :]
            s = summed(x_at + k * BC, gate_at + k * BC, residual_at + k * BC, mask, HAS_RESIDUAL, GATE_FIRST, SIGMOID)
            power += tl.sum(s * s, 1)
        if MEAN:
            power = power / G
        factor = tl.rsqrt(power + eps)[:, None]
        for k in range(COLUMNS):
            inside = c < G - k * BC
            mask = some & inside[None, :]
            if COLUMNS > 1:
                s = summed(
                    x_at + k * BC, gate_at + k * BC, residual_at + k * BC, mask, HAS_RESIDUAL, GATE_FIRST, SIGMOID
                )
            out = s * factor
            if HAS_WEIGHT:
                out *= tl.load(weight + channel + k * BC + c, mask=inside, other=0.0).to(tl.float32)[None, :]
            if HAS_BIAS:
                out += tl.load(bias + channel + k * BC + c, mask=inside, other=0.0).to(tl.float32)[None, :]
            if HAS_GATE and not GATE_FIRST:
                out *= gate_factor(tl.load(gate_at + k * BC, mask=mask, other=0.0).to(tl.float32), SIGMOID)
            tl.store(y_at + k * BC, out.to(y.dtype.element_ty), mask=mask)


def launch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    mean: bool,
    gate: torch.Tensor | None = None,
    sigmoid: bool = False,
    gate_first: bool = False,
    group_size: int | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    cores: int | None = None,
) -> torch.Tensor:
    """`rms` (`mean=True`) or `l2norm` (`mean=False`) on checked arguments.

    Args:
        x, gate, residual: `[..., D]`; copied unless their rows have one distance and contiguous channels.
        sigmoid: the gate is `sigmoid(gate)` instead of `gate * sigmoid(gate)`.
        dtype: of the result, x's when None.
    """
    D = x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    flat_x, flat_gate, flat_residual = (None if t is None else _rows(t) for t in (x, gate, residual))
    assert flat_x is not None
    norm_kernel[(cores or vector_core_count(x.device),)](
        flat_x,
        flat_gate,
        flat_residual,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        flat_x.shape[0],
        *(0 if t is None else t.stride(0) for t in (flat_x, flat_gate, flat_residual)),
        eps,
        **constants(D, group_size or D),
        MEAN=mean,
        SIGMOID=sigmoid,
        HAS_GATE=gate is not None,
        GATE_FIRST=gate_first and gate is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        **launch_options(**OPTIONS),
    )
    return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as `[rows, D]` with contiguous channels."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def constants(D: int, G: int) -> dict[str, int]:
    """The compile-time arguments that shapes decide."""
    channels = min(triton.next_power_of_2(G), BLOCK_CHANNELS)
    return {"D": D, "G": G, "BR": max(MIN_ROWS, min(64, TILE // channels)), "BC": channels}


def builds() -> list[KernelBuild]:
    """What the compile test covers."""
    found = []
    for kind, dtype, D, G in (
        ("rms", "bf16", 128, 128),
        ("rms", "bf16", 4096, 4096),
        ("rms", "fp32", 2048, 2048),
        ("rms-all", "fp32", 1000, 500),
        ("gated", "bf16", 128, 128),
        ("gated", "fp16", 256, 256),
        ("gated-first", "bf16", 4096, 512),
        ("l2", "bf16", 128, 128),
        ("l2", "fp32", 100, 100),
    ):
        every, gated = kind == "rms-all", kind.startswith("gated")
        fixed: dict[str, int | float | bool | str | None] = {
            **constants(D, G),
            "MEAN": kind != "l2",
            "SIGMOID": False,
            "HAS_GATE": gated or every,
            "GATE_FIRST": kind == "gated-first",
            "HAS_RESIDUAL": every,
            "HAS_WEIGHT": kind != "l2",
            "HAS_BIAS": every,
        }
        optional = {"gate": "HAS_GATE", "residual": "HAS_RESIDUAL", "weight": "HAS_WEIGHT", "bias": "HAS_BIAS"}
        tensors = {"x", "y"} | {name for name, flag in optional.items() if fixed[flag]}
        found.append(
            KernelBuild(
                name=f"norm-{kind}-{dtype}-D{D}-G{G}",
                kernel=f"{__name__}:norm_kernel",
                signature=dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(_NUMBERS, "i32") | {"eps": "fp32"},
                constants=fixed | dict.fromkeys(set(optional) - tensors),
                options=OPTIONS,
            )
        )
    return found
