"""Layouts: the least time, against exhaustive search and an integer program that know neither prunings nor cuts."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.planner import dataflow, layout, order
from fla_npu.planner.chips import CHIPS, chip
from fla_npu.planner.dataflow import RECURRENCES, ChunkShape, Graph, Operator, Tensor
from fla_npu.planner.layout import LAYOUTS, Layout, LayoutCosts, LayoutPlan, Transform, Way
from tests.work import calls

P310, A2, A5 = chip("310P"), chip("910B3"), chip("950")
OPS = tuple(RECURRENCES)


def placed(op: str, name: str = "310P", shape: ChunkShape | None = None) -> Graph:
    return dataflow.placed(dataflow.rewritten(dataflow.semantic(op, shape)), chip(name))


# What a plan costs, said again without cuts: a sum of terms, each over the layouts in which a few tensors are made


Term = tuple[set[str], Callable[[Mapping[str, Layout]], float]]


def terms(graph: Graph, costs: LayoutCosts) -> Iterator[Term]:
    for one in graph.operators:
        if one.unit == "vector":
            yield {one.output}, lambda made, one=one: costs.execute(graph, one, made[one.output])
    for name, tensor in graph.tensors.items():
        readers = [one for one in graph.readers[name] if one.unit != "matrix"]
        if readers:
            yield (
                {name, *(one.output for one in readers)},
                lambda made, tensor=tensor, readers=readers: reading(graph, costs, tensor, readers, made),
            )


def reading(
    graph: Graph, costs: LayoutCosts, tensor: Tensor, readers: list[Operator], made: Mapping[str, Layout]
) -> float:
    """A tensor's transforms: with a copy in the other layout, or without."""
    totals = []
    for there in ({made[tensor.name]}, set(LAYOUTS)):
        total = costs.transform(tensor) if len(there) == 2 else 0.0
        for one in readers:
            wanted = made[one.output]
            if wanted not in there:
                can = one.unit == "move"
                total += costs.on_the_way(tensor, graph.tensors[one.output]) if can else inf
        totals.append(total)
    return min(totals)


def anchors(graph: Graph) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    for name, one in graph.tensors.items():
        if one.space in ("L1", "L0C"):
            found[name] = "blocked"
        elif one.space == "GM" and one.role in ("input", "output"):
            found[name] = "dense"
    return found


def exhaustive(graph: Graph, costs: LayoutCosts, fixed: Mapping[str, Layout]) -> float:
    """The least cost of a chunk over every assignment; a partial one that costs more already is not completed."""
    choices = {name: (*{**dict.fromkeys(LAYOUTS)},) for name in graph.tensors}
    for held in (anchors(graph), fixed):
        choices.update({name: tuple(one for one in choices[name] if one == value) for name, value in held.items()})
    # A tensor stands by those it shares a term with, so that terms are complete early.
    names: list[str] = []
    for one in graph.operators:
        names += [name for name in (*one.inputs, one.output) if name not in names]
    closing: list[list[Callable[[Mapping[str, Layout]], float]]] = [[] for _ in names]
    for needed, price in terms(graph, costs):
        closing[max(map(names.index, needed))].append(price)
    made: dict[str, Layout] = {}
    best = inf

    def search(at: int, cost: float) -> None:
        nonlocal best
        if cost >= best:
            return
        if at == len(names):
            best = cost
            return
        for one in choices[names[at]]:
            made[names[at]] = one
            search(at + 1, cost + sum(price(made) for price in closing[at]))

    search(0, 0.0)
    return best


def boundary(graph: Graph, costs: LayoutCosts) -> dict[str, tuple[float, float]]:
    """What a state in UB costs at both ends of a sequence, by its layout."""
    found = []
    for end, name in enumerate(graph.state):
        state = graph.tensors[name]
        memory = Tensor(name, state.shape, state.dtype, space="GM")
        way = costs.on_the_way(state, memory) if end else costs.on_the_way(memory, state)
        found.append(min(way, costs.transform(state)))
    return {"dense": (0.0, 0.0), "blocked": (found[0], found[1])}


def exhaustive_sequences(graph: Graph, costs: LayoutCosts) -> Callable[[int], float]:
    """The least cost of a number of chunks, over every sequence of the state's layouts."""
    entry, exit = graph.state
    step = {(p, s): exhaustive(graph, costs, {entry: p, exit: s}) for p in LAYOUTS for s in LAYOUTS}
    ends = boundary(graph, costs)

    def cost(states: tuple[Layout, ...]) -> float:
        return ends[states[0]][0] + sum(step[pair] for pair in pairwise(states)) + ends[states[-1]][1]

    return lambda chunks: min(map(cost, product(LAYOUTS, repeat=chunks + 1)))


def check_plan(graph: Graph, plan: LayoutPlan, chunks: int) -> None:
    """Every operator finds its tensors in its layout, anchors hold, runs fit together, and sums are sums."""
    assert plan.chunks == chunks
    for _, one in plan.runs:
        assert {name: one.layouts[name] for name in anchors(graph)} == anchors(graph)
        assert (one.layouts[graph.state[0]], one.layouts[graph.state[1]]) == (one.entry, one.exit)
        copies = {t.tensor: t.target for t in one.transforms if t.path == "UB"}
        passing = {t.tensor: (t.source, t.target) for t in one.transforms if t.path != "UB"}
        assert len(copies) + len(passing) == len(one.transforms)
        for operator in graph.operators:
            for name in operator.inputs if operator.unit != "matrix" else ():
                there = {one.layouts[name], copies.get(name, one.layouts[name])}
                source, target = passing.get(operator.output, (one.layouts[operator.output],) * 2)
                assert source in there
                assert target == one.layouts[operator.output]
        seconds = [plan.costs.execute(graph, o, one.layouts[o.output]) for o in graph.operators if o.unit == "vector"]
        assert one.exec_seconds == pytest.approx(sum(seconds), rel=1e-12)
        assert one.transform_seconds == pytest.approx(sum(t.seconds for t in one.transforms), rel=1e-12)
    for (_, one), (_, following) in pairwise(plan.runs):
        assert one.exit == following.entry
    assert plan.seconds == pytest.approx(
        sum(count * (one.exec_seconds + one.transform_seconds) for count, one in plan.runs)
        + sum(one.seconds for one in plan.boundary),
        rel=1e-12,
    )


# Optimality


def costs_of(draw: Callable[[float, float], float], ways: bool = True) -> LayoutCosts:
    """Any costs that the model allows, in units of microseconds a tensor of a few KiB."""
    every = [("GM", "L1"), ("GM", "UB"), ("UB", "GM"), ("UB", "L1"), ("L0C", "UB")]
    kept = every if ways else [one for one in every if draw(0, 1) < 0.7]
    return LayoutCosts(
        vector_seconds_per_byte=draw(0, 4) * 1e-11,
        transform_seconds_per_byte=draw(0, 4) * 1e-11,
        ways=tuple(Way(*one, draw(0, 4) * 1e-11) for one in kept),  # type: ignore[arg-type]
        broadcast=1 + draw(0, 4),
        strided=1 + draw(0, 8),
    )


ANY_COSTS = st.builds(
    lambda seed, ways: costs_of(random.Random(seed).uniform, ways), st.integers(0, 2**20), st.booleans()
)


SMALL = tuple(op for op in OPS if op not in ("gdn", "kda"))
"""At most 18 decisions in a chunk; the others take minutes to search."""


@pytest.mark.parametrize(("op", "name"), [("gdn", "310P"), *product(SMALL, ["310P", "950"])])
def test_least_of_all_assignments(op: str, name: str) -> None:
    graph = placed(op, name)
    least = exhaustive_sequences(graph, LayoutCosts.of(chip(name)))
    for chunks in (1, 3):
        plan = layout.plan_layouts(graph, chip(name), chunks)
        check_plan(graph, plan, chunks)
        assert plan.seconds == pytest.approx(least(chunks), rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_least_of_all_assignments_for_any_costs(seed: int) -> None:
    graph = placed(SMALL[seed % len(SMALL)], shape=ChunkShape(C=24, K=16, V=40))
    costs = costs_of(random.Random(seed).uniform)
    plan = layout.plan_layouts(graph, P310, 2, costs)
    check_plan(graph, plan, 2)
    assert plan.seconds == pytest.approx(exhaustive_sequences(graph, costs)(2), rel=1e-12)


@st.composite
def any_graph(draw: st.DrawFn) -> Graph:
    """A placed graph of any structure: tensors of 16 x 16 and 16 x 1 handed about between memories and units."""
    tensors = {
        "a": Tensor("a", (16, 16), "fp16", "input", "GM"),
        "b": Tensor("b", (16, 1), "fp32", "input", "GM"),
        "S": Tensor("S", (16, 16), "fp32", "state_in", "UB"),
    }
    operators: list[Operator] = []

    def make(name: str, expr: tuple, space: str, unit: str, role: str = "intermediate", dtype: str = "fp32") -> None:
        shape = dataflow.shape_of(expr, tensors)
        tensors[name] = Tensor(name, shape, dtype, role, space)  # type: ignore[arg-type]
        operators.append(Operator(name, expr, "o", unit))  # type: ignore[arg-type]

    def there(space: str, square: bool = False) -> list[str]:
        return [n for n, one in tensors.items() if one.space == space and (one.shape[1] == 16 or not square)]

    for at in range(draw(st.integers(1, 8))):
        kinds = ["vector", "pair", "load", "operand", "spill"]
        kinds += ["dot"] if there("L1") else []
        kinds += ["fetch", "fetch"] if there("L0C") else []
        kind, name = draw(st.sampled_from(kinds)), f"t{at}"
        if kind == "vector":
            function = draw(st.sampled_from(["exp", "cumsum", "lower"]))
            make(name, (function, draw(st.sampled_from(there("UB", function == "lower")))), "UB", "vector")
        elif kind == "pair":
            left, right = (draw(st.sampled_from(there("UB"))) for _ in range(2))
            make(name, (draw(st.sampled_from(["add", "mul"])), left, right), "UB", "vector")
        elif kind == "load":
            make(name, ("move", draw(st.sampled_from(there("GM")))), "UB", "move")
        elif kind == "operand":
            source = draw(st.sampled_from(there("UB", True) + there("GM", True) + there("L0C")))
            make(name, ("move", source), "L1", "move", dtype="fp16")
        elif kind == "spill":
            make(name, ("move", draw(st.sampled_from(there("UB")))), "GM", "move")
        elif kind == "dot":
            left, right = (draw(st.sampled_from(there("L1"))) for _ in range(2))
            make(name, ("dot", left, right), "L0C", "matrix")
        else:
            make(name, ("move", draw(st.sampled_from(there("L0C")))), "UB", "move")
    make("S'", ("add", "S", draw(st.sampled_from(there("UB")))), "UB", "vector", "state_out")
    make("o", ("move", draw(st.sampled_from(there("UB", True)))), "GM", "move", "output", "fp16")
    return dataflow.verify(Graph("any", ChunkShape(), tensors, tuple(operators)))


@settings(max_examples=150, deadline=None)
@given(any_graph(), ANY_COSTS, st.integers(1, 3))
def test_least_of_any_graph(graph: Graph, costs: LayoutCosts, chunks: int) -> None:
    least = exhaustive_sequences(graph, costs)(chunks)
    if least == inf:
        with pytest.raises(ValueError, match="none prescribed"):
            layout.plan_layouts(graph, P310, chunks, costs)
        return
    plan = layout.plan_layouts(graph, P310, chunks, costs)
    check_plan(graph, plan, chunks)
    assert plan.seconds == pytest.approx(least, rel=1e-9, abs=1e-17)
    assert plan.seconds <= layout.naive_layouts(graph, P310, chunks, full(costs)).seconds * (1 + 1e-9) + 1e-17


def full(costs: LayoutCosts) -> LayoutCosts:
    """With every way, so that plans without a plan exist; those that lack are dear."""
    there = {way[:2] for way in costs.ways}
    more = [Way(*one, 1.0) for one in (("GM", "L1"), ("UB", "L1")) if one not in there]  # type: ignore[arg-type]
    return LayoutCosts(
        costs.vector_seconds_per_byte,
        costs.transform_seconds_per_byte,
        (*costs.ways, *more),
        costs.broadcast,
        costs.strided,
    )


def integer_program(graph: Graph, costs: LayoutCosts, chunks: int) -> float:
    """The same problem for all chunks at once, nothing pruned, by HiGHS. Times are scaled to microseconds."""
    optimize = pytest.importorskip("scipy.optimize", reason="the integer program is solved by scipy")
    numpy = pytest.importorskip("numpy")
    price: list[float] = []
    rows: list[tuple[dict[int, float], float]] = []  # sum of coefficients times variables <= bound
    constant = 0.0

    def variable(cost: float) -> int:
        price.append(cost * 1e6)
        return len(price) - 1

    def at_most(left: Mapping[int, float], bound: float) -> None:
        rows.append((dict(left), bound))

    blocked: dict[tuple[int, str], int] = {}
    for chunk in range(chunks):
        copied: dict[str, int] = {}
        for name, tensor in graph.tensors.items():
            blocked[chunk, name] = variable(0.0)
            if (seconds := costs.transform(tensor)) < inf:
                copied[name] = variable(seconds)

        def found(there: Mapping[str, int], chunk: int, name: str, wants: int) -> None:
            """Whoever wants a tensor blocked (`wants` is 1) or dense (0) finds it so."""
            copy = {there[name]: -1.0} if name in there else {}
            at_most({wants: 1.0, blocked[chunk, name]: -1.0, **copy}, 0.0)
            at_most({wants: -1.0, blocked[chunk, name]: 1.0, **copy}, 0.0)

        for one in graph.operators:
            made = blocked[chunk, one.output]
            if one.unit == "vector":
                dense, slow = (costs.execute(graph, one, where) for where in LAYOUTS)
                price[made] += (slow - dense) * 1e6
                constant += dense
                for name in one.inputs:
                    found(copied, chunk, name, made)
            if one.unit == "move":
                (name,) = one.inputs
                seconds = costs.on_the_way(graph.tensors[name], graph.tensors[one.output])
                read = variable(0.0) if seconds < inf else made
                found(copied, chunk, name, read)
                if seconds < inf:
                    changed = variable(seconds)
                    at_most({read: 1.0, made: -1.0, changed: -1.0}, 0.0)
                    at_most({read: -1.0, made: 1.0, changed: -1.0}, 0.0)
        for name, held in anchors(graph).items():
            sign = 1.0 if held == "dense" else -1.0
            at_most({blocked[chunk, name]: sign}, min(sign, 0.0))
        if chunk:
            before, after = blocked[chunk - 1, graph.state[1]], blocked[chunk, graph.state[0]]
            at_most({before: 1.0, after: -1.0}, 0.0)
            at_most({before: -1.0, after: 1.0}, 0.0)
    first, last = boundary(graph, costs)["blocked"]
    price[blocked[0, graph.state[0]]] += first * 1e6
    price[blocked[chunks - 1, graph.state[1]]] += last * 1e6

    matrix = numpy.zeros((len(rows), len(price)))
    for at, (left, _) in enumerate(rows):
        for column, value in left.items():
            matrix[at, column] += value
    solved = optimize.milp(
        price,
        constraints=optimize.LinearConstraint(matrix, ub=[bound for _, bound in rows]),
        integrality=1,
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert solved.success, solved.message
    return float(solved.fun) / 1e6 + constant


@pytest.mark.parametrize("op", OPS)
def test_least_by_an_integer_program(op: str) -> None:
    for name, costs in (("310P", None), ("950", None), ("310P", costs_of(random.Random(op).uniform))):
        graph = placed(op, name)
        plan = layout.plan_layouts(graph, chip(name), 4, costs)
        assert plan.seconds == pytest.approx(integer_program(graph, plan.costs, 4), rel=1e-6)


def test_spilled_tensors_take_any_layout() -> None:
    graph = order.fit(dataflow.placed(dataflow.semantic("kda"), P310), P310).graph
    for one in (graph, order.fit(placed("kda", shape=ChunkShape(C=128)), P310).graph):
        plan = layout.plan_layouts(one, P310, 3)
        check_plan(one, plan, 3)
        assert plan.seconds == pytest.approx(integer_program(one, plan.costs, 3), rel=1e-6)


# Chains (pruning 3)


def chain(start: str, functions: list[str], end: str, joins: int | None = None) -> Graph:
    """Vector operators in a row from the GM or L0C to GM or L1; one may take in a second matrix result."""
    tensors = {
        "x": Tensor("x", (64, 64), "fp16", "input", "GM"),
        "b": Tensor("b", (64, 1), "fp32", "input", "GM"),
        "x@L1": Tensor("x@L1", (64, 64), "fp16", space="L1"),
        "y": Tensor("y", (64, 64), "fp32", space="L0C"),
        "y@UB": Tensor("y@UB", (64, 64), "fp32", space="UB"),
        "b@UB": Tensor("b@UB", (64, 1), "fp32", space="UB"),
        "S": Tensor("S", (64, 64), "fp32", "state_in", "UB"),
        "S'": Tensor("S'", (64, 64), "fp32", "state_out", "UB"),
        "c0": Tensor("c0", (64, 64), "fp32", space="UB"),
    }
    operators = [
        Operator("x@L1", ("move", "x"), "o", "move"),
        Operator("y", ("dot", "x@L1", "x@L1"), "o", "matrix"),
        Operator("y@UB", ("move", "y"), "o", "move"),
        Operator("b@UB", ("move", "b"), "o", "move"),
        Operator("S'", ("exp", "S"), "o", "vector"),
        Operator("c0", ("move", "x" if start == "GM" else "y"), "o", "move"),
    ]
    for at, function in enumerate(functions):
        expr = (function, f"c{at}", "b@UB") if function == "mul" else (function, f"c{at}")
        expr = ("add", f"c{at}", "y@UB") if at == joins else expr
        tensors[f"c{at + 1}"] = Tensor(f"c{at + 1}", (64, 64), "fp32", space="UB")
        operators.append(Operator(f"c{at + 1}", expr, "o", "vector"))
    role = "output" if end == "GM" else "intermediate"
    tensors["z"] = Tensor("z", (64, 64), "fp16", role, end)  # type: ignore[arg-type]
    operators.append(Operator("z", ("move", f"c{len(functions)}"), "o", "move"))
    return dataflow.verify(Graph("chain", ChunkShape(), tensors, tuple(operators)))


def uniform(graph: Graph, functions: list[str], costs: LayoutCosts) -> float:
    """All of the chain in one layout, the better of both."""
    found = []
    for one in LAYOUTS:
        made = {f"c{at + 1}": one for at in range(len(functions))}
        found.append(layout.forced(graph, P310, made, 1, costs).seconds)
    return min(found)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["GM", "L0C"]),
    st.lists(st.sampled_from(["exp", "cumsum", "mul"]), min_size=1, max_size=5),
    st.sampled_from(["GM", "L1"]),
    st.integers(0, 2**20),
)
def test_a_chain_needs_one_layout(start: str, functions: list[str], end: str, seed: int) -> None:
    """The paper's pruning: no slower in dense, transforms equal along the chain, other operands there in dense."""
    graph, costs = chain(start, functions, end), costs_of(random.Random(seed).uniform)
    plan = layout.plan_layouts(graph, P310, 1, costs)
    assert uniform(graph, functions, costs) == pytest.approx(plan.seconds, rel=1e-9, abs=1e-17)


def test_a_chain_with_a_second_matrix_result_may_need_both() -> None:
    """Why chains are not merged: both results are added in blocked, then one transform, then the sum in dense."""
    functions = ["exp", "add", "cumsum"]
    graph = chain("L0C", functions, "GM", joins=1)
    costs = LayoutCosts(
        vector_seconds_per_byte=1e-12,
        transform_seconds_per_byte=4e-12,
        ways=(Way("GM", "L1", 0.0), Way("GM", "UB", 0.0), Way("UB", "GM", 4e-12)),
        strided=16.0,
    )
    plan = layout.plan_layouts(graph, P310, 1, costs)
    assert [plan.layouts[f"c{at}"] for at in (1, 2, 3)] == ["blocked", "blocked", "dense"]
    assert plan.seconds < 0.8 * uniform(graph, functions, costs)


# Memory


def test_ub_by_hand() -> None:
    """GDN on the 310P: copies of the columns c and beta in blocks; e is made in blocks. In blocks a column takes
    64 x 16 x 4 bytes, in dense 256. All else that is in blocks has whole tiles."""
    graph = placed("gdn")
    steps = order.best(graph, P310).order
    plan = layout.plan_layouts(graph, P310, 64)
    assert {one.tensor for one in plan.transforms if one.path == "UB"} == {"c", "beta@UB"}
    more = dict.fromkeys(steps, 0)
    for first, last, size in (
        ("e", "o@UB", 4096 - 256),  # e
        ("e", "S'", 4096),  # the copy of c, which all its readers take,
        ("D", "S'", -256),  # so that c itself is gone
        ("A", "u0", 4096),  # the copy of beta; the two places of an input stay
    ):
        for step in steps[steps.index(first) : steps.index(last) + 1]:
            more[step] += size
    dense = order.occupancy(graph, steps)["UB"]
    assert list(layout.occupied(graph, steps, plan)) == [a + more[step] for a, step in zip(dense, steps, strict=True)]


def test_ub_of_what_is_blocked_on_its_way() -> None:
    """Without planned layouts the vector unit blocks all operands, rounded to 16 bits, beside what they are made of."""
    graph = placed("gdn")
    steps = order.semantic_order(graph)
    plan = layout.naive_layouts(graph, P310)
    dense, found = order.occupancy(graph, steps)["UB"], layout.occupied(graph, steps, plan)
    more = {step: b - a for step, a, b in zip(steps, dense, found, strict=True)}
    assert more["u0@L1"] == 64 * 128 * 2 and more["S@L1"] == 128 * 128 * 2


# Many chunks


class Counted(dict):  # type: ignore[type-arg]
    reads = 0

    def __getitem__(self, key: object) -> int:
        self.reads += 1
        return super().__getitem__(key)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=8, max_size=8), st.integers(1, 6))
def test_path_is_the_least_of_all(numbers: list[int], chunks: int) -> None:
    starts, ends = (dict(zip(LAYOUTS, pair, strict=True)) for pair in (numbers[:2], numbers[2:4]))
    step = dict(zip(product(LAYOUTS, repeat=2), numbers[4:], strict=True))

    def cost(states: tuple[Layout, ...]) -> int:
        return starts[states[0]] + sum(step[p] for p in pairwise(states)) + ends[states[-1]]

    total, runs = layout.least_path(starts, step, ends, chunks)
    states = tuple(one for one, count in runs for _ in range(count))
    assert len(states) == chunks + 1
    assert cost(states) == total == min(map(cost, product(LAYOUTS, repeat=chunks + 1)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(1, 300))
def test_path_of_many_chunks(numbers: list[int], chunks: int) -> None:
    """Against the recurrence, chunk by chunk; four steps each at most."""
    starts, ends = (dict(zip(LAYOUTS, pair, strict=True)) for pair in (numbers[:2], numbers[2:4]))
    step = Counted(zip(product(LAYOUTS, repeat=2), numbers[4:], strict=True))
    total, runs = layout.least_path(starts, step, ends, chunks)
    assert step.reads <= 4 * chunks
    costs = starts
    for _ in range(chunks):
        costs = {s: min(costs[p] + step[p, s] for p in LAYOUTS) for s in LAYOUTS}
    assert total == min(costs[s] + ends[s] for s in LAYOUTS)
    states = [one for one, count in runs for _ in range(count)]
    assert total == starts[states[0]] + sum(step[pair] for pair in pairwise(states)) + ends[states[-1]]


def test_path_takes_time_linear_in_chunks() -> None:
    """Also where the best state changes with every chunk, so that nothing repeats."""
    numbers = {("dense", "dense"): 9, ("dense", "blocked"): 0, ("blocked", "dense"): 1, ("blocked", "blocked"): 9}
    for chunks in (1, 10, 1000, 16384):
        step = Counted(numbers)
        layout.least_path({"dense": 0, "blocked": 5}, step, {"dense": 0, "blocked": 0}, chunks)
        assert step.reads == 4 * chunks


def test_path_of_more_chunks_than_memory_holds() -> None:
    step = {(p, s): 3 if p == s else 1 for p in LAYOUTS for s in LAYOUTS} | {("dense", "dense"): 0}
    total, runs = layout.least_path({"dense": 0, "blocked": 0}, step, {"dense": 0, "blocked": 0}, 10**18)
    assert (total, runs) == (0, (("dense", 10**18 + 1),))


def test_last_chunk_may_differ() -> None:
    """A state that is dear to store in blocked is made dense by the last chunk's own operator."""
    graph = placed("gla")
    costs = LayoutCosts.of(P310)
    ways = tuple(way._replace(seconds_per_byte=1e-9) if way.target == "GM" else way for way in costs.ways)
    costs = LayoutCosts(costs.vector_seconds_per_byte, 1e-11, ways)
    plan = layout.plan_layouts(graph, P310, 5, costs)
    check_plan(graph, plan, 5)
    assert [(n, one.entry, one.exit) for n, one in plan.runs] == [(4, "blocked", "blocked"), (1, "blocked", "dense")]
    assert plan.seconds == pytest.approx(exhaustive_sequences(graph, costs)(5), rel=1e-12)
    longer = layout.plan_layouts(graph, P310, 1000, costs)
    more = plan.steady.exec_seconds + plan.steady.transform_seconds
    assert longer.seconds == pytest.approx(plan.seconds + 995 * more, rel=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_work_does_not_grow_with_the_sequence(op: str) -> None:
    graph = dataflow.placed(dataflow.semantic(op), P310)
    few, many = (calls(layout.plan_layouts, graph, P310, chunks) for chunks in (16, 1 << 20))
    assert many < 1.1 * few < 400_000


def test_same_plan_in_another_process() -> None:
    code = (
        "from fla_npu.planner import dataflow, layout; from fla_npu.planner.chips import chip; c = chip('310P');"
        "print(layout.plan_layouts(dataflow.placed(dataflow.rewritten(dataflow.semantic('kda')), c), c, 64))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout == f"{layout.plan_layouts(placed('kda'), P310, 64)}\n"


# What the plans say


def crossings(graph: Graph) -> set[str]:
    """Moves of what the vector unit made to the matrix unit, and of products that it reads the other way."""
    found = set()
    for one in graph.operators:
        source = one.inputs[0]
        way = graph.tensors[source].space, graph.tensors[one.output].space
        made = source not in graph.producer or graph.producer[source].unit == "vector"
        read = any(reader.unit == "vector" for reader in graph.readers[one.output])
        if one.unit == "move" and ((way == ("UB", "L1") and made) or (way == ("L0C", "UB") and read)):
            found.add(one.output)
    return found


@pytest.mark.parametrize("op", OPS)
def test_naive_transforms_every_crossing(op: str) -> None:
    graph = placed(op)
    plan = layout.naive_layouts(graph, P310, 7)
    check_plan(graph, plan, 7)
    assert crossings(graph) <= {one.tensor for one in plan.transforms}
    assert {plan.layouts[one.output] for one in graph.operators if one.unit == "vector"} == {"dense"}
    assert plan.exec_seconds == pytest.approx(
        7 * graph.total_element_ops * 4 * plan.costs.vector_seconds_per_byte, rel=1e-12
    )


@pytest.mark.parametrize("op", OPS)
def test_on_310p_no_crossing_is_transformed(op: str) -> None:
    graph = placed(op)
    plan, naive = layout.plan_layouts(graph, P310, 64), layout.naive_layouts(graph, P310, 64)
    assert plan.state == "blocked"
    assert not crossings(graph) & {one.tensor for one in plan.transforms}
    assert plan.transform_seconds < 0.35 * naive.transform_seconds
    assert plan.exec_seconds > naive.exec_seconds


@pytest.mark.parametrize("op", OPS)
def test_on_a2_copies_through_global_memory_transform_for_nothing(op: str) -> None:
    plan = layout.plan_layouts(placed(op, "910B3"), A2, 64)
    assert plan.transform_seconds == 0
    assert plan.seconds == layout.naive_layouts(placed(op, "910B3"), A2, 64).seconds


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_a_plan(name: str) -> None:
    graph = placed("kda", name)
    plan, naive = (make(graph, chip(name), 16) for make in (layout.plan_layouts, layout.naive_layouts))
    check_plan(graph, plan, 16)
    assert plan.seconds <= naive.seconds
    assert plan.transform_bytes <= naive.transform_bytes


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(OPS), st.sampled_from(sorted(CHIPS)), *(st.integers(1, 160) for _ in range(3)))
def test_any_shape(op: str, name: str, C: int, K: int, V: int) -> None:
    graph = placed(op, name, ChunkShape(C, K, V))
    plan = layout.plan_layouts(graph, chip(name), 5)
    check_plan(graph, plan, 5)
    assert plan.seconds <= layout.naive_layouts(graph, chip(name), 5).seconds * (1 + 1e-12)


def test_figures_of_310p() -> None:
    costs = LayoutCosts.of(P310)
    assert costs.transform_seconds_per_byte == 1 / (32 * 1.06e9)
    assert costs.vector_seconds_per_byte == 1 / (256 * 1.06e9)
    assert costs.strided == 8
    graph = placed("gdn")
    # Two blocks in fp32 to a row of a tile; a column is padded to a tile's width.
    assert costs.transform(graph.tensors["QS@UB"]) == pytest.approx(64 * 128 * 4 / 32 / 1.06e9)
    assert costs.transform(graph.tensors["c"]) == pytest.approx(64 * 16 * 4 / 32 / 1.06e9)
    assert costs.transform(graph.tensors["QS"]) == inf
    assert costs.on_the_way(graph.tensors["k"], graph.tensors["k@L1"]) == pytest.approx(
        64 * 128 * 2 * (1 / 32 / 1.06e9 - 1 / 95e9)
    )
    assert costs.on_the_way(graph.tensors["QS"], graph.tensors["QS@UB"]) == inf
    # A column is repeated over a tile's width, which takes the vector unit.
    assert costs.on_the_way(graph.tensors["beta"], graph.tensors["beta@UB"]) == inf
    narrow = placed("gdn", shape=ChunkShape(C=60))
    assert costs.on_the_way(narrow.tensors["v"], narrow.tensors["v@UB"]) == pytest.approx(
        64 * 128 * 2 * (1 / 32 / 1.06e9 - 1 / 82e9)
    )


def test_figures_of_950() -> None:
    costs, graph = LayoutCosts.of(A5), placed("gdn", "950")
    # Two vector cores share a pass; the matrix unit writes a row of a tile, 64 bytes, a cycle.
    assert costs.transform_seconds_per_byte == pytest.approx(1 / (2 * 32 * 1.8e9))
    assert costs.on_the_way(graph.tensors["QS"], graph.tensors["QS@UB"]) == pytest.approx(
        64 * 128 * 4 * (1 / 64 / 1.8e9 - 1 / 230.4e9)
    )


def test_slowdowns() -> None:
    graph, costs = placed("gdn"), LayoutCosts.of(P310)
    time_of = {
        one.output: [costs.execute(graph, one, where) / costs.vector_seconds_per_byte / 4 for where in LAYOUTS]
        for one in graph.operators
    }
    assert time_of["e"] == [64, 64 * 16]
    assert time_of["c"] == [64, 64 * 16 * 8]
    assert time_of["D"] == [64 * 64, 64 * 64 * 2]
    assert time_of["P"] == [2 * 64 * 64, 2 * 64 * 64]
    assert time_of["A"] == [3 * 64 * 64, 4 * 64 * 64]
    assert time_of["QS"] == [0, 0]


def test_choices_price_the_other_layout() -> None:
    graph = placed("gdn")
    plan = layout.plan_layouts(graph, P310, 64)
    least = exhaustive(graph, plan.costs, {"S": "blocked", "S'": "blocked"})
    assert [one.operator for one in plan.choices] == [one.output for one in graph.operators if one.unit == "vector"]
    for one in plan.choices:
        assert one.layout == plan.layouts[one.operator]
        other: Layout = "dense" if one.layout == "blocked" else "blocked"
        state: dict[str, Layout] = (
            {"S": other, "S'": other} if one.operator == "S'" else {"S": "blocked", "S'": "blocked"}
        )
        dearer = exhaustive(graph, plan.costs, {**state, one.operator: other})
        assert one.margin_seconds == pytest.approx(dearer - least, rel=1e-6)


def test_forced_layouts_hold() -> None:
    graph = placed("gdn")
    plan = layout.forced(graph, P310, {"u0": "dense", "S": "blocked"}, 4)
    check_plan(graph, plan, 4)
    assert (plan.layouts["u0"], plan.layouts["S"]) == ("dense", "blocked")
    assert plan.seconds > layout.plan_layouts(graph, P310, 4).seconds
    stands = Counter((one.tensor, one.operator) for one in plan.transforms)
    assert stands["KS@UB", "u0"] == 1
    assert (
        Transform(
            "u0@L1",
            "dense",
            "blocked",
            "u0@L1",
            "vector",
            "UB->L1",
            2 * 64 * 128 * 2,
            plan.costs.on_the_way(graph.tensors["u0"], graph.tensors["u0@L1"]),
        )
        in plan.transforms
    )


# Errors


def test_errors() -> None:
    graph = placed("gdn")
    with pytest.raises(TypeError, match="chunks must be an int, got float"):
        layout.plan_layouts(graph, P310, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        layout.naive_layouts(graph, P310, 0)
    with pytest.raises(ValueError, match="graph must be placed, got no memory for q, k"):
        layout.plan_layouts(dataflow.semantic("gdn"), P310)
    with pytest.raises(ValueError, match="layouts must be of tensors of the graph, got x"):
        layout.forced(graph, P310, {"x": "dense"})
    with pytest.raises(ValueError, match="layout of u0 must be dense or blocked, got 'nz'"):
        layout.forced(graph, P310, {"u0": "nz"})  # type: ignore[dict-item]
    for impossible in ({"T@L1": "dense"}, {"o": "blocked"}, {"QS@UB": "dense"}, {"S": "blocked", "S'": "dense"}):
        with pytest.raises(ValueError, match=f"layouts must be possible .* got {next(iter(impossible))}"):
            layout.forced(graph, P310, impossible, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vector_seconds_per_byte": -1.0}, "vector_seconds_per_byte must be"),
        ({"transform_seconds_per_byte": inf}, "transform_seconds_per_byte must be"),
        ({"broadcast": 0.5}, "broadcast must be at least 1"),
        ({"strided": float("nan")}, "strided must be at least 1"),
        ({"ways": (Way("GM", "L1", -1.0),)}, "ways must add seconds"),
        ({"ways": (Way("GM", "L1", 0.0), Way("GM", "L1", 1.0))}, "each pair of memories once"),
    ],
)
def test_costs_are_within_the_model(change: dict, message: str) -> None:  # type: ignore[type-arg]
    given = {"vector_seconds_per_byte": 1e-12, "transform_seconds_per_byte": 1e-12, "ways": ()}
    with pytest.raises(ValueError, match=message):
        LayoutCosts(**{**given, **change})
