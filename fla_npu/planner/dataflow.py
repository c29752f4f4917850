"""The dataflow of one chunk of one head: operators, the tensors between them, and the rewrite that the paper makes.

    graph = semantic("gdn", ChunkShape())      # the textbook order: gate, KKT, Solve, W/U, H, O
    graph = rewritten(graph)                   # W = T K gone: the inverse is applied to V - K S; vector chains fused
    graph = placed(graph, chip("310P"))        # every tensor in a memory, with the moves between memories

A graph is a set of operators, not an order: `operators` stands in the semantic order, `order.py` finds a better one.
An operator computes one tensor by an expression, a nested tuple over tensor names; `execute.py` evaluates it, so a
transformation is right when both graphs give the same numbers. A new op is a row in `RECURRENCES`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fla_npu.planner.chips import Chip

Unit = Literal["matrix", "vector", "move"]
Space = Literal["GM", "UB", "L1", "L0C"]
Role = Literal["input", "output", "state_in", "state_out", "intermediate"]
Node = tuple[Any, ...]
"""(function, operand, ...), see `FUNCTIONS`."""
Expr = str | Node
"""A tensor's name, or a node."""

ITEMSIZE: Mapping[str, int] = MappingProxyType({"fp16": 2, "bf16": 2, "fp32": 4})

FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "dot": "matrix product",
        "invert": "(I + x)^-1 of a strictly lower triangular x",
        "t": "transpose",
        "add": "sum",
        "sub": "difference",
        "mul": "product of elements",
        "neg": "negation",
        "exp": "exponential",
        "scale": "times the scale of the op",
        "cumsum": "running sum down the rows",
        "last": "last row",
        "lower": "lower triangle with the diagonal, zero above",
        "strict": "lower triangle without the diagonal",
        "decay": "exp(x_i - x_j) in the lower triangle, zero above",
        "move": "the same numbers in another memory, rounded to the dtype there",
    }
)


class Recurrence(NamedTuple):
    """What tells the ops of the family apart; `ops/common/recurrence.py` is the loop they are chunked from."""

    decay: Literal["none", "scalar", "channel"]
    delta: bool
    """Whether a token's value is corrected by what the state holds for its key; needs Solve."""
    beta: bool
    """Whether values are weighed by a number per token: the delta rule's beta, the time step of SSD."""


RECURRENCES: Mapping[str, Recurrence] = MappingProxyType(
    {
        "gdn": Recurrence("scalar", delta=True, beta=True),
        "kda": Recurrence("channel", delta=True, beta=True),
        "deltanet": Recurrence("none", delta=True, beta=True),
        "gla": Recurrence("channel", delta=False, beta=False),
        "retnet": Recurrence("scalar", delta=False, beta=False),
        "ssd": Recurrence("scalar", delta=False, beta=True),
    }
)
"""By the name of the op: Gated DeltaNet, Kimi Delta Attention, DeltaNet, Gated Linear Attention, RetNet, Mamba-2."""


@dataclass(frozen=True)
class ChunkShape:
    """Sizes of one chunk of one head and the dtypes of its tensors."""

    C: int = 64
    K: int = 128
    V: int = 128
    dtype: str = "fp16"
    """Of q, k, v, o and of the operands of matrix products."""
    accumulate: str = "fp32"
    """Of gates, beta, the state and everything that vector operators make."""

    def __post_init__(self) -> None:
        for name in ("C", "K", "V"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be a positive int, got {size!r}")
        for name in ("dtype", "accumulate"):
            if getattr(self, name) not in ITEMSIZE:
                raise ValueError(f"{name} must be one of {', '.join(ITEMSIZE)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the chunk. `space` is None until the graph is placed."""

    name: str
    shape: tuple[int, int]
    dtype: str
    role: Role = "intermediate"
    space: Space | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Operator:
    """One operator: `output = expr`, on one unit. Its name is that of the tensor it makes."""

    output: str
    expr: Node
    phase: str
    """Row of the paper's table that it belongs to: gate, kkt, solve, wu, h or o."""
    unit: Unit

    @property
    def name(self) -> str:
        return self.output

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Tensors read, each once, in the order of the expression."""
        return tuple(dict.fromkeys(leaves(self.expr)))


@dataclass(frozen=True)
class Graph:
    """Operators in their semantic order with all tensors by name. Made by the functions below, never changed."""

    op: str
    shape: ChunkShape
    tensors: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    state: tuple[str, str] = ("S", "S'")
    """The tensor that comes from the previous chunk and the one that goes to the next."""
    form: str = field(default="semantic")

    @cached_property
    def producer(self) -> Mapping[str, Operator]:
        return {one.output: one for one in self.operators}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Operator, ...]]:
        return {name: tuple(one for one in self.operators if name in one.inputs) for name in self.tensors}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """What is there before the chunk: its tensors in global memory, and the state."""
        return tuple(name for name, one in self.tensors.items() if one.role in ("input", "state_in"))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name, one in self.tensors.items() if one.role in ("output", "state_out"))

    def macs(self, operator: Operator) -> int:
        """Multiplications of a matrix operator. Inverting a triangle counts as C^3 / 2 (HA-NPU's Table 1)."""
        if operator.unit != "matrix":
            return 0
        function, *operands = operator.expr
        if function == "invert":
            return int(shape_of(operands[0], self.tensors)[0] ** 3 // 2)
        (rows, inner), (_, columns) = (shape_of(one, self.tensors) for one in operands)
        return rows * inner * columns

    def element_ops(self, operator: Operator) -> int:
        """Element operations of a vector operator: each function of its expression passes over its result once."""
        if operator.unit != "vector":
            return 0
        return sum(prod(shape_of(one, self.tensors)) for one in nodes(operator.expr) if one[0] != "t")

    @property
    def total_macs(self) -> int:
        return sum(self.macs(one) for one in self.operators)

    @property
    def total_element_ops(self) -> int:
        return sum(self.element_ops(one) for one in self.operators)


def leaves(expr: Expr) -> Iterator[str]:
    """Tensor names in an expression, with repetitions."""
    if isinstance(expr, str):
        yield expr
    else:
        for operand in expr[1:]:
            yield from leaves(operand)


def nodes(expr: Expr) -> Iterator[Node]:
    """The applications of functions in an expression."""
    if not isinstance(expr, str):
        yield expr
        for operand in expr[1:]:
            yield from nodes(operand)


def shape_of(expr: Expr, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """The shape of an expression's value.

    Raises:
        ValueError: shapes do not go together, or a name or function does not exist.
    """
    if isinstance(expr, str):
        if expr not in tensors:
            raise ValueError(f"graph reads {expr}, which is none of its tensors")
        return tensors[expr].shape
    function, *operands = expr
    if function not in FUNCTIONS:
        raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, got {function!r}")
    shapes = [shape_of(one, tensors) for one in operands]
    if function == "dot":
        (rows, inner), (also, columns) = shapes
        if inner != also:
            raise ValueError(f"operands of dot must share their inner size, got {shapes} in {expr}")
        return rows, columns
    if function == "t":
        return shapes[0][1], shapes[0][0]
    if function == "last":
        return 1, shapes[0][1]
    if function == "decay":
        return shapes[0][0], shapes[0][0]
    if function in ("add", "sub", "mul"):
        sizes = tuple(max(pair) for pair in zip(*shapes, strict=True))
        if any(size not in (1, most) for shape in shapes for size, most in zip(shape, sizes, strict=True)):
            raise ValueError(f"operands of {function} must broadcast, got {shapes} in {expr}")
        return sizes[0], sizes[1]
    return shapes[0]


def verify(graph: Graph) -> Graph:
    """The graph itself, if it is sound; run after every transformation.

    Raises:
        ValueError: names the first operator that reads what is not made before it, is made twice, has a shape that its
            expression does not have, runs on the wrong unit or reads a memory that its unit does not reach.
    """
    made = set(graph.inputs)
    for one in graph.operators:
        if missing := [name for name in one.inputs if name not in made]:
            raise ValueError(f"operator {one.name} reads {', '.join(missing)} before it is made")
        if one.output in made:
            raise ValueError(f"operator {one.name} makes a tensor that exists already")
        if (found := shape_of(one.expr, graph.tensors)) != graph.tensors[one.output].shape:
            raise ValueError(f"operator {one.name} makes {found}, its tensor is {graph.tensors[one.output].shape}")
        functions = {node[0] for node in nodes(one.expr)}
        units: Mapping[Unit, set[str]] = {"matrix": {"dot", "invert"}, "move": {"move"}}
        for unit, own in units.items():
            if (one.unit == unit) != bool(functions & own):
                raise ValueError(f"operator {one.name} runs on the {one.unit} unit but computes {sorted(functions)}")
        _verify_spaces(graph, one)
        made.add(one.output)
    if missing := [name for name in graph.outputs if name not in made]:
        raise ValueError(f"no operator makes {', '.join(missing)}")
    if extra := [name for name in graph.tensors if name not in made]:
        raise ValueError(f"nothing makes or gives {', '.join(extra)}")
    return graph


def _verify_spaces(graph: Graph, one: Operator) -> None:
    spaces = {graph.tensors[name].space for name in one.inputs}
    output = graph.tensors[one.output].space
    if output is None and spaces == {None}:
        return
    reach: Mapping[Unit, tuple[set[Space], set[Space]]] = {
        "matrix": ({"L1"}, {"L0C"}),
        "vector": ({"UB"}, {"UB"}),
        "move": ({"GM", "UB", "L1", "L0C"}, {"GM", "UB", "L1"}),
    }
    readable, writable = reach[one.unit]
    if not spaces <= readable or output not in writable:
        raise ValueError(f"operator {one.name} ({one.unit}) reads {sorted(map(str, spaces))} and writes {output}")


class _Builder:
    """Collects operators; a tensor's shape follows from its expression."""

    def __init__(self, op: str, shape: ChunkShape) -> None:
        self.op, self.shape = op, shape
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []

    def give(self, name: str, rows: int, columns: int, dtype: str, role: Role = "input") -> None:
        self.tensors[name] = Tensor(name, (rows, columns), dtype, role)

    def make(self, phase: str, name: str, expr: Node, role: Role = "intermediate") -> str:
        functions = {node[0] for node in nodes(expr)}
        unit: Unit = "matrix" if functions & {"dot", "invert"} else "vector"
        dtype = self.shape.dtype if role == "output" else self.shape.accumulate
        self.tensors[name] = Tensor(name, shape_of(expr, self.tensors), dtype, role)
        self.operators.append(Operator(name, expr, phase, unit))
        return name

    def graph(self) -> Graph:
        return verify(Graph(self.op, self.shape, self.tensors, tuple(self.operators)))


def semantic(op: str, shape: ChunkShape | None = None) -> Graph:
    """The graph of an op as its definition reads (HA-NPU, Figure 1 and Section 5).

    Args:
        op: a name in `RECURRENCES`.
        shape: sizes and dtypes; C = 64, K = V = 128 and fp16 by default.

    Inputs are `q k [C, K]`, `v [C, V]`, log decays `g [C, 1]` or `[C, K]`, `beta [C, 1]` and the state `S [K, V]`;
    outputs `o [C, V]` and `S'`. Channel decays are split into a factor per row and one per column of the scores,
    relative to the chunk's start; real kernels choose nearer references, which costs vector work but moves no tensor.

    Raises:
        ValueError: the op does not exist.
    """
    if op not in RECURRENCES:
        raise ValueError(f"op must be one of {', '.join(RECURRENCES)}, got {op!r}")
    kind, shape = RECURRENCES[op], shape or ChunkShape()
    C, K, V = shape.C, shape.K, shape.V
    b = _Builder(op, shape)
    b.give("q", C, K, shape.dtype)
    b.give("k", C, K, shape.dtype)
    b.give("v", C, V, shape.dtype)
    if kind.decay != "none":
        b.give("g", C, 1 if kind.decay == "scalar" else K, shape.accumulate)
    if kind.beta:
        b.give("beta", C, 1, shape.accumulate)
    b.give("S", K, V, shape.accumulate, "state_in")

    # Gate: decays from the chunk's start to a token (e), from a token to the chunk's end (r), over the chunk (d).
    if kind.decay != "none":
        b.make("gate", "c", ("cumsum", "g"))
        b.make("gate", "e", ("exp", "c"))
        b.make("gate", "r", ("exp", ("sub", ("last", "c"), "c")))
        b.make("gate", "d", ("exp", ("last", "c")))
    if kind.decay == "scalar":
        b.make("gate", "D", ("decay", "c"))
    if kind.decay == "channel":
        if kind.delta:
            b.make("gate", "kd", ("mul", "k", "e"))
        b.make("gate", "ki", ("mul", "k", ("exp", ("neg", "c"))))
        b.make("gate", "kr", ("mul", "k", "r"))
        b.make("gate", "qd", ("mul", "q", "e"))
    row, column, query, write = ("kd", "ki", "qd", "kr") if kind.decay == "channel" else ("k", "k", "q", "k")

    def masked(mask: str, product: str) -> Node:
        return (mask, ("mul", product, "D") if kind.decay == "scalar" else product)

    u = b.make("wu", "vb", ("mul", "v", "beta")) if kind.beta else "v"
    if kind.delta:
        b.make("kkt", "G", ("dot", row, ("t", column)))
        scores = masked("strict", "G")
        b.make("kkt", "A", ("mul", scores, "beta") if kind.beta else scores)
        b.make("solve", "T", ("invert", "A"))
        factors = ["beta"] * kind.beta + ["e"] * (kind.decay == "scalar")
        weight: Expr = ("mul", *factors) if len(factors) == 2 else "".join(factors)
        weighed = b.make("wu", "kb", ("mul", row, weight)) if factors else row
        b.make("wu", "W", ("dot", "T", weighed))
        b.make("wu", "U", ("dot", "T", u))
        b.make("h", "WS", ("dot", "W", "S"))
        u = b.make("h", "u", ("sub", "U", "WS"))
    written = b.make("h", "ur", ("mul", u, "r")) if kind.decay == "scalar" else u
    b.make("h", "Sd", ("dot", ("t", write), written))
    kept: Expr = "S" if kind.decay == "none" else ("mul", "S", ("t", "d"))
    b.make("h", "S'", ("add", kept, "Sd"), "state_out")
    b.make("o", "QS", ("dot", query, "S"))
    b.make("o", "QK", ("dot", query, ("t", column)))
    b.make("o", "P", masked("lower", "QK"))
    b.make("o", "Pu", ("dot", "P", u))
    read: Expr = ("mul", "QS", "e") if kind.decay == "scalar" else "QS"
    b.make("o", "o", ("scale", ("add", read, "Pu")), "output")
    return b.graph()


# The rewrite


def rewritten(graph: Graph) -> Graph:
    """GEMM-first form: no product between Solve and the state, the state written last, vector chains fused.

    Four transformations, each sound by itself: `apply_inverse_last`, `scale_after_product`, `factor_weights`, `fused`.
    """
    out = fused(factor_weights(scale_after_product(apply_inverse_last(graph))))
    return replace(out, form="rewritten")


def _with(graph: Graph, operators: list[Operator], tensors: Mapping[str, Tensor] | None = None) -> Graph:
    """The graph of other operators, in an order in which each follows what it reads; unused tensors are dropped."""
    tensors = tensors or graph.tensors
    made = [name for name, one in tensors.items() if one.role in ("input", "state_in")]
    left, ordered = list(operators), []
    while left:
        ready = next((one for one in left if all(name in made for name in one.inputs)), None)
        if ready is None:
            raise ValueError(f"operators {', '.join(one.name for one in left)} wait for each other")
        ordered.append(ready)
        made.append(ready.output)
        left.remove(ready)
    kept = {name: tensors[name] for name in tensors if name in made}
    return verify(replace(graph, operators=tuple(ordered), tensors=kept))


def apply_inverse_last(graph: Graph) -> Graph:
    """`T X - (T Y) Z` becomes `T (X - Y Z)`: the product T Y (W of the delta rule) is not formed."""
    for one in graph.operators:
        match one.expr:
            case ("sub", str(left), str(right)):
                pass
            case _:
                continue
        first, second = graph.producer.get(left), graph.producer.get(right)
        if first is None or second is None or first.expr[0] != "dot" or second.expr[0] != "dot":
            continue
        inverse, plain = first.expr[1:]
        product, state = second.expr[1:]
        third = graph.producer.get(product) if isinstance(product, str) else None
        if third is None or third.expr[0] != "dot" or third.expr[1] != inverse:
            continue
        if any(len(graph.readers[name]) > 1 for name in (left, right, product)):
            continue
        tensors = dict(graph.tensors)
        read = f"{third.expr[2]}{state}"
        rest = f"{one.output}0"
        for name, like in ((read, right), (rest, left)):
            tensors[name] = replace(tensors[like], name=name)
        operators = [other for other in graph.operators if other not in (one, first, second, third)]
        operators += [
            Operator(read, ("dot", third.expr[2], state), "h", "matrix"),
            Operator(rest, ("sub", plain, read), "h", "vector"),
            Operator(one.output, ("dot", inverse, rest), "h", "matrix"),
        ]
        return _with(graph, operators, tensors)
    return graph


def scale_after_product(graph: Graph) -> Graph:
    """`(x * s) Z` with a number of s per row becomes `(x Z) * s`, so that the product reads x itself.

    Done where the scaled tensor has no other reader and x is an operand of matrix products anyway.
    """
    for one in graph.operators:
        if one.expr[0] != "dot" or not isinstance(one.expr[1], str):
            continue
        scaled = graph.producer.get(one.expr[1])
        if scaled is None or scaled.expr[0] != "mul" or len(graph.readers[scaled.output]) > 1:
            continue
        plain, factor = scaled.expr[1:]
        others = [other for other in graph.readers.get(plain, ()) if other.unit == "matrix"]
        if not isinstance(plain, str) or not others or shape_of(factor, graph.tensors)[1] != 1:
            continue
        product = f"{plain.upper()}{one.expr[2]}"
        tensors = {**graph.tensors, product: replace(graph.tensors[one.output], name=product)}
        operators = [other for other in graph.operators if other not in (one, scaled)]
        operators += [
            Operator(product, ("dot", plain, one.expr[2]), one.phase, "matrix"),
            Operator(one.output, ("mul", product, factor), one.phase, "vector"),
        ]
        return scale_after_product(_with(graph, operators, tensors))
    return graph


def factor_weights(graph: Graph) -> Graph:
    """`x * b - y * (b * e)` becomes `(x - y * e) * b`: one pass over `[C, V]` less."""
    for one in graph.operators:
        match one.expr:
            case ("sub", str(left), str(right)):
                pass
            case _:
                continue
        first, second = graph.producer.get(left), graph.producer.get(right)
        if first is None or second is None or first.expr[0] != "mul" or second.expr[0] != "mul":
            continue
        x, weight = first.expr[1:]
        y, factor = second.expr[1:]
        if factor == weight:
            rest: Expr = y
        elif isinstance(factor, tuple) and factor[:2] == ("mul", weight):
            rest = ("mul", y, factor[2])
        else:
            continue
        if len(graph.readers[left]) > 1 or len(graph.readers[right]) > 1:
            continue
        changed = replace(one, expr=("mul", ("sub", x, rest), weight))
        return _with(graph, [changed if o is one else o for o in graph.operators if o not in (first, second)])
    return graph


def fused(graph: Graph) -> Graph:
    """Vector operators with one reader, itself a vector operator, become part of it: no tensor between them."""
    for one in graph.operators:
        readers = graph.readers[one.output]
        if one.unit != "vector" or len(readers) != 1 or readers[0].unit != "vector":
            continue
        if graph.tensors[one.output].role != "intermediate":
            continue
        reader = readers[0]
        changed = replace(reader, expr=substituted(reader.expr, {one.output: one.expr}))
        return fused(_with(graph, [changed if o is reader else o for o in graph.operators if o is not one]))
    return graph


def substituted(node: Node, by: Mapping[str, Expr]) -> Node:
    """The node with tensors replaced."""

    def one(expr: Expr) -> Expr:
        return by.get(expr, expr) if isinstance(expr, str) else substituted(expr, by)

    return (node[0], *map(one, node[1:]))


# Memories


def placed(graph: Graph, chip: Chip) -> Graph:
    """The graph with a memory for every tensor and the moves between them, on a chip.

    Matrix operators read L1 and write L0C, vector operators read and write UB. The state stays in UB from chunk to
    chunk. A tensor that vector code made or that came in float32 is rounded to the operands' dtype on its way to L1. A
    product that another product reads goes by way of UB: no source names a way from L0C to L1. A chip without a way
    between its units (`vector_to_cube`) takes all these moves through global memory, a product straight to L1;
    `cost.py` charges the detour.
    """
    tensors: dict[str, Tensor] = {}
    operators: list[Operator] = []
    homes: dict[str, Space] = {}
    for name, tensor in graph.tensors.items():
        producer = graph.producer.get(name)
        if producer is None:
            homes[name] = "UB" if tensor.role == "state_in" else "GM"
        else:
            homes[name] = "UB" if producer.unit == "vector" else "L0C"
        tensors[name] = replace(tensor, space=homes[name])

    def bring(name: str, space: Space, phase: str) -> str:
        """The tensor's copy in a memory, made by a move where it does not exist yet."""
        if homes[name] == space:
            return name
        copy = f"{name}@{space}"
        if copy not in tensors:
            dtype = graph.shape.dtype if space == "L1" else tensors[name].dtype
            source = name
            if (homes[name], space) == ("L0C", "L1") and chip.vector_to_cube == "on_core":
                source = bring(name, "UB", phase)
            tensors[copy] = Tensor(copy, tensors[name].shape, dtype, space=space)
            operators.append(Operator(copy, ("move", source), phase, "move"))
        return copy

    for one in graph.operators:
        if one.unit == "matrix":
            copies = {name: bring(name, "L1", one.phase) for name in one.inputs}
        else:
            copies = {name: bring(name, "UB", one.phase) for name in one.inputs}
        operators.append(replace(one, expr=substituted(one.expr, copies)))
        if tensors[one.output].role == "output":
            # The operator writes UB; the tensor of that name in global memory is what leaves the core.
            made = f"{one.output}@UB"
            tensors[made] = replace(tensors[one.output], name=made, role="intermediate", space="UB")
            tensors[one.output] = replace(tensors[one.output], space="GM")
            operators[-1] = replace(operators[-1], output=made)
            operators.append(Operator(one.output, ("move", made), one.phase, "move"))
    return verify(replace(graph, tensors=tensors, operators=tuple(operators)))
