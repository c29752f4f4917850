"""Matrix products under FLA's names."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "") -> torch.Tensor:
    """`activation(a @ b)`.

    Args:
        a: `[M, K]` or `[B, M, K]`.
        b: `[K, N]`.
        activation: `"leaky_relu"` (slope 0.01), `"relu"`, `"sigmoid"`, `"tanh"`, or none.

    Raises:
        ShapeError: shapes that do not fit together.
        ValueError: unknown activation.
    """
    _check(a, b)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    return ACTIVATIONS[activation](a @ b)


def addmm(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float | None = None, beta: float | None = None
) -> torch.Tensor:
    """`beta * x + alpha * (a @ b)`; a and b as in `matmul`, x of the product's shape or one that broadcasts to it,
    factors 1 when None."""
    _check(a, b)
    product = a @ b if alpha is None else alpha * (a @ b)
    return product + (x if beta is None else beta * x)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.ndim not in (2, 3) or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ShapeError(f"a must be [M, K] or [B, M, K] and b [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
