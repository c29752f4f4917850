"""RMSNorm and LayerNorm followed by an output gate, and that followed by a linear map."""

import torch

from fla_npu.modules.norm.affine import AffineNorm
from fla_npu.modules.norm.layernorm import Normalised, then_linear
from fla_npu.modules.norm.rms import GATES, residual_stream, rms


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normalised:
    """`rms_norm(x) * activation(g)`.

    Args:
        x, g: `[..., D]`.
        weight, bias: `[D]` or None.
        activation: `"swish"` or `"silu"` (`g * sigmoid(g)`), or `"sigmoid"`.
        residual, prenorm, residual_in_fp32: as in `rms_norm`.

    Returns:
        y of x's shape and dtype, or `(y, x + residual)` with `prenorm`. Arithmetic is done in fp32 (fp64 for fp64 x)
        and y is rounded once.

    Raises:
        ShapeError: shapes that do not fit together.
        ValueError: unknown activation.
    """
    _check_activation(activation)
    y = rms(x, weight, bias, eps=eps, gate=g, activation=activation, residual=residual)
    return (y, residual_stream(x, residual, residual_in_fp32)) if prenorm else y


def layer_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normalised:
    """`layer_norm(x) * activation(g)`; otherwise as `rms_norm_gated`."""
    _check_activation(activation)
    y = rms(x, weight, bias, eps=eps, gate=g, activation=activation, residual=residual, center=True)
    return (y, residual_stream(x, residual, residual_in_fp32)) if prenorm else y


def rms_norm_swish_gate_linear(
    x: torch.Tensor,
    g: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normalised:
    """`rms_norm_gated` with the swish gate, then a linear map `[D', D]` in x's dtype."""
    normalised = rms_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps)
    return then_linear(normalised, linear_weight, linear_bias)


def layer_norm_swish_gate_linear(
    x: torch.Tensor,
    g: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Normalised:
    """`layer_norm_gated` with the swish gate, then a linear map `[D', D]` in x's dtype."""
    normalised = layer_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps)
    return then_linear(normalised, linear_weight, linear_bias)


class FusedRMSNormGated(AffineNorm):
    """`rms_norm_gated` with the parameter `weight` `[hidden_size]` (ones)."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_activation(activation)
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normalised:
        """See `rms_norm_gated`."""
        return rms_norm_gated(
            x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, eps=self.eps
        )


class FusedLayerNormGated(AffineNorm):
    """`layer_norm_gated` with the parameters of `LayerNorm`."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_activation(activation)
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = activation

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normalised:
        """See `layer_norm_gated`."""
        return layer_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, eps=self.eps
        )


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """`FusedRMSNormGated` with the swish gate, FLA's older name."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, "swish", device, dtype)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """`FusedLayerNormGated` with the swish gate, FLA's older name."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, "swish", eps, device, dtype)


class _GatedLinear(AffineNorm):
    """The parameter `weight` of the norm; the linear map is an argument of `forward`."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)


class FusedRMSNormGatedLinear(_GatedLinear):
    """`rms_norm_swish_gate_linear`."""

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normalised:
        """See `rms_norm_swish_gate_linear`."""
        return rms_norm_swish_gate_linear(
            x, g, self.weight, self.bias, weight, bias, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedLayerNormGatedLinear(_GatedLinear):
    """`layer_norm_swish_gate_linear`."""

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Normalised:
        """See `layer_norm_swish_gate_linear`."""
        return layer_norm_swish_gate_linear(
            x, g, self.weight, self.bias, weight, bias, residual, prenorm, residual_in_fp32, self.eps
        )


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """`FusedRMSNormGatedLinear` under FLA's older name."""


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """`FusedLayerNormGatedLinear` under FLA's older name."""


def _check_activation(activation: str) -> None:
    if activation not in GATES:
        raise ValueError(f"Unsupported activation: {activation!r}, must be one of {sorted(GATES)}")
