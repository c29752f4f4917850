"""Which kernels ship, as the vendor's compiler takes them: the chunk kernel per shape, dtype and precision, and the
small kernels around it. `fla-npu compile` and the compile tests read this; it imports triton."""

from array import array
from collections.abc import Sequence
from itertools import product
from typing import Any

from fla_npu.compiler.build import KernelBuild
from fla_npu.compiler.table import ChunkCall
from fla_npu.modules.kernels import conv, norm
from fla_npu.ops.common import decode_kernel, gate_kernel, tune
from fla_npu.ops.common.configs import Config, pad
from fla_npu.ops.common.launch import Shape, constants, pointers
from fla_npu.ops.problem import Options
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.dataflow import RECURRENCES
from fla_npu.planner.kernels import KERNELS, deal

PRECISIONS = ("exact", "fast")

_NUMBERS = (
    "units", "whole", "T", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
    "v_head", "o_batch", "rows", "rest", "norm_rest",
)  # fmt: skip


def build_for(
    op: str,
    chip: str,
    *,
    dtype: str = "bf16",
    K: int = 128,
    V: int = 128,
    heads: int = 32,
    seq: int = 8192,
    precision: str = "exact",
    chunk: int | None = None,
    tile: int | None = None,
    config: Config | None = None,
    qk_heads: int | None = None,
    lower_bound: float | None = -5.0,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    varlen: bool = False,
    has_h0: bool = True,
) -> tuple[KernelBuild, dict[str, int], dict[str, Sequence[int]], int]:
    """The chunk kernel for one sequence and a chip.

    Args:
        op: `chunk_gdn` or `chunk_kda`.
        chip: name of a chip of `planner.chips`.
        dtype: of q, k, v and o: `fp16`, `bf16` or `fp32`.
        K, V, heads, seq: sizes; heads are value heads, of which `qk_heads` (default: all) have keys of their own.
        precision: `exact` or `fast`.
        chunk, tile: instead of those of the chip's default configuration.
        config: instead of the chip's default configuration.
        lower_bound: KDA: of the log decays; None where the gate has no bound.

    Returns:
        The build, and what evaluating it takes: scalar arguments, arrays that are read as integers, the grid.

    Raises:
        ValueError: an argument is not among those named here.
    """
    if op not in KERNELS:
        raise ValueError(f"op must be one of {', '.join(KERNELS)}, got {op!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be exact or fast, got {precision!r}")
    cores = find_chip(chip).aicores
    fast = precision == "fast" and dtype != "fp32"
    base = config or tune.default(op, chip, pad(K), pad(V), dtype, fast)
    config = base.with_sizes(chunk, tile).fit(pad(V))
    KP, VP = pad(K), pad(V)
    H = qk_heads or heads
    bounded = op == "chunk_kda" and lower_bound is not None
    options = Options(
        decay=RECURRENCES[KERNELS[op]].decay, scale=K**-0.5, qk_l2norm=qk_l2norm, gate="bounded" if bounded else "none",
        lower_bound=lower_bound if bounded else None, state_v_first=state_v_first, output_final_state=True,
    )  # fmt: skip
    split = deal(KERNELS[op], config, V=V, heads=heads, cores=cores, sequences=1, tokens=seq).schedule.split
    fixed = constants(
        Shape(heads, H, KP, VP),
        options,
        config,
        split,
        fast=fast,
        has_h0=has_h0,
        has_ht=True,
        varlen=varlen,
        table=False,
    )
    absent = {"bounds", "ids"}
    absent |= set() if varlen else {"cu_seqlens"}
    absent |= set() if fixed["MAY_BE_STRONG"] else {"is_strong"}
    absent |= set() if qk_l2norm else {"norms"}
    kinds: dict[str, str] = {**pointers(dtype), **dict.fromkeys(_NUMBERS, "i32"), "scale": "fp32"}
    name = f"{op}-{dtype}-K{K}-V{V}-{precision}-C{config.chunk}-BV{split.width}"
    extras = {
        f"-T{split.tile}": split.parts > 1,
        f"-HV{heads}": split.parts > 1,
        "-gva": heads != H,
        "-l2": qk_l2norm,
        "-unbounded": op == "chunk_kda" and not bounded,
        "-vfirst": state_v_first,
        "-packed": varlen,
        "-zero": not has_h0,
    }
    build = KernelBuild(
        name=name + "".join(text for text, wanted in extras.items() if wanted),
        kernel="fla_npu.ops.common.chunk_kernel:delta_rule_kernel",
        signature={argument: kind for argument, kind in kinds.items() if argument not in absent},
        constants=fixed | dict.fromkeys(sorted(absent)),
        options=config.options(),
    )
    rows = -(-seq // config.chunk) * config.chunk + (config.chunk if varlen else 0)
    scalars = {
        "units": split.units, "whole": split.whole, "T": seq, "rows": rows, "rest": heads * rows, "norm_rest": H * rows,
        "q_batch": seq * H * KP, "q_token": H * KP, "q_head": KP, "k_batch": seq * H * KP, "k_token": H * KP,
        "k_head": KP, "v_batch": seq * heads * VP, "v_token": heads * VP, "v_head": VP, "o_batch": seq * heads * VP,
    }  # fmt: skip
    arrays: dict[str, Sequence[int]] = {"cu_seqlens": array("q", (0, seq))} if varlen else {}
    if fixed["MAY_BE_STRONG"]:
        arrays["is_strong"] = array("i", [0]) * (heads * rows // config.chunk)
    return build, scalars, arrays, cores


def shipped(chip: str = "910B3") -> tuple[KernelBuild, ...]:
    """Every kernel and configuration that the launchers choose by default, and one of each variant of a kernel."""
    return tuple(build for build, _ in shipped_calls(chip))


def shipped_calls(chip: str) -> tuple[tuple[KernelBuild, ChunkCall | None], ...]:
    """What ships, and how the chunk kernels among it are evaluated. Those that calls depend on most come first."""
    calls: list[dict[str, Any]] = [
        {"op": op, "dtype": dtype, "precision": precision}
        for dtype, precision, op in product(("bf16", "fp16"), ("exact", "fast"), KERNELS)
    ]
    # The gate of Kimi models has no bound.
    calls += [
        {"op": "chunk_kda", "lower_bound": None, "dtype": dtype, "precision": precision}
        for dtype, precision in (("bf16", "exact"), ("bf16", "fast"), ("fp16", "exact"), ("fp16", "fast"))
    ]
    calls += [{"op": op, "has_h0": False, "qk_l2norm": True} for op in KERNELS]
    calls += [
        {"op": op, "heads": 32, "qk_heads": 16, "qk_l2norm": True, "state_v_first": True, "varlen": True}
        for op in KERNELS
    ]
    calls += [
        {"op": "chunk_kda", "lower_bound": None, "qk_l2norm": True, "state_v_first": True, "varlen": True},
        {"op": "chunk_kda", "lower_bound": None, "qk_l2norm": True, "has_h0": False},
    ]
    # More heads than cores by a few: a launch with whole units and tiles, which is two chunk loops. Those of KDA do not
    # fit into UB beside each other (1,710,080 bits of 1,572,864 with tiles of 64).
    calls.append({"op": "chunk_gdn", "heads": find_chip(chip).aicores + 4, "config": Config(tile=64)})
    calls += [{"op": op, "dtype": "fp32"} for op in KERNELS]
    calls += [
        {"op": op, "dtype": dtype, "precision": precision, "K": 64, "V": 64}
        for dtype, precision, op in product(("bf16", "fp16"), ("exact", "fast"), KERNELS)
    ]
    calls += [{"op": op, "K": 256, "V": 256, "precision": precision} for precision in PRECISIONS for op in KERNELS]
    calls += [{"op": op, "K": K, "V": V} for K, V in ((96, 192), (60, 100)) for op in KERNELS]
    calls += [{"op": op, "qk_l2norm": True, "precision": "fast", "has_h0": False, "varlen": True} for op in KERNELS]
    calls += [
        {"op": "chunk_kda", "lower_bound": None, "dtype": "fp32"},
        {"op": "chunk_kda", "lower_bound": None, "K": 64, "V": 64},
        {"op": "chunk_kda", "lower_bound": None, "K": 256, "V": 256},
    ]
    found: dict[str, tuple[KernelBuild, ChunkCall | None]] = {}
    for call in calls:
        build, scalars, arrays, grid = build_for(chip=chip, **call)
        K, V, dtype = call.get("K", 128), call.get("V", 128), call.get("dtype", "bf16")
        plain = set(call) <= {"op", "dtype", "precision", "lower_bound"} and dtype != "fp32"
        scalars["heads"] = call.get("heads", 32)
        found[build.name] = (
            build,
            ChunkCall(call["op"], dtype, K, V, scalars, arrays, grid, call.get("has_h0", True), launches=plain),
        )
    small = (
        *gate_kernel.builds(),
        *gate_kernel.norms_builds(),
        *decode_kernel.builds(),
        *conv.builds(),
        *norm.builds(),
    )
    return (*found.values(), *((build, None) for build in small))
