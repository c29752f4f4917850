"""Running a call: check the arguments, pick the implementation, run it; and the gradients of a call on their own."""

from collections.abc import Callable
from typing import Any

import torch

from fla_npu.ops import checks, dispatch
from fla_npu.ops.autograd import without_autocast
from fla_npu.ops.common.chunked_bwd import chunked_backward
from fla_npu.ops.problem import Problem, Tensors

_CHECKS: dict[str, Callable[..., Problem]] = {
    "chunk_gdn": checks.check_chunk_gdn,
    "fused_recurrent_gdn": checks.check_recurrent_gdn,
    "chunk_kda": checks.check_chunk_kda,
    "fused_recurrent_kda": checks.check_recurrent_kda,
    "chunk_gdn2": checks.check_chunk_gdn2,
    "fused_recurrent_gdn2": checks.check_recurrent_gdn2,
    "chunk_delta_product": checks.check_chunk_delta_product,
    "chunk_delta_rule": checks.check_chunk_delta_rule,
    "fused_recurrent_delta_rule": checks.check_recurrent_delta_rule,
    "chunk_simple_gla": checks.check_chunk_simple_gla,
    "fused_recurrent_simple_gla": checks.check_recurrent_simple_gla,
    "chunk_gla": checks.check_chunk_gla,
    "fused_recurrent_gla": checks.check_recurrent_gla,
}

_FORWARD_ONLY = frozenset({"fused_recurrent_gdn", "fused_recurrent_kda", "fused_recurrent_gdn2"})


def differentiable(op: str) -> bool:
    """Whether an op has a backward pass."""
    return op not in _FORWARD_ONLY


def run(op: str, **arguments: Any) -> dispatch.Result:
    """Run an op, by its short name as in `dispatch.OPS`, with the arguments of its public function.

    Returns:
        o, the final state or None, the chunk states or None.
    """
    return dispatch.run(op, _CHECKS[op](**arguments), differentiable=differentiable(op))


def gradients(op: str, do: torch.Tensor, d_state: torch.Tensor | None, **arguments: Any) -> Tensors:
    """Gradients of a call by its tensors, given those of o and of the final state.

    Raises:
        NotImplementedError: the call has no chunk form. Only autograd itself can go through the token loop.
    """
    problem = _CHECKS[op](**arguments)
    reason = dispatch.no_chunk_form(problem, backward=True)
    if reason is not None:
        raise NotImplementedError(f"{reason}, and without one there is no backward pass under torch.compile")
    with without_autocast(do.device.type):
        return chunked_backward(problem, do, d_state, None)
