"""Runs a graph on numbers, to prove that a transformation keeps its meaning. Needs torch, which is loaded here only."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fla_npu.planner.dataflow import Expr, Graph

if TYPE_CHECKING:
    from torch import Tensor


def execute(graph: Graph, inputs: Mapping[str, "Tensor"], scale: float = 1.0) -> dict[str, "Tensor"]:
    """The outputs of a graph, `o [C, V]` and the state `S' [K, V]`, in the dtype of the inputs (use float64).

    Args:
        graph: semantic, rewritten or placed. Moves copy and do not round: this checks meaning, not precision.
        inputs: by name, of the shapes of the graph's input tensors.
        scale: the op's scale.

    Raises:
        ValueError: an input is missing or has another shape.
    """
    values: dict[str, Tensor] = {}
    for name in graph.inputs:
        if name not in inputs:
            raise ValueError(f"inputs must have {name}, got {', '.join(inputs) or 'none'}")
        if tuple(inputs[name].shape) != graph.tensors[name].shape:
            raise ValueError(f"{name} must be {graph.tensors[name].shape}, got {tuple(inputs[name].shape)}")
        values[name] = inputs[name]
    for one in graph.operators:
        values[one.output] = _evaluate(one.expr, values, scale)
    return {name: values[name] for name in graph.outputs}


def _evaluate(expr: Expr, values: Mapping[str, "Tensor"], scale: float) -> "Tensor":
    import torch

    if isinstance(expr, str):
        return values[expr]
    function = expr[0]
    x, *rest = (_evaluate(one, values, scale) for one in expr[1:])
    if function == "dot":
        return x @ rest[0]
    if function == "invert":
        eye = torch.eye(len(x), dtype=x.dtype)
        return torch.linalg.solve_triangular(eye + x, eye, upper=False, unitriangular=True)
    if function == "decay":
        return torch.exp((x - x.mT).masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, -torch.inf))
    if function in ("add", "sub", "mul"):
        return getattr(x, function)(rest[0])
    if function in ("neg", "exp"):
        return getattr(x, function)()
    return {
        "t": lambda: x.mT,
        "scale": lambda: x * scale,
        "cumsum": lambda: x.cumsum(0),
        "last": lambda: x[-1:],
        "lower": lambda: x.tril(),
        "strict": lambda: x.tril(-1),
        "move": lambda: x,
    }[function]()
