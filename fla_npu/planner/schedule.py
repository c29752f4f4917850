"""Which core does what: whole heads, column tiles of the residual heads, and what would better go by chunks.

A persistent kernel runs one program per core. Its work is the columns of the states of all (sequence, value head)
pairs. A *unit* is one such pair (or one of `Split.blocks` column blocks of it, where no allowed tile is as wide as
the head); units are numbered block within head within sequence. The three tiers of HA-NPU (Section 4):

1. whole units, one after another on one core;
2. residual units, too few to give every core one, as column tiles. Columns of a state do not depend on each other;
   rows do, and are never split. Every tile of a unit repeats its score matrices and its solve, so tiles are not free
   (`Cost`) and are used only where they end earlier than whole units;
3. extreme tails chunk by chunk on all cores, in a launch of its own: reported as `Schedule.tail`, never dealt here.

What a kernel walks, without a host-device sync before the launch:

    # closed form (`Schedule.order` is None): five integers, no table. Enough whenever lengths are equal or unknown.
    for unit in range(pid, whole, cores):                                  # columns block * width ..
        ...
    for t in range(whole * parts + pid, units * parts, cores):             # tile t of unit t // parts
        unit = t // parts; first column = block * width + t % parts * tile
    # with a table (int32, lengths known on the host and unequal): the same ids, read from `order.ids`
    for j in range(bounds[2 * pid], bounds[2 * pid + 1]):      unit = ids[j]
    for j in range(bounds[2 * pid + 1], bounds[2 * pid + 2]):  t = ids[j]
    # both
    block = unit % blocks; head = unit // blocks % heads; sequence = unit // (blocks * heads)

Guarantees, with `bound` the work of whole units divided evenly over the cores and `longest` the costliest unit:
the makespan is at most `bound + longest`, at most that of whole units dealt round-robin (equal lengths) or longest
first (unequal, or `bound * 65 / 64` where that is more), and within 4/3 of the best deal of whole units.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, chain
from operator import index
from typing import NamedTuple

TILES = (32, 64, 128)
"""Column tiles that the kernels take."""

TAIL_FACTOR = 1.2
"""A makespan beyond this multiple of the divisible load makes a tail worth a launch of its own. The paper's example,
16 heads on 10 cores, is 1.25 with whole heads alone."""

_SMALL = 64
"""Units below `bound / _SMALL` are dealt in runs, not one by one: they cannot cost more than that in balance."""


@dataclass(frozen=True)
class Cost:
    """Time of an item in units of one column of one chunk: `(chunks + start) * (fixed + column * columns)`.

    `fixed` is what scores and solve of a chunk cost whatever its columns; `cost.schedule_cost` has it for the kernels
    of an op. `start` stands for the state's way in and out and for filling the pipeline; it is an assumption, not a
    measurement, and it keeps empty sequences from being free.
    """

    fixed: int
    column: int = 1
    start: int = 1

    def __call__(self, chunks: int, columns: int) -> int:
        return (chunks + self.start) * (self.fixed + self.column * columns)


CostModel = Callable[[int, int], int]
"""Cost of an item of so many chunks and columns, columns counted with padding; at least 1."""


class Item(NamedTuple):
    """Columns `column .. column + columns` of the state of one head of one sequence."""

    sequence: int
    head: int
    column: int
    columns: int


@dataclass(frozen=True)
class Split:
    """The integers of the closed form; `width`, `tile`, `parts` and `blocks` are compile-time constants of a kernel."""

    units: int
    whole: int
    """Units below this are whole (closed form only; a table says which are)."""
    width: int
    """Columns of a whole unit, with padding."""
    tile: int
    """Columns of a tile, with padding; `width` where there are no tiles."""
    parts: int
    """Tiles of a unit; 1 where there are no tiles."""
    blocks: int
    """Units of a head."""


@dataclass(frozen=True)
class Order:
    """Ids by core: of core p the units are `ids[bounds[2p]:bounds[2p+1]]`, the tiles `ids[bounds[2p+1]:bounds[2p+2]]`.

    Both are int32 arrays that `torch.frombuffer` reads without a copy.
    """

    bounds: "array[int]"
    ids: "array[int]"


@dataclass(frozen=True)
class Tail:
    """The third tier: whole heads that would better be computed chunk by chunk, and the schedule of the others."""

    items: tuple[Item, ...]
    rest: "Schedule"


@dataclass(frozen=True)
class Schedule:
    """Items of each core, with what they cost in the model's unit."""

    split: Split
    order: Order | None
    cores: int
    heads: int
    value_dim: int
    makespan: int
    """Cost of the busiest core."""
    bound: float
    """Cost per core if whole units could be divided without end."""
    tail: Tail | None = None

    def ids(self, pid: int) -> tuple[Sequence[int], Sequence[int]]:
        """Whole units and tiles of a core, in the kernel's order; without a table they are ranges."""
        split = self.split
        if self.order is None:
            tiles = range(split.whole * split.parts + pid, split.units * split.parts, self.cores)
            return range(pid, split.whole, self.cores), tiles
        first, middle, end = self.order.bounds[2 * pid : 2 * pid + 3]
        return self.order.ids[first:middle], self.order.ids[middle:end]

    def core(self, pid: int) -> Iterator[Item]:
        """The items of a core, in the kernel's order."""
        units, tiles = self.ids(pid)
        yield from map(self.item, units)
        yield from map(self.part, tiles)

    def part(self, tile: int) -> Item:
        """The item of a tile's id."""
        return self.item(*divmod(tile, self.split.parts))

    def item(self, unit: int, part: int | None = None) -> Item:
        """A whole unit, or one of its tiles."""
        head, block = divmod(unit, self.split.blocks)
        first, columns = block * self.split.width, self.split.width
        end = min(first + columns, self.value_dim)
        if part is not None:
            first += part * self.split.tile
            end = min(first + self.split.tile, end)
        return Item(head // self.heads, head % self.heads, first, end - first)


def schedule(
    lengths: Sequence[int],
    heads: int,
    cores: int,
    *,
    value_dim: int,
    tiles: Sequence[int] = TILES,
    chunk: int = 64,
    cost: CostModel,
) -> Schedule:
    """The schedule for sequences whose lengths the host knows.

    Args:
        lengths: tokens of each sequence; there may be none, and a sequence may be empty.
        heads: value heads. Query heads do not matter.
        cores: programs of the launch.
        value_dim: columns of a state.
        tiles: column tiles that the kernel takes; the cheapest cover of `value_dim` makes a whole unit.
        chunk: tokens of a chunk.
        cost: the cost model.
    """
    found = _unequal(lengths, heads, cores, value_dim, tiles, chunk, cost)
    return found if isinstance(found, Schedule) else _with_tail(*found)


def makespan(
    lengths: Sequence[int],
    heads: int,
    cores: int,
    *,
    value_dim: int,
    tiles: Sequence[int] = TILES,
    chunk: int = 64,
    cost: CostModel,
) -> int:
    """That of the schedule, in a fraction of its time: no table is made. Arguments as those of `schedule`."""
    found = _unequal(lengths, heads, cores, value_dim, tiles, chunk, cost)
    return found.makespan if isinstance(found, Schedule) else found[0].makespan


def equal_schedule(
    n_sequences: int,
    heads: int,
    cores: int,
    *,
    value_dim: int,
    tiles: Sequence[int] = TILES,
    length: int | None = None,
    chunk: int = 64,
    cost: CostModel,
) -> Schedule:
    """The schedule for sequences of one length, or of lengths that the host does not know; needs no table.

    Without `length`, costs are per chunk and no tail is reported. Cached: a launcher may call it every time. Other
    arguments are those of `schedule`.
    """
    if length is not None:
        length = _length(length)
    return _equal_schedule(n_sequences, heads, cores, value_dim, tuple(tiles), length, chunk, cost)


@lru_cache(maxsize=4096)
def _equal_schedule(
    n_sequences: int,
    heads: int,
    cores: int,
    value_dim: int,
    tiles: tuple[int, ...],
    length: int | None,
    chunk: int,
    cost: CostModel,
) -> Schedule:
    shape = _shape(n_sequences, heads, cores, value_dim, tiles, cost)
    chunk = _positive("chunk", chunk)
    chunks = 1 if length is None else -(-length // chunk)
    whole_cost = cost(chunks, shape.width)
    # All full rounds are whole units: a round of them as tiles would be `parts` rounds, which cost no less.
    full = shape.units // cores * cores
    residual = shape.units - full

    def split(units: int, whole: int, tile: int, parts: int) -> Schedule:
        rounds = -(-(units - whole) * parts // cores)
        makespan = -(-whole // cores) * whole_cost + rounds * cost(chunks, tile)
        made = Split(units, whole, shape.width, tile, parts, shape.blocks)
        return Schedule(made, None, cores, shape.heads, shape.value_dim, makespan, units * whole_cost / cores)

    plans = [split(shape.units, shape.units, shape.width, 1)]
    plans += [split(shape.units, full, tile, parts) for tile, parts in shape.narrower if residual]
    best = min(plans, key=lambda plan: plan.makespan)
    if length is None or best.makespan <= TAIL_FACTOR * best.bound or chunks < cores:
        return best
    # As few units as possible go by chunks: what is left when tiles have filled every round that they can fill.
    rests = [split(full, full, shape.width, 1)]
    for tile, parts in shape.narrower:
        if tiled := residual * parts // cores * cores // parts:
            rests.append(split(full + tiled, full, tile, parts))
    earlier = [rest for rest in rests if rest.makespan < best.makespan and rest.split.units < shape.units]
    if not earlier:
        return best
    rest = min(earlier, key=lambda plan: (-plan.split.units, plan.makespan))
    left = range(rest.split.units, shape.units)
    return replace(best, tail=Tail(tuple(best.item(unit) for unit in left), rest))


class _Shape(NamedTuple):
    units: int
    heads: int
    cores: int
    value_dim: int
    width: int
    blocks: int
    narrower: tuple[tuple[int, int], ...]
    """(tile, tiles of a unit), widest first."""


class _Run(NamedTuple):
    """Units of one sequence, which cost the same."""

    cost: int
    chunks: int
    first: int
    number: int


class _Piece(NamedTuple):
    """Consecutive ids of one cost."""

    cost: int
    tiles: bool
    first: int
    number: int


class _Deal(NamedTuple):
    makespan: int
    cores: list[list[tuple[bool, range]]]
    """Of each core, whether they are tiles, and ids."""
    tile: int
    parts: int


def _shape(n_sequences: int, heads: int, cores: int, value_dim: int, tiles: Sequence[int], cost: CostModel) -> _Shape:
    n_sequences = index(n_sequences)
    if n_sequences < 0:
        raise ValueError(f"n_sequences must not be negative, got {n_sequences}")
    heads, cores, value_dim = _positive("heads", heads), _positive("cores", cores), _positive("value_dim", value_dim)
    tiles = sorted({_positive("tiles", tile) for tile in tiles}, reverse=True)
    if not tiles:
        raise ValueError("tiles must name at least one column tile, got none")
    width = min(tiles, key=lambda tile: -(-value_dim // tile) * cost(1, tile))
    blocks = -(-value_dim // width)
    last = value_dim - (blocks - 1) * width
    # The last block may be narrower than the others; a kernel's constant `parts` must hold for it as well.
    full = width if blocks > 1 else last
    narrower = tuple(
        (tile, -(-full // tile)) for tile in tiles if -(-full // tile) == -(-last // tile) > 1 and tile < width
    )
    units = n_sequences * heads * blocks
    most = units * max((parts for _, parts in narrower), default=1)
    if most + cores >= 2**31:
        raise ValueError(f"n_sequences * heads must stay below 2**31 items in all, got {most}: call in parts")
    return _Shape(units, heads, cores, value_dim, width, blocks, narrower)


def _positive(name: str, value: int) -> int:
    value = index(value)
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


def _length(value: int) -> int:
    value = index(value)
    if value < 0:
        raise ValueError(f"lengths must not be negative, got {value}")
    return value


def _unequal(
    lengths: Sequence[int],
    heads: int,
    cores: int,
    value_dim: int,
    tiles: Sequence[int],
    chunk: int,
    cost: CostModel,
) -> Schedule | tuple[_Deal, list[_Run], _Shape, CostModel]:
    """The deal of sequences, and what it was made from; of those that have equal numbers of chunks the schedule."""
    chunk = _positive("chunk", chunk)
    chunks = [-(-_length(length) // chunk) for length in lengths]
    if len(set(chunks)) <= 1:
        length = chunk * max(chunks, default=0)
        return equal_schedule(
            len(chunks), heads, cores, value_dim=value_dim, tiles=tiles, length=length, chunk=chunk, cost=cost
        )
    # Thousands of sequences have few lengths in chunks, and a model may be slow.
    cost = cache(cost)
    shape = _shape(len(chunks), heads, cores, value_dim, tiles, cost)
    by_sequence = sorted(range(len(chunks)), key=chunks.__getitem__, reverse=True)
    per_sequence = shape.heads * shape.blocks
    runs = [_Run(cost(chunks[n], shape.width), chunks[n], n * per_sequence, per_sequence) for n in by_sequence]
    return _deal(runs, shape, cost), runs, shape, cost


def _deal(runs: list[_Run], shape: _Shape, cost: CostModel) -> _Deal:
    """The best of: whole units alone; and for each tile, the longest units or the residual ones or both as tiles."""
    units = sum(run.number for run in runs)
    total = sum(run.cost * run.number for run in runs)
    small = total // (shape.cores * _SMALL)

    def deal(tile: int, parts: int, long: int, residual: int) -> _Deal:
        """Units of rank below `long` and from `residual` on as tiles."""
        pieces, rank = [], 0
        for run in runs:
            end = rank + run.number
            cuts = (rank, min(max(long, rank), end), max(min(residual, end), rank), end)
            for tiled, start, stop in ((True, cuts[0], cuts[1]), (False, cuts[1], cuts[2]), (True, cuts[2], end)):
                if start < stop:
                    first = run.first + start - rank
                    if tiled:
                        pieces.append(_Piece(cost(run.chunks, tile), True, first * parts, (stop - start) * parts))
                    else:
                        pieces.append(_Piece(run.cost, False, first, stop - start))
            rank = end
        return _Deal(*_assign(pieces, shape.cores, small), tile, parts)

    whole = [_Piece(run.cost, False, run.first, run.number) for run in runs]
    best = _Deal(*_assign(whole, shape.cores, small), shape.width, 1)
    full = units // shape.cores * shape.cores
    # Residual units matter only where they are not lost among the small ones.
    residuals = {units, full} if runs and runs[-1].cost > small else {units}
    longs = {0} | {sum(run.number for run in runs if run.cost * shape.cores * share > total) for share in (1, 4 / 3, 2)}
    for tile, parts in shape.narrower:
        for long in sorted(longs):
            for residual in sorted(residuals, reverse=True):
                if best.makespan * shape.cores <= total + total // _SMALL:
                    return best
                if 0 < long <= residual or residual < units:
                    best = min(best, deal(tile, parts, min(long, residual), residual), key=lambda one: one.makespan)
    return best


def _assign(pieces: list[_Piece], cores: int, small: int) -> tuple[int, list[list[tuple[bool, range]]]]:
    """Longest first, each item to the least loaded core; the small ones at the end in runs up to one level."""
    pieces = sorted(pieces, key=lambda piece: (-piece.cost, piece.tiles, piece.first))
    dealt: list[list[tuple[bool, range]]] = [[] for _ in range(cores)]
    heap = [(0, core) for core in range(cores)]
    heapify(heap)
    rest = []
    for piece in pieces:
        if piece.cost <= small:
            rest.append(piece)
            continue
        for i in range(piece.first, piece.first + piece.number):
            load, core = heap[0]
            dealt[core].append((piece.tiles, range(i, i + 1)))
            heapreplace(heap, (load + piece.cost, core))
    loads = sorted(heap)
    work = sum(piece.cost * piece.number for piece in rest)
    makespan = loads[-1][0]
    if work:
        below = 0
        for lowest, (load, _) in enumerate(loads, 1):
            below += load
            level = -(-(work + below) // lowest)
            if lowest == cores or loads[lowest][0] >= level:
                break
        rest.reverse()
        for load, core in loads[:lowest]:
            while load < level and rest:
                piece = rest.pop()
                taken = min(piece.number, -(-(level - load) // piece.cost))
                load += taken * piece.cost
                dealt[core].append((piece.tiles, range(piece.first, piece.first + taken)))
                if taken < piece.number:
                    rest.append(piece._replace(first=piece.first + taken, number=piece.number - taken))
            makespan = max(makespan, load)
    return makespan, dealt


def _with_tail(plan: _Deal, runs: list[_Run], shape: _Shape, cost: CostModel) -> Schedule:
    """The schedule of a deal; its tail are the units that take longer than the divisible load in any tile."""
    best = _tabled(plan, runs, shape)
    narrowest = min((tile for tile, _ in shape.narrower), default=shape.width)
    # Runs come longest first.
    count = sum(cost(run.chunks, narrowest) > best.bound and run.chunks >= shape.cores for run in runs)
    if best.makespan <= TAIL_FACTOR * best.bound or not count:
        return best
    rest = _tabled(_deal(runs[count:], shape, cost), runs[count:], shape)
    if rest.makespan >= best.makespan:
        return best
    items = (best.item(unit) for run in runs[:count] for unit in range(run.first, run.first + run.number))
    return replace(best, tail=Tail(tuple(items), rest))


def _tabled(plan: _Deal, runs: list[_Run], shape: _Shape) -> Schedule:
    listed = [[some for kind, some in core if kind == tiles] for core in plan.cores for tiles in (False, True)]
    bounds = array("i", accumulate((sum(map(len, ranges)) for ranges in listed), initial=0))
    ids = array("i", chain.from_iterable(chain.from_iterable(listed)))
    split = Split(shape.units, shape.units, shape.width, plan.tile, plan.parts, shape.blocks)
    bound = sum(run.cost * run.number for run in runs) / shape.cores
    return Schedule(split, Order(bounds, ids), shape.cores, shape.heads, shape.value_dim, plan.makespan, bound)
