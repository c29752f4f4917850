"""The five ways of running an op that HA-NPU compares: which operators share a launch, and what therefore crosses GM.

    separate     vLLM-Ascend on the 310P: one torch_npu operator per function, everything through global memory (GM)
    fla          chunk-head-chunk: the kernels of Flash Linear Attention, the state of every chunk kept for the last one
    megakernel   the same in one launch; what crosses GM still does
    flashqla     chunk-segment-segment: the inverses first, segments that start from states computed ahead
    head         head-head-head (HA-NPU, ours): one launch, nothing but inputs and results crosses

A mapping divides a graph's operators into stages. What a stage reads and writes in GM follows from that: inputs and
outputs of the op, and tensors made in one stage and read in another. Only what is no tensor of the graph is declared
(`Extra`). Gates other than their running sum cost less than their way through GM, so a stage makes those it needs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2, prod, sqrt
from typing import Literal, get_args

from fla_npu.planner.dataflow import (
    ITEMSIZE,
    RECURRENCES,
    ChunkShape,
    Expr,
    Graph,
    Operator,
    rewritten,
    semantic,
    shape_of,
)

Name = Literal["separate", "fla", "megakernel", "flashqla", "head"]
NAMES: tuple[Name, ...] = get_args(Name)

Grain = Literal["tensor", "chunk", "segment", "head"]
"""What a core takes at a time: a share of a whole tensor, a chunk, a segment, or all chunks of a head."""

Visits = Literal["all", "ahead"]
"""Chunks of a stage: all, or only those computed before a segment to know the state that it starts from."""

WARMUP = 5
"""Chunks that FlashQLA computes ahead of every segment but the first. Its sources take as many as the decay needs to
fall below exp(-10), so this depends on the gates; the published savings of MACs, 17.5 % and 12.9 %, tell it for the
paper's. They make FlashQLA's count 0.825 / 0.871 of FLA's: 1364 blocks of 16^3 per chunk and head where FLA has 1440.
The graph without W has 1312 and a chunk ahead 640, so 5.2 of 64 chunks are computed twice. Fitted, on that alone."""


@dataclass(frozen=True)
class Extra:
    """A tensor in GM that is none of the graph's: so many bytes for every chunk or every segment of a head."""

    name: str
    bytes: int
    per: Literal["chunk", "segment"]
    written: str
    """The stage that writes it."""
    read: str
    """The stage that reads it."""
    moved: bool = True
    """Whether it is written and read at all; allocated it is."""


@dataclass(frozen=True)
class Stage:
    """Operators that run together, and the tensors that they move from and to GM: bytes per chunk of a head."""

    name: str
    grain: Grain
    operators: tuple[Operator, ...]
    """In the graph's order, with the gates that the stage makes for itself."""
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    carries: bool = False
    """Whether the state stays on the core from chunk to chunk."""
    visits: Visits = "all"
    submissions: int = 1
    """Launches of a call; 0 where the stage runs in the launch of the one before."""
    looped: bool = False
    """Whether these are launches for every chunk of the longest sequence, one after another."""


@dataclass(frozen=True)
class Partition:
    """One of the five mappings for one op and shape."""

    name: Name
    graph: Graph
    stages: tuple[Stage, ...]
    stored: Mapping[str, int]
    """Tensors of the graph in GM between stages: bytes per chunk of a head."""
    extras: tuple[Extra, ...] = ()
    holds: bool = False
    """Whether what is stored stays allocated until the call returns, as the locals of a Python function do."""
    dropped: frozenset[str] = frozenset()
    """Of these, tensors that are freed after their last reader all the same."""
    in_place: frozenset[str] = frozenset()
    """Tensors written over the one that they are made of."""

    def stage(self, name: str) -> int:
        """The place of a stage."""
        return [one.name for one in self.stages].index(name)

    def allocated(self, index: int) -> Iterator[str]:
        """Stored tensors of the graph that are allocated while a stage runs."""
        for name in self.stored:
            users = [i for i, one in enumerate(self.stages) if name in one.reads or name in one.writes]
            last = len(self.stages) if self.holds and name not in self.dropped else max(users)
            if name not in self.in_place and min(users) <= index <= last:
                yield name


def segment_chunks(chunks: int, heads: int, cores: int) -> int:
    """Chunks of a segment as FlashQLA's sources choose it: the power of two nearest to three times the root of the
    chunks that each core gets, at least 4.

    Args:
        chunks: of all sequences.
        heads: value heads.
        cores: of the chip.
    """
    return max(4, 2 ** round(log2(3 * sqrt(heads * chunks / cores)))) if chunks else 4


def partition(name: str, op: str, shape: ChunkShape | None = None) -> Partition:
    """A mapping of an op.

    Args:
        name: one of `NAMES`.
        op: a name in `dataflow.RECURRENCES`.
        shape: sizes and dtypes of a chunk; those of `ChunkShape()` by default.

    Raises:
        ValueError: the mapping or the op does not exist.
    """
    if name not in NAMES:
        raise ValueError(f"mapping must be one of {', '.join(NAMES)}, got {name!r}")
    if op not in RECURRENCES:
        raise ValueError(f"op must be one of {', '.join(RECURRENCES)}, got {op!r}")
    return _partition(name, op, shape or ChunkShape())


@lru_cache(maxsize=256)
def _partition(name: str, op: str, shape: ChunkShape) -> Partition:
    makers: Mapping[str, Callable[[str, ChunkShape], Partition]] = {
        "separate": _separate,
        "fla": _fla,
        "megakernel": _megakernel,
        "flashqla": _flashqla,
        "head": _head,
    }
    return makers[name](op, shape)


def _fla(op: str, shape: ChunkShape) -> Partition:
    """FLA's stages as ported to Ascend, where kkt and solve are apart. With channel decays the scores of queries are
    made beside those of keys and the inverse, after a stage that makes the diagonal blocks of 16 in float32."""
    graph = semantic(op, shape)
    channel = RECURRENCES[op].decay == "channel"
    stages: dict[str, tuple[Grain, tuple[str, ...]]] = {
        "cumsum": ("chunk", ("c",)),
        "kkt": ("chunk", ("G", "A", "T", "QK", "P") if channel else ("G", "A")),
        "solve": ("chunk", ("T",)),
        "wu": ("chunk", ("vb", "kb", "W", "U")),
        "h": ("head", ("WS", "u", "ur", "Sd", "S'")),
        "o": ("chunk", ("QS", "QK", "P", "Pu", "o")),
    }
    made = _divide(graph, stages, {"c": shape.accumulate, "A": shape.accumulate})
    if channel and RECURRENCES[op].delta:
        reads = {name: graph.tensors[name].bytes for name in ("q", "k", "beta")} | {"c": made.stored["c"]}
        place = made.stage("kkt")
        gates = tuple(one for one in made.stages[place].operators if one.phase == "gate")
        diagonal = Stage("diagonal", "chunk", gates, reads, {})
        extra = Extra("diagonal of A", shape.C * min(16, shape.C) * 4, "chunk", "diagonal", "kkt")
        made = replace(made, stages=(*made.stages[:place], diagonal, *made.stages[place:]), extras=(extra,))
    stored = made.stored.keys()
    return replace(
        made, name="fla", holds=True, dropped=frozenset({"A"} & stored), in_place=frozenset({"u"} & stored - {"v"})
    )


def _megakernel(op: str, shape: ChunkShape) -> Partition:
    made = _partition("fla", op, shape)
    stages = (made.stages[0], *(replace(one, submissions=0) for one in made.stages[1:]))
    return replace(made, name="megakernel", stages=stages)


def _flashqla(op: str, shape: ChunkShape) -> Partition:
    """FlashQLA's stages, from its sources: the inverses; the chunks ahead of segments; the rest, fused. It applies the
    inverse to V - K S, as ours does. Running gates of all chunks are allocated where chunks are computed ahead, as the
    paper says of its port; only what is visited is written. (The sources, for scalar decays only, sum all gates first.)
    """
    graph = rewritten(semantic(op, shape))
    inverse = tuple(name for name in ("G", "A", "T") if name in graph.producer)
    rest = tuple(one.output for one in graph.operators if one.phase != "gate" and one.output not in inverse)
    stages: dict[str, tuple[Grain, tuple[str, ...]]] = {"kkt": ("chunk", inverse), "segment": ("segment", rest)}
    made = _divide(graph, stages, {})
    segment = made.stages[-1]
    needed = {one.output for one in segment.operators if one.phase in ("wu", "h")}
    for one in reversed(segment.operators):
        if one.output in needed:
            needed |= set(one.inputs)
    ahead = tuple(one for one in segment.operators if one.output in needed)
    reads = {name: size for name, size in segment.reads.items() if name in needed}
    width = ITEMSIZE[shape.accumulate]
    extras = [
        Extra("states ahead", shape.K * shape.V * width, "segment", "ahead", "segment"),
        Extra("transitions", shape.K**2 * width, "segment", "ahead", "ahead", moved=False),
    ]
    if "c" in graph.producer:
        extras.append(Extra("running gates", graph.tensors["c"].bytes, "chunk", "ahead", "ahead"))
    stage = Stage("ahead", "segment", ahead, reads, {}, carries=True, visits="ahead", submissions=3)
    divided = (*made.stages[:-1], stage, segment)
    return replace(made, name="flashqla", stages=divided, extras=tuple(extras), holds=True)


def _head(op: str, shape: ChunkShape) -> Partition:
    return whole(rewritten(semantic(op, shape)))


def whole(graph: Graph) -> Partition:
    """Head-head-head for any form of a graph: one stage, the state on the core."""
    return _divide(graph, {"head": ("head", tuple(one.output for one in graph.operators))}, {})


def _divide(graph: Graph, stages: Mapping[str, tuple[Grain, Collection[str]]], dtypes: Mapping[str, str]) -> Partition:
    """The partition in which an operator belongs to the first stage that names it; one that none names is made wherever
    it is needed. Stored tensors are rounded to the operands' dtype unless `dtypes` says otherwise."""
    state, following = graph.state
    owner: dict[str, str] = {}
    for stage, (_, names) in stages.items():
        for name in names:
            if name in graph.producer:
                owner.setdefault(name, stage)
    made: dict[str, set[str]] = {}
    outside: dict[str, set[str]] = {}
    for stage in stages:
        wanted = {name for name, at in owner.items() if at == stage}
        for one in reversed(graph.operators):
            if one.output in wanted:
                wanted |= {name for name in one.inputs if owner.get(name, stage) == stage}
        made[stage] = wanted & graph.producer.keys()
        outside[stage] = {name for one in made[stage] for name in graph.producer[one].inputs} - made[stage]
    home = owner[following]
    crossing = {name for stage, names in outside.items() for name in names if name in owner}
    crossing |= {state for stage, names in outside.items() if stage != home and state in names}

    def size(name: str) -> int:
        tensor = graph.tensors[name]
        return (
            tensor.bytes if tensor.role == "input" else tensor.elements * ITEMSIZE[dtypes.get(name, graph.shape.dtype)]
        )

    divided = []
    for stage, (grain, _) in stages.items():
        if not made[stage]:
            continue
        carries = stage == home
        reads = {name: size(name) for name in graph.tensors if name in outside[stage]}
        writes = {name: size(name) for name in graph.tensors if name in crossing and owner.get(name) == stage}
        writes |= {
            name: graph.tensors[name].bytes for name in graph.outputs if owner[name] == stage and name != following
        }
        if carries:
            reads.pop(state, None)
            writes |= {state: size(state)} if state in crossing else {}
        operators = tuple(one for one in graph.operators if one.output in made[stage])
        divided.append(Stage(stage, grain, operators, reads, writes, carries))
    return Partition("head", graph, tuple(divided), {name: size(name) for name in graph.tensors if name in crossing})


def _separate(op: str, shape: ChunkShape) -> Partition:
    """One launch per function of the semantic graph, in float32, after a transposed copy and a cast of the inputs. What
    needs the state runs in a loop over the chunks. As vllm-ascend's PyTorch code for the 310P does."""
    graph = semantic(op, shape)
    width = ITEMSIZE[shape.accumulate]
    stages: list[Stage] = []

    def launch(
        name: str,
        reads: Mapping[str, int],
        made: str,
        size: int,
        times: int = 1,
        looped: bool = False,
        operators: tuple[Operator, ...] = (),
    ) -> None:
        stages.append(Stage(name, "tensor", operators, reads, {made: size}, submissions=times, looped=looped))

    inputs = [graph.tensors[name] for name in graph.inputs if graph.tensors[name].role == "input"]
    for one in inputs:
        launch(f"{one.name} transposed", {one.name: one.bytes}, one.name, one.bytes)
        if one.dtype != shape.accumulate:
            launch(f"{one.name} cast", {one.name: one.bytes}, one.name, one.elements * width)
    for operator in graph.operators:
        looped = operator.phase in ("h", "o")
        if operator.expr[0] == "invert":
            # Row by row: copies of the row and of the rows above, their product, its sum, the sum with the row, and
            # the copy back; the identity is added at the end.
            rows = range(1, shape.C)
            moved = sum(3 * i * i + 5 * i for i in rows), sum(2 * i * i + 4 * i for i in rows)
            whole_matrix = shape.C * shape.C * width
            launch("T rows", {"A": moved[0] * width}, "T rows", moved[1] * width, 6 * len(rows))
            launch("T", {"T rows": whole_matrix}, "T", whole_matrix, operators=(operator,))
            continue
        made: dict[Expr, str] = {}
        for node in _innermost_first(operator.expr):
            name = operator.output if node is operator.expr else f"{operator.output}.{len(made)}"
            made[node] = name
            elements = prod(shape_of(node, graph.tensors))
            reads = {
                made.get(one, str(one)): prod(shape_of(one, graph.tensors)) * width for one in map(_seen, node[1:])
            }
            # The mask before the exponential keeps it finite, the one after it makes zeros.
            times = 4 if node[0] == "decay" else 1
            if times > 1:
                reads[name] = (times - 1) * elements * width
            size = times * elements * width
            if node[0] == "dot":
                # The matrix unit of the 310P takes 16 bits in blocked layout: kernels of their own cast operands, then
                # block them, and treat the result the other way round.
                half = ITEMSIZE[shape.dtype]
                reads = {key: bytes_ // width * (width + 2 * half) for key, bytes_ in reads.items()}
                between = sum(reads.values()) // (width + 2 * half) * 2 * half
                reads[name] = 2 * elements * half
                size += between + 2 * elements * half
            launch(name, reads, name, size, times, looped, (operator,) if node is operator.expr else ())
    output = graph.tensors["o"]
    if output.dtype != shape.accumulate:
        launch("o cast", {"o": output.elements * width}, "o", output.bytes)
    launch("o transposed", {"o": output.bytes}, "o", output.bytes)
    stored = {one.name: one.elements * width for one in inputs}
    for operator in graph.operators:
        if operator.phase not in ("h", "o"):
            stored[operator.output] = graph.tensors[operator.output].elements * width
    return Partition("separate", graph, tuple(stages), stored, holds=True)


def _innermost_first(expr: Expr) -> Iterator[Expr]:
    """Functions that take a launch: transposes and last rows are views."""
    if not isinstance(expr, str):
        for operand in expr[1:]:
            yield from _innermost_first(operand)
        if expr[0] not in ("t", "last"):
            yield expr


def _seen(expr: Expr) -> Expr:
    """What a view is a view of."""
    while not isinstance(expr, str) and expr[0] in ("t", "last"):
        expr = expr[1]
    return expr
