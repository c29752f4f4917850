"""Means over chunks of time, under FLA's name."""

from itertools import pairwise
from typing import Any

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.ops.checks import sequence_bounds


def mean_pooling(
    x: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Mean of every chunk; the last one of a sequence may be short.

    Args:
        x: `[B, T, ...]`.
        chunk_size: tokens per chunk.
        cu_seqlens: `[N + 1]`, bounds of the sequences packed in x, whose B is then 1.

    Returns:
        `[B, NT, ...]` in x's dtype, NT being the number of chunks of a row or of all sequences; differentiable.

    Raises:
        ShapeError: packed sequences in more than one row.
        DeprecationWarning: `head_first` is given.
    """
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first has been removed: pass inputs as `[B, T, H, ...]`")
    if cu_seqlens is None:
        return _chunk_means(x, chunk_size)
    if x.shape[0] != 1:
        raise ShapeError(f"packed sequences (cu_seqlens) need a batch size of 1, got {x.shape[0]}")
    bounds = sequence_bounds(cu_seqlens, x.shape[1])
    return torch.cat([_chunk_means(x[:, a:b], chunk_size) for a, b in pairwise(bounds)], dim=1)


def _chunk_means(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    whole = x.shape[1] // chunk_size * chunk_size
    wide = x.to(compute_dtype(x))
    means = wide[:, :whole].unflatten(1, (-1, chunk_size)).mean(2) if whole else wide[:, :0]
    if whole < x.shape[1]:
        means = torch.cat([means, wide[:, whole:].mean(1, keepdim=True)], dim=1)
    return means.to(x.dtype)
