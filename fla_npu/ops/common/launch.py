"""From a checked call to the launches of the chunk kernel: padding, gates, schedule, one launch."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fla_npu.ops.common.ascend import core_count, launch_options
from fla_npu.ops.common.chunk_kernel import delta_rule_kernel
from fla_npu.ops.common.configs import HALF, STRONG, Config, pad, piece_size, tile_size
from fla_npu.ops.common.gate_kernel import launch_gates, launch_norms
from fla_npu.ops.problem import Options, Tensors
from fla_npu.planner.dataflow import RECURRENCES
from fla_npu.planner.kernels import KERNELS, Deal, deal


class Shape(NamedTuple):
    """What fixes the compile-time constants of a launch besides the configuration."""

    HV: int
    H: int
    K: int
    """Padded (`configs.pad`), like V."""
    V: int


def constants(
    shape: Shape,
    options: Options,
    config: Config,
    split: Any,
    *,
    fast: bool,
    has_h0: bool,
    has_ht: bool,
    varlen: bool,
    table: bool,
) -> dict[str, Any]:
    """The compile-time arguments of `delta_rule_kernel`."""
    channel = options.decay == "channel"
    bound = options.lower_bound if options.gate == "bounded" else None
    piece = piece_size(bound, config.chunk)
    return {
        "PARTS": split.parts,
        "BLOCKS": split.blocks,
        "TABLE": table,
        "HV": shape.HV,
        "GROUP": shape.HV // shape.H,
        "K": shape.K,
        "V": shape.V,
        "KP": shape.K,
        "BK": min(tile_size(shape.K), HALF),
        "BV": split.width,
        "TILE": split.tile,
        "C": config.chunk,
        "PIECE": piece if channel else 1,
        "PART": STRONG,
        "EYE": eye_size(shape.K, shape.V, config.chunk),
        "DECAY": options.decay,
        "L2NORM": options.qk_l2norm,
        "FAST": fast,
        "MAY_BE_STRONG": channel and bound is None,
        "HAS_H0": has_h0,
        "HAS_HT": has_ht,
        "V_FIRST": options.state_v_first,
        "VARLEN": varlen,
    }


def eye_size(K: int, V: int, chunk: int) -> int:
    """Rows of the table of the identity."""
    return max(min(tile_size(K), HALF), min(tile_size(V), HALF), chunk)


@lru_cache(maxsize=64)
def identity(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The identity on a device, made once."""
    return torch.eye(size, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def no_state(K: int, V: int, device: torch.device) -> torch.Tensor:
    """One state of zeros, for sequences that start without one."""
    return torch.zeros(K, V, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def flags(chunk: int, device: torch.device) -> torch.Tensor:
    """Row flags per level of the scores, `[levels, 1 + chunk, chunk]`: row 0 is 1 in the upper half of each block of
    `chunk >> level` rows and -1 in the lower, row 1 + b is 1 in block b and 0 elsewhere."""
    # On the host and in float32, whatever the defaults of this thread are.
    row = torch.arange(chunk, device="cpu")
    table = torch.zeros(chunk.bit_length(), 1 + chunk, chunk, dtype=torch.float32, device="cpu")
    for level in range(chunk.bit_length()):
        size = chunk >> level
        table[level, 0] = torch.where(row % size * 2 >= size, 1.0, -1.0)
        table[level, 1 + row // size, row] = 1.0
    return table.to(device)


def pointers(dtype: str) -> Mapping[str, str]:
    """Types of the pointer arguments, in order, for inputs of a dtype."""
    floats = dict.fromkeys(("c", "beta", "norms", "h0", "ht", "eye", "marks", "marks_strong"), "*fp32")
    integers = {"is_strong": "*i32", "cu_seqlens": "*i64", "bounds": "*i32", "ids": "*i32"}
    inputs = dict.fromkeys(("q", "k", "v", "o", "eye_in"), f"*{dtype}")
    return inputs | floats | integers


def launch_chunks(
    tensors: Tensors,
    options: Options,
    config: Config,
    *,
    cu_seqlens: torch.Tensor | None = None,
    lengths: list[int] | None = None,
    fast: bool = False,
    cores: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a checked call.

    Args:
        tensors, options: of the call. Tensors may have any strides; what the kernel cannot read as it is gets copied.
        config: static choices.
        cu_seqlens: int64 `[N + 1]` on the device; its values are not read here.
        lengths: of the sequences, if known on the host without asking the device: balances unequal ones.
        fast: 16-bit operands throughout (16-bit inputs only).
        cores: programs; those of the device by default.

    Returns:
        o `[B, T, HV, V]` and the final state or None.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    device = v.device
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    KP, VP = pad(K), pad(V)
    config = config.fit(VP)
    cores = core_count(device) if cores is None else cores
    plan = dealt(tensors, options, config, cu_seqlens=cu_seqlens, lengths=lengths, cores=cores).schedule
    q, k, v = (_rows(x, pad(x.shape[3])) for x in (q, k, v))
    h0 = None if tensors.initial_state is None else _state(tensors.initial_state, KP, VP, options.state_v_first)
    state = (VP, KP) if options.state_v_first else (KP, VP)
    ht = None
    if options.output_final_state:
        ht = torch.empty(N, HV, *state, dtype=torch.float32, device=device)
        if cu_seqlens is not None or T == 0:
            # The kernel writes the states of sequences with tokens.
            ht.copy_(h0) if h0 is not None else ht.zero_()
    o = torch.empty(B, T, HV, VP, dtype=v.dtype, device=device)
    if N > 0 and T > 0:
        gates = launch_gates(
            tensors.g, tensors.step_size, tensors.A_log, tensors.dt_bias, options, cu_seqlens, config.chunk, cores=None
        )
        norms = launch_norms(q, k, cu_seqlens, config.chunk) if options.qk_l2norm else None
        fixed = constants(
            Shape(HV, H, KP, VP), options, config, plan.split, fast=fast, has_h0=h0 is not None,
            has_ht=ht is not None, varlen=cu_seqlens is not None, table=plan.order is not None,
        )  # fmt: skip
        eye = identity(fixed["EYE"], torch.float32, device)
        # Copied before the arrays go: such memory is not pinned, so the copy does not wait for the device's work.
        tables: tuple[torch.Tensor | None, ...] = (None, None)
        if plan.order is not None:
            order = (plan.order.bounds, plan.order.ids)
            tables = tuple(torch.frombuffer(numbers, dtype=torch.int32).to(device) for numbers in order)
        delta_rule_kernel[(cores,)](
            q, k, v, gates.c, gates.beta, gates.strong, norms,
            no_state(KP, VP, device) if h0 is None else h0, o, ht,
            identity(fixed["EYE"], q.dtype, device), eye, flags(config.chunk, device), flags(STRONG, device),
            cu_seqlens,
            *tables,
            plan.split.units, plan.split.whole, T,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            v.stride(0), v.stride(1), v.stride(2), o.stride(0),
            gates.beta.shape[-1], gates.beta.numel(), B * H * gates.beta.shape[-1], options.scale,
            **fixed, **launch_options(**config.options()),
        )  # fmt: skip
    if ht is not None and (KP, VP) != (K, V):
        ht = (ht[..., :V, :K] if options.state_v_first else ht[..., :K, :V]).contiguous()
    return (o if VP == V else o[..., :V].contiguous()), ht


def dealt(
    tensors: Tensors,
    options: Options,
    config: Config,
    *,
    cu_seqlens: torch.Tensor | None,
    lengths: list[int] | None,
    cores: int,
) -> Deal:
    """What the planner makes of a call: who computes what of it. Arguments as those of `launch_chunks`."""
    B, T, HV, V = tensors.v.shape
    sequences, given = (B, [T] * B) if cu_seqlens is None else (len(cu_seqlens) - 1, lengths)
    op = next(op for op in KERNELS.values() if RECURRENCES[op].decay == options.decay)
    known = None if given is None else tuple(given)
    return deal(op, config, V=V, heads=HV, cores=cores, sequences=sequences, tokens=B * T, lengths=known)


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """x with rows that the kernel can read: padded to whole lines, the last axis contiguous, steps that fit 32 bits."""
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    aligned = all(step * x.element_size() % 32 == 0 for step in x.stride()[:3])
    return x if x.stride(3) == 1 and aligned and x.stride(1) < 2**24 else x.contiguous()


def _state(h: torch.Tensor, K: int, V: int, v_first: bool) -> torch.Tensor:
    """h in float32, contiguous and padded; itself if it is."""
    rows, columns = (V, K) if v_first else (K, V)
    if h.shape[2:] != (rows, columns):
        h = F.pad(h, (0, columns - h.shape[3], 0, rows - h.shape[2]))
    return h.float().contiguous()
