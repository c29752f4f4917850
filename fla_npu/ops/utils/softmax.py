"""Softmax and its gradient, under FLA's names."""

import torch

from fla_npu.dtypes import compute_dtype


def softmax_fwd(x: torch.Tensor, dtype: torch.dtype | None = torch.float) -> torch.Tensor:
    """Softmax of x `[..., D]` over its last axis, in `dtype` (x's when None); arithmetic is done in fp32 or fp64."""
    return _wide(x).softmax(-1).to(x.dtype if dtype is None else dtype)


def softmax_bwd(p: torch.Tensor, dp: torch.Tensor, dtype: torch.dtype | None = torch.float) -> torch.Tensor:
    """Gradient of x from `p = softmax(x)` and the gradient of p, in `dtype` (p's when None)."""
    wide, d = _wide(p), _wide(dp)
    return (wide * (d - (wide * d).sum(-1, keepdim=True))).to(p.dtype if dtype is None else dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(compute_dtype(x))
