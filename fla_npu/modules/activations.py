"""Activations and gated linear units under FLA's names.

Arithmetic is done in fp32 (fp64 for fp64 inputs) and rounded once to the dtype of the first argument.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.modules.blockwise import blockwise


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))`."""
    return _elementwise(torch.sigmoid, x)


def logsigmoid(x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`log(sigmoid(x)) / temperature`."""
    return _elementwise(lambda x: F.logsigmoid(x) / temperature, x)


def swish(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(x)`."""
    return _elementwise(F.silu, x)


def sqrelu(x: torch.Tensor) -> torch.Tensor:
    """`max(x, 0)^2`."""
    return _elementwise(lambda x: F.relu(x).square(), x)


def elu_p1(x: torch.Tensor) -> torch.Tensor:
    """`elu(x) + 1`: `exp(x)` below 0, where adding 1 to the ELU would cancel, and `x + 1` above."""
    return _elementwise(lambda x: torch.where(x >= 0, x + 1, x.clamp(max=0).exp()), x)


def fast_gelu_impl(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation."""
    return _elementwise(lambda x: F.gelu(x, approximate="tanh"), x)


def bias_gelu_impl(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`fast_gelu_impl(x + bias)`, x `[..., D]`, bias `[D]`."""
    return fast_gelu_impl(x + bias)


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`swish(x) * y`, of equal shapes."""
    return _elementwise(lambda x, y: F.silu(x) * y, x, y)


def sigmoidglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`sigmoid(x) * y`, of equal shapes."""
    return _elementwise(lambda x, y: torch.sigmoid(x) * y, x, y)


def powglu(x: torch.Tensor, y: torch.Tensor, power: float = 3.0) -> torch.Tensor:
    """`gate(x) * y`, of equal shapes, with `gate(x) = x^(power / (sqrt(x) + 1)) * sigmoid(x)` for positive x and
    `x * sigmoid(x)` for the others."""

    def glu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        positive = x > 0
        # The exponent's gradient is infinite at 0 and undefined below, so those entries go through as 1.
        base = torch.where(positive, x, 1.0)
        grown = base ** (power / (base.sqrt() + 1))
        return torch.where(positive, grown, x) * torch.sigmoid(x) * y

    return _elementwise(glu, x, y)


def swiglu_linear(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`swiglu`, then a linear map `[D', D]`."""
    return F.linear(swiglu(x, y), weight, bias)


def sigmoidglu_linear(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`sigmoidglu`, then a linear map `[D', D]`."""
    return F.linear(sigmoidglu(x, y), weight, bias)


def powglu_linear(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, power: float = 3.0
) -> torch.Tensor:
    """`powglu`, then a linear map `[D', D]`."""
    return F.linear(powglu(x, y, power), weight, bias)


def _elementwise(fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    x = inputs[0]
    if any(t.shape != x.shape for t in inputs):
        raise ShapeError(f"x and y must have one shape, got {' and '.join(str(tuple(t.shape)) for t in inputs)}")
    return blockwise(fn, [t.reshape(1, -1, 1) for t in inputs]).view(x.shape)


ACT2FN: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "sigmoid": sigmoid,
    "logsigmoid": logsigmoid,
    "silu": swish,
    "swish": swish,
    "sqrelu": sqrelu,
    "gelu": fast_gelu_impl,
    "bias_gelu": bias_gelu_impl,
}
