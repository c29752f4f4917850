"""FLA's naive references: the part of FLA that runs on a CPU.

They neither normalise nor (for GDN) group heads, so q and k are converted before the clock starts; in
`forward+backward` the conversion belongs to the function whose gradients are compared and is timed with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

from benchmarks.inputs import Inputs, normalise
from benchmarks.peers import torch_call
from benchmarks.registry import Case

FUNCTIONS = {
    ("gdn", "chunk"): naive_chunk_gated_delta_rule,
    ("gdn", "recurrent"): naive_recurrent_gated_delta_rule,
    ("kda", "chunk"): naive_chunk_kda,
    ("kda", "recurrent"): naive_recurrent_kda,
}


def chunk(case: Case, inputs: Inputs) -> Callable:
    return _prepare(case, inputs, "chunk")


def recurrent(case: Case, inputs: Inputs) -> Callable:
    return _prepare(case, inputs, "recurrent")


def _prepare(case: Case, inputs: Inputs, form: str) -> Callable:
    function = FUNCTIONS[case.op, form]

    def forward(q, k, v, g, beta, state):
        return function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    def normalise_and_forward(q, k, *rest):
        return forward(*normalise(q, k, case.HV), *rest)

    if case.mode == "forward+backward":
        return torch_call(case, inputs, normalise_and_forward)
    q, k = inputs.normalised
    return torch_call(case, replace(inputs, q=q, k=k), forward)
