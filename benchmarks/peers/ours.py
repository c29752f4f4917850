"""fla_npu, through the names that FLA's users import."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.inputs import Inputs
from benchmarks.peers import torch_call
from benchmarks.registry import Case

FUNCTIONS = {
    ("gdn", "chunk"): "fla_npu.ops.gated_delta_rule:chunk_gated_delta_rule",
    ("gdn", "recurrent"): "fla_npu.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",
    ("kda", "chunk"): "fla_npu.ops.kda:chunk_kda",
    ("kda", "recurrent"): "fla_npu.ops.kda:fused_recurrent_kda",
}


def prepare(case: Case, inputs: Inputs) -> Callable:
    module, name = FUNCTIONS[case.op, "recurrent" if case.mode == "decode" else "chunk"].split(":")
    function = getattr(importlib.import_module(module), name)

    def forward(q, k, v, g, beta, state):
        return function(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    return torch_call(case, inputs, forward)
