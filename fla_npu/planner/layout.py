"""Which layout each tensor has and where it changes (HA-NPU, Section 6).

    plan = plan_layouts(placed(rewritten(semantic("gdn")), chip("310P")), chip("310P"), chunks=64)
    plan.layouts["u0"], plan.transforms, plan.seconds

Dense is row-major. Blocked is made of 16 x 16 tiles, rows within a tile and columns of tiles outermost, both sizes
rounded up to 16. Matrix operators read and write blocked tensors only; inputs and outputs in global memory are dense;
a vector operator takes both, with all its tensors in one layout, and is never slower in dense. The plan minimises
what vector operators take in the layouts chosen, plus all transforms, over all chunks of a sequence.

Why the plan is optimal. The paper prunes three times and then enumerates; here the same facts leave less to prove:

1. Only the state's layout crosses a chunk, so with `c(p, s)` the least cost of a chunk that finds the state in layout p
   and leaves it in s, the best plan follows from `D_i(s) = min_p [D_{i-1}(p) + c(p, s)]` (`least_path`).
2. Operands and results of matrix products and the tensors of global memory are anchored. Every other decision within
   a chunk is dense or blocked, and costs arise for one operator alone, or where a tensor is read in the layout that it
   does not have: once per tensor (a transformed copy serves all its readers in that layout) or once per move. Such a
   cost depends on one pair of decisions, is zero where they agree and not negative where they differ: so the plan is a
   least cut of a small graph, dense on one side and blocked on the other, found exactly in polynomial time
   (`_Cut`). In general PBQP is NP-hard; with two layouts and no cost for agreement this one is not.
3. A chain of vector operators is one operator here: `dataflow.fused` has left no tensor within it. The paper's
   argument that a chain needs no mixed layouts holds where only the chain's ends meet other layouts. It fails where a
   chain takes in a second matrix result on its way (then blocked up to there and dense after it may be best), so
   chains are not merged any further; the cut needs no merging to be fast.

Costs are whole attoseconds while the plan is made, so equal means equal; among equal plans the one with the fewest
blocked tensors is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from types import MappingProxyType
from typing import Literal, NamedTuple

from fla_npu.planner.chips import Chip
from fla_npu.planner.dataflow import ITEMSIZE, Expr, Graph, Node, Operator, Space, Tensor, shape_of
from fla_npu.planner.order import lifetimes

Layout = Literal["dense", "blocked"]
LAYOUTS: tuple[Layout, Layout] = ("dense", "blocked")

TILE = 16
"""Rows and columns of a tile."""

BLOCK_BYTES = 32
"""What all memories of a core are addressed in; a strided access moves one such block a cycle."""

_STRIDED = ("cumsum", "last", "t")
"""Functions that walk along single rows or columns, which a blocked tensor has in pieces."""

_ATTO = 10**18


class Way(NamedTuple):
    """A way between memories on which a layout can change, and what that adds to the copy."""

    source: Space
    target: Space
    seconds_per_byte: float
    """Of the tensor where it goes to, in blocked form."""
    unit: Literal["vector", "move"] = "move"
    """Whether the copy itself does it, or a pass of the vector unit over what is to be copied, rounded already."""


@dataclass(frozen=True)
class LayoutCosts:
    """Seconds of vector operators in both layouts and of transforms, on one core.

    A transform takes a tensor apart into rows of tiles, one or two blocks of 32 bytes each, at a stride. A vector
    instruction handles eight blocks a cycle, but rows of 512 bytes put all eight in one bank group, so it gets one; a
    copy gets one block a cycle, too. That is the default of every figure below that the chip's table does not give.
    """

    vector_seconds_per_byte: float
    """Of one element operation, per byte of its result."""
    transform_seconds_per_byte: float
    """Of a pass of the vector unit that changes a layout, per byte of the tensor in blocked form."""
    ways: tuple[Way, ...]
    """On others a copy keeps the layout."""
    broadcast: float = 2.0
    """Slowdown in blocked of an operation that repeats rows or columns: one instruction per column of tiles, two where
    rows repeat, not two in all. Assumed: with 15 cycles to start one, 64 x 128 takes 1.6 to 2.3 times as long."""
    strided: float = 8.0
    """Slowdown in blocked of running sums, of taking one row and of transposing: one block a cycle instead of eight."""

    def __post_init__(self) -> None:
        for name in ("vector_seconds_per_byte", "transform_seconds_per_byte"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be a number of seconds, not negative, got {getattr(self, name)!r}")
        for name in ("broadcast", "strided"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be at least 1 (dense is never slower), got {getattr(self, name)!r}")
        for way in self.ways:
            if not (isfinite(way.seconds_per_byte) and way.seconds_per_byte >= 0):
                raise ValueError(f"ways must add seconds, not negative, got {way}")
        if len({way[:2] for way in self.ways}) < len(self.ways):
            raise ValueError(f"ways must name each pair of memories once, got {self.ways}")

    @classmethod
    def of(cls, chip: Chip) -> "LayoutCosts":
        """The costs of a chip.

        All copies to and from global memory transform on the way: in hardware on A2, A3 and A5, as copies of single
        blocks on the 310 series. So do results of the matrix unit on A2, A3 and A5, a row of a tile a cycle. No copy
        from the vector to the matrix unit does on the core: the vendor's library emulates it and advises a pass of the
        vector unit, which is cheaper after rounding. Where units meet in global memory, copies transform both ways.
        """
        hertz = chip.rates.hertz or _HERTZ
        vector_bytes = chip.rates.vector_bytes_per_cycle or _VECTOR_BYTES
        block = 1 / (BLOCK_BYTES * hertz)
        vector_pass = block / chip.vector_per_core

        def extra(strided: float, bandwidth: float | None) -> float:
            return max(0.0, strided - 1 / bandwidth) if bandwidth else 0.0

        paths = chip.bandwidths
        ways = [
            Way("GM", "L1", extra(block, paths.gm_to_l1)),
            Way("GM", "UB", extra(block, paths.gm_to_ub)),
            Way("UB", "GM", extra(block, paths.ub_to_gm or paths.gm_to_ub)),
        ]
        if chip.vector_to_cube == "global_memory":
            ways += [Way("UB", "L1", ways[0].seconds_per_byte), Way("L0C", "UB", extra(block, paths.l0c_to_gm))]
        else:
            ways.append(Way("UB", "L1", vector_pass, "vector"))
            if chip.family not in ("310P", "310B"):
                ways.append(Way("L0C", "UB", extra(block / 2, paths.l0c_to_ub)))
        return cls(
            vector_seconds_per_byte=1 / (vector_bytes * hertz * chip.vector_per_core),
            transform_seconds_per_byte=vector_pass,
            ways=tuple(ways),
            strided=vector_bytes / BLOCK_BYTES,
        )

    def execute(self, graph: Graph, operator: Operator, layout: Layout) -> float:
        """Seconds of a vector operator with all its tensors in a layout; 0 for operators of other units."""
        if operator.unit != "vector":
            return 0.0
        size = ITEMSIZE[graph.shape.accumulate]
        if layout == "dense":
            return graph.element_ops(operator) * size * self.vector_seconds_per_byte
        work = 0.0
        for node in _nodes(operator.expr):
            shape = shape_of(node, graph.tensors)
            operands = [shape_of(one, graph.tensors) for one in node[1:]]
            slowdown = 1.0
            if node[0] in _STRIDED:
                slowdown = self.strided
            elif any(one != shape for one in operands):
                slowdown = self.broadcast
            work += slowdown * prod(map(_padded, shape))
        return work * size * self.vector_seconds_per_byte

    def transform(self, tensor: Tensor) -> float:
        """Seconds of the vector pass that makes a tensor's copy in the other layout; infinite outside UB."""
        return blocked_bytes(tensor) * self.transform_seconds_per_byte if tensor.space == "UB" else inf

    def way(self, source: Tensor, target: Tensor) -> Way | None:
        """The way between two memories, if a layout can change on it: not that of a column into UB, which blocked form
        repeats over the width of a tile."""
        if target.space == "UB" and target.shape[1] == 1:
            return None
        return next((one for one in self.ways if one[:2] == (source.space, target.space)), None)

    def on_the_way(self, source: Tensor, target: Tensor) -> float:
        """Seconds that a change of layout adds to a copy between memories; infinite where it cannot change."""
        way = self.way(source, target)
        return inf if way is None else blocked_bytes(target) * way.seconds_per_byte


_HERTZ = 1e9
_VECTOR_BYTES = 256
"""Where the table does not know them; the choice of layouts hardly depends on either."""


def blocked_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in blocked form."""
    return prod(map(_padded, tensor.shape)) * ITEMSIZE[tensor.dtype]


def _padded(size: int) -> int:
    return -(-size // TILE) * TILE


def _nodes(expr: Expr) -> Iterator[Node]:
    if not isinstance(expr, str):
        yield expr
        for operand in expr[1:]:
            yield from _nodes(operand)


@dataclass(frozen=True)
class Transform:
    """One change of a tensor's layout in every chunk of a run."""

    tensor: str
    source: Layout
    target: Layout
    operator: str
    """Where it stands: a pass of the vector unit before this vector operator or move, the first in the order of
    `graph.operators` that needs it; else within this move."""
    unit: Literal["vector", "move"]
    path: str
    """`UB` for a copy that all readers can use, or the way of a move, such as `GM->L1`."""
    bytes: int
    """Read and written in UB by the vector unit; 0 for a move, which copies the same bytes anyway."""
    seconds: float


@dataclass(frozen=True)
class ChunkLayouts:
    """The plan of one chunk."""

    entry: Layout
    """Of the state when the chunk begins."""
    exit: Layout
    """Of the state when it ends."""
    layouts: Mapping[str, Layout]
    """In which each tensor is made. Readers that want the other one read a copy, see `transforms`."""
    transforms: tuple[Transform, ...]
    exec_seconds: float
    """Of vector operators in these layouts."""
    transform_seconds: float


@dataclass(frozen=True)
class Choice:
    """The decision for one chain of vector operators, which is one operator of the graph."""

    operator: str
    layout: Layout
    margin_seconds: float
    """How much longer a chunk takes at least if this operator, and nothing else, must take the other layout."""


@dataclass(frozen=True)
class LayoutPlan:
    """Layouts and transforms of a whole sequence of chunks, for one head on one core."""

    runs: tuple[tuple[int, ChunkLayouts], ...]
    """Numbers of equal chunks after each other, and their plan."""
    boundary: tuple[Transform, ...]
    """Of the state, when it is loaded before the first chunk and stored after the last."""
    choices: tuple[Choice, ...]
    """For the longest run."""
    costs: LayoutCosts
    exec_seconds: float
    """Of all chunks, as `transform_seconds` and `seconds`; products and plain copies are not in it."""
    transform_seconds: float
    transform_bytes: int

    @property
    def chunks(self) -> int:
        return sum(count for count, _ in self.runs)

    @property
    def seconds(self) -> float:
        return self.exec_seconds + self.transform_seconds

    @property
    def steady(self) -> ChunkLayouts:
        """The plan of the longest run; the first of equals."""
        return max(self.runs, key=lambda run: run[0])[1]

    @property
    def layouts(self) -> Mapping[str, Layout]:
        return self.steady.layouts

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return self.steady.transforms

    @property
    def state(self) -> Layout:
        """Of the state between chunks of the longest run."""
        return self.steady.exit


def plan_layouts(graph: Graph, chip: Chip, chunks: int = 1, costs: LayoutCosts | None = None) -> LayoutPlan:
    """The layouts of least total time.

    Args:
        graph: placed (`dataflow.placed`), possibly with spills.
        chip: whose costs are taken.
        chunks: of the sequence. A single one may want the state as it is loaded, where two want it blocked.
        costs: instead of the chip's.

    Raises:
        TypeError: chunks is not an int.
        ValueError: the graph is not placed, or chunks is less than 1.
    """
    return forced(graph, chip, {}, chunks, costs)


def naive_layouts(graph: Graph, chip: Chip, chunks: int = 1, costs: LayoutCosts | None = None) -> LayoutPlan:
    """What an implementation without a plan does: all vector operators and the state in dense, so that each tensor is
    transformed whenever it crosses between the units, where the way can't do it in a pass of its own. Arguments and
    errors as `plan_layouts`.
    """
    dense: dict[str, Layout] = {one.output: "dense" for one in graph.operators if one.unit == "vector"}
    return forced(graph, chip, {**dense, graph.state[0]: "dense"}, chunks, costs)


def forced(
    graph: Graph, chip: Chip, layouts: Mapping[str, Layout], chunks: int = 1, costs: LayoutCosts | None = None
) -> LayoutPlan:
    """The best plan in which some tensors are made in given layouts, in every chunk.

    Args:
        layouts: by name of the tensor.
        graph, chip, chunks, costs: as `plan_layouts`.

    Raises:
        TypeError, ValueError: as `plan_layouts`; or a tensor or layout does not exist, or no plan has these layouts.
    """
    if type(chunks) is not int:
        raise TypeError(f"chunks must be an int, got {type(chunks).__name__}")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if unplaced := [name for name, one in graph.tensors.items() if one.space is None]:
        raise ValueError(f"graph must be placed, got no memory for {', '.join(unplaced)}")
    for name, layout in layouts.items():
        if name not in graph.tensors:
            raise ValueError(f"layouts must be of tensors of the graph, got {name}")
        if layout not in LAYOUTS:
            raise ValueError(f"layout of {name} must be dense or blocked, got {layout!r}")
    chunk = _Chunk(graph, costs or LayoutCosts.of(chip), layouts)
    first, last = chunk.boundary(0), chunk.boundary(1)
    never = chunk.never * (chunks + 1)
    step = {(p, s): chunk.cost(p, s) if chunk.possible(p, s) else never for p in LAYOUTS for s in LAYOUTS}
    ends = {s: sum(_atto(one.seconds) for one in last[s]) for s in LAYOUTS}
    starts = {p: sum(_atto(one.seconds) for one in first[p]) for p in LAYOUTS}
    total, states = least_path(starts, step, ends, chunks)
    if total >= never:
        asked = ", ".join(f"{name} {layout}" for name, layout in layouts.items()) or "none prescribed"
        ways = ", ".join(f"{way.source}->{way.target}" for way in chunk.costs.ways)
        raise ValueError(f"layouts must be possible with layouts changing in UB and on {ways} only, got {asked}")

    runs = [(count, chunk.plan(p, s)) for count, p, s in _pairs(states)]
    boundary = (*first[states[0][0]], *last[states[-1][0]])
    steady = max(runs, key=lambda run: run[0])[1]
    return LayoutPlan(
        runs=tuple(runs),
        boundary=boundary,
        choices=tuple(chunk.choices(steady)),
        costs=chunk.costs,
        exec_seconds=sum(count * one.exec_seconds for count, one in runs),
        transform_seconds=sum(count * one.transform_seconds for count, one in runs)
        + sum(one.seconds for one in boundary),
        transform_bytes=sum(count * t.bytes for count, one in runs for t in one.transforms)
        + sum(one.bytes for one in boundary),
    )


def occupied(graph: Graph, order: Sequence[str], plan: LayoutPlan, buffers: int = 2) -> tuple[int, ...]:
    """Bytes of UB alive during each step of an order, in the layouts of a plan's longest run.

    `order.occupancy` counts each tensor once and dense. Here a blocked one takes whole tiles. Of a tensor that is read
    in the other layout there is a copy, from its first reader to its last; the tensor itself stays for its own readers.
    What the vector unit makes of a tensor on its way to L1 is there during the move. Arguments and errors are those of
    `order.occupancy`.
    """
    at = {name: step for step, name in enumerate(order)}
    reads = dict(plan.layouts) | {one.operator: one.source for one in plan.transforms if one.path != "UB"}
    copies = {one.tensor: one.target for one in plan.transforms if one.path == "UB"}
    alive = [0] * len(at)

    def add(name: str, layout: Layout, first: int, last: int) -> None:
        tensor = graph.tensors[name]
        for step in range(first, last + 1):
            alive[step] += blocked_bytes(tensor) if layout == "blocked" else tensor.bytes

    ends: dict[str, int] = {}
    for name, layout in copies.items():
        readers = graph.readers[name]
        copied = [at[one.name] for one in readers if reads[one.name] == layout]
        add(name, layout, min(copied), max(copied))
        ends[name] = max([min(copied), *(at[one.name] for one in readers if reads[one.name] != layout)])
    for one in plan.transforms:
        if one.unit == "vector" and one.path != "UB":
            add(one.tensor, one.target, at[one.operator], at[one.operator])
    for life in lifetimes(graph, order, buffers):
        if life.space == "UB":
            # Static places are taken throughout, whatever is read of them.
            throughout = (life.first, life.last) == (0, len(at) - 1)
            last = life.last if throughout else min(life.last, ends.get(life.tensor, life.last))
            add(life.tensor, plan.layouts[life.tensor], life.first, last)
    return tuple(alive)


def least_path(
    starts: Mapping[Layout, int], step: Mapping[tuple[Layout, Layout], int], ends: Mapping[Layout, int], chunks: int
) -> tuple[int, tuple[tuple[Layout, int], ...]]:
    """The state's layouts of least cost: `D_i(s) = min_p [D_{i-1}(p) + step(p, s)]` from `starts`, plus `ends`.

    Four steps per chunk at most. A chunk's choices depend on D_(i-1) only by the difference of its two values; once a
    chunk leaves this difference as it was, all later chunks choose and add the same, and are not computed. Among equals
    a state stays as it is, and then is dense.

    Returns:
        The cost, and the layouts before the first chunk and after each, as (layout, how often it follows itself + 1).
    """
    costs = dict(starts)
    before: list[tuple[int, dict[Layout, Layout]]] = []
    left = chunks
    while left:
        found: dict[Layout, int] = {}
        come: dict[Layout, Layout] = {}
        for s in LAYOUTS:
            found[s], _, come[s] = min((costs[p] + step[p, s], p != s, p) for p in reversed(LAYOUTS))
        added = {found[s] - costs[s] for s in LAYOUTS}
        same = left if len(added) == 1 else 1
        costs = {s: found[s] + (same - 1) * (found[s] - costs[s]) for s in LAYOUTS}
        before.append((same, come))
        left -= same
    total, _, state = min((costs[s] + ends[s], s != "dense", s) for s in LAYOUTS)
    runs: list[tuple[Layout, int]] = [(state, 1)]
    for same, come in reversed(before):
        while same:
            # A state that comes from itself does so in all of these chunks.
            count = same if come[state] == state else 1
            state = come[state]
            if runs[-1][0] == state:
                runs[-1] = (state, runs[-1][1] + count)
            else:
                runs.append((state, count))
            same -= count
    return total, tuple(reversed(runs))


def _pairs(states: tuple[tuple[Layout, int], ...]) -> Iterator[tuple[int, Layout, Layout]]:
    """Numbers of equal chunks after each other with the state's layouts before and after them."""
    for at, (state, count) in enumerate(states):
        if count > 1:
            yield count - 1, state, state
        if at + 1 < len(states):
            yield 1, state, states[at + 1][0]


def _atto(seconds: float) -> int:
    return round(seconds * _ATTO)


_Key = tuple[str, str]
"""("made", tensor): the layout it is made in; ("read", move): the layout in which a move reads its tensor."""


class _Chunk:
    """The decisions of one chunk as a cut: dense is the sink's side, blocked the source's."""

    def __init__(self, graph: Graph, costs: LayoutCosts, layouts: Mapping[str, Layout]) -> None:
        self.graph, self.costs = graph, costs
        self.never = 1
        """More than any plan costs."""
        self._terms: list[tuple[_Key | None, _Key | None, float]] = []
        """(a, b, seconds): paid where a is blocked and b is dense; None is blocked, dense for certain."""
        for name, tensor in graph.tensors.items():
            self._read(name)
            if (anchor := _anchor(tensor)) is not None:
                self._fix(("made", name), anchor)
            if name in layouts:
                self._fix(("made", name), layouts[name])
        for one in graph.operators:
            made: _Key = ("made", one.output)
            if one.unit == "vector":
                self._terms.append((made, None, costs.execute(graph, one, "blocked")))
                self._terms.append((None, made, costs.execute(graph, one, "dense")))
            if one.unit == "move":
                seconds = costs.on_the_way(graph.tensors[one.inputs[0]], graph.tensors[one.output])
                self._differ(("read", one.output), made, seconds)
        self.never += sum(_atto(seconds) for _, _, seconds in self._terms if seconds < inf)
        self._solved: dict[tuple[Layout, Layout], tuple[int, Mapping[_Key, Layout]]] = {}

    def _fix(self, key: _Key, layout: Layout) -> None:
        self._terms.append((key, None, inf) if layout == "dense" else (None, key, inf))

    def _differ(self, one: _Key, other: _Key, seconds: float) -> None:
        self._terms += [(one, other, seconds), (other, one, seconds)]

    def _read(self, name: str) -> None:
        """One pass serves all readers in a layout: it is paid if any reads blocked what is dense, or the reverse."""
        made: _Key = ("made", name)
        readers = [_reader(one) for one in self.graph.readers[name] if one.unit != "matrix"]
        seconds = self.costs.transform(self.graph.tensors[name])
        for side in LAYOUTS:
            copy: _Key = (side, name)
            for reader in readers:
                self._terms.append((reader, copy, inf) if side == "blocked" else (copy, reader, inf))
            if readers:
                self._terms.append((copy, made, seconds) if side == "blocked" else (made, copy, seconds))

    def _solve(self, fixed: Mapping[str, Layout]) -> tuple[int, Mapping[_Key, Layout]]:
        cut = _Cut()
        ends: list[tuple[_Key | None, _Key | None, float]] = []
        for name, layout in fixed.items():
            ends.append((("made", name), None, inf) if layout == "dense" else (None, ("made", name), inf))
        for one, other, seconds in [*self._terms, *ends]:
            cut.pay(
                one or _Cut.ONE, other or _Cut.ZERO, min(_atto(seconds), self.never) if seconds < inf else self.never
            )
        cost, ones = cut.least()
        keys: list[_Key] = [("made", name) for name in self.graph.tensors]
        keys += [("read", one.output) for one in self.graph.operators if one.unit == "move"]
        return cost, {key: "blocked" if key in ones else "dense" for key in keys}

    def _state(self, entry: Layout, exit: Layout) -> dict[str, Layout]:
        return {self.graph.state[0]: entry, self.graph.state[1]: exit}

    def _at(self, entry: Layout, exit: Layout) -> tuple[int, Mapping[_Key, Layout]]:
        if (entry, exit) not in self._solved:
            self._solved[entry, exit] = self._solve(self._state(entry, exit))
        return self._solved[entry, exit]

    def cost(self, entry: Layout, exit: Layout) -> int:
        """c(p, s) in attoseconds."""
        return self._at(entry, exit)[0]

    def possible(self, entry: Layout, exit: Layout) -> bool:
        """Whether the layouts asked for allow it."""
        return self.cost(entry, exit) < self.never

    def plan(self, entry: Layout, exit: Layout) -> ChunkLayouts:
        _, found = self._at(entry, exit)
        layouts: dict[str, Layout] = {name: found["made", name] for name in self.graph.tensors}
        transforms = tuple(self._transforms(found))
        vector = [one for one in self.graph.operators if one.unit == "vector"]
        return ChunkLayouts(
            entry,
            exit,
            MappingProxyType(layouts),
            transforms,
            sum(self.costs.execute(self.graph, one, layouts[one.output]) for one in vector),
            sum(one.seconds for one in transforms),
        )

    def _transforms(self, found: Mapping[_Key, Layout]) -> Iterator[Transform]:
        copied = set()
        for one in self.graph.operators:
            if one.unit == "matrix":
                continue
            wanted = found[_reader(one)]
            for name in one.inputs:
                tensor = self.graph.tensors[name]
                if found["made", name] != wanted and name not in copied:
                    copied.add(name)
                    yield _pass(tensor, found["made", name], one.output, self.costs)
            if one.unit == "move" and found["made", one.output] != wanted:
                tensor, target = self.graph.tensors[one.inputs[0]], self.graph.tensors[one.output]
                yield _on_the_way(tensor, target, wanted, one.output, self.costs)

    def boundary(self, end: int) -> dict[Layout, tuple[Transform, ...]]:
        """What it takes to load (end 0) or store (end 1) the state, dense in global memory, by its layout in UB."""
        name = self.graph.state[end]
        state = self.graph.tensors[name]
        memory = Tensor(name, state.shape, state.dtype, state.role, "GM")
        source, target = (state, memory) if end else (memory, state)
        here: Layout = "blocked" if end else "dense"
        ways = [
            _on_the_way(source, target, here, name, self.costs),
            _pass(state, here, name, self.costs),
        ]
        return {"dense": (), "blocked": (min(ways, key=lambda one: one.seconds),)}

    def choices(self, steady: ChunkLayouts) -> Iterator[Choice]:
        cost = self.cost(steady.entry, steady.exit)
        for one in self.graph.operators:
            if one.unit != "vector":
                continue
            layout = steady.layouts[one.output]
            other = LAYOUTS[1 - LAYOUTS.index(layout)]
            if one.output == self.graph.state[1]:
                dearer = self.cost(other, other)
            else:
                dearer, _ = self._solve({**self._state(steady.entry, steady.exit), one.output: other})
            yield Choice(one.output, layout, inf if dearer >= self.never else (dearer - cost) / _ATTO)


def _reader(one: Operator) -> _Key:
    """The decision that says in which layout an operator reads: its own for a move, its result's otherwise."""
    return ("read" if one.unit == "move" else "made", one.output)


def _anchor(tensor: Tensor) -> Layout | None:
    if tensor.space in ("L1", "L0C"):
        return "blocked"
    if tensor.space == "GM" and tensor.role != "intermediate":
        return "dense"
    return None


def _other(layout: Layout) -> Layout:
    return "blocked" if layout == "dense" else "dense"


def _pass(tensor: Tensor, source: Layout, operator: str, costs: LayoutCosts) -> Transform:
    seconds = costs.transform(tensor)
    return Transform(tensor.name, source, _other(source), operator, "vector", "UB", _both(tensor), seconds)


def _both(tensor: Tensor) -> int:
    """Bytes of the tensor in both layouts."""
    return tensor.bytes + blocked_bytes(tensor)


def _on_the_way(source: Tensor, target: Tensor, layout: Layout, operator: str, costs: LayoutCosts) -> Transform:
    way = costs.way(source, target)
    unit = "move" if way is None else way.unit
    path = f"{source.space}->{target.space}"
    moved = _both(target) if unit == "vector" else 0
    return Transform(target.name, layout, _other(layout), operator, unit, path, moved, costs.on_the_way(source, target))


class _Cut:
    """Labels 0 or 1 of least cost, where a pair pays if its first is 1 and its second 0: a least cut, by Dinic's
    algorithm on whole numbers. Of equal labellings the one with the fewest ones (they are a lattice).
    """

    ONE: _Key = ("", "one")
    ZERO: _Key = ("", "zero")

    def __init__(self) -> None:
        self._left: dict[_Key, dict[_Key, int]] = {self.ONE: {}, self.ZERO: {}}

    def pay(self, one: _Key, zero: _Key, cost: int) -> None:
        forward = self._left.setdefault(one, {})
        forward[zero] = forward.get(zero, 0) + cost
        self._left.setdefault(zero, {}).setdefault(one, 0)

    def least(self) -> tuple[int, set[_Key]]:
        """The cost, and the nodes labelled 1. Uses the object up."""
        total = 0
        while self.ZERO in (levels := self._levels()):
            untried = {node: list(following) for node, following in self._left.items()}
            while pushed := self._push(self.ONE, None, levels, untried):
                total += pushed
        return total, set(levels)

    def _levels(self) -> dict[_Key, int]:
        levels = {self.ONE: 0}
        for node in (queue := [self.ONE]):
            for following, left in self._left[node].items():
                if left and following not in levels:
                    levels[following] = levels[node] + 1
                    queue.append(following)
        return levels

    def _push(
        self, node: _Key, most: int | None, levels: Mapping[_Key, int], untried: Mapping[_Key, list[_Key]]
    ) -> int:
        if node == self.ZERO:
            return most or 0
        while untried[node]:
            following = untried[node][-1]
            left = self._left[node][following]
            if left and levels.get(following) == levels[node] + 1:
                pushed = self._push(following, left if most is None else min(most, left), levels, untried)
                if pushed:
                    self._left[node][following] -= pushed
                    self._left[following][node] += pushed
                    return pushed
            untried[node].pop()
        return 0
