"""The one autograd Function of the delta-rule ops: saves the arguments, forwards to the chunked passes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fla_npu.ops.common.chunked import Kept, chunked_forward
from fla_npu.ops.common.chunked_bwd import chunked_backward
from fla_npu.ops.common.step import decode
from fla_npu.ops.problem import Problem, Tensors

NO_BACKWARD = "the fused_recurrent ops have no backward pass: train through chunk_gated_delta_rule or chunk_kda"


def eager(problem: Problem, *, differentiable: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The `eager` implementation: the chunked passes, with gradients where they are wanted.

    Args:
        problem: the call.
        differentiable: False makes the backward pass raise NotImplementedError, as in FLA's recurrent ops.
    """
    tensors, options, cu_seqlens = problem
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    with without_autocast(tensors.q.device.type):
        if not wanted:
            one_each = tensors.q.shape[1] == 1 and cu_seqlens is None and not options.return_intermediate_states
            return decode(problem) if one_each else chunked_forward(problem)
        kept: list[Kept] | None = [] if options.keep_states and differentiable else None
        o, final = DeltaRule.apply(*tensors, options, cu_seqlens, differentiable, kept)
        return o, final, None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast must not touch the products inside an op, whose arithmetic is float32 as in FLA's kernels."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class DeltaRule(torch.autograd.Function):
    """Arguments: the fields of `Tensors`, then what is not differentiable."""

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors, (options, cu_seqlens, _, kept) = Tensors(*args[:-4]), args[-4:]
        o, final, _ = chunked_forward(Problem(tensors, options, cu_seqlens), kept)
        return o, final

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-4])
        ctx.options, ctx.cu_seqlens, ctx.differentiable, ctx.kept = inputs[-4:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor, d_final: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if not ctx.differentiable:
            raise NotImplementedError(NO_BACKWARD)
        with without_autocast(do.device.type):
            problem = Problem(Tensors(*ctx.saved_tensors), ctx.options, ctx.cu_seqlens)
            grads = chunked_backward(problem, do, d_final, ctx.kept)
        return (*grads, None, None, None, None)
