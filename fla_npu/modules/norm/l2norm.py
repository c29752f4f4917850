"""L2 normalisation `x / sqrt(sum(x^2) + eps)`. Zero rows, which padding produces, stay zero."""

import torch
import torch.nn as nn

from fla_npu.dtypes import compute_dtype
from fla_npu.modules.blockwise import blockwise
from fla_npu.modules.kernels import launch


def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last axis.

    Args:
        x: `[..., D]`.
        output_dtype: of the result, x's when None.

    Returns:
        x's shape; arithmetic is done in fp32 (fp64 for fp64 x) and rounded once.
    """
    if launch.takes(x) and output_dtype in (None, *launch.DTYPES):
        from fla_npu.modules.kernels.norm import launch_norm

        return launch_norm(x, None, None, eps=eps, mean=False, dtype=output_dtype)

    def l2norm_rows(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

    return blockwise(l2norm_rows, (x.reshape(1, -1, x.shape[-1]),), dtype=output_dtype).view(x.shape)


l2_norm = l2norm


def l2norm_fwd(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`l2norm(x)` and the reciprocal norm `1 / sqrt(sum(x^2) + eps)`, fp32, of x's shape without its last axis."""
    wide = x.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.square().sum(-1) + eps)
    return (wide * rstd.unsqueeze(-1)).to(output_dtype or x.dtype), rstd


def l2norm_bwd(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Gradient of x, in y's dtype, from what `l2norm_fwd` returned and the gradient of y. `eps` is in rstd already."""
    wide = compute_dtype(y)
    y_wide, dy_wide = y.to(wide), dy.to(wide)
    radial = (dy_wide * y_wide).sum(-1, keepdim=True)
    return ((dy_wide - radial * y_wide) * rstd.unsqueeze(-1)).to(y.dtype)


class L2Norm(nn.Module):
    """`l2norm` as a module without parameters."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[..., D]`."""
        return l2norm(x, self.eps, self.output_dtype)
