"""The `reference` implementation: the token loop of `recurrence.py` behind the arguments of the ops.

Slow, differentiable by plain autograd and able to do everything, it is what the others are measured against, and what
runs the rare arguments that no chunk form exists for (decay or beta per value channel).
"""

from typing import Any

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.common.gate import gate_forward
from fla_npu.ops.common.prepare import L2NORM_EPS, gate_parameters
from fla_npu.ops.common.recurrence import delta_recurrence, packed_delta_recurrence
from fla_npu.ops.problem import Problem


def reference_forward(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """Run a call; results as those of `chunked_forward`."""
    tensors, options, cu_seqlens = problem
    dtype = compute_dtype(tensors.q)
    q, k = tensors.q.to(dtype), tensors.k.to(dtype)
    beta = None if tensors.beta is None else tensors.beta.to(dtype)
    if options.qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for x in (q, k))
    if beta is not None and options.beta_sigmoid:
        beta = options.beta_scale * beta.sigmoid()
    g = None if tensors.g is None else tensors.g.to(dtype)
    if g is not None and options.gate != "none":
        g = gate_forward(g, *gate_parameters(tensors, options), options.gate, options.lower_bound)
    per_channel = options.decay == "channel"
    arguments: dict[str, Any] = {
        "beta": beta,
        "g": None if per_channel else g,
        "gk": g if per_channel else tensors.gk,
        "gv": tensors.gv,
        "b": tensors.b,
        "w": tensors.w,
        "updates": options.updates,
        "delta": tensors.beta is not None,
        "scale": options.scale,
        "initial_state": tensors.initial_state,
        "state_v_first": options.state_v_first,
        "dtype": dtype,
    }
    if cu_seqlens is None:
        o, state = delta_recurrence(q, k, tensors.v, **arguments)
    else:
        o, state = packed_delta_recurrence(q, k, tensors.v, cu_seqlens=cu_seqlens, **arguments)
    return o.to(tensors.v.dtype), state if options.output_final_state else None, None
