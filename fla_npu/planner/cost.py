"""What a mapping of an op costs on a chip: traffic, arithmetic, memory, time.

    cost("gdn", "head", chip=chip("310P"), lengths=[4096], heads=16).seconds
    cost("gdn", "fla", chip=chip("310P"), lengths=[4096], heads=16).gm_bytes

Traffic, arithmetic and memory are counted; no constant is in them. Time is modelled:

* A core has four engines that work at the same time, each on one operator after another in the order given: one loads
  from global memory, one stores to it, one multiplies, one computes vectors and moves tensors between the units. An
  operator starts when its engine is free and its inputs are there. The inputs of a chunk are loaded while the one
  before is computed, where both have places. What a chunk adds once all engines are in step is its time
  (`Step.seconds`); a stage that takes chunk by chunk overlaps nothing with the next one (`Step.first`), unless its
  kernel loops over them.
* An operator takes what its bytes or products take at the chip's rates, and `Machine.operator` for its issue and the
  flag that it waits for. Solve is a chain of such operators (`solve_steps`).
* An item (a chunk, a segment, a head) takes `Machine.item` besides; a launch takes `Machine.launch`.
* All cores share global memory: one gets its part of `gm_total`, at most what its own way carries.

`Machine` holds all figures that are not in the chip's table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from fla_npu.planner.chips import Chip
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.dataflow import (
    ITEMSIZE,
    RECURRENCES,
    ChunkShape,
    Graph,
    Operator,
    Space,
    Tensor,
    placed,
    rewritten,
    semantic,
    verify,
)
from fla_npu.planner.layout import LayoutPlan, naive_layouts, occupied, plan_layouts
from fla_npu.planner.mappings import WARMUP, Extra, Partition, Stage, partition, segment_chunks
from fla_npu.planner.order import (
    Order,
    Ordered,
    best,
    capacities,
    fit,
    l0,
    operand_loads,
    peaks,
    rereading,
    semantic_order,
)
from fla_npu.planner.schedule import TILES, CostModel, Schedule, schedule
from fla_npu.planner.schedule import Cost as ScheduleCost

Variant = Literal["mapped", "ordered", "planned"]
"""Of the head mapping: in the semantic order with a spilled state; with the rewrite and the planned order; with planned
layouts, too."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class Machine:
    """Seconds that no table has."""

    operator: float
    """Issue of an operator on a core, and its wait for the engine that makes its input."""
    item: float
    """Start and end of an item that a core takes from a launch."""
    launch: float
    """Submission of a launch."""
    loops: bool = False
    """Whether a core takes chunks in a loop that loads the next one early, as a persistent kernel does."""


MACHINE = Machine(operator=0.669e-6, item=23.5e-6, launch=35.7e-6)
"""Of the paper's kernels on the 310P. `operator` and `item` are fitted on the four GDN latencies of Figure 18;
`launch`, which matters for separate operators alone, on one point of Figure 13. See `published.calibrate`."""

TRITON = replace(MACHINE, item=0.0, loops=True)
"""Of persistent Triton kernels, hence of every chip that has them: their cores loop over chunks. Nothing is fitted; the
published times of six such kernels on a 910B2 are in `published.rows`."""

_STEADY = 1 << 20
"""Chunks that are enough for a few others at the ends of a sequence not to matter."""

SCHEDULE_FIXED: Mapping[str, int] = MappingProxyType({"none": 209, "scalar": 209, "channel": 577})
"""Columns that cost as much as what a chunk takes whatever its columns, by kind of decay. From compiled programs:
estimated cycles (docs/tuning.md) of the GDN and KDA kernels with K = V = 128, chunks of 64, exact, for 32, 64 and 128
columns on the 910B3, by least squares. A test makes them again."""


class Step(NamedTuple):
    """Time of a chunk on one core."""

    first: float
    """By itself."""
    seconds: float
    """When chunks follow each other."""


@dataclass(frozen=True)
class Cost:
    """Cost of a call."""

    op: str
    mapping: str
    chip: str
    gm_read: Mapping[str, int]
    """Bytes read from global memory, by tensor; the state that comes in, of all heads, is `initial state`."""
    gm_written: Mapping[str, int]
    path_bytes: Mapping[str, int]
    """Bytes moved on the cores, by way."""
    macs: int
    element_ops: int
    peak_bytes: int
    """Of device memory: inputs, outputs and what is between launches, at the fullest moment."""
    launches: int
    submission_seconds: float
    seconds: float
    stages: Mapping[str, float]
    """Seconds of each stage, without submissions."""
    joules: float | None
    """An estimate: the most that the board draws, for these seconds. None where the table has no figure."""

    @property
    def gm_bytes(self) -> int:
        return sum(self.gm_read.values()) + sum(self.gm_written.values())


def cost(
    op: str,
    mapping: str,
    *,
    chip: Chip,
    heads: int,
    lengths: Sequence[int],
    shape: ChunkShape | None = None,
    variant: Variant = "planned",
    machine: Machine | None = None,
    tiles: Sequence[int] = TILES,
    segments: Sequence[Sequence[int]] | None = None,
) -> Cost:
    """The cost of a forward call.

    Args:
        op: a name in `dataflow.RECURRENCES`.
        mapping: a name in `mappings.NAMES`.
        chip: from `chips.chip`.
        heads: value heads. Query heads count as many: the paper's inputs are not shared between heads.
        lengths: tokens of each sequence.
        shape: sizes and dtypes of a chunk.
        variant: of the head mapping, see `Variant`; others have one.
        machine: instead of `machine_of(chip)`.
        tiles: columns of a state that a core may take at once.
        segments: lengths of the segments of each sequence, where the launchers of the head mapping cut them
            (`kernels.deal`): three launches over all tokens then, and products of states between them.

    Raises:
        ValueError: an argument is not among those named here, there is nothing to compute, or no tile fits into the
            memories of a core.
    """
    shape = shape or ChunkShape()
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    if type(heads) is not int or heads < 1:
        raise ValueError(f"heads must be a positive int, got {heads!r}")
    if not lengths or any(type(one) is not int or one < 1 for one in lengths):
        raise ValueError(f"lengths must be positive ints, at least one, got {lengths!r}")
    machine = machine or machine_of(chip)
    if mapping == "head":
        longest = -(-max(lengths) // shape.C)
        fitting = [tile for tile in tiles if _possible(op, replace(shape, V=min(tile, shape.V)), chip, longest)]
        if not fitting:
            # Says why.
            fitted(op, replace(shape, V=min(*tiles, shape.V)), chip, longest)
        tiles = fitting
    call = _Call(op, partition(mapping, op, shape), chip, heads, tuple(lengths), variant, machine, tuple(tiles))
    if segments is None:
        return call.cost()
    if mapping != "head":
        raise ValueError(f"segments must be None for {mapping}: only the head mapping is cut into them")
    if [sum(some) for some in segments] != list(lengths) or not all(one > 0 for some in segments for one in some):
        raise ValueError(f"segments must divide the lengths {list(lengths)}, got {[list(some) for some in segments]}")
    return call.in_segments(tuple(length for some in segments for length in some))


@dataclass(frozen=True)
class _Call:
    op: str
    partition: Partition
    chip: Chip
    heads: int
    lengths: tuple[int, ...]
    variant: Variant
    machine: Machine
    tiles: tuple[int, ...]

    @property
    def shape(self) -> ChunkShape:
        return self.partition.graph.shape

    def cost(self) -> Cost:
        read, written = self._traffic()
        stages = {one.name: self._seconds(one) for one in self.partition.stages}
        longest = max(self._chunks)
        launches = sum(one.submissions * (longest if one.looped else 1) for one in self._visited())
        work = [
            (done.chunks, self._program(stage, columns))
            for stage in self.partition.stages
            if stage.grain != "tensor"
            for columns, done in self._dealt[stage.name].work.items()
        ]
        paths: dict[str, int] = {}
        for chunks, program in work:
            for way, size in program.paths.items():
                paths[way] = paths.get(way, 0) + size * chunks
        graph = self.partition.graph
        alone = [
            (self._visits(stage), one)
            for stage in self.partition.stages
            if stage.grain == "tensor"
            for one in stage.operators
        ]
        return self._found(
            read,
            written,
            paths,
            macs=sum(chunks * one.macs for chunks, one in work) + sum(n * graph.macs(one) for n, one in alone),
            element_ops=sum(chunks * one.element_ops for chunks, one in work)
            + sum(n * graph.element_ops(one) for n, one in alone),
            peak=self._peak() + self.chip.aicores * max((one.workspace for _, one in work), default=0),
            launches=launches,
            stages=stages,
        )

    def in_segments(self, lengths: tuple[int, ...]) -> Cost:
        """In three launches over segments of these lengths, as `ops/common/segments.py` does it: their final states
        from none; what takes a state through each, from the identity and values of zero; the call. Between the last
        two, for every segment a copy of its first state and a product with the next one."""
        shape = self.shape
        values = replace(self, lengths=lengths)
        square = partition("head", self.op, replace(shape, V=shape.K))
        transitions = replace(values, partition=square)
        passes = {"final states": values.cost(), "transitions": transitions.cost(), "head": values.cost()}
        read: dict[str, int] = {}
        written: dict[str, int] = {}
        paths: dict[str, int] = {}
        for name, one in passes.items():
            # One row of zeros stands for the values of all tokens.
            zero = {"v"} if name == "transitions" else set()
            for total, part in ((read, one.gm_read), (written, one.gm_written), (paths, one.path_bytes)):
                for key, size in part.items():
                    if key not in zero | {"initial state", "final state"}:
                        total[key] = total.get(key, 0) + size
        states, maps = values._state_bytes(), transitions._state_bytes()
        between = 3 * states + maps, 2 * states
        ends = self._state_bytes()
        read |= {"initial state": ends, "states of segments": between[0] + maps + states - ends}
        written |= {"final state": ends, "states of segments": between[1] + states + maps + states - ends}
        macs = len(lengths) * self.heads * shape.K**2 * shape.V
        rate = _macs(self.chip, shape.accumulate) * self.chip.aicores
        products = max(sum(between) / _memory(self.chip), macs / rate)
        stages = {name: one.stages["head"] for name, one in passes.items()} | {"products": products}
        launches = sum(one.launches for one in passes.values()) + 2 * len(lengths)
        # Outputs of two launches are there at once.
        workspace = passes["head"].peak_bytes - values._peak()
        peak = self._peak() + workspace + passes["transitions"].gm_written["o"] + 3 * states + maps
        return self._found(
            read,
            written,
            paths,
            macs=macs + sum(one.macs for one in passes.values()),
            element_ops=sum(one.element_ops for one in passes.values()),
            peak=peak,
            launches=launches,
            stages=stages,
        )

    def _found(
        self,
        read: dict[str, int],
        written: dict[str, int],
        paths: dict[str, int],
        *,
        macs: int,
        element_ops: int,
        peak: int,
        launches: int,
        stages: dict[str, float],
    ) -> Cost:
        submissions = launches * self.machine.launch
        seconds = sum(stages.values()) + submissions
        watts = self.chip.board_watts
        return Cost(
            op=self.op,
            mapping=self.partition.name,
            chip=self.chip.name,
            gm_read=MappingProxyType(read),
            gm_written=MappingProxyType(written),
            path_bytes=MappingProxyType(paths),
            macs=macs,
            element_ops=element_ops,
            peak_bytes=peak,
            launches=launches,
            submission_seconds=submissions,
            seconds=seconds,
            stages=MappingProxyType(stages),
            joules=None if watts is None else watts * seconds,
        )

    # Counts

    @cached_property
    def _chunks(self) -> list[int]:
        return [-(-length // self.shape.C) for length in self.lengths]

    @cached_property
    def _segment(self) -> int:
        """Chunks of a segment."""
        return segment_chunks(sum(self._chunks), self.heads, self.chip.aicores)

    def _ahead(self) -> int:
        """Segments whose state is computed ahead, of one head."""
        return sum(-(-count // self._segment) for count in self._chunks) - len(self.lengths)

    def _visits(self, stage: Stage) -> int:
        """Chunks of heads that a stage computes."""
        return self.heads * (sum(self._chunks) if stage.visits == "all" else WARMUP * self._ahead())

    def _visited(self) -> list[Stage]:
        return [one for one in self.partition.stages if self._visits(one)]

    def _moved(self, size: int, name: str, visits: int, tokens: int | None = None) -> int:
        """Bytes of a tensor in so many chunks; of a row per token, the last chunk of a sequence has its tokens only.

        Args:
            tokens: in these chunks; their share of all tokens by default.
        """
        tensor = self.partition.graph.tensors.get(name)
        if tensor is None or tensor.shape[0] != self.shape.C:
            return size * visits
        if tokens is None:
            return size * sum(self.lengths) * visits // (sum(self._chunks) * self.shape.C)
        return size * tokens // self.shape.C

    def _state_bytes(self) -> int:
        tensor = self.partition.graph.tensors[self.partition.graph.state[0]]
        return tensor.bytes * self.heads * len(self.lengths)

    def _traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        read: dict[str, int] = {}
        written: dict[str, int] = {}

        def add(counted: dict[str, int], name: str, size: int) -> None:
            if size:
                counted[name] = counted.get(name, 0) + size

        for stage in self.partition.stages:
            visits = self._visits(stage)
            if stage.grain == "tensor":
                for counted, moved in ((read, stage.reads), (written, stage.writes)):
                    for name, size in moved.items():
                        add(counted, name, self._moved(size, name, visits))
                continue
            work = self._dealt[stage.name].work
            narrow = self._part(16).stages[self.partition.stage(stage.name)]
            for counted, moved, parts in ((read, stage.reads, narrow.reads), (written, stage.writes, narrow.writes)):
                for name, size in moved.items():
                    if size != parts[name]:
                        # Divided by columns: each is moved once.
                        add(counted, name, self._moved(size, name, visits))
                        continue
                    for done in work.values():
                        add(counted, name, self._moved(size, name, done.chunks, done.tokens))
            for columns, done in work.items():
                program = self._program(stage, columns)
                for counted, spilled in ((read, program.spilled[0]), (written, program.spilled[1])):
                    add(counted, "spills", spilled * done.chunks)
                    add(counted, "workspace", program.workspace * done.chunks)
        for extra in self.partition.extras:
            if extra.moved and (count := self._count(extra, moved=True)):
                read[extra.name] = written[extra.name] = extra.bytes * count
        if any(one.carries for one in self.partition.stages):
            read["initial state"] = written["final state"] = self._state_bytes()
        return read, written

    def _count(self, extra: Extra, moved: bool) -> int:
        """Chunks or segments of an extra tensor."""
        stage = self.partition.stages[self.partition.stage(extra.written)]
        if extra.per == "segment":
            return self._ahead() * self.heads
        if stage.visits == "ahead" and (moved or not self._ahead()):
            return self._visits(stage)
        return sum(self._chunks) * self.heads

    def _peak(self) -> int:
        graph, part = self.partition.graph, self.partition
        chunks = sum(self._chunks) * self.heads
        inputs = [one for one in graph.tensors.values() if one.role == "input"]
        base = sum(self._moved(one.bytes, one.name, chunks) for one in inputs) + 2 * self._state_bytes()
        output = next(one for one in graph.tensors.values() if one.role == "output")
        first = next(i for i, stage in enumerate(part.stages) if output.name in stage.writes)
        peak = 0
        for i, stage in enumerate(part.stages):
            if not self._visits(stage):
                continue
            now = sum(self._moved(part.stored[name], name, chunks) for name in part.allocated(i))
            for extra in part.extras:
                if part.stage(extra.written) <= i <= part.stage(extra.read):
                    now += extra.bytes * self._count(extra, moved=False)
            if i >= first:
                now += self._moved(output.bytes, output.name, chunks)
            peak = max(peak, now)
        return base + peak

    # Time

    def _part(self, columns: int) -> Partition:
        """The mapping with so many columns, at most those of a head."""
        return partition(self.partition.name, self.op, replace(self.shape, V=min(columns, self.shape.V)))

    def _chunk(self, stage: Stage, columns: int, busy: int) -> "_Chunk":
        name, longest = self.partition.name, max(self._chunks)
        return _Chunk(self.op, name, stage.name, self.shape, columns, self.chip, self.variant, longest, busy)

    def _program(self, stage: Stage, columns: int) -> "_Program":
        return _program(self._chunk(stage, columns, self.chip.aicores))

    @cached_property
    def _dealt(self) -> "dict[str, _Dealt]":
        """Who computes what of each stage."""
        return {one.name: self._deal(one) for one in self.partition.stages if one.grain != "tensor"}

    def _deal(self, stage: Stage) -> "_Dealt":
        visits, cores, columns = self._visits(stage), self.chip.aicores, self.shape.V
        if not visits:
            return _Dealt(0.0, {})
        chunks, C = self._chunks, self.shape.C
        tokens = self.heads * sum(self.lengths) if stage.visits == "all" else visits * C
        if not stage.carries:
            step = _step(self._chunk(stage, columns, min(cores, visits)), self.machine.operator)
            items = -(-visits // cores)
            looped = step.first + (items - 1) * step.seconds
            seconds = looped if self.machine.loops else items * (self.machine.item + step.first)
            return _Dealt(seconds, {columns: _Work(visits, tokens)})
        if stage.visits == "ahead":
            lengths = [WARMUP * C] * self._ahead() if self._ahead() <= _DEALT else None
        elif stage.grain != "segment":
            lengths = list(self.lengths)
        elif self._ahead() <= _DEALT:
            most = self._segment * C
            lengths = [min(most, length - start) for length in self.lengths for start in range(0, length, most)]
        else:
            lengths = None
        item = partial(
            ItemCost, self.op, self.chip, self.shape, self.machine, self.partition.name, stage.name, self.variant
        )
        if lengths is None:
            # So many that each core has its even share, whatever is left over.
            most = WARMUP if stage.visits == "ahead" else self._segment
            rounds = -(-visits // (most * cores))
            longest = item(longest=max(chunks))(most, columns)
            return _Dealt(rounds * longest * 1e-12, {columns: _Work(visits, tokens)})
        cost = item(longest=max(chunks))
        # Segments even the load by themselves; FlashQLA chooses their number for that.
        tiles = self.tiles if stage.grain == "head" else (columns,)
        made = schedule(lengths, self.heads, cores, value_dim=columns, tiles=tiles, chunk=C, cost=cost)
        makespan, used = made.makespan, _busy(made)
        if used < cores:
            makespan = _makespan(made, [-(-one // C) for one in lengths], replace(cost, busy=used))
        return _Dealt(makespan * 1e-12, _work(made, lengths, C))

    def _seconds(self, stage: Stage) -> float:
        return self._whole_tensors(stage) if stage.grain == "tensor" else self._dealt[stage.name].seconds

    def _whole_tensors(self, stage: Stage) -> float:
        graph = self.partition.graph
        moved = sum(stage.reads.values()) + sum(stage.writes.values())
        total = _memory(self.chip)
        macs = sum(graph.macs(one) for one in stage.operators)
        return self._visits(stage) * max(moved / total, macs / (_macs(self.chip, self.shape.dtype) * self.chip.aicores))


_DEALT = 1 << 12
"""Segments that are dealt one by one; more are no less even."""


class _Work(NamedTuple):
    """What items of one width compute, all together."""

    chunks: int
    tokens: int


class _Dealt(NamedTuple):
    """A stage on all cores."""

    seconds: float
    """Of the busiest."""
    work: Mapping[int, _Work]
    """By columns of an item."""


def _busy(made: Schedule) -> int:
    """Cores that have items."""
    return sum(any(map(len, made.ids(core))) for core in range(made.cores))


def _makespan(made: Schedule, chunks: Sequence[int], cost: CostModel) -> int:
    """Of a schedule, at other costs than it was made for."""
    split, each = made.split, made.heads * made.split.blocks
    if made.order is None:
        # All cost the same, and the first core has the most.
        units, tiles = made.ids(0)
        return len(units) * cost(chunks[0], split.width) + len(tiles) * cost(chunks[0], split.tile)
    return max(
        sum(cost(chunks[unit // each], split.width) for unit in units)
        + sum(cost(chunks[tile // split.parts // each], split.tile) for tile in tiles)
        for units, tiles in map(made.ids, range(made.cores))
    )


def _work(made: Schedule, lengths: Sequence[int], C: int) -> dict[int, _Work]:
    """What the items of a schedule compute, by their columns: each takes all chunks of its sequence."""
    split = made.split
    each = made.heads * split.blocks
    if made.order is None:
        tiled = [min(each, max(0, each * (n + 1) - split.whole)) for n in range(len(lengths))]
    else:
        tiled = [0] * len(lengths)
        for core in range(made.cores):
            for tile in made.ids(core)[1]:
                tiled[tile // split.parts // each] += 1
        tiled = [tiles // split.parts for tiles in tiled]
    found: dict[int, _Work] = {}
    for columns, numbers in (
        (split.width, [each - some for some in tiled]),
        (split.tile, [some * split.parts for some in tiled]),
    ):
        chunks = sum(number * -(-length // C) for number, length in zip(numbers, lengths, strict=True))
        tokens = sum(number * length for number, length in zip(numbers, lengths, strict=True))
        if chunks:
            found[columns] = _Work(chunks, tokens)
    return found


@dataclass(frozen=True)
class ItemCost:
    """Picoseconds of an item of so many chunks and columns on one core: `cost` deals heads to cores by it, `plan` too
    where no Triton kernel runs."""

    op: str
    chip: Chip
    shape: ChunkShape
    machine: Machine
    mapping: str = "head"
    stage: str = "head"
    variant: Variant = "planned"
    longest: int = _STEADY
    """Chunks of the longest sequence: layouts may be others for a few."""
    busy: int | None = None
    """Cores that have work, which share global memory; all by default."""

    def __call__(self, chunks: int, columns: int) -> int:
        names = self.op, self.mapping, self.stage
        busy = self.busy or self.chip.aicores
        chunk = _Chunk(*names, self.shape, columns, self.chip, self.variant, self.longest, busy)
        step = _step(chunk, self.machine.operator)
        return _picoseconds(self.machine.item + step.first + (chunks - 1) * step.seconds)


def machine_of(chip: Chip) -> Machine:
    """The figures that a chip's table does not have."""
    return TRITON if chip.triton else MACHINE


def schedule_cost(op: str) -> ScheduleCost:
    """The cost model of `schedule.schedule` for the kernels of an op.

    Args:
        op: a name in `dataflow.RECURRENCES`.

    Raises:
        ValueError: the op does not exist.
    """
    if op not in RECURRENCES:
        raise ValueError(f"op must be one of {', '.join(RECURRENCES)}, got {op!r}")
    return ScheduleCost(fixed=SCHEDULE_FIXED[RECURRENCES[op].decay])


def _picoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e12))


# One chunk on one core


Engine = Literal["load", "store", "matrix", "vector"]


class _Instruction(NamedTuple):
    name: str
    engine: Engine
    seconds: float
    """At the chip's rates."""
    issues: int
    """Times that `Machine.operator` is paid."""
    needs: tuple[str, ...]
    early: bool = False
    """Whether it loads an input of the op, which may be done before the chunk begins."""


class _Chunk(NamedTuple):
    """What a core computes of a chunk in a stage of a mapping: a number of columns of the state."""

    op: str
    mapping: str
    stage: str
    shape: ChunkShape
    columns: int
    chip: Chip
    variant: Variant
    longest: int = _STEADY
    busy: int = 1


class _Program(NamedTuple):
    """One chunk of a stage on one core."""

    instructions: tuple[_Instruction, ...]
    state: tuple[str, str]
    paths: Mapping[str, int]
    """Bytes by way."""
    places: int
    """Of each input."""
    spilled: tuple[int, int]
    """Bytes loaded from and stored to global memory beside inputs and results."""
    workspace: int
    """Bytes that go from one unit to the other by way of global memory, once in each direction."""
    macs: int
    element_ops: int


@lru_cache(maxsize=1024)
def _program(chunk: _Chunk) -> _Program:
    op, chip, variant = chunk.op, chunk.chip, chunk.variant
    shape = replace(chunk.shape, V=min(chunk.columns, chunk.shape.V))
    if chunk.mapping != "head":
        part = partition(chunk.mapping, op, shape)
        graph = _stage_graph(part, part.stages[part.stage(chunk.stage)], chip)
        order, layouts = semantic_order(graph), naive_layouts(graph, chip)
        places = _places(graph, order, chip)
        spilled = 0, 0
    elif variant == "mapped":
        graph = _spilled(rereading(placed(semantic(op, shape), chip)))
        order, layouts = semantic_order(graph), naive_layouts(graph, chip)
        places = _places(graph, order, chip)
        state = shape.K * shape.V * ITEMSIZE[shape.dtype]
        spilled = state, state
    else:
        ordered, layouts = fitted(op, shape, chip, chunk.longest)
        graph, order, places = ordered.graph, ordered.order, ordered.buffers
        layouts = layouts if variant == "planned" else naive_layouts(graph, chip)
        stored = sum(
            graph.tensors[one.output].bytes
            for one in graph.operators
            if (graph.tensors[one.output].space, graph.tensors[one.output].role) == ("GM", "intermediate")
        )
        spilled = ordered.spill_bytes - stored, stored
    made = _program_of(graph, order, layouts, chip, places, chunk.busy)
    return made._replace(spilled=spilled)


def _program_of(
    graph: Graph, order: Sequence[str], layouts: LayoutPlan, chip: Chip, places: int, busy: int
) -> _Program:
    workspace = 0
    through_memory = chip.vector_to_cube == "global_memory"
    changes: dict[str, list[float]] = {}
    on_the_way: dict[str, float] = {}
    for change in layouts.transforms:
        if change.unit == "vector":
            changes.setdefault(change.operator, []).append(change.seconds)
        else:
            on_the_way[change.operator] = on_the_way.get(change.operator, 0.0) + change.seconds
    tensors = graph.tensors
    loads = operand_loads(graph, order, l0(chip))
    paths = {"L1->L0": sum(map(sum, loads.values()))}
    found: list[_Instruction] = []
    for name in order:
        one = graph.producer[name]
        needs = one.inputs
        for seconds in changes.get(name, ()):
            found.append(_Instruction(f"{name}: layout {len(found)}", "vector", seconds, 1, one.inputs))
            needs = (*needs, found[-1].name)
        if one.unit == "matrix":
            sides = zip(loads[name], _l0_rates(chip), strict=True)
            seconds = max(sum(size / rate for size, rate in sides), graph.macs(one) / _macs(chip, graph.shape.dtype))
            issues = solve_steps(graph.shape.C) if one.expr[0] == "invert" else 1
            found.append(_Instruction(name, "matrix", seconds, issues, needs))
        elif one.unit == "vector":
            seconds = layouts.costs.execute(graph, one, layouts.layouts[name])
            found.append(_Instruction(name, "vector", seconds, 1, needs))
        else:
            source, target = tensors[one.inputs[0]], tensors[name]
            size = min(source.bytes, target.bytes)
            ways = [f"{source.space}->{target.space}"]
            if through_memory and "GM" not in (source.space, target.space):
                ways = [f"{source.space}->GM", f"GM->{target.space}"]
                workspace += size
            for way in ways:
                paths[way] = paths.get(way, 0) + size
            rate = _rate(chip, str(source.space), str(target.space), busy)
            seconds = on_the_way.get(name, 0.0) + size / rate
            engine: Engine = "load" if source.space == "GM" else "vector" if source.space == "L0C" else "store"
            found.append(_Instruction(name, engine, seconds, 1, needs, source.role == "input"))
    return _Program(
        tuple(found),
        graph.state,
        MappingProxyType(paths),
        places,
        (0, 0),
        workspace,
        graph.total_macs,
        graph.total_element_ops,
    )


@lru_cache(maxsize=4096)
def _step(chunk: _Chunk, operator: float) -> Step:
    return _timed(_program(chunk), operator)


def _timed(program: _Program, operator: float) -> Step:
    """The engines over four chunks of a head."""
    free: dict[Engine, float] = {}
    ends: list[float] = []
    following = 0.0
    for _ in range(4):
        # An input with two places is loaded when the chunk before the last one is done, with one after the last.
        begin = ends[-program.places] if len(ends) >= program.places else 0.0
        done = {program.state[0]: following}
        for one in program.instructions:
            start = max([free.get(one.engine, 0.0), *(done.get(name, 0.0) for name in one.needs)])
            start = max(start, begin) if one.early else start
            done[one.name] = free[one.engine] = start + one.seconds + one.issues * operator
        following = done.get(program.state[1], 0.0)
        ends.append(max(done.values()))
    return Step(ends[0], ends[-1] - ends[-2])


def solve_steps(C: int) -> int:
    """Operators in the chain of a triangular inverse of C rows: the rows of its diagonal blocks of 16, all blocks at
    once, one after another; then, for each doubling of the blocks, two products, each with a move of its result from
    the matrix unit and a move back."""
    block = min(C, 16)
    levels = max(0, -(-C // block) - 1).bit_length()
    return (block - 1) + levels * 2 * 3


class Fitted(NamedTuple):
    """How a core computes a chunk."""

    ordered: Ordered
    layouts: LayoutPlan

    @property
    def ub_bytes(self) -> tuple[int, ...]:
        """Of UB during each step, with what layouts add."""
        ordered = self.ordered
        return occupied(ordered.graph, ordered.order, self.layouts, ordered.buffers)


@lru_cache(maxsize=1024)
def fitted(op: str, shape: ChunkShape, chip: Chip, chunks: int = _STEADY) -> Fitted:
    """The order and the layouts of a chunk: what a plan shows, and what it costs.

    Orders that are equal in memory differ by a tenth in time, which no count tells. So those of wider chunks are tried,
    too, and of all that fit the quickest is taken: in one order no chunk takes longer than a wider one.

    Args:
        op: a name in `dataflow.RECURRENCES`.
        shape: of the chunk, with the columns that are computed at once.
        chip: whose memories it must fit, with what layouts add in UB.
        chunks: of the longest sequence.

    Raises:
        ValueError: there is none; the message says what would fit.
    """
    own = _fitted(op, shape, chip, chunks)
    if own.ordered.spilled:
        return own
    graph, buffers = own.ordered.graph, own.ordered.buffers
    found = [own]
    for order in _orders(op, shape, chip, buffers):
        one = Fitted(Ordered(graph, order, peaks(graph, order, buffers), buffers), own.layouts)
        if _fits(dict(one.ordered.peaks) | {"UB": max(one.ub_bytes)}, chip):
            found.append(one)
    return min(found, key=lambda one: _seconds(one, chip, chunks))


def _seconds(one: Fitted, chip: Chip, chunks: int) -> float:
    """Of so many chunks of a head."""
    ordered = one.ordered
    made = _program_of(ordered.graph, ordered.order, one.layouts, chip, ordered.buffers, chip.aicores)
    step = _timed(made, MACHINE.operator)
    return step.first + (chunks - 1) * step.seconds


def _orders(op: str, shape: ChunkShape, chip: Chip, buffers: int) -> Iterator[Order]:
    """Those of wider chunks, each once."""
    wider = dict.fromkeys(
        (
            *(replace(shape, V=max(shape.V, tile)) for tile in TILES),
            replace(shape, K=max(shape.K, 128), V=max(shape.V, 128)),
            replace(shape, dtype=shape.accumulate),
        )
    )
    yield from dict.fromkeys(_best(op, one, chip, buffers) for one in wider if one != shape)


@lru_cache(maxsize=1024)
def _best(op: str, shape: ChunkShape, chip: Chip, buffers: int) -> Order:
    return best(placed(rewritten(semantic(op, shape)), chip), chip, buffers).order


@lru_cache(maxsize=1024)
def _fitted(op: str, shape: ChunkShape, chip: Chip, chunks: int) -> Fitted:
    """With the order of least memory."""
    graph, kept = placed(rewritten(semantic(op, shape)), chip), 0
    while True:
        try:
            ordered = fit(graph, replace(chip, ub_bytes=chip.ub_bytes - kept))
        except ValueError as error:
            if not kept:
                raise
            taken = kept * chip.vector_per_core
            raise ValueError(f"with {taken} bytes of UB kept for copies in other layouts: {error}") from error
        found = Fitted(ordered, plan_layouts(ordered.graph, chip, chunks))
        over = max(found.ub_bytes) - capacities(chip)["UB"]
        if over <= 0:
            return found
        kept += -(-over // chip.vector_per_core)


@lru_cache(maxsize=1024)
def _possible(op: str, shape: ChunkShape, chip: Chip, chunks: int) -> bool:
    try:
        fitted(op, shape, chip, chunks)
    except ValueError:
        return False
    return True


def _places(graph: Graph, order: Sequence[str], chip: Chip) -> int:
    """Of each input: one where only that fits."""
    return 2 if _fits(peaks(graph, order, 2), chip) or not _fits(peaks(graph, order, 1), chip) else 1


def _fits(needed: Mapping[Space, int], chip: Chip) -> bool:
    return all(needed[space] <= size for space, size in capacities(chip).items())


def _spilled(graph: Graph) -> Graph:
    """The old state's second copy for the matrix unit, made by way of global memory: that is the paper's spill, 64 KiB
    per chunk and head. What `order.fit` spills for its own accounting of buffers may be less."""
    state = graph.state[0]
    first, *others = [one for one in graph.readers[state] if one.unit == "move"]
    tensors, operators = dict(graph.tensors), list(graph.operators)
    for one in others:
        kept = f"{one.output}@GM"
        tensors[kept] = replace(tensors[one.output], name=kept, space="GM")
        operators.insert(operators.index(first), Operator(kept, ("move", state), one.phase, "move"))
        operators[operators.index(one)] = replace(one, expr=("move", kept))
    return verify(replace(graph, tensors=tensors, operators=tuple(operators)))


def _stage_graph(part: Partition, stage: Stage, chip: Chip) -> Graph:
    """The placed graph of a stage: what it reads from global memory are inputs, what it writes is moved there."""
    whole_graph = part.graph
    state = whole_graph.state
    tensors: dict[str, Tensor] = {}
    made = {one.output for one in stage.operators}
    for name, tensor in whole_graph.tensors.items():
        if name in made:
            tensors[name] = replace(tensor, role="intermediate") if tensor.role == "output" else tensor
        elif name in stage.reads:
            dtype = next(
                (key for key, width in ITEMSIZE.items() if width * tensor.elements == stage.reads[name]), tensor.dtype
            )
            tensors[name] = replace(tensor, role="input", dtype=dtype)
        elif name == state[0] and stage.carries:
            tensors[name] = tensor
    if not stage.carries:
        # Every graph has a state; this one's is empty.
        state = ("no state", "no state")
        tensors["no state"] = Tensor("no state", (1, 1), whole_graph.shape.accumulate, "state_in")
    graph = placed(replace(whole_graph, tensors=tensors, operators=stage.operators, state=state), chip)
    tensors, operators = dict(graph.tensors), list(graph.operators)
    for name, size in stage.writes.items():
        source = tensors[name]
        if source.space == "L0C":
            copy = f"{name}@UB"
            if copy not in tensors:
                tensors[copy] = replace(source, name=copy, space="UB")
                operators.append(Operator(copy, ("move", name), stage.name, "move"))
            source = tensors[copy]
        dtype = next((key for key, width in ITEMSIZE.items() if width * source.elements == size), source.dtype)
        target = f"{name}@GM"
        tensors[target] = replace(source, name=target, role="intermediate", dtype=dtype, space="GM")
        operators.append(Operator(target, ("move", source.name), stage.name, "move"))
    return verify(replace(graph, tensors=tensors, operators=tuple(operators)))


# Rates. What is not known of a chip is taken from the 310P, whose ways the paper measured (Figure 2: "310 series").

_LIKE = find_chip("310P")


def _hertz(chip: Chip) -> float:
    return chip.rates.hertz or _LIKE.rates.hertz or 0.0


def _macs(chip: Chip, dtype: str) -> float:
    """Products per second of one core. Where the rate of 32 bits is not known it is that of 16."""
    known = chip.rates.fp32_macs_per_cycle if ITEMSIZE[dtype] == 4 else None
    return (known or chip.rates.macs_per_cycle or _LIKE.rates.macs_per_cycle or 0) * _hertz(chip)


def _memory(chip: Chip) -> float:
    """Bytes per second of all cores from global memory."""
    ways = chip.bandwidths
    return ways.gm_total or chip.aicores * (ways.gm_to_l1 or _memory(_LIKE) / _LIKE.aicores)


def _l0_rates(chip: Chip) -> tuple[float, float]:
    """Bytes per second from L1 to L0A and to L0B."""
    ways, like = chip.bandwidths, _LIKE.bandwidths
    return ways.l1_to_l0a or like.l1_to_l0a or 0.0, ways.l1_to_l0b or like.l1_to_l0b or 0.0


def _rate(chip: Chip, source: str, target: str, busy: int) -> float:
    """Bytes per second of a way on one core while so many work."""
    ways, like = chip.bandwidths, _LIKE.bandwidths
    detour = ways.ub_to_gm_to_l1 or (like.ub_to_gm_to_l1 if chip.vector_to_cube == "global_memory" else None)
    known: Mapping[tuple[str, str], tuple[float | None, ...]] = {
        ("GM", "L1"): (ways.gm_to_l1,),
        ("GM", "UB"): (ways.gm_to_ub,),
        ("UB", "GM"): (ways.ub_to_gm,),
        ("UB", "L1"): (ways.ub_to_l1, detour, like.ub_to_l1),
        ("L0C", "UB"): (ways.l0c_to_ub, detour, like.l0c_to_ub),
        ("L0C", "L1"): (ways.l0c_to_ub, detour, like.l0c_to_ub),
    }
    way = next((rate for rate in known[source, target] if rate is not None), None)
    share = _memory(chip) / busy
    if "GM" in (source, target):
        return min(share, way or share)
    assert way is not None
    return way
