"""One module per peer. Each is imported only when it is measured; an ImportError means that the peer is missing.

A peer's function takes a case and its inputs and returns a call without arguments. The call computes output and final
state, in `forward+backward` also the gradients of q, k, v, g, beta and the initial state."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.inputs import Inputs
from benchmarks.registry import Case

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def torch_call(case: Case, inputs: Inputs, forward: Forward) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The call of an implementation in PyTorch: `forward(q, k, v, g, beta, state)`, with autograd if the case asks."""
    if case.mode == "forward+backward":
        leaves = [x.detach().requires_grad_() for x in inputs.arguments]

        def with_gradients() -> tuple[torch.Tensor, ...]:
            output, state = forward(*leaves)
            gradients = torch.autograd.grad([output, state], leaves, [inputs.do.to(output.dtype), inputs.dstate])
            return (output, state, *gradients)

        return with_gradients

    def plain() -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return forward(*inputs.arguments)

    return plain
