"""Unit lower triangular systems `(I + A) x = b`, one per head: the Solve stage of the chunked delta rule.

Both ways here are forward substitutions. The doubling inverse `(I - A)(I + A^2)(I + A^4)...` suits matrix units, but is
not an option: when the keys of a chunk repeat, its powers grow like binomial coefficients and the result is lost in any
precision (`tests/ops/test_solve.py` shows it).
"""

import torch


def solve_unit_lower(
    A: torch.Tensor, b: torch.Tensor, *, transpose: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Solve `(I + strict_lower(A)) x = b`, or its transpose.

    Args:
        A: `[N, C, C]`; only the part below the diagonal is read, the rest may hold anything.
        b: `[N, C, V]`.
        transpose: solve `(I + strict_lower(A))^T x = b`.
        out: memory for x, where that helps: contiguous; may be b.

    Returns:
        x `[N, C, V]`.
    """
    if A.device.type == "cpu":
        # Transposed and from the right: LAPACK then works on row-major memory without a copy, 2.8 times faster here.
        x = torch.linalg.solve_triangular(
            A if transpose else A.mT,
            b.mT,
            upper=not transpose,
            left=False,
            unitriangular=True,
            out=None if out is None else out.mT,
        )
        return x.mT
    return blocked_solve(A, b, transpose=transpose)


def blocked_solve(A: torch.Tensor, b: torch.Tensor, *, transpose: bool = False, block: int = 16) -> torch.Tensor:
    """`solve_unit_lower` by matrix products alone, for devices without a triangular solver.

    The diagonal blocks are inverted by merging: with `X` the inverse of the blocks of size s and `M` the part of A that
    joins two neighbours, `X - X M X` is the inverse of the blocks of size 2s. Block rows then follow one by one.
    """
    N, C, _ = A.shape
    padded = -C % block
    A = torch.nn.functional.pad(A, (0, padded, 0, padded)) if padded else A
    b = torch.nn.functional.pad(b, (0, 0, 0, padded)) if padded else b
    n = (C + padded) // block
    diagonal = A.view(N, n, block, n, block).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    row = torch.arange(block, device=A.device)
    X = torch.eye(block, device=A.device, dtype=A.dtype).expand(N, n, block, block)
    size = 1
    while size < block:
        joins = (row[:, None] // (2 * size) == row // (2 * size)) & (row[:, None] // size > row // size)
        X = X - X @ torch.where(joins, diagonal, 0.0) @ X
        size *= 2
    x = torch.empty_like(b)
    for i in reversed(range(n)) if transpose else range(n):
        rows = slice(i * block, (i + 1) * block)
        done = slice((i + 1) * block, None) if transpose else slice(0, i * block)
        known = A[:, done, rows].mT if transpose else A[:, rows, done]
        inverse = X[:, i].mT if transpose else X[:, i]
        x[:, rows] = inverse @ (b[:, rows] - known @ x[:, done])
    return x[:, :C]
