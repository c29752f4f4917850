"""Padded batches to packed sequences and back, under FLA's names; both directions are differentiable."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.ops.checks import sequence_bounds


def pack_sequence(x: torch.Tensor, cu_seqlens: torch.Tensor, padding_side: str = "left") -> torch.Tensor:
    """The tokens of a padded batch, one sequence after the other.

    Args:
        x: `[N,S,...]`, row n holding sequence n and `S - length` tokens of padding.
        cu_seqlens: `[N+1]` bounds of the packed sequences.
        padding_side: where the padding is, `left` or `right`.

    Returns:
        `[T,...]` with `T = cu_seqlens[-1]`.
    """
    left = _is_left(padding_side)
    bounds = sequence_bounds(cu_seqlens)
    longest = max(b - a for a, b in pairwise(bounds))
    if x.ndim < 2 or x.shape[0] != len(bounds) - 1 or x.shape[1] < longest:
        raise ShapeError(f"x must have shape [N, S, ...] with N={len(bounds) - 1}, S >= {longest}, got {list(x.shape)}")
    size = x.shape[1]
    rows = enumerate(b - a for a, b in pairwise(bounds))
    return torch.cat([x[n, size - length :] if left else x[n, :length] for n, length in rows])


def unpack_sequence(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    padding_side: str = "left",
    desired_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The inverse of `pack_sequence`: packed tokens `[T,...]` as a batch `[N,S,...]` padded with zeros.

    `desired_shape` gives `(N, S, ...)`; without it S is the length of the longest sequence.
    """
    left = _is_left(padding_side)
    bounds = sequence_bounds(cu_seqlens, x.shape[0])
    longest = max(b - a for a, b in pairwise(bounds))
    shape = (len(bounds) - 1, longest, *x.shape[1:]) if desired_shape is None else tuple(desired_shape)
    if shape != (len(bounds) - 1, shape[1], *x.shape[1:]) or shape[1] < longest:
        raise ShapeError(
            f"desired_shape must be (N, S, ...)={(len(bounds) - 1, '*', *x.shape[1:])} with S >= {longest}, got {shape}"
        )
    inner = (0, 0) * (x.ndim - 1)
    rows = []
    for a, b in pairwise(bounds):
        missing = shape[1] - (b - a)
        rows.append(F.pad(x[a:b], (*inner, missing, 0) if left else (*inner, 0, missing)))
    return torch.stack(rows)


def _is_left(padding_side: str) -> bool:
    if padding_side not in ("left", "right"):
        raise ShapeError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    return padding_side == "left"
