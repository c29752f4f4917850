"""What the backward pass of an autograd Function does under `create_graph=True`.

A backward pass that works on raw memory gives gradients without a history. PyTorch's `once_differentiable` raises when
they are differentiated, but only if the gradient that came in has a history too: those of `f(x).sum()` would count as
constants, and a penalty on them as one that pulls nothing. One of the two functions here takes its place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

Gradients = tuple[torch.Tensor | None, ...]


def gradients_with_history(
    fn: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    dy: torch.Tensor,
) -> Gradients:
    """The gradients of `fn(*tensors)`, as functions of the tensors and of dy.

    Args:
        fn: what the Function computes, in operations that autograd knows.
        tensors: those that the Function has saved.
        needed: which of them get a gradient.
        dy: the gradient of the result.

    Returns:
        A gradient or None for every tensor.
    """
    # One tensor may be there twice; each place gets its own gradient.
    places = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [t for t, need in zip(places, needed, strict=True) if t is not None and need]
    found = iter(torch.autograd.grad(fn(*places), wanted, dy, create_graph=True))
    return tuple(next(found) if t is not None and need else None for t, need in zip(places, needed, strict=True))


def first_derivatives_only(what: str) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """A decorator for a backward pass whose gradients cannot be differentiated: that raises a RuntimeError, which says
    so of `what`."""

    def decorator(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: torch.Tensor) -> Gradients:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return found
            # What the gradients depend on, so that derivatives by it come upon the error.
            sources = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
            if not sources:
                found = tuple(None if d is None else d.detach().requires_grad_() for d in found)
            return tuple(None if d is None else _Final.apply(d, what, *sources) for d in found)

        return wrapper

    return decorator


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, what: str, *sources: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.what = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> NoReturn:
        raise RuntimeError(f"{ctx.what} has no second derivatives")
