"""Inverses of the unit lower triangular systems of a chunked delta rule, under FLA's name."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.ops.checks import sequence_bounds
from fla_npu.ops.common.solve import solve_unit_lower


def solve_tril(
    A: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> torch.Tensor:
    """`(I + A)^-1` of every chunk, by forward substitution in float32.

    Args:
        A: `[B,T,H,C]`: row r of the matrix of a chunk is at its r-th token; only what is strictly below the diagonal
            counts. The last chunk of a sequence may be short.
        cu_seqlens: bounds of packed sequences; B is then 1.
        chunk_indices: accepted for FLA's sake; nothing here needs them.
        output_dtype: None for that of A.

    Returns:
        The inverses, laid out as A.
    """
    if A.ndim != 4:
        raise ShapeError(f"A must have shape [B, T, H, C], got {list(A.shape)}")
    if cu_seqlens is None:
        inverse = _inverses(A)
    else:
        if A.shape[0] != 1:
            raise ShapeError(f"Only batch size 1 is supported when cu_seqlens are provided, got {A.shape[0]}")
        bounds = sequence_bounds(cu_seqlens, A.shape[1])
        inverse = torch.cat([_inverses(A[:, a:b]) for a, b in pairwise(bounds)], dim=1)
    return inverse.to(A.dtype if output_dtype is None else output_dtype)


def _inverses(A: torch.Tensor) -> torch.Tensor:
    """The inverses of one sequence `[B,T,H,C]`; missing rows of a short chunk become rows of the unit matrix."""
    length, size = A.shape[1], A.shape[3]
    wide = A.to(compute_dtype(A))
    padded = F.pad(wide, (0, 0, 0, 0, 0, -length % size))
    chunks = padded.reshape(A.shape[0], -1, size, A.shape[2], size).transpose(2, 3)  # [B, NT, H, C, C]
    unit = torch.eye(size, dtype=wide.dtype, device=A.device).expand(chunks.shape)
    inverse = solve_unit_lower(chunks.flatten(0, 2), unit.flatten(0, 2)).view(chunks.shape)
    return inverse.transpose(2, 3).flatten(1, 2)[:, :length]
