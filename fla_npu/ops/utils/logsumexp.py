"""Log-sum-exp under FLA's name."""

import torch

from fla_npu.dtypes import compute_dtype


def logsumexp_fwd(x: torch.Tensor, scale: float | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`log(sum(exp(scale * x)))` of x `[..., D]` over its last axis, in `dtype` (fp32 when None, fp64 for fp64 x)."""
    wide = x.to(compute_dtype(x))
    y = (wide if scale is None else wide * scale).logsumexp(-1)
    return y if dtype is None else y.to(dtype)
