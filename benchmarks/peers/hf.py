"""transformers' own PyTorch functions of Qwen3-Next (GDN) and Kimi-Linear (KDA).

The public names are wrappers that call FLA's Triton kernels when FLA is importable, as it is in this environment. The
function they decorate is what a user on a CPU runs; `torch_function` takes exactly that one and proves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import transformers
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from benchmarks.inputs import Inputs
from benchmarks.peers import torch_call
from benchmarks.registry import Case


def torch_function(module, name: str) -> Callable:
    function = getattr(module, name)
    function = getattr(function, "__wrapped__", function)
    source = Path(function.__code__.co_filename)
    if function.__code__.co_name != name or Path(transformers.__file__).parent not in source.parents:
        raise RuntimeError(f"{name} resolves to {function.__qualname__} of {source.name}, not to transformers' own")
    if source != Path(module.__file__):
        raise RuntimeError(f"{name} is still a wrapper from {source.name}")
    return function


FUNCTIONS = {
    ("gdn", "chunk"): torch_function(modeling_qwen3_next, "torch_chunk_gated_delta_rule"),
    ("gdn", "recurrent"): torch_function(modeling_qwen3_next, "torch_recurrent_gated_delta_rule"),
    ("kda", "chunk"): torch_function(modeling_kimi_linear, "chunk_kimi_delta_attention"),
    ("kda", "recurrent"): torch_function(modeling_kimi_linear, "recurrent_kimi_delta_attention"),
}


def chunk(case: Case, inputs: Inputs) -> Callable:
    return _prepare(case, inputs, "chunk")


def recurrent(case: Case, inputs: Inputs) -> Callable:
    return _prepare(case, inputs, "recurrent")


def _prepare(case: Case, inputs: Inputs, form: str) -> Callable:
    function = FUNCTIONS[case.op, form]

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
