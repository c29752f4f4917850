"""RMSNorm."""

import torch
import torch.nn as nn

from fla_npu.modules.norm.rms import residual_stream, rms


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`s / sqrt(mean(s^2) + eps) * weight + bias` with `s = x + residual`.

    Args:
        x: `[..., D]`.
        weight, bias: `[D]` or None.
        residual: shape of x.
        prenorm: also return s, in the residual's dtype; without a residual s is x itself.
        residual_in_fp32: without a residual, return s in fp32.

    Returns:
        y of x's shape and dtype, or `(y, s)`. Arithmetic is done in fp32 (fp64 for fp64 x) and y is rounded once.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    y = rms(x, weight, bias, eps=eps, residual=residual)
    return (y, residual_stream(x, residual, residual_in_fp32)) if prenorm else y


class RMSNorm(nn.Module):
    """`rms_norm` with parameters `weight` `[hidden_size]` (ones) and, with `bias=True`, `bias` (zeros)."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            if bias:
                self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm`."""
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)
