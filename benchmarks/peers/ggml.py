"""ggml's GATED_DELTA_NET (the op behind llama.cpp's Qwen3-Next and Kimi-Linear) through ggml-python.

The op is a token loop in C over a transposed state, in fp32 only, without backward, K = V, scale K^-0.5. A gate of
width 1 makes it GDN, a gate of width K makes it KDA. Its layouts are ours read backwards (`ne = [K, H, T, B]` is
`[B,T,H,K]`), so the tensors of the graph point at torch's memory and nothing is copied; the state is V-first. It groups
heads in tiles where FLA groups neighbours, so grouped q, k are repeated before the clock starts, as is the L2 norm."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ggml
import torch

from benchmarks.inputs import Inputs
from benchmarks.registry import Case

if not hasattr(ggml, "ggml_gated_delta_net"):
    raise ImportError("this ggml-python has no ggml_gated_delta_net")

FINAL_STATE_ONLY = 1
"""Number of state snapshots that the op returns."""


class Graph:
    """One op on torch memory, planned once with its own thread pool, as llama.cpp keeps both between tokens."""

    def __init__(self, q, k, v, g, beta, state, threads: int):
        self.sources = (q, k, v, g, beta, state)
        B, T, HV, V = v.shape
        self.outputs = torch.empty(B * T + B * V, HV * V)
        self.o = self.outputs[: B * T].view(B, T, HV, V)
        self.state = self.outputs[B * T :].view(B, HV, V, V)
        parameters = ggml.ggml_init_params(mem_size=1 << 20, mem_buffer=None, no_alloc=True)
        self.context = ggml.ggml_init(parameters)
        result = ggml.ggml_gated_delta_net(self.context, *map(self._tensor, self.sources), FINAL_STATE_ONLY)
        result.contents.data = self.outputs.data_ptr()
        self.graph = ggml.ggml_new_graph(self.context)
        ggml.ggml_build_forward_expand(self.graph, result)
        self.pool = ggml.ggml_threadpool_new(ctypes.byref(ggml.ggml_threadpool_params_default(threads)))
        self.plan = ggml.ggml_graph_plan(self.graph, threads, self.pool)
        self.scratch = (ctypes.c_uint8 * max(1, self.plan.work_size))()
        self.plan.work_data = ctypes.cast(self.scratch, ctypes.POINTER(ctypes.c_uint8))

    def _tensor(self, x: torch.Tensor):
        tensor = ggml.ggml_new_tensor_4d(self.context, ggml.GGML_TYPE_F32, *reversed(x.shape))
        tensor.contents.data = x.data_ptr()
        return tensor

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        status = ggml.ggml_graph_compute(self.graph, ctypes.byref(self.plan))
        if status != ggml.GGML_STATUS_SUCCESS:
            raise RuntimeError(f"ggml_graph_compute returned {status}")
        return self.o, self.state.transpose(-1, -2)

    def __del__(self):
        ggml.ggml_threadpool_free(self.pool)
        ggml.ggml_free(self.context)


def prepare(case: Case, inputs: Inputs) -> Callable:
    q, k = inputs.normalised
    g = inputs.g if case.op == "kda" else inputs.g[..., None]
    state = inputs.state.transpose(-1, -2)
    tensors = (q, k, inputs.v, g, inputs.beta[..., None], state)
    return Graph(*(x.float().contiguous() for x in tensors), threads=torch.get_num_threads())
