"""Lifetimes of a chunk's tensors, and the order of its operators that needs the least memory.

What is alive in a memory during a step, by four rules:

* A tensor is alive from the step that makes it to its last reader. A move needs source and destination at once, so a
  product is whole in L0C and whole in UB while it moves.
* With `buffers=2`, inputs and outputs have two places for the whole chunk, so that the next chunk is loaded and the
  last one stored meanwhile (a queue of depth two, the custom on Ascend). With 1 they are tensors like others.
* The state's place is static, because the next chunk runs the same program. The new state is written over the old one
  if it reads it by elements and nothing reads it later; else there are two places for the chunk, which swap roles.
* A vector operator writes over an input of the same shape and bytes that dies with it, if it reads it by elements.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from fla_npu.planner.chips import Chip
from fla_npu.planner.dataflow import (
    RECURRENCES,
    Expr,
    Graph,
    Operator,
    Space,
    Tensor,
    leaves,
    placed,
    rewritten,
    semantic,
    substituted,
    verify,
)

SPACES: tuple[Space, ...] = ("UB", "L1", "L0C")
"""The memories whose bytes are counted."""

Order = tuple[str, ...]
"""Names of all operators of a graph, each after what it reads."""

_FIELD = 48
"""Bits of one memory's bytes where those of all are packed into one int, UB lowest; the topmost is spare."""
_UNLIMITED = (1 << _FIELD - 1) - 1
_SPARE = sum(1 << _FIELD * at + _FIELD - 1 for at in range(len(SPACES)))

_NOT_ELEMENTWISE = {"t", "last", "decay", "cumsum"}


@dataclass(frozen=True)
class Lifetime:
    """A tensor takes its bytes in a memory during the steps `first ... last`."""

    tensor: str
    space: Space
    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Ordered:
    """A placed graph in an order, and the most bytes alive in each memory."""

    graph: Graph
    order: Order
    peaks: Mapping[Space, int]
    buffers: int = 2
    """Places of each input and output."""
    spilled: tuple[str, ...] = ()
    """Tensors that wait in global memory between two uses."""
    spill_bytes: int = 0
    """Bytes that they move to and from global memory, per chunk."""


def capacities(chip: Chip) -> Mapping[Space, int]:
    """Bytes of the memories of one core of a chip; a size that is not known is left out and limits nothing.

    Two vector cores share the work by rows, so their UBs count together.
    """
    ub = chip.ub_bytes * (chip.vector_cores // chip.aicores)
    sizes: Mapping[Space, int | None] = {"UB": ub, "L1": chip.l1_bytes, "L0C": chip.l0c_bytes}
    return {space: size for space, size in sizes.items() if size is not None}


def _unpacked(alive: int) -> tuple[int, ...]:
    return tuple(alive >> _FIELD * at & (1 << _FIELD) - 1 for at in range(len(SPACES)))


def _within(alive: int, limit: int) -> bool:
    """Whether packed bytes exceed a limit in no memory."""
    return (limit | _SPARE) - alive & _SPARE == _SPARE


class _Model:
    """A placed graph as bit masks over its operators, which are numbered as they stand."""

    def __init__(self, graph: Graph, buffers: int) -> None:
        if any(one.space is None for one in graph.tensors.values()):
            raise ValueError(
                f"graph must be placed on a chip, got the {graph.form} graph of {graph.op} with no memories"
            )
        if buffers not in (1, 2):
            raise ValueError(f"buffers must be 1 or 2, got {buffers!r}")
        self.graph = graph
        self.names = [one.name for one in graph.operators]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.all = (1 << len(self.names)) - 1
        self.readers = dict.fromkeys(graph.tensors, 0)
        self.before = []
        for i, one in enumerate(graph.operators):
            mask = 0
            for name in one.inputs:
                self.readers[name] |= 1 << i
                if name in self.index:
                    mask |= 1 << self.index[name]
            self.before.append(mask)
        self.state, self.new_state = graph.state
        self.static = self._static(buffers)
        self.counted = {
            name: SPACES.index(one.space)
            for name, one in graph.tensors.items()
            if one.space in SPACES and name not in self.static
        }
        self.over = [self._may_overwrite(one) for one in graph.operators]
        self.made = [self.bytes_of(one.output) for one in graph.operators]
        self.frees = [
            [(self.readers[name], self.bytes_of(name)) for name in (*one.inputs, one.output) if name in self.counted]
            for one in graph.operators
        ]

    def bytes_of(self, name: str) -> int:
        """Packed bytes of a tensor, 0 if it has a static place or is in global memory."""
        return self.graph.tensors[name].bytes << _FIELD * self.counted[name] if name in self.counted else 0

    def _static(self, buffers: int) -> dict[str, int]:
        """Places that a tensor has for the whole chunk, the state's second one aside."""
        graph = self.graph
        places = {name: 1 for name in graph.tensors if name == self.state}
        places |= {name: 0 for name in graph.tensors if name == self.new_state}
        for one in graph.operators:
            if one.unit != "move" or buffers == 1:
                continue
            source = graph.tensors[one.inputs[0]]
            if source.role == "input":
                places[one.output] = 2
            if graph.tensors[one.output].role == "output":
                places[source.name] = 2
        return places

    def _may_overwrite(self, one: Operator) -> tuple[int, ...]:
        """Readers of each input whose place the output may take."""
        if one.unit != "vector" or one.output not in self.counted:
            return ()
        tensors = self.graph.tensors
        output = tensors[one.output]
        whole = set(one.inputs) - set(_not_elementwise(one.expr))
        return tuple(
            self.readers[name]
            for name in one.inputs
            if name in whole and name in self.counted
            and (tensors[name].shape, tensors[name].bytes) == (output.shape, output.bytes)
        )  # fmt: skip

    def mask(self, names: Collection[str]) -> int:
        return sum(1 << self.index[name] for name in names)

    def delayed(self, mask: int) -> "_Model":
        """The same graph with the new state written after these operators."""
        if self.new_state not in self.index:
            return self
        later, at = copy(self), self.index[self.new_state]
        later.before = list(self.before)
        later.before[at] |= mask & ~(1 << at)
        return later

    def two_states(self, done: int) -> bool:
        """Whether the new state, written after `done`, may not take the old one's place."""
        at = self.index[self.new_state]
        later = self.readers.get(self.state, 0) & ~done & ~(1 << at)
        return bool(later) or self.state in _not_elementwise(self.graph.operators[at].expr)

    def reserve(self, states: int) -> int:
        """Packed bytes of the static places."""
        taken = 0
        for name, places in self.static.items():
            tensor = self.graph.tensors[name]
            if tensor.space in SPACES:
                size = tensor.bytes * (states if name == self.state else places)
                taken += size << _FIELD * SPACES.index(tensor.space)
        return taken

    def step(self, done: int, alive: int, i: int) -> tuple[int, int]:
        """Packed bytes during operator i and after it, given those before it."""
        rest = ~(done | 1 << i)
        during = after = alive + self.made[i]
        for readers in self.over[i]:
            if not readers & rest:
                during = alive
                break
        for readers, size in self.frees[i]:
            if not readers & rest:
                after -= size
        return during, after

    def least(self, start: int) -> list[int]:
        """Packed bytes that each operator needs in any order: of tensors made before and read by it or after it."""
        above = list(self.before)
        changed = True
        while changed:
            changed = False
            for i, mask in enumerate(above):
                for j in _ones(mask):
                    mask |= above[j]
                changed |= mask != above[i]
                above[i] = mask
        found = [start]
        for i, mask in enumerate(above):
            below = 1 << i | sum(1 << j for j, other in enumerate(above) if other >> i & 1)
            needed = start if self.over[i] else start + self.made[i]
            found.append(needed + sum(self.made[j] for j in _ones(mask) if self.readers[self.names[j]] & below))
        return found

    def ready(self, done: int) -> Iterator[int]:
        rest = ~done
        for i, before in enumerate(self.before):
            if not before & rest and not done >> i & 1:
                yield i


def _ones(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _not_elementwise(expr: Expr) -> Iterator[str]:
    """Tensors that an expression reads otherwise than element by element."""
    if isinstance(expr, str):
        return
    for operand in expr[1:]:
        if expr[0] in _NOT_ELEMENTWISE:
            yield from leaves(operand)
        else:
            yield from _not_elementwise(operand)


def _steps(graph: Graph, order: Sequence[str], buffers: int) -> tuple[_Model, list[int]]:
    """The model and the numbers of an order."""
    model = _Model(graph, buffers)
    if sorted(order) != sorted(model.names):
        raise ValueError(f"order must name each of the {len(model.names)} operators once, got {tuple(order)}")
    numbers, done = [model.index[name] for name in order], 0
    for i in numbers:
        if missing := model.before[i] & ~done:
            first = model.names[(missing & -missing).bit_length() - 1]
            raise ValueError(f"order must run {first} before {model.names[i]}")
        done |= 1 << i
    return model, numbers


def _states(model: _Model, numbers: Sequence[int]) -> int:
    if model.new_state not in model.index:
        return 1
    done = sum(1 << i for i in numbers[: numbers.index(model.index[model.new_state])])
    return 2 if model.two_states(done) else 1


def occupancy(graph: Graph, order: Sequence[str], buffers: int = 2) -> Mapping[Space, tuple[int, ...]]:
    """Bytes alive in each memory during each step of an order.

    Args:
        graph: placed.
        order: names of all operators.
        buffers: places of each input and output.

    Raises:
        ValueError: the graph is not placed; the order leaves out or repeats an operator, or runs one too early.
    """
    model, numbers = _steps(graph, order, buffers)
    alive, done, rows = model.reserve(_states(model, numbers)), 0, []
    for i in numbers:
        during, alive = model.step(done, alive, i)
        rows.append(_unpacked(during))
        done |= 1 << i
    return {space: tuple(row[at] for row in rows) for at, space in enumerate(SPACES)}


def peaks(graph: Graph, order: Sequence[str], buffers: int = 2) -> Mapping[Space, int]:
    """The most bytes alive in each memory; arguments and errors are those of `occupancy`."""
    return {space: max(rows, default=0) for space, rows in occupancy(graph, order, buffers).items()}


def lifetimes(graph: Graph, order: Sequence[str], buffers: int = 2) -> tuple[Lifetime, ...]:
    """When each tensor is alive, in the order of its first step; arguments and errors are those of `occupancy`.

    Static places are alive throughout. What is written over an input starts a step later than it is made: during that
    step the bytes are the input's.
    """
    model, numbers = _steps(graph, order, buffers)
    at = {model.names[i]: step for step, i in enumerate(numbers)}
    end = len(numbers) - 1
    states = _states(model, numbers)
    found = []
    for name, tensor in graph.tensors.items():
        if tensor.space not in SPACES:
            continue
        if name in model.static:
            places = states if name == model.state else model.static[name]
            found += [Lifetime(name, tensor.space, 0, end, tensor.bytes)] * places
            continue
        first = at[name]
        last = max((at[one.name] for one in graph.readers[name]), default=first)
        done = sum(1 << i for i in numbers[: first + 1])
        first += any(not readers & ~done for readers in model.over[model.index[name]])
        if first <= last:
            found.append(Lifetime(name, tensor.space, first, last, tensor.bytes))
    return tuple(sorted(found, key=lambda one: (one.first, one.last, one.tensor)))


# Operands of matrix products

L0 = tuple[int, int]
"""Bytes of, or moved to, L0A and L0B."""

_Operand = tuple[str, int]
"""Key and bytes."""
_Resident = tuple[tuple[_Operand, ...], tuple[_Operand, ...]]
"""What is in L0A and in L0B, least recently used first."""


def _operands(graph: Graph, one: Operator) -> tuple[_Operand, ...]:
    """Left and right operand of a product; the inverse reads one. A transposed operand is another one."""
    found = []
    for expr in one.expr[1:]:
        name, turned = (expr, "") if isinstance(expr, str) else (expr[1], "^T")
        found.append((f"{name}{turned}", graph.tensors[name].bytes))
    return tuple(found)


def l0(chip: Chip) -> L0:
    """Bytes of a chip's L0A and L0B."""
    return chip.l0a_bytes, chip.l0b_bytes


def _load(graph: Graph, one: Operator, resident: _Resident, sizes: L0) -> tuple[L0, _Resident]:
    """Bytes that a matrix operator loads to either side, and what is resident after it."""
    operands = _operands(graph, one)
    if one.expr[0] == "invert":
        # Its intermediates take both buffers (HA-NPU, Figure 11).
        return (sum(size for _, size in operands), 0), ((), ())
    loaded, sides = [], []
    for operand, side, capacity in zip(operands, resident, sizes, strict=True):
        loaded.append(0 if operand in side else operand[1])
        kept = [*(other for other in side if other != operand), operand]
        while sum(size for _, size in kept) > capacity:
            kept.pop(0)
        sides.append(tuple(kept))
    return (loaded[0], loaded[1]), (sides[0], sides[1])


def operand_loads(graph: Graph, order: Sequence[str], sizes: L0) -> Mapping[str, L0]:
    """Bytes that each matrix operator of a chunk loads from L1 to L0A and L0B.

    An operand that is still there is not loaded again; room is made by dropping the least recently used. One that is
    larger than its side goes through it in parts, once, and does not stay. The inverse drops all.

    Args:
        graph: placed.
        order: names of all operators.
        sizes: of the two buffers, `l0(chip)`; (0, 0) keeps nothing, as where each product is an operator of its own.
    """
    model, numbers = _steps(graph, order, 1)
    found, resident = {}, _EMPTY
    for i in numbers:
        one = model.graph.operators[i]
        if one.unit == "matrix":
            found[one.name], resident = _load(graph, one, resident, sizes)
    return found


def operand_traffic(graph: Graph, order: Sequence[str], sizes: L0) -> int:
    """Bytes of all `operand_loads`; arguments as there."""
    return sum(map(sum, operand_loads(graph, order, sizes).values()))


_EMPTY: _Resident = ((), ())


# Orders that have a name


def semantic_order(graph: Graph) -> Order:
    """The operators as they stand in the graph."""
    return tuple(one.name for one in graph.operators)


def rereading(graph: Graph) -> Graph:
    """The placed graph of separate operators: each phase brings its own copy of the old state to the matrix unit.

    With one copy for all, the operand copy in L1 serves the output after the state is written (Figure 10a of HA-NPU has
    no such copy: there the old state itself waits).
    """
    state = graph.tensors[graph.state[0]]
    moves = [one for one in graph.readers[state.name] if one.unit == "move"]
    tensors, operators = dict(graph.tensors), list(graph.operators)
    for move in moves:
        for phase in {one.phase: None for one in graph.readers[move.output] if one.phase != move.phase}:
            name = f"{move.output}:{phase}"
            tensors[name] = replace(graph.tensors[move.output], name=name)
            first = next(i for i, one in enumerate(operators) if move.output in one.inputs and one.phase == phase)
            operators = [
                replace(one, expr=substituted(one.expr, {move.output: name})) if one.phase == phase else one
                for one in operators
            ]
            operators.insert(first, replace(move, output=name, phase=phase))
    return verify(replace(graph, tensors=tensors, operators=tuple(operators)))


def state_first(graph: Graph, chip: Chip, buffers: int = 2) -> Ordered:
    """The order of `best` among those that write the new state before the output reads the old one.

    Its graph is that of `rereading`: the old state waits, so the state has two places.
    """
    graph = rereading(graph)
    model = _Model(graph, buffers)
    at = model.index[model.new_state]
    needed = 0
    for i in reversed(range(at + 1)):
        if i == at or needed >> i & 1:
            needed |= model.before[i]
    for i in range(len(model.names)):
        if i != at and model.readers[model.state] >> i & 1 and not needed >> i & 1:
            model.before[i] |= 1 << at
    found = _search(model, chip, 2)
    assert found is not None
    return _ordered(graph, found.order, buffers)


def is_chunk_first(graph: Graph, order: Sequence[str]) -> bool:
    """Whether the new state is written after the last product that reads the old one (HA-NPU, Figure 10b)."""
    at = {name: step for step, name in enumerate(order)}
    return all(at[name] <= at[graph.state[1]] for name in _old_state_readers(graph))


def _old_state_readers(graph: Graph) -> set[str]:
    """Operators that read the old state or a copy of it."""
    old, found = {graph.state[0]}, set()
    for one in graph.operators:
        if old & set(one.inputs):
            found.add(one.name)
            if one.unit == "move":
                old.add(one.output)
    return found


def is_gemm_first(graph: Graph, order: Sequence[str]) -> bool:
    """Whether every product that can do without the inverse runs before it (Figure 11c); true if there is none."""
    after: set[str] = set()
    for one in graph.operators:
        if one.expr[0] == "invert" or after & set(one.inputs):
            after.add(one.output)
    products = [name for name in order if graph.producer[name].unit == "matrix"]
    return [name in after for name in products] == sorted(name in after for name in products)


# The exact search


def best(graph: Graph, chip: Chip, buffers: int = 2) -> Ordered:
    """The order that needs the least memory, proven by exhaustion.

    Of all orders, those that take the smallest part of the fullest memory; of these, those with the fewest bytes of UB;
    of these, one that loads the fewest operands from L1, and if possible writes the state last. It may exceed the
    chip's memories: `fit` sees to that.

    Args:
        graph: placed on the chip.
        buffers: places of each input and output.

    Raises:
        ValueError: the graph is not placed.
    """
    found = None
    for states in (1, 2):
        found = _search(_Model(graph, buffers), chip, states, found) or found
    assert found is not None
    return _ordered(graph, found.order, buffers)


def _ordered(graph: Graph, order: Sequence[str], buffers: int) -> Ordered:
    return Ordered(graph, tuple(order), peaks(graph, order, buffers), buffers)


class _Found(NamedTuple):
    """An order with what it is chosen by."""

    part: float
    """Of the fullest memory."""
    ub: int
    traffic: int
    order: Order


def _search(model: _Model, chip: Chip, states: int, than: _Found | None = None) -> _Found | None:
    """The best order where the state has so many places; None if it is no better than another."""
    ways = [model]
    if states == 1:
        model = model.delayed(model.readers.get(model.state, 0))
        if model.new_state in model.index and model.two_states(model.all):
            return None
        ways = [model.delayed(model.mask(_old_state_readers(model.graph))), model]
    start, sizes = model.reserve(states), capacities(chip)

    def part(alive: int) -> float:
        """Of the fullest memory."""
        return max(size / sizes[space] for space, size in zip(SPACES, _unpacked(alive), strict=True) if space in sizes)

    def ub_bytes(alive: int) -> int:
        return alive & (1 << _FIELD) - 1

    if than is not None and max(map(part, model.least(start))) > than.part:
        return None
    # UB is the fullest memory nearly always; what it needs by itself spares most of the second search.
    ub = int(_minimax(model, start, ub_bytes))
    most = _minimax(model, start, part, part(ub))
    limit = sum(_most_bytes(most, sizes.get(space)) << _FIELD * at for at, space in enumerate(SPACES))
    if part(ub) < most:
        ub = int(_minimax(model, start, ub_bytes, ub, limit))
    limit += ub - ub_bytes(limit)
    found: tuple[int, tuple[int, ...]] | None = None
    for way in ways:
        found = _cheapest(way, start, limit, l0(chip), found and found[0]) or found
    assert found is not None
    traffic, order = found
    one = _Found(most, ub, traffic, tuple(model.names[i] for i in order))
    return one if than is None or one[:3] < than[:3] else None


def _most_bytes(part: float, size: int | None) -> int:
    """The most bytes that are no larger a part of a memory."""
    if size is None:
        return _UNLIMITED
    found = int(part * size) + 1
    while found / size > part:
        found -= 1
    return found


def _minimax(
    model: _Model, start: int, cost: Callable[[int], float], floor: float = 0, limit: int | None = None
) -> float:
    """The least that the most expensive step of an order can cost, over orders all of whose steps keep a limit.

    Best first over the sets of operators that can be done, from what single operators need. An operator that fits now
    and leaves no memory fuller is run at once: in any order that runs it later, moving it here makes no step in between
    fuller. `floor` is a cost known to be needed.
    """
    heap, seen = [(max(floor, *map(cost, model.least(start))), 0, 0, start)], set()
    while heap:
        most, left, done, alive = heappop(heap)
        if done in seen:
            continue
        seen.add(done)
        if done == model.all:
            return most
        nexts = []
        for i in model.ready(done):
            during, after = model.step(done, alive, i)
            if limit is not None and not _within(during, limit):
                continue
            needed = cost(during)
            one = (max(most, needed), left - 1, done | 1 << i, after)
            if needed <= most and _within(after, alive):
                nexts = [one]
                break
            if one[2] not in seen:
                nexts.append(one)
        for one in nexts:
            heappush(heap, one)
    raise AssertionError("every graph has an order")


def _cheapest(model: _Model, start: int, limit: int, sizes: L0, than: int | None) -> tuple[int, tuple[int, ...]] | None:
    """The least operand traffic of an order all of whose steps keep a limit, and that order.

    None if there is none, or none with less traffic than is known already.

    As `_minimax`, over sets of done operators with what is resident in L0; only matrix operators cost, so only others
    are run at once.
    """
    graph = model.graph
    needs = [
        [(side, operand) for side, operand in enumerate(_operands(graph, one))] if one.unit == "matrix" else []
        for one in graph.operators
    ]

    @cache
    def least(done: int, resident: _Resident) -> int:
        """What operators not done load at least: each operand that is not there, once."""
        missing = {need for i, some in enumerate(needs) if not done >> i & 1 for need in some}
        return sum(operand[1] for side, operand in missing if operand not in resident[side])

    @cache
    def load(i: int, resident: _Resident) -> tuple[int, _Resident]:
        if not needs[i]:
            return 0, resident
        loaded, then = _load(graph, graph.operators[i], resident, sizes)
        return sum(loaded), then

    products = sum(1 << i for i, some in enumerate(needs) if some)
    first = (0, _EMPTY)
    came: dict[tuple[int, _Resident], tuple[tuple[int, _Resident], int]] = {}
    paid = {first: 0}
    heap, seen = [(least(*first), 0, 0, *first, start)], set()
    while heap:
        bound, left, traffic, done, resident, alive = heappop(heap)
        if than is not None and bound >= than:
            return None
        if (done, resident) in seen:
            continue
        seen.add((done, resident))
        if done == model.all:
            path, at = [], (done, resident)
            while at != first:
                at, i = came[at]
                path.append(i)
            return traffic, tuple(reversed(path))
        nexts = []
        for i in model.ready(done):
            during, after = model.step(done, alive, i)
            if not _within(during, limit):
                continue
            loaded, then = load(i, resident)
            now = done | 1 << i
            bound = traffic + loaded + least(now & products, then)
            one = (bound, left - 1, traffic + loaded, now, then, after)
            if not needs[i] and _within(after, alive):
                nexts = [(one, i)]
                break
            nexts.append((one, i))
        for one, i in nexts:
            key = (one[3], one[4])
            if key not in seen and (key not in paid or one[2] < paid[key]):
                paid[key] = one[2]
                came[key] = ((done, resident), i)
                heappush(heap, one)
    return None


# Spills


def fit(graph: Graph, chip: Chip, order: Sequence[str] | None = None, buffers: int | None = None) -> Ordered:
    """An order that exceeds no memory of the chip, with tensors moved to global memory and back where it must be.

    Args:
        graph: placed on the chip.
        order: names of all operators; None takes the best.
        buffers: places of each input and output; None takes two if nothing is spilled for it, else one.

    Returns:
        The order. Where it spills, its graph has the moves, and `spilled` names the tensors. The spills are those that
        move the fewest bytes to and from global memory.

    Raises:
        ValueError: the graph is not placed, or not even spills make it fit; the message names the memory, the bytes
            needed and there, and what would fit.
    """
    found = None
    for depth in (2, 1) if buffers is None else (buffers,):
        if _lacking(_Model(graph, depth), chip) is None:
            found = best(graph, chip, depth) if order is None else _ordered(graph, order, depth)
            if _fits(found.peaks, chip):
                return found
    found = found and _spilled(found, chip)
    if found is None:
        raise ValueError(_does_not_fit(graph, chip, order, 1 if buffers is None else buffers))
    return found


def _fits(needed: Mapping[Space, int], chip: Chip) -> bool:
    sizes = capacities(chip)
    return all(needed[space] <= size for space, size in sizes.items())


def _lacking(model: _Model, chip: Chip) -> tuple[Space, int] | None:
    """A memory that is too small for a single operator with the static places, and the bytes needed."""
    sizes = capacities(chip)
    needed = zip(*map(_unpacked, model.least(model.reserve(1))), strict=True)
    most = {space: max(some) for space, some in zip(SPACES, needed, strict=True)}
    return next(((space, most[space]) for space, size in sizes.items() if most[space] > size), None)


class _Gap(NamedTuple):
    """Steps between two uses of a tensor, in which it may be in global memory instead of UB."""

    tensor: str
    after: int
    until: int
    operand: bool
    """Whether it is only brought to the matrix unit from then on: straight from global memory, as an operand."""


def _gaps(ordered: Ordered) -> list[_Gap]:
    """All gaps of tensors in UB; of the old state, only that after the new one takes its place."""
    graph, at = ordered.graph, {name: step for step, name in enumerate(ordered.order)}
    model = _Model(graph, ordered.buffers)
    state, new = graph.state
    found: list[_Gap] = []
    for name in (*model.counted, state):
        if name not in graph.tensors or graph.tensors[name].space != "UB":
            continue
        readers = graph.readers[name]
        steps = {at[one.name] for one in readers}
        others = [at[one.name] for one in readers if graph.tensors[one.output].space != "L1"]
        for after, until in pairwise(sorted(steps | ({at[name]} if name in at else set()))):
            operand = until > max(others, default=-1)
            wanted = operand and after == at.get(new) if name == state else until - after > 1
            if wanted and not (found and found[-1].tensor == name and found[-1].operand):
                found.append(_Gap(name, after, until, operand))
    return found


def _input_of(graph: Graph, name: str) -> str | None:
    """The input in global memory that a tensor is a copy of, so that it need not be stored."""
    one = graph.producer.get(name)
    if one is None or one.unit != "move" or graph.tensors[one.inputs[0]].role != "input":
        return None
    return one.inputs[0]


def _stores(graph: Graph, gaps: Collection[_Gap]) -> dict[str, Tensor]:
    """What waits in global memory, by the tensor in UB."""
    found = {}
    for gap in gaps:
        if (source := _input_of(graph, gap.tensor)) is not None:
            found[gap.tensor] = graph.tensors[source]
            continue
        tensor = graph.tensors[gap.tensor]
        whole = any(other.tensor == gap.tensor and not other.operand for other in gaps)
        dtype = tensor.dtype if whole else graph.shape.dtype
        found[gap.tensor] = Tensor(f"{gap.tensor}@GM", tensor.shape, dtype, space="GM")
    return found


def _spill_bytes(graph: Graph, gaps: Collection[_Gap]) -> int:
    """Traffic with global memory: a tensor is stored once and loaded after each of its gaps."""
    stores = _stores(graph, gaps)
    stored = sum(store.bytes for name, store in stores.items() if _input_of(graph, name) is None)
    return stored + sum(stores[gap.tensor].bytes for gap in gaps)


def _with_gaps(ordered: Ordered, gaps: Collection[_Gap]) -> tuple[Ordered, list[float]]:
    """The order with moves around the gaps, and where its steps stand among the old ones."""
    graph, order, stores = ordered.graph, ordered.order, _stores(ordered.graph, gaps)
    tensors = dict(graph.tensors)
    steps: list[tuple[float, Operator]] = []

    def move(at: float, source: str, made: Tensor) -> None:
        tensors[made.name] = made
        steps.append((at, Operator(made.name, ("move", source), graph.producer[order[round(at)]].phase, "move")))

    for name, store in stores.items():
        if _input_of(graph, name) is None:
            first = min(gap.after for gap in gaps if gap.tensor == name)
            # Before the last reader, which may write over it.
            move(first + 0.25 if order[first] == name else first - 0.25, name, store)
    for gap in gaps:
        if not gap.operand:
            back = replace(graph.tensors[gap.tensor], name=f"{gap.tensor}~{gap.until}")
            move(gap.until - 0.5, stores[gap.tensor].name, back)
    for step, name in enumerate(order):
        one = graph.producer[name]
        now = {
            gap.tensor: stores[gap.tensor].name if gap.operand else f"{gap.tensor}~{gap.until}"
            for gap in sorted(gaps)
            if gap.until <= step
        }
        steps.append((step, replace(one, expr=substituted(one.expr, now))))
    steps.sort(key=lambda one: one[0])
    moved = verify(replace(graph, tensors=tensors, operators=tuple(one for _, one in steps)))
    spilled = tuple(dict.fromkeys(gap.tensor for gap in gaps))
    plain = _ordered(moved, semantic_order(moved), ordered.buffers)
    return replace(plain, spilled=spilled, spill_bytes=_spill_bytes(graph, gaps)), [at for at, _ in steps]


def _spilled(ordered: Ordered, chip: Chip) -> Ordered | None:
    """The cheapest spills that make an order fit, None if there are none.

    Best first over sets of gaps: some gap around the first step that does not fit must be used.
    """
    sizes, gaps = capacities(chip), _gaps(ordered)
    # More spills never make a step fuller, so all of them together tell whether any do.
    if not _fits(_with_gaps(ordered, gaps)[0].peaks, chip):
        return None
    state = ordered.graph.state[0]
    heap: list[tuple[int, tuple[_Gap, ...]]] = [(0, ())]
    seen = set()
    while heap:
        _, used = heappop(heap)
        if used in seen:
            continue
        seen.add(used)
        found, stands = _with_gaps(ordered, used)
        if _fits(found.peaks, chip):
            return found
        alive = occupancy(found.graph, found.order, found.buffers)["UB"]
        full = next(at for at, size in zip(stands, alive, strict=True) if size > sizes["UB"])
        for gap in gaps:
            # The old state's second place is taken during all steps. A tensor stored before a step may be written over
            # in it.
            if gap not in used and (gap.tensor == state or gap.after <= full < gap.until):
                more = tuple(sorted((*used, gap)))
                heappush(heap, (_spill_bytes(ordered.graph, more), more))
    raise AssertionError("all gaps together fit")


def _does_not_fit(graph: Graph, chip: Chip, order: Sequence[str] | None, buffers: int) -> str:
    """Why, and the largest tile of V or chunk that would."""
    sizes, shape = capacities(chip), graph.shape
    lacking = _lacking(_Model(graph, buffers), chip)
    if lacking is None:
        needed = best(graph, chip, buffers).peaks if order is None else peaks(graph, order, buffers)
        lacking = max(needed.items(), key=lambda one: one[1] / sizes.get(one[0], one[1] + 1))
    space, size = lacking
    sizes_are = f"C={shape.C}, K={shape.K}, V={shape.V}"
    said = f"{graph.op} with {sizes_are} needs {size} bytes of {space}, {chip.name} has {sizes[space]}"
    return f"{said}{_what_fits(graph, chip, buffers)}"


def _what_fits(graph: Graph, chip: Chip, buffers: int) -> str:
    """The next smaller tile of V, or chunk, that fits without spills."""
    shape = graph.shape
    smaller = [replace(shape, V=V) for V in _halves(shape.V)] + [replace(shape, C=C) for C in _halves(shape.C)]
    for one in smaller if graph.op in RECURRENCES else ():
        made = semantic(graph.op, one)
        made = placed(rewritten(made) if graph.form == "rewritten" else made, chip)
        if _lacking(_Model(made, buffers), chip) is None and _fits(best(made, chip, buffers).peaks, chip):
            return f"; C={one.C}, K={one.K}, V={one.V} fits"
    return ""


def _halves(size: int) -> list[int]:
    """Halves of a size, down to the 16 of the matrix unit's tiles."""
    return [size >> by for by in range(1, size.bit_length()) if size >> by >= 16]
