"""The decays of RetNet."""

import torch

from fla_npu.dtypes import compute_dtype


def retention_decay(heads: int, like: torch.Tensor) -> torch.Tensor:
    """`log(1 - 2^(-5 - h))` of the heads h, `[heads]`: float64 for a float64 `like`, and float32 otherwise.

    FLA rounds `1 - 2^(-5 - h)` before it takes the logarithm, which from the 20th head on leaves no decay.
    """
    dtype = compute_dtype(like)
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=dtype, device=like.device)))
