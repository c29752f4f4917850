"""RMSNorm, LayerNorm and GroupNorm, each alone and followed by a linear map.

All take an x `[..., D]` and an optional `residual` of its shape, and normalise `s = x + residual`. `prenorm` also
returns s, in the residual's dtype; without a residual s is x itself, in fp32 with `residual_in_fp32`. Arithmetic is
done in fp32 (fp64 for fp64 x) and y is rounded once to x's dtype. Shapes that do not fit together raise a ShapeError.
"""

import torch
import torch.nn.functional as F

from fla_npu.modules.norm.affine import AffineGroupNorm, AffineNorm, group_width
from fla_npu.modules.norm.rms import residual_stream, rms

Normalised = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normalised:
    """`(s - mean(s)) / sqrt(var(s) + eps) * weight + bias` over each of `num_groups` groups of channels.

    Args:
        x: `[..., D]`.
        weight, bias: `[D]` or None.
        is_rms_norm: do not take the mean off.

    Raises:
        ValueError: D is not a multiple of `num_groups`.
    """
    width = group_width(x.shape[-1], num_groups)
    y = rms(x, weight, bias, eps=eps, residual=residual, group_size=width, center=not is_rms_norm)
    return (y, residual_stream(x, residual, residual_in_fp32)) if prenorm else y


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Normalised:
    """`group_norm` with one group."""
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Normalised:
    """`s / sqrt(mean(s^2) + eps) * weight + bias` with `s = x + residual`.

    Args:
        x: `[..., D]`.
        weight, bias: `[D]` or None.

    Returns:
        y of x's shape and dtype, or `(y, s)`.
    """
    return group_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm=True)


def group_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Normalised:
    """`group_norm`, then a linear map `[D', D]` in x's dtype; `[..., D']`, or with `prenorm` that and s."""
    normalised = group_norm(
        x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups
    )
    return then_linear(normalised, linear_weight, linear_bias)


layer_norm_linear = group_norm_linear
"""FLA's second name of it, not of its special case."""


def rms_norm_linear(
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
    """`rms_norm`, then a linear map; see `group_norm_linear`."""
    return group_norm_linear(
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


def then_linear(normalised: Normalised, weight: torch.Tensor, bias: torch.Tensor | None) -> Normalised:
    """`F.linear` of what a norm returned, in the dtype of y; what came with y stays."""
    y, *stream = normalised if isinstance(normalised, tuple) else (normalised,)
    out = F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))
    return (out, stream[0]) if stream else out


class _Norm(AffineNorm):
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normalised:
        """See `group_norm`."""
        return group_norm(
            x,
            self.weight,
            self.bias,
            residual,
            self.eps,
            prenorm,
            residual_in_fp32,
            self.is_rms_norm,
            self.num_groups,
        )


class _NormLinear(AffineNorm):
    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normalised:
        """See `group_norm_linear`."""
        return group_norm_linear(
            x,
            self.weight,
            self.bias,
            weight,
            bias,
            residual,
            self.eps,
            prenorm,
            residual_in_fp32,
            self.is_rms_norm,
            self.num_groups,
        )


class RMSNorm(_Norm):
    """`rms_norm` as a layer."""

    is_rms_norm = True


class LayerNorm(_Norm):
    """`layer_norm` as a layer. Unlike PyTorch's it has no bias unless asked for."""


class GroupNorm(AffineGroupNorm, _Norm):
    """`group_norm` as a layer. Channels are the last axis, unlike in PyTorch's."""


class RMSNormLinear(_NormLinear):
    """`rms_norm_linear`; the layer owns the norm's parameters, the linear map is an argument of `forward`."""

    is_rms_norm = True


class LayerNormLinear(_NormLinear):
    """`layer_norm_linear`; the layer owns the norm's parameters, the linear map is an argument of `forward`."""


class GroupNormLinear(AffineGroupNorm, _NormLinear):
    """`group_norm_linear`; the layer owns the norm's parameters, the linear map is an argument of `forward`."""
