"""The static choices of the chunk kernels: with which configuration a call runs, and who computes what of it.

The launchers ask `configuration` and `deal` and decide nothing themselves; `plan.py` reports what these two say. Both
cost microseconds once asked before, and neither waits for a device: lengths that the host does not know are not needed.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from fla_npu.ops.common.configs import Config, pad
from fla_npu.ops.common.tune import config_for, key_for, shipped
from fla_npu.planner.chips import Chip
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.schedule import CostModel, Schedule, equal_schedule, schedule

KERNELS: Mapping[str, str] = MappingProxyType({"chunk_gdn": "gdn", "chunk_kda": "kda"})
"""The chunk kernels, and the row of `dataflow.RECURRENCES` that each computes."""

WIDEST_HEAD = 256
"""Largest K of the kernels, and V of those by chunks: what they are compiled for."""

PASSES = 3
"""Launches of a call in segments, over all its tokens each; see `ops/common/segments.py`."""

SHORTEST = 16
"""Chunks that a segment has at least: below, the launches and small products cost more than they save."""

WORTH = 0.8
"""Part of the modelled time of one launch that the three together may take. A guess, to be measured on a device."""

Segments = tuple[tuple[int, ...], ...]
"""Lengths of the segments of each sequence."""


class Deal(NamedTuple):
    """Who computes what of a call."""

    schedule: Schedule
    """Of one launch."""
    segments: Segments | None
    """Where three launches over parts of the sequences end earlier: their lengths."""


def refusal(op: str, chip: Chip) -> str | None:
    """Why no chunk kernel runs an op (a row of `dataflow.RECURRENCES`) on a chip, or None."""
    if op not in KERNELS.values():
        return f"there is no kernel for {op}"
    if chip.family == "A5":
        return (
            "the chunk kernels do not fit on A5: triton-ascend 3.2.0, whose front end knows no A5, does not divide "
            "their tiles between the vector cores (docs/compiled.md)"
        )
    return chip.no_triton_reason


def configuration(
    op: str,
    chip: str,
    *,
    K: int,
    V: int,
    dtype: str,
    fast: bool,
    heads: int,
    sequences: int,
    tokens: int,
    bounded: bool = True,
    tuned: bool = True,
) -> Config:
    """Tile sizes and compiler options of a call: what tuning found on this machine, else what ships.

    Args:
        op: in `KERNELS`.
        chip: a chip of `planner.chips`.
        K, V: head dimensions, up to 256.
        dtype: of the inputs: `fp16`, `bf16` or `fp32`.
        fast: whether products take 16-bit operands.
        heads: value heads.
        sequences, tokens: of the call, tokens in all.
        bounded: False for KDA whose log decays have no known bound.
        tuned: False for what ships, whatever was tuned here.

    Raises:
        ValueError: an argument is not among those named here.
    """
    found = find_chip(chip)
    sizes: dict[str, Any] = {
        "heads": heads, "sequences": sequences, "length": tokens // max(sequences, 1), "cores": found.aicores,
    }  # fmt: skip
    call = op, found.name, pad(K), pad(V), dtype, fast
    # Nothing is tuned for decays without a bound.
    taken = tuned or not bounded
    chosen = config_for(*call, **sizes, bounded=bounded) if taken else shipped(key_for(*call, **sizes))
    return chosen.fit(pad(V))


def deal(
    op: str,
    config: Config,
    *,
    V: int,
    heads: int,
    cores: int,
    sequences: int,
    tokens: int,
    lengths: tuple[int, ...] | None = None,
    cost: CostModel | None = None,
) -> Deal:
    """Who computes what of a call with a configuration.

    Args:
        op: a row of `dataflow.RECURRENCES`.
        config: see `configuration`.
        V: value head dimension.
        heads: value heads.
        cores: programs of a launch.
        sequences, tokens: of the call, tokens in all.
        lengths: of the sequences, where the host knows them. Without, nothing is cut and no table is made.
        cost: of an item, hashable; `cost.schedule_cost(op)`, that of the chunk kernels, by default.
    """
    return _deal(op, config.fit(pad(V)), pad(V), heads, cores, sequences, tokens, lengths, cost)


# Few: what is kept of unequal lengths has an entry per unit.
@lru_cache(maxsize=128)
def _deal(
    op: str,
    config: Config,
    V: int,
    heads: int,
    cores: int,
    sequences: int,
    tokens: int,
    lengths: tuple[int, ...] | None,
    cost: CostModel | None,
) -> Deal:
    # With it comes the whole planner, which `import fla_npu` should not wait for.
    from fla_npu.planner.cost import schedule_cost

    cost = cost or schedule_cost(op)
    if lengths is None:
        length = tokens // max(sequences, 1)
        whole = equal_schedule(
            sequences, heads, cores, value_dim=V, tiles=config.tiles, length=length, chunk=config.chunk, cost=cost
        )
        return Deal(whole, None)
    whole = schedule(lengths, heads, cores, value_dim=V, tiles=config.tiles, chunk=config.chunk, cost=cost)
    return Deal(whole, _segments(lengths, heads, cores, V, config, whole, cost))


def _segments(
    lengths: tuple[int, ...], heads: int, cores: int, V: int, config: Config, whole: Schedule, cost: CostModel
) -> Segments | None:
    """Segments where they end earlier by the schedule's model than the schedule of one launch."""
    units = len(lengths) * heads * -(-V // config.width)
    if units == 0 or units * PASSES > cores:
        return None
    segments = tuple(_cut(length, cores // units, config.chunk) for length in lengths)
    flat = [length for sequence in segments for length in sequence]
    if len(flat) <= len(lengths):
        return None
    cut = schedule(flat, heads, cores, value_dim=V, tiles=config.tiles, chunk=config.chunk, cost=cost)
    return segments if PASSES * cut.makespan < WORTH * whole.makespan else None


def _cut(length: int, parts: int, chunk: int) -> tuple[int, ...]:
    """About equal segments of whole chunks, at most `parts` of them."""
    chunks = -(-length // chunk)
    parts = max(1, min(parts, chunks // SHORTEST))
    ends = [min(length, chunks * part // parts * chunk) for part in range(parts + 1)]
    return tuple(b - a for a, b in pairwise(ends) if b > a)
