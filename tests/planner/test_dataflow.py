"""The dataflow of a chunk: what it computes, what its rewrite saves, and that a broken graph is refused."""

from dataclasses import replace
from itertools import product
from types import MappingProxyType

import pytest
import torch

from fla_npu.ops.common.recurrence import delta_recurrence
from fla_npu.planner import dataflow
from fla_npu.planner.chips import chip
from fla_npu.planner.dataflow import (
    RECURRENCES,
    ChunkShape,
    Graph,
    Operator,
    Recurrence,
    Tensor,
    placed,
    rewritten,
    semantic,
    verify,
)
from fla_npu.planner.execute import execute
from fla_npu.testing import rms_ratio

SMALL = ChunkShape(C=16, K=8, V=12)
ROUNDING = 1e-12
"""RMS ratio in float64: some 100 roundings of 1.1e-16, times exp(3.2), the largest factor that splits a decay."""

ALL = {
    f"{kind}{'-delta' * delta}{'-beta' * beta}": Recurrence(kind, delta, beta)
    for kind, delta, beta in product(("none", "scalar", "channel"), (False, True), (False, True))
}
"""Every row that the table can have, those of no known op included."""


@pytest.fixture(params=[*RECURRENCES, *ALL])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dataflow, "RECURRENCES", MappingProxyType({**RECURRENCES, **ALL}))
    return request.param


def forms(op: str, shape: ChunkShape | None = None) -> dict[str, Graph]:
    graphs = {"semantic": semantic(op, shape), "rewritten": rewritten(semantic(op, shape))}
    return {**graphs, **{f"{form}, placed": placed(graph, chip("310P")) for form, graph in graphs.items()}}


def random_inputs(op: str, chunks: int) -> dict[str, torch.Tensor]:
    """Of some chunks, with a state to begin with; log decays down to -0.2 per token."""
    row, made = {**RECURRENCES, **ALL}[op], torch.Generator().manual_seed(0)
    T, K, V = chunks * SMALL.C, SMALL.K, SMALL.V

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=made, dtype=torch.float64)

    inputs = {"q": normal(T, K), "k": torch.nn.functional.normalize(normal(T, K)), "v": normal(T, V)}
    if row.decay != "none":
        width = K if row.decay == "channel" else 1
        inputs["g"] = -0.2 * torch.rand(T, width, generator=made, dtype=torch.float64)
    if row.beta:
        inputs["beta"] = torch.rand(T, 1, generator=made, dtype=torch.float64)
    return {**inputs, "S": normal(K, V)}


def expected(op: str, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    row = {**RECURRENCES, **ALL}[op]
    q, k, v = (inputs[name][None, :, None] for name in ("q", "k", "v"))
    g = inputs.get("g")
    gates = {"gk": g[None, :, None]} if row.decay == "channel" else {"g": g.mT[..., None]} if g is not None else {}
    beta = inputs["beta"].mT[..., None] if row.beta else None
    state = inputs["S"][None, None]
    o, state = delta_recurrence(
        q, k, v, beta=beta, **gates, scale=0.5, initial_state=state, delta=row.delta, dtype=torch.float64
    )
    return o[0, :, 0], state[0, 0]


def test_every_form_is_the_recurrence(op: str):
    chunks, inputs = 3, random_inputs(op, 3)
    o, state = expected(op, inputs)
    for form, graph in forms(op, SMALL).items():
        outputs, carried = [], inputs["S"]
        for n in range(chunks):
            rows = slice(n * SMALL.C, (n + 1) * SMALL.C)
            cut = {name: carried if name == "S" else x[rows] for name, x in inputs.items()}
            made = execute(graph, cut, scale=0.5)
            carried = made["S'"]
            outputs.append(made["o"])
        assert rms_ratio(torch.cat(outputs), o) < ROUNDING, form
        assert rms_ratio(carried, state) < ROUNDING, form


@pytest.mark.parametrize("tokens", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_macs_are_those_published(op: str, tokens: int):
    published = {512: 0.75, 1024: 1.51, 2048: 3.02, 4096: 6.04}[tokens]
    # Published with two digits after the point.
    assert abs(semantic(op).total_macs * 16 * tokens / 64 / 1e9 - published) < 0.0051


def test_rewrite_saves_one_product(op: str):
    before, after = semantic(op), rewritten(semantic(op))
    C, K = before.shape.C, before.shape.K
    saved = C * C * K if {**RECURRENCES, **ALL}[op].delta else 0
    assert before.total_macs - after.total_macs == saved
    assert after.total_element_ops <= before.total_element_ops
    assert len(after.operators) <= len(before.operators)


def test_no_product_between_the_inverse_and_the_state(op: str):
    graph, after = rewritten(semantic(op)), set()
    for one in graph.operators:
        if one.expr[0] == "invert" or after & set(one.inputs):
            after.add(one.output)
        if one.unit == "matrix" and "S" in one.inputs:
            assert one.output not in after


@pytest.mark.parametrize("name", ["310P", "310B1", "910B3", "950"])
def test_placed_keeps_the_work(op: str, name: str):
    graph = rewritten(semantic(op))
    on_chip = placed(graph, chip(name))
    assert on_chip.total_macs == graph.total_macs
    assert on_chip.total_element_ops == graph.total_element_ops
    assert on_chip.outputs == graph.outputs
    assert {one.space for one in on_chip.tensors.values()} == {"GM", "UB", "L1", "L0C"}
    # Products that products read (the inverse does, the values of the delta rule) go by way of UB, if there is one.
    copies = [one for one in on_chip.operators if on_chip.tensors[one.output].space == "L1"]
    straight = any(on_chip.tensors[one.inputs[0]].space == "L0C" for one in copies)
    solves = any(one.expr[0] == "invert" for one in graph.operators)
    assert straight == (solves and chip(name).vector_to_cube == "global_memory")
    assert on_chip.tensors["S"].space == on_chip.tensors["S'"].space == "UB"
    operands = {name for one in on_chip.operators if one.unit == "matrix" for name in one.inputs}
    assert {on_chip.tensors[name].dtype for name in operands} == {graph.shape.dtype}


def test_graphs_say_the_same_in_any_process(op: str):
    assert semantic(op) == semantic(op)
    assert rewritten(semantic(op)) == rewritten(semantic(op))


def changed(name: str, **to: object) -> Graph:
    graph = placed(semantic("gdn", SMALL), chip("310P"))
    return replace(graph, operators=tuple(replace(o, **to) if o.name == name else o for o in graph.operators))


def tensor_changed(name: str, **to: object) -> Graph:
    graph = placed(semantic("gdn", SMALL), chip("310P"))
    return replace(graph, tensors={**graph.tensors, name: replace(graph.tensors[name], **to)})


def without(name: str) -> Graph:
    graph = semantic("gdn", SMALL)
    return replace(graph, operators=tuple(one for one in graph.operators if one.name != name))


def with_more(operator: Operator) -> Graph:
    graph = semantic("gdn", SMALL)
    return replace(graph, operators=(*graph.operators, operator))


def with_tensor(tensor: Tensor) -> Graph:
    graph = semantic("gdn", SMALL)
    return replace(graph, tensors={**graph.tensors, tensor.name: tensor})


BROKEN = {
    "order": (
        replace(semantic("gdn", SMALL), operators=tuple(reversed(semantic("gdn", SMALL).operators))),
        "operator o reads QS, e, Pu before it is made",
    ),
    "missing": (without("c"), "operator e reads c before it is made"),
    "twice": (with_more(Operator("c", ("cumsum", "g"), "gate", "vector")), "operator c makes a tensor that exists"),
    "shape": (tensor_changed("u", shape=(16, 8)), r"operator u makes \(16, 12\), its tensor is \(16, 8\)"),
    "inner": (changed("G", expr=("dot", "k@L1", "k@L1")), "operands of dot must share their inner size"),
    "broadcast": (changed("vb", expr=("mul", "v@UB", "S")), "operands of mul must broadcast"),
    "function": (changed("e", expr=("sine", "c")), "function must be one of .*, got 'sine'"),
    "unknown": (changed("e", expr=("exp", "x")), "operator e reads x before it is made"),
    "unit": (changed("e", unit="matrix"), r"operator e runs on the matrix unit but computes \['exp'\]"),
    "product": (changed("G", unit="vector"), "operator G runs on the vector unit but computes"),
    "move": (changed("g@UB", unit="vector"), "operator g@UB runs on the vector unit but computes"),
    "operand": (tensor_changed("k@L1", space="UB"), r"operator G \(matrix\) reads \['UB'\] and writes L0C"),
    "result": (tensor_changed("G", space="UB"), r"operator G \(matrix\) reads \['L1'\] and writes UB"),
    "vector": (tensor_changed("e", space="L1"), r"operator e \(vector\) reads \['UB'\] and writes L1"),
    "half placed": (tensor_changed("e", space=None), r"operator e \(vector\) reads \['UB'\] and writes None"),
    "no output": (without("o"), "no operator makes o"),
    "unused": (with_tensor(Tensor("x", (1, 1), "fp32")), "nothing makes or gives x"),
}


@pytest.mark.parametrize(("graph", "message"), BROKEN.values(), ids=BROKEN)
def test_verify_refuses(graph: Graph, message: str):
    with pytest.raises(ValueError, match=message):
        verify(graph)


def test_verify_hands_a_sound_graph_on():
    for graph in forms("kda").values():
        assert verify(graph) is graph


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"op must be one of gdn, kda, .*, got 'mamba'"):
        semantic("mamba")
    with pytest.raises(ValueError, match="C must be a positive int, got 0"):
        ChunkShape(C=0)
    with pytest.raises(ValueError, match=r"V must be a positive int, got 64\.0"):
        ChunkShape(V=64.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be one of fp16, bf16, fp32, got 'fp8'"):
        ChunkShape(dtype="fp8")
    graph, inputs = semantic("gdn", SMALL), random_inputs("gdn", 1)
    with pytest.raises(ValueError, match="inputs must have beta, got q"):
        execute(graph, {name: x for name, x in inputs.items() if name != "beta"})
    with pytest.raises(ValueError, match=r"v must be \(16, 12\), got \(16, 8\)"):
        execute(graph, {**inputs, "v": inputs["k"]})
