"""Rotary position embeddings."""

import torch
import torch.nn as nn

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.ops.utils.index import prepare_token_indices

Rotated = tuple[torch.Tensor, torch.Tensor]


def rotary_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the first R channels of every head by the angles of its token's position.

    Args:
        x: `[B, T, H, D]`.
        cos, sin: `[S, R / 2]`, of the angles at positions 0 to S - 1.
        interleaved: pairs are neighbours; otherwise channel i and channel i + R/2.
        inplace: write the result to x.
        seqlen_offsets: position of the first token, one for all or `[N]`. Tokens before position 0, which is padding,
            get zeros in the rotated channels.
        cu_seqlens: `[N + 1]`, bounds of the sequences packed in x, whose B is then 1; each starts at its offset.
        chunk_indices: accepted for FLA's sake; nothing here needs them.

    Returns:
        x's shape and dtype; arithmetic is done in fp32 (fp64 for fp64 x) and rounded once.

    Raises:
        ShapeError: shapes that do not fit together.
        ValueError: a position past the tables (on a device only noticed for an int offset).
    """
    if x.ndim != 4 or cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(
            "x must be [B, T, H, D] and cos and sin [S, R / 2] with R <= D, got "
            f"{tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    positions = token_positions(x, seqlen_offsets, cu_seqlens)
    is_checked = x.numel() > 0 and (positions.device.type == "cpu" or isinstance(seqlen_offsets, int))
    if is_checked and not torch.compiler.is_compiling() and int(positions.max()) >= len(cos):
        raise ValueError(f"cos and sin have {len(cos)} positions, position {int(positions.max())} is needed")
    known = positions.clamp(min=0)
    rotated = rotate(x, cos[known].unsqueeze(-2), sin[known].unsqueeze(-2), interleaved)
    if isinstance(seqlen_offsets, torch.Tensor):
        before = (positions < 0)[..., None, None]
        R = 2 * cos.shape[1]
        rotated = torch.cat([rotated[..., :R].masked_fill(before, 0.0), rotated[..., R:]], dim=-1)
    return x.copy_(rotated) if inplace else rotated


def token_positions(
    x: torch.Tensor, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions of the tokens of x `[B, T, ...]`: `[1 or B, T]`.

    Raises:
        ShapeError: `offsets` is a tensor of another shape than `[N]`, or x a batch of packed sequences.
    """
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ShapeError(f"packed sequences (cu_seqlens) need a batch size of 1, got {x.shape[0]}")
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if isinstance(offsets, torch.Tensor) and offsets.shape != (N,):
        raise ShapeError(f"the offset must be an int or [{N}], got {tuple(offsets.shape)}")
    if cu_seqlens is None:
        token = torch.arange(x.shape[1], device=x.device)[None]
        return token + (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets)
    sequence, token = prepare_token_indices(cu_seqlens).long().unbind(1)
    return (token + (offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets))[None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x `[..., D]` with the first `R = 2 * cos.shape[-1]` channels rotated; cos and sin broadcast over the rest."""
    half = cos.shape[-1]
    wide = compute_dtype(x)
    head = x[..., : 2 * half].to(wide)
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    cos, sin = cos.to(wide), sin.to(wide)
    pair = a * cos - b * sin, a * sin + b * cos
    y = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return y if 2 * half == x.shape[-1] else torch.cat([y, x[..., 2 * half :]], -1)


class RotaryEmbedding(nn.Module):
    """Rotate queries and keys, https://arxiv.org/abs/2104.09864. Has no parameters and no buffers: angles are computed
    for the positions at hand, so there is no longest sequence.

    Args:
        dim: rotated channels of a head, an even number.
        base: the angle of pair i per position is `base^(-2i / dim)`.
        scale_base: scale queries up and keys down with the position, https://arxiv.org/abs/2212.10554.
        interleaved: pairs are neighbours; otherwise channel i and channel i + dim/2.
        pos_idx_in_fp32: angles are computed in fp32; otherwise in the dtype of the queries, as models were trained that
            did so.
        device: accepted for FLA's sake.

    Raises:
        ShapeError: `dim` is odd.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ShapeError(f"Rotary dimension must be even, got {dim}")
        self.dim = dim
        self.base = float(base)
        self.scale_base = scale_base
        self.interleaved = interleaved
        self.pos_idx_in_fp32 = pos_idx_in_fp32

    def extra_repr(self) -> str:
        scale = "" if self.scale_base is None else f"scale_base={self.scale_base}, "
        return (
            f"dim={self.dim}, base={self.base}, interleaved={self.interleaved}, {scale}"
            f"pos_idx_in_fp32={self.pos_idx_in_fp32}"
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        seqlen_offset: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Rotated:
        """Rotate q `[B, T, H, D]` and k `[B, T, H', D]`.

        Args:
            seqlen_offset: position of the first token, one for all or `[N]`.
            cu_seqlens: `[N + 1]`, bounds of the sequences packed in a batch of one; each starts at its offset.
            max_seqlen: with `scale_base`, scales are relative to the middle of this many positions; by default of
                those seen. The product of a query and a key does not depend on it, as long as it is the same for both.
            chunk_indices: accepted for FLA's sake; nothing here needs them.
            position_ids: `[1 or B, T]`, the positions themselves, in place of what the others say.

        Returns:
            Both, in their shapes and dtypes. The angles' cosines and sines are rounded to q's dtype as in FLA.
        """
        if position_ids is None:
            position_ids = token_positions(q, seqlen_offset, cu_seqlens)
        exact = compute_dtype(q) if self.pos_idx_in_fp32 else q.dtype
        channel = torch.arange(0, self.dim, 2, device=q.device, dtype=torch.float32)
        frequency = (1.0 / self.base ** (channel / self.dim)).to(exact)
        angle = (position_ids.to(exact)[..., None] * frequency).unsqueeze(-2)  # [1 or B, T, 1, dim / 2]
        cos, sin = angle.cos(), angle.sin()
        scale: torch.Tensor | None = None
        if self.scale_base is not None:
            if max_seqlen is None:
                max_seqlen = int(position_ids.max()) + 1
            power = (position_ids - max_seqlen // 2).float() / self.scale_base
            scale = (((channel + 0.4 * self.dim) / (1.4 * self.dim)) ** power[..., None]).unsqueeze(-2)

        def apply(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
            return rotate(x, (cos * scale).to(q.dtype), (sin * scale).to(q.dtype), self.interleaved)

        return (apply(q, 1.0), apply(k, 1.0)) if scale is None else (apply(q, scale), apply(k, 1 / scale))
