"""Cumulative sums over time, within chunks or whole sequences, under FLA's names.

Inputs are `[B,T,H]` or `[B,T,H,S]`, or `[1,T,...]` with `cu_seqlens`; sums restart at every sequence. They are taken in
float32 (float64 for such inputs) and are differentiable.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.ops.checks import sequence_bounds


def chunk_local_cumsum(
    g: torch.Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: torch.Tensor | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Sums from the start of every chunk, or with `reverse` from its end, times `scale`.

    Args:
        chunk_size: tokens per chunk; the last chunk of a sequence may be short.
        output_dtype: None for that of `g`.
        chunk_indices, use_graph: accepted for FLA's sake; nothing here needs them.
    """

    def of_chunks(x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        padded = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, -length % chunk_size))
        return _cumsum(padded.unflatten(1, (-1, chunk_size)), 2, reverse).flatten(1, 2)[:, :length]

    return _per_sequence(of_chunks, g, scale, cu_seqlens, output_dtype, kwargs)


def chunk_global_cumsum(
    s: torch.Tensor,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    **kwargs: Any,
) -> torch.Tensor:
    """Sums from the start of every sequence, or with `reverse` from its end, times `scale`.

    `output_dtype` None stands for that of `s`.
    """
    return _per_sequence(lambda x: _cumsum(x, 1, reverse), s, scale, cu_seqlens, output_dtype, kwargs)


# FLA's names for one number per head, and for a vector of them. One function serves both here.
chunk_local_cumsum_scalar = chunk_local_cumsum_vector = chunk_local_cumsum
chunk_global_cumsum_scalar = chunk_global_cumsum_vector = chunk_global_cumsum


def _cumsum(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def _per_sequence(
    cumsum: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    scale: float | None,
    cu_seqlens: torch.Tensor | None,
    output_dtype: torch.dtype | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """`scale * cumsum(sequence)` for every sequence of `x`, in `output_dtype`."""
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first has been removed: pass inputs as `[B, T, H, ...]`")
    if x.ndim not in (3, 4):
        raise ValueError(f"Unsupported input shape {list(x.shape)}, which should be [B, T, H] or [B, T, H, D]")
    wide = x.to(compute_dtype(x))
    if x.shape[1] == 0:
        y = wide
    elif cu_seqlens is None:
        y = cumsum(wide)
    else:
        if x.shape[0] != 1:
            raise ShapeError(f"Only batch size 1 is supported when cu_seqlens are provided, got {x.shape[0]}")
        bounds = sequence_bounds(cu_seqlens, x.shape[1])
        y = torch.cat([cumsum(wide[:, a:b]) for a, b in pairwise(bounds) if a < b], dim=1)
    y = y if scale is None else y * scale
    return y.to(x.dtype if output_dtype is None else output_dtype)
