"""The gate in front of the clock: an implementation is timed only after it has computed the right thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks import inputs as make_inputs
from benchmarks.registry import Case

# Rounding in fp32 gives about 1e-13, one missing token or a wrong scale more than 1e-3. In bf16 rounding only the
# result costs 1e-6, and intermediate products in bf16 a few 1e-5.
NMSE_LIMITS = {"fp32": 1e-8, "bf16": 2e-4}

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
Results = tuple[torch.Tensor, ...]


class Wrong(Exception):
    """A result differs from the definition of the op."""


def gate_case(case: Case) -> Case:
    """The small case that stands for `case`: two chunks, two heads (grouped as in the case), same mode and dtype."""
    group = case.HV // case.H
    return replace(case, B=2, T=1 if case.mode == "decode" else 128, H=2, HV=2 * group, D=64)


def reference(case: Case, inputs: make_inputs.Inputs) -> Results:
    """Output and final state in fp64, and with a backward pass the gradients of q, k, v, g, beta and state."""
    leaves = [x.double().requires_grad_(case.mode == "forward+backward") for x in inputs.arguments]
    output, state = make_inputs.recurrence(make_inputs.Inputs(*leaves), case)
    if case.mode != "forward+backward":
        return output, state
    gradients = torch.autograd.grad([output, state], leaves, [inputs.do.double(), inputs.dstate.double()])
    return (output.detach(), state.detach(), *gradients)


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Squared error over squared size: `sum((x - r)^2) / sum(r^2)`."""
    if result.shape != expected.shape:
        raise Wrong(f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}")
    error = (result.detach().double() - expected).square().sum() / expected.square().sum()
    return float(error)


def check(prepare: Callable, case: Case) -> float:
    """The largest error of an implementation over the results of the gate case. Raises `Wrong` beyond the limit."""
    small = gate_case(case)
    inputs = make_inputs.make(small, seed=1)
    results = prepare(small, inputs)()
    expected = reference(small, inputs)
    if len(results) != len(expected) or any(x is None for x in results):
        raise Wrong("a result is missing: output, final state or a gradient")
    worst = 0.0
    for name, result, wanted in zip(NAMES, results, expected, strict=False):
        error = nmse(result, wanted)
        if not error <= NMSE_LIMITS[case.dtype]:
            raise Wrong(f"{name} is wrong: NMSE {error:.1e} at {small.key}, limit {NMSE_LIMITS[case.dtype]:.0e}")
        worst = max(worst, error)
    return worst
