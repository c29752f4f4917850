"""RMSNorm followed by an output gate."""

import torch
import torch.nn as nn

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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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


class FusedRMSNormGated(nn.Module):
    """`rms_norm_gated` with the parameter `weight` `[hidden_size]` (ones)."""

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_activation(activation)
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.activation = activation
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}, "
            f"activation={self.activation}"
        )

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm_gated`."""
        return rms_norm_gated(
            x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, eps=self.eps
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


def _check_activation(activation: str) -> None:
    if activation not in GATES:
        raise ValueError(f"Unsupported activation: {activation!r}, must be one of {sorted(GATES)}")
