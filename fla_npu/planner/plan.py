"""The plan of an op on a chip: order, memories, layouts, who computes what, and what it costs beside the alternatives.

    plan("kda", "310P", heads=16, seq=4096)

The pipeline: a chip (`chips`); the graph of a chunk as defined, rewritten and placed (`dataflow`); its best order that
fits (`order`); layouts (`layout`); heads to cores (`kernels`, `schedule`); costs (`cost`). Where a Triton kernel runs
the op, tile sizes and the schedule are those of its launchers, which ask the same functions (`kernels`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from reprlib import repr as brief
from typing import Any, Literal, NamedTuple

from fla_npu.ops.common.configs import Config, pad, tile_size
from fla_npu.planner import kernels
from fla_npu.planner.chips import Chip
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.cost import ItemCost, Variant, cost, fitted, machine_of, schedule_cost
from fla_npu.planner.dataflow import (
    ChunkShape,
    Expr,
    Space,
    Unit,
)
from fla_npu.planner.kernels import KERNELS, Deal, Segments
from fla_npu.planner.layout import Layout, Transform, occupied, plan_layouts
from fla_npu.planner.mappings import Name
from fla_npu.planner.order import SPACES, Ordered, capacities, occupancy
from fla_npu.planner.record import decoded
from fla_npu.planner.request import Request, integer, one_of, token_counts
from fla_npu.planner.schedule import TILES as COLUMN_TILES
from fla_npu.planner.schedule import CostModel, Item, Schedule, makespan

SCHEMA = "fla_npu.plan/1"
"""Of the JSON form; its number grows when a plan of before cannot be read any more."""

CHUNKS = (64, 32, 16)
"""Tokens of a chunk to choose from, the best first."""

TILES = (128, 64, 32, 16)
"""Columns of a state to hold at once, likewise."""

WAYS: tuple[tuple[str, Name, Variant], ...] = (
    ("separate operators", "separate", "planned"),
    ("FLA", "fla", "planned"),
    ("FLA in one launch", "megakernel", "planned"),
    ("FlashQLA", "flashqla", "planned"),
    ("ours, default order", "head", "mapped"),
    ("ours, default layouts", "head", "ordered"),
    ("ours", "head", "planned"),
)
"""Ways of running an op whose costs a plan has: a name, the mapping, and of the head mapping the variant."""

Chosen = Literal["planned", "shipped", "tuned"]
"""`planned` by the planner, where no kernel runs; `shipped` with the kernel; or otherwise `tuned` on the machine that
made the plan."""


@dataclass(frozen=True)
class Memory:
    """A memory of a core."""

    name: str
    bytes: int | None
    """None where no source gives the chip's size; nothing is held against it then."""
    peak: int

    def __post_init__(self) -> None:
        if self.bytes is not None and self.peak > self.bytes:
            raise ValueError(f"peak must be at most the {self.bytes} bytes of {self.name}, got {self.peak}")


@dataclass(frozen=True)
class Step:
    """One operator, in the order in which they run."""

    operator: str
    phase: str
    unit: Unit
    computes: str
    """Its expression, or of a move the memories that it goes from and to."""
    live: tuple[int, ...]
    """Bytes alive meanwhile, by memory."""


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of a chunk."""

    name: str
    rows: int
    columns: int
    dtype: str
    memory: str
    layout: Layout


@dataclass(frozen=True)
class Dealt:
    """Heads to cores in a launch, in the unit of the schedule's cost model."""

    cores: int
    units: int
    """Heads of sequences or of their segments, or column blocks of them."""
    whole: int
    """Units that are computed whole."""
    tile: int
    """Columns of a tile of the others."""
    parts: int
    """Tiles of a unit; 1 where all are whole."""
    makespan: int
    bound: float
    """What each core had to do if units could be divided without end."""
    tail: int
    """Units of heads that would better go chunk by chunk on all cores."""
    segments: Segments | None
    """Lengths of the segments of each sequence, where the launchers cut them; these are dealt then, three times."""


@dataclass(frozen=True)
class Prediction:
    """What one way of running the call costs, see `cost.Cost`."""

    name: str
    mapping: str
    """One of `mappings.NAMES`."""
    chunk: int
    """Tokens of its chunks."""
    launches: int
    gm_read: int
    gm_written: int
    paths: tuple[tuple[str, int], ...]
    """Bytes moved on the cores, by way."""
    macs: int
    element_ops: int
    peak_bytes: int
    """Of device memory."""
    submission_seconds: float
    seconds: float
    stages: tuple[tuple[str, float], ...]
    joules: float | None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")


class Span(NamedTuple):
    """What a core does from a time to another, in the schedule's unit."""

    item: Item
    """Its sequence is a segment, where sequences are cut; those of all sequences are numbered together."""
    whole: bool
    """Whether it is all columns of a unit, not one of its tiles."""
    start: int
    end: int


class KernelPlan(NamedTuple):
    """What the launchers of the chunk kernels take."""

    config: Config
    schedule: Schedule
    segments: Segments | None


@dataclass(frozen=True)
class Plan:
    """A plan. Small, hashable, and the same bytes of JSON whenever and wherever it is made, unless it is `tuned`: what
    tuning found on a machine is taken there only. With `FLA_NPU_TUNE=0` no plan is."""

    request: Request
    config: Config
    """Tokens of a chunk (`chunk`), columns of the state at once (`width`), tiles of residual heads (`tile`)."""
    chosen: Chosen
    """Who chose the configuration, but for sizes that were asked for."""
    kernel: str | None
    """The Triton kernel that runs it, if one does."""
    memories: tuple[Memory, ...]
    buffers: int
    """Places of each input and output: with two, the next chunk is loaded while one is computed."""
    spilled: tuple[str, ...]
    """Tensors that wait in global memory between two uses."""
    steps: tuple[Step, ...]
    tensors: tuple[PlacedTensor, ...]
    state: Layout
    """Of the state between chunks."""
    sites: tuple[Transform, ...]
    """Where tensors change their layouts in every chunk."""
    dealt: Dealt
    predictions: tuple[Prediction, ...]
    """Of the alternatives, of ours without its parts, and, the last, of this plan."""
    remarks: tuple[str, ...]

    @property
    def shape(self) -> ChunkShape:
        """Of a chunk of the graph."""
        return _shape(self.request, self.config.chunk, self.config.width)

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(step.operator for step in self.steps)

    def deal(self) -> Deal:
        """The schedule itself, and segments; the launchers get the same object."""
        return _deal(self.request, self.config, self.kernel)

    def timeline(self) -> Iterator[tuple[Span, ...]]:
        """What each core does in a launch, one core after another."""
        lengths, schedule = _launched(self.request, self.config, self.kernel)
        chunk = self.config.chunk
        item_cost = _item_cost(self.request, self.config, self.kernel)
        for core in range(schedule.cores):
            units, tiles = schedule.ids(core)
            dealt = [(schedule.item(unit), schedule.split.width) for unit in units]
            dealt += [(schedule.part(tile), schedule.split.tile) for tile in tiles]
            spans, now = [], 0
            for number, (item, columns) in enumerate(dealt):
                start, now = now, now + item_cost(-(-lengths[item.sequence] // chunk), columns)
                spans.append(Span(item, number < len(units), start, now))
            yield tuple(spans)

    def to_kernel_config(self) -> KernelPlan:
        """What the launchers of the chunk kernel take for this request.

        Raises:
            ValueError: no chunk kernel runs the op on the chip.
        """
        if self.kernel is None:
            raise ValueError(
                f"a kernel configuration needs a chip and a call that the chunk kernels take, got {self.request.op} on "
                f"{self.request.chip}: {_refusal(self.request, find_chip(self.request.chip))}"
            )
        schedule, segments = self.deal()
        return KernelPlan(self.config, schedule, segments)

    def to_json(self) -> str:
        """The plan as a JSON object, on one line; `from_json` gives an equal plan back."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan of a JSON object that `to_json` made.

        Raises:
            ValueError: it is none, or of another schema; the message names the first field that is not as it must be.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"plan must be a JSON object, got {text[:40]!r}: {error}") from error
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            found = record.get("schema") if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"schema of a plan must be {SCHEMA}, got {brief(found)}")
        del record["schema"]
        made = decoded(record, Plan, "plan")
        for name, found, wanted in made._derived():
            if found != wanted:
                raise ValueError(f"plan.{name} must be {wanted} with all before it in the plan, got {found}")
        return made

    def _derived(self) -> Iterator[tuple[str, object, object]]:
        """What follows from other fields: its name, what is in the plan, what follows. In an order in which each needs
        only those before."""
        request, config = self.request, self.config
        chip = find_chip(request.chip)
        yield "request.chip", request.chip, chip.name
        yield "kernel", self.kernel, _kernel(request, chip)
        known = "planned" if self.kernel is None else "tuned" if self.chosen == "tuned" else "shipped"
        yield "chosen", self.chosen, known
        yield from _fields("config", config, config.fit(pad(request.V)))
        yield from _fields("dealt", self.dealt, _dealt(request, config, self.kernel))
        sizes = [(space, capacities(chip).get(space)) for space in SPACES]
        yield "memories", [(one.name, one.bytes) for one in self.memories], sizes
        yield "buffers", self.buffers, min(max(self.buffers, 1), 2)
        yield "steps", len(self.steps), max(len(self.steps), 1)
        for at, step in enumerate(self.steps):
            yield f"steps[{at}].live", len(step.live), len(SPACES)
        for at, memory in enumerate(self.memories):
            yield f"memories[{at}].peak", memory.peak, max(step.live[at] for step in self.steps)
        yield "predictions", [(one.name, one.mapping) for one in self.predictions], [way[:2] for way in WAYS]


def _fields(at: str, found: Any, wanted: Any) -> Iterator[tuple[str, object, object]]:
    for name in (field.name for field in fields(wanted)):
        yield f"{at}.{name}", getattr(found, name), getattr(wanted, name)


def plan(
    op: str,
    chip: str,
    *,
    heads: int,
    lengths: Sequence[int] | None = None,
    seq: int | None = None,
    batch: int = 1,
    K: int = 128,
    V: int = 128,
    chunk: int | None = None,
    tile: int | None = None,
    dtype: str = "fp16",
    precision: str = "exact",
    bounded: bool = True,
) -> Plan:
    """The plan of an op.

    Args:
        op: a row of `dataflow.RECURRENCES`: gdn, kda, ...
        chip: a chip of `planner.chips`, under any of its names.
        heads: value heads; how many of them share keys does not matter.
        lengths: tokens of each sequence of a pack; or
        seq, batch: tokens of each of `batch` sequences of one length.
        K, V: head dimensions of keys and values.
        chunk: tokens of a chunk: 16, 32 or 64. The best that fits by default.
        tile: columns of a state held at once: 16, 32, 64 or 128. Likewise.
        dtype: of q, k, v, o and of the operands of products: fp16, bf16 or fp32.
        precision: of the Triton kernels, where they run.
        bounded: False for KDA called without `lower_bound`: its log decays have no known bound. Matters to the Triton
            kernels only.

    Raises:
        TypeError: a number is not an int, a name not a str, or `bounded` not a bool.
        ValueError: an argument is not among those named here, or no plan fits into the chip's memories; the message
            says what would.
    """
    found = find_chip(chip)
    chunk, tile = one_of("chunk", chunk, CHUNKS), one_of("tile", tile, TILES)
    heads, K, V = integer("heads", heads), integer("K", K), integer("V", V)
    request = Request(op, found.name, heads, token_counts(lengths, seq, batch), K, V, dtype, precision, bounded)  # type: ignore[arg-type]
    kernel = _kernel(request, found)
    config, ordered = _tiled(request, found, kernel, chunk, tile)
    chosen: Chosen = "planned"
    if kernel is not None:
        chosen = "shipped" if config == _kernel_config(request, kernel, chunk, tile, tuned=False) else "tuned"
    layouts = plan_layouts(ordered.graph, found, _chunks(request, config.chunk))
    alive = dict(occupancy(ordered.graph, ordered.order, ordered.buffers))
    alive["UB"] = occupied(ordered.graph, ordered.order, layouts, ordered.buffers)
    dealt = _dealt(request, config, kernel)
    return Plan(
        request=request,
        config=config,
        chosen=chosen,
        kernel=kernel,
        memories=tuple(Memory(space, capacities(found).get(space), max(alive[space])) for space in SPACES),
        buffers=ordered.buffers,
        spilled=ordered.spilled,
        steps=tuple(_steps(ordered, alive)),
        tensors=tuple(
            PlacedTensor(name, *one.shape, one.dtype, str(one.space), layouts.layouts[name])
            for name, one in ordered.graph.tensors.items()
        ),
        state=layouts.state,
        sites=layouts.transforms,
        dealt=dealt,
        predictions=tuple(_predictions(request, found, config, dealt.segments)),
        remarks=tuple(_remarks(request, found, kernel, ordered, None if chunk or tile else chosen)),
    )


def _refusal(request: Request, chip: Chip) -> str | None:
    """Why no chunk kernel runs a request on a chip, or None."""
    widest = kernels.WIDEST_HEAD
    too_wide = f"its head dimensions go up to {widest}, not K={request.K}, V={request.V}"
    return kernels.refusal(request.op, chip) or (too_wide if max(request.K, request.V) > widest else None)


def _kernel(request: Request, chip: Chip) -> str | None:
    """The chunk kernel that runs a request on a chip."""
    return None if _refusal(request, chip) else next(name for name, op in KERNELS.items() if op == request.op)


def _shape(request: Request, chunk: int, width: int) -> ChunkShape:
    return ChunkShape(chunk, pad(request.K), min(width, pad(request.V)), request.dtype)


def _chunks(request: Request, chunk: int) -> int:
    """Of the longest sequence."""
    return -(-max(request.lengths) // chunk)


def _fit(request: Request, chip: Chip, chunk: int, width: int) -> Ordered:
    """The order of a chunk of these sizes, that which `cost` takes.

    Raises:
        ValueError: there is none.
    """
    return fitted(request.op, _shape(request, chunk, width), chip, _chunks(request, chunk)).ordered


def _kernel_config(request: Request, kernel: str, chunk: int | None, tile: int | None, tuned: bool = True) -> Config:
    """That of the launchers, with the sizes that were asked for."""
    found = kernels.configuration(
        kernel,
        request.chip,
        K=request.K,
        V=request.V,
        dtype=request.dtype,
        fast=request.precision == "fast",
        heads=request.heads,
        sequences=len(request.lengths),
        tokens=sum(request.lengths),
        bounded=request.bounded,
        tuned=tuned,
    )
    return found.with_sizes(chunk, tile).fit(pad(request.V))


def _tiled(
    request: Request, chip: Chip, kernel: str | None, chunk: int | None, tile: int | None
) -> tuple[Config, Ordered]:
    """Sizes and the order of a chunk of these sizes."""
    if kernel is not None:
        config = _kernel_config(request, kernel, chunk, tile)
        return config, _fitted(request, chip, config, chunk, tile)
    widest = tile_size(pad(request.V))
    tried = [
        Config(chunk=tokens, width=width).fit(pad(request.V))
        for tokens in ([chunk] if chunk else CHUNKS)
        for width in ([tile] if tile else [one for one in TILES if one <= widest])
    ]
    whole: list[tuple[Config, Ordered]] = []
    spilling: list[tuple[Config, Ordered]] = []
    for config in tried:
        # Of two that keep everything on the core, one that is larger in both sizes is never slower.
        if any(config.chunk <= one.chunk and config.width <= one.width for one, _ in whole):
            continue
        try:
            ordered = _fit(request, chip, config.chunk, config.width)
        except ValueError:
            continue
        (spilling if ordered.spilled else whole).append((config, ordered))
    found = [
        (replace(config, tile=part), ordered)
        for config, ordered in whole or spilling[:1]
        for part in (0, *(one for one in TILES if one < config.width))
    ]
    if not found:
        return tried[0], _fitted(request, chip, tried[0], chunk, tile)
    return min(found, key=lambda one: _makespan(request, one[0]))


def _fitted(request: Request, chip: Chip, config: Config, chunk: int | None, tile: int | None) -> Ordered:
    """The order of a chunk of these sizes, or an error that says which sizes would fit."""
    try:
        return _fit(request, chip, config.chunk, config.width)
    except ValueError as error:
        if chunk is not None or tile is not None:
            try:
                other, _ = _tiled(request, chip, None, None, None)
            except ValueError:
                pass
            else:
                forced = ", ".join(
                    f"{name}={size}" for name, size in (("chunk", chunk), ("tile", tile)) if size is not None
                )
                raise ValueError(
                    f"chunk and tile must fit into the memories of {chip.name}, got {forced}: {error}; "
                    f"chunk={other.chunk}, tile={other.width} would"
                ) from error
        raise ValueError(
            f"K must be at most {_largest_key(request, chip)} for {request.op} with {request.dtype} on {chip.name}, "
            f"got {request.K}: {error}"
        ) from error


def _largest_key(request: Request, chip: Chip) -> int:
    """The largest K that fits, with the smallest chunk and tile."""

    def fits(tiles: int) -> bool:
        try:
            _fit(replace(request, K=16 * tiles), chip, CHUNKS[-1], TILES[-1])
        except ValueError:
            return False
        return True

    low, high = 0, -(-request.K // 16)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 16 * low


def _makespan(request: Request, config: Config) -> int:
    """Where no kernel runs."""
    return makespan(
        request.lengths,
        request.heads,
        find_chip(request.chip).aicores,
        value_dim=pad(request.V),
        tiles=config.tiles,
        chunk=config.chunk,
        cost=_item_cost(request, config, None),
    )


def _item_cost(request: Request, config: Config, kernel: str | None) -> CostModel:
    """Of an item: what compiled kernels tell where one runs, else what the model predicts."""
    if kernel:
        return schedule_cost(request.op)
    chip = find_chip(request.chip)
    longest = _chunks(request, config.chunk)
    return ItemCost(request.op, chip, _whole_shape(request, config.chunk), machine_of(chip), longest=longest)


def _whole_shape(request: Request, chunk: int) -> ChunkShape:
    """Of a chunk with all columns of a head."""
    return ChunkShape(chunk, pad(request.K), pad(request.V), request.dtype)


def _deal(request: Request, config: Config, kernel: str | None, lengths: tuple[int, ...] | None = None) -> Deal:
    """Of the sequences, or of others of these lengths. Only the launchers of kernels cut sequences."""
    lengths = request.lengths if lengths is None else lengths
    made = kernels.deal(
        request.op,
        config,
        V=request.V,
        heads=request.heads,
        cores=find_chip(request.chip).aicores,
        sequences=len(lengths),
        tokens=sum(lengths),
        lengths=lengths,
        cost=_item_cost(request, config, kernel),
    )
    return made if kernel else made._replace(segments=None)


def _launched(request: Request, config: Config, kernel: str | None) -> tuple[tuple[int, ...], Schedule]:
    """The lengths that a launch sees, those of segments where sequences are cut, and its schedule."""
    schedule, segments = _deal(request, config, kernel)
    if segments is None:
        return request.lengths, schedule
    lengths = tuple(length for sequence in segments for length in sequence)
    return lengths, _deal(request, config, kernel, lengths).schedule


def _dealt(request: Request, config: Config, kernel: str | None) -> Dealt:
    _, schedule = _launched(request, config, kernel)
    split = schedule.split
    return Dealt(
        cores=schedule.cores,
        units=split.units,
        whole=sum(len(schedule.ids(core)[0]) for core in range(schedule.cores)),
        tile=split.tile,
        parts=split.parts,
        makespan=schedule.makespan,
        bound=schedule.bound,
        tail=0 if schedule.tail is None else len(schedule.tail.items),
        segments=_deal(request, config, kernel).segments,
    )


def _predictions(request: Request, chip: Chip, config: Config, segments: Segments | None) -> Iterator[Prediction]:
    filled = None if segments is None else [sequence for sequence in segments if sequence]
    lengths = tuple(length for length in request.lengths if length)
    for name, mapping, variant in WAYS:
        tokens = config.chunk if mapping == "head" else CHUNKS[0]
        found = cost(
            request.op,
            mapping,
            chip=chip,
            heads=request.heads,
            lengths=lengths,
            shape=_whole_shape(request, tokens),
            variant=variant,
            tiles=config.tiles if mapping == "head" else COLUMN_TILES,
            segments=filled if mapping == "head" else None,
        )
        yield Prediction(
            name=name,
            mapping=mapping,
            chunk=tokens,
            launches=found.launches,
            gm_read=sum(found.gm_read.values()),
            gm_written=sum(found.gm_written.values()),
            paths=tuple(sorted(found.path_bytes.items())),
            macs=found.macs,
            element_ops=found.element_ops,
            peak_bytes=found.peak_bytes,
            submission_seconds=found.submission_seconds,
            seconds=found.seconds,
            stages=tuple(found.stages.items()),
            joules=found.joules,
        )


def _steps(ordered: Ordered, alive: Mapping[Space, Sequence[int]]) -> Iterator[Step]:
    for at, name in enumerate(ordered.order):
        one, tensors = ordered.graph.producer[name], ordered.graph.tensors
        ways = [str(tensors[x].space) for x in (one.inputs[0], name)]
        computes = " -> ".join(ways) if one.unit == "move" else written(one.expr)
        yield Step(name, one.phase, one.unit, computes, tuple(alive[space][at] for space in SPACES))


_INFIX = {"add": (1, " + "), "sub": (1, " - "), "mul": (2, " * "), "dot": (2, " @ ")}
"""How tightly a function binds, and its sign."""


def written(expr: Expr, binding: int = 0) -> str:
    """An expression as people write it, in parentheses where something around it binds as tightly."""
    if isinstance(expr, str):
        return expr
    function, *operands = expr
    if function == "t":
        return f"{written(operands[0], 3)}^T"
    if function not in _INFIX:
        return f"{function}({', '.join(map(written, operands))})"
    own, sign = _INFIX[function]
    first, second = operands
    text = f"{written(first, own)}{sign}{written(second, own + 1)}"
    return f"({text})" if own < binding else text


def _remarks(
    request: Request,
    chip: Chip,
    kernel: str | None,
    ordered: Ordered,
    chosen: Chosen | None,
) -> Iterator[str]:
    if kernel is not None and chosen is not None:
        ways = f"{kernel} ships with" if chosen == "shipped" else f"were tuned for {kernel} on this machine"
        yield (
            f"chunk and columns are those that {ways}: the vendor's compiler fits them (docs/compiled.md); "
            "order, memories and layouts are the model's"
        )
    if kernel is not None and not request.bounded:
        yield (
            "without a bound, chunks that decay too much for one product are taken 16 tokens at a time: "
            "predictions are for mild decays"
        )
    reason = _refusal(request, chip)
    if reason is not None:
        yield f"no Triton kernel runs this: {reason}"
    if ordered.spilled:
        yield f"{', '.join(ordered.spilled)} wait in global memory: no order keeps everything on the core"
    if ordered.buffers == 1:
        yield "inputs and outputs have one place each: loads and stores of neighbouring chunks do not overlap"
