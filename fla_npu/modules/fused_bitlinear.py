"""BitNet's linear map: RMSNorm, activations of 8 bits and weights of -1, 0 and 1 (arXiv 2402.17764, 2406.02528).

Values are quantised and scaled back, so that the map itself is an ordinary one; gradients pass the quantisation as if
it were not there. Numbers halfway between two levels go to the even one, in the fused functions too, where FLA takes
the one away from zero.
"""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.modules.norm import RMSNorm
from fla_npu.modules.norm.layernorm import Normalised, then_linear
from fla_npu.modules.norm.rms import residual_stream, rms

SMALLEST = 1e-5
"""The largest magnitude of a token, or the mean one of a weight, counts as at least this."""


def activation_quant(x: torch.Tensor) -> torch.Tensor:
    """x `[..., D]` with the values of a token at 255 levels, the outer ones its largest magnitude and minus that.

    Returns:
        x's shape and dtype; arithmetic is done in fp32 (fp64 for fp64 x) and rounded once.
    """
    if x.numel() == 0:
        return x.clone()
    wide = x.to(compute_dtype(x))
    scale = 127.0 / wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return ((wide * scale).round() / scale).to(x.dtype)


def weight_quant(w: torch.Tensor) -> torch.Tensor:
    """A weight whose values are -s, 0 and s, with s their mean magnitude; w's shape and dtype, as above."""
    wide = w.to(compute_dtype(w))
    scale = 1.0 / wide.abs().mean().clamp(min=SMALLEST)
    return ((wide * scale).round().clamp(-1, 1) / scale).to(w.dtype)


class _StraightThrough(torch.autograd.Function):
    """`quantised`, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
        return quantised.view_as(quantised)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


def layer_norm_linear_quant(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Normalised:
    """`layer_norm` of `x + residual`, quantised, then a linear map with quantised weights.

    Args:
        x: `[..., D]`.
        norm_weight, norm_bias: `[D]` or None.
        linear_weight, linear_bias: `[D', D]`, and `[D']` or None, which is not quantised.
        is_rms_norm: do not take the mean off.
        residual, prenorm, residual_in_fp32: as in `fla_npu.modules.norm.layernorm`.

    Returns:
        y `[..., D']` in x's dtype, or `(y, x + residual)` with `prenorm`. Differentiable in every tensor argument.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    D = x.shape[-1]
    if linear_weight.ndim != 2 or linear_weight.shape[1] != D:
        raise ShapeError(f"linear_weight must be [D', D] with D={D}, got {tuple(linear_weight.shape)}")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ShapeError(f"linear_bias must be [{linear_weight.shape[0]}], got {tuple(linear_bias.shape)}")
    wide = x.to(compute_dtype(x))
    normalised = rms(wide, norm_weight, norm_bias, eps=eps, residual=residual, center=not is_rms_norm)
    y = _StraightThrough.apply(normalised, activation_quant(normalised.detach())).to(x.dtype)
    weight = _StraightThrough.apply(linear_weight, weight_quant(linear_weight.detach()))
    return then_linear((y, residual_stream(x, residual, residual_in_fp32)) if prenorm else y, weight, linear_bias)


layer_norm_linear_quant_fn = layer_norm_linear_quant
"""FLA's older name."""


def rms_norm_linear_quant(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Normalised:
    """`layer_norm_linear_quant` with the RMS norm."""
    return layer_norm_linear_quant(
        x,
        norm_weight,
        norm_bias,
        linear_weight,
        linear_bias,
        residual,
        eps,
        prenorm,
        residual_in_fp32,
        is_rms_norm=True,
    )


def bit_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> torch.Tensor:
    """`rms_norm_linear_quant` without a residual, the map first; `[..., D']` in x's dtype."""
    y = rms_norm_linear_quant(x, norm_weight, norm_bias, weight, bias, eps=eps)
    assert isinstance(y, torch.Tensor)
    return y


class BitLinear(nn.Linear):
    """`bit_linear` with the parameters `weight` `[out_features, in_features]`, `bias` if asked for, and `norm.weight`.

    FLA's forgets the bias, which its `FusedBitLinear` adds; here both do.

    Args:
        in_features, out_features: D and D'.
        bias: whether there is one.
        norm_eps: added to the mean square.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, norm_eps: float = 1e-8) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.norm = RMSNorm(in_features, eps=norm_eps, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., D]`; `[..., D']` in x's dtype."""
        return bit_linear(x, self.weight, self.bias, self.norm.weight, self.norm.bias, self.norm.eps)


class FusedBitLinear(BitLinear):
    """`BitLinear` under FLA's name for the fused one."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
