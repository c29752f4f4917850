"""The autograd Functions of the ops: one saves the arguments and forwards to the chunked passes, the other
has no backward pass and says so."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from fla_npu.ops.common.chunked import KeptStates, chunked_forward
from fla_npu.ops.common.chunked_bwd import chunked_backward
from fla_npu.ops.common.step import decode
from fla_npu.ops.problem import Problem, Tensors
from fla_npu.ops.utils.second_derivatives import first_derivatives_only

Result = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

NO_BACKWARD = (
    "the fused_recurrent ops of GDN, KDA and GDN-2 have no backward pass: train through chunk_gated_delta_rule, "
    "chunk_kda or chunk_gdn2"
)


def eager(problem: Problem) -> Result:
    """The `eager` implementation: the chunked passes, with gradients where they are wanted."""
    tensors, options, cu_seqlens = problem
    if gradients_wanted(tensors):
        kept = KeptStates() if options.keep_states else None
        return with_gradients(partial(chunked_forward, kept=kept), problem, kept)
    one_each = tensors.q.shape[1] == 1 and cu_seqlens is None and not options.return_intermediate_states
    return decode(problem) if one_each else chunked_forward(problem)


def with_gradients(forward: Callable[[Problem], Result], problem: Problem, kept: KeptStates | None = None) -> Result:
    """Run a call forward by `forward`, and backward by the portable pass.

    Args:
        kept: receives the states before every chunk from `forward`; without, the backward pass recomputes them.
    """
    tensors, options, cu_seqlens = problem
    return (*DeltaRule.apply(*tensors, options, cu_seqlens, kept, forward), None)


def forward_only(run: Callable[[Problem], Result], problem: Problem) -> Result:
    """Run a call such that a backward pass through its results raises NotImplementedError."""
    if gradients_wanted(problem.tensors):
        return (*ForwardOnly.apply(run, problem, *problem.tensors), None)
    return run(problem)


def gradients_wanted(tensors: Tensors) -> bool:
    """Whether autograd records what happens to these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast must not touch the products inside an op, whose arithmetic is float32 as in FLA's kernels."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class DeltaRule(torch.autograd.Function):
    """Arguments: the fields of `Tensors`, then what is not differentiable."""

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *tensors, options, cu_seqlens, _, forward = args
        o, final, _ = forward(Problem(Tensors(*tensors), options, cu_seqlens))
        return o, final

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options, ctx.cu_seqlens, ctx.kept, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @first_derivatives_only("an op of fla_npu")
    def backward(ctx: Any, do: torch.Tensor, d_final: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with without_autocast(do.device.type):
            problem = Problem(Tensors(*ctx.saved_tensors), ctx.options, ctx.cu_seqlens)
            grads = chunked_backward(problem, do, d_final, ctx.kept)
        return (*grads, None, None, None, None)


class ForwardOnly(torch.autograd.Function):
    """Arguments: what runs the call, the call, and its tensors once more for autograd to see."""

    @staticmethod
    def forward(run: Callable[[Problem], Result], problem: Problem, *tensors: Any) -> tuple[Any, ...]:
        return run(problem._replace(tensors=Tensors(*tensors)))[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(NO_BACKWARD)
