"""Causal convolutions as long as the sequence, by FFT, with filters that are learned or come from a small network.

They mix whole rows: packed sequences must be unpacked first.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError


def fft_conv(
    u: torch.Tensor,
    k: torch.Tensor,
    dropout_mask: torch.Tensor | None,
    gelu: bool = True,
    k_rev: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gelu(u_t + sum_{j<=t} k_j u_{t-j}) * dropout_mask`, with `k_rev` also `sum_j k_rev_j u_{t+j}` inside.

    In FLA a filter longer than u wraps around: its far taps reach tokens to come. Here those taps are not used.

    Args:
        u: `[B, D, L]` or `[B, D, V, L]`.
        k, k_rev: `[D, L']`, for u of three dimensions also `[1 or B, D, L']`; taps from L on are not used.
        dropout_mask: `[B, D]` or None, for u of three dimensions.
        gelu: whether the GELU is applied.

    Returns:
        u's shape and dtype; differentiable. Arithmetic is done in fp32 (fp64 for fp64 u) and rounded once.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    _check_filter("k", k, u)
    if k_rev is not None:
        _check_filter("k_rev", k_rev, u)
    if dropout_mask is not None and (u.ndim != 3 or dropout_mask.shape != u.shape[:2]):
        raise ShapeError(f"dropout_mask must be [B, D] for u [B, D, L], got {tuple(dropout_mask.shape)}")
    L = u.shape[-1]
    # Twice the length, so that nothing wraps around; there is no transform of length 0.
    size = 2 * max(L, 1)
    wide = u.to(compute_dtype(u))

    def spectrum(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x[..., :L].to(wide.dtype), n=size)

    filters = spectrum(k) if k_rev is None else spectrum(k) + spectrum(k_rev).conj()
    if u.ndim == 4:
        filters = filters.unsqueeze(1)
    y = torch.fft.irfft(spectrum(wide) * filters, n=size)[..., :L] + wide
    if gelu:
        y = F.gelu(y)
    if dropout_mask is not None:
        y = y * dropout_mask.unsqueeze(-1)
    return y.to(u.dtype)


def _check_filter(name: str, k: torch.Tensor, u: torch.Tensor) -> None:
    fits = (u.ndim == 3 and k.ndim == 3 and k.shape[0] in (1, u.shape[0])) or (u.ndim in (3, 4) and k.ndim == 2)
    if not fits or k.shape[-2] != u.shape[1]:
        raise ShapeError(
            f"u must be [B, D, L] or [B, D, V, L] and {name} [D, L'], got {tuple(u.shape)} and {tuple(k.shape)}"
        )


class _LongConvolution(nn.Module, ABC):
    """A causal convolution over whole rows with the filters of `taps`."""

    hidden_size: int

    @abstractmethod
    def taps(self, length: int) -> torch.Tensor:
        """The filters for that many tokens, `[D, L']` or `[1, D, L']`."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convolve x `[B, T, D]` and add it; x's shape and dtype. Other arguments are ignored, as in FLA.

        Raises:
            ShapeError: x is not of this shape.
            NotImplementedError: `cu_seqlens` is given, with which FLA would mix the sequences.
        """
        if kwargs.get("cu_seqlens") is not None:
            raise NotImplementedError("long convolutions mix whole rows: unpack the sequences of cu_seqlens first")
        if x.ndim != 3 or x.shape[2] != self.hidden_size:
            raise ShapeError(f"x must be [B, T, D] with D={self.hidden_size}, got {tuple(x.shape)}")
        return fft_conv(x.transpose(1, 2), self.taps(x.shape[1]), None, gelu=False).transpose(1, 2)


class LongConvolution(_LongConvolution):
    """A convolution with the parameter `filter` `[hidden_size, max_len]`: the taps, normally distributed at first.

    Args:
        hidden_size: D.
        max_len: number of taps; a token does not see what is further back.
        **kwargs: ignored, as in FLA.
    """

    def __init__(self, hidden_size: int, max_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.filter = nn.Parameter(torch.randn(hidden_size, max_len))

    def taps(self, length: int) -> torch.Tensor:
        return self.filter


class PositionalEmbedding(nn.Module):
    """Time from 0 to 1 and waves over it: `z` `[1, seq_len, emb_dim]`, a parameter that is not trained.

    Raises:
        ShapeError: `emb_dim` is even or below 3.
    """

    def __init__(self, emb_dim: int, seq_len: int, **kwargs: Any) -> None:
        super().__init__()
        if emb_dim % 2 == 0 or emb_dim < 3:
            raise ShapeError(f"d_emb (emb_dim) must be odd and at least 3 (time, sine and cosine), got {emb_dim}")
        self.seq_len = seq_len
        bands = (emb_dim - 1) // 2
        angle = 2 * math.pi * torch.linspace(0, seq_len - 1, seq_len)[:, None] / seq_len
        angle = angle * torch.linspace(1e-4, bands - 1, bands)
        time = torch.linspace(0, 1, seq_len)[:, None]
        self.z = nn.Parameter(torch.cat([time, angle.cos(), -angle.sin()], dim=-1)[None], requires_grad=False)

    def forward(self, L: int) -> torch.Tensor:
        """Of the first L positions, or of all if there are fewer."""
        return self.z[:, :L]


class ImplicitLongConvolution(_LongConvolution):
    """A convolution whose taps a small network computes from `PositionalEmbedding` (Hyena, arXiv 2302.10866).

    Args:
        hidden_size: D.
        max_len: number of positions that have an embedding, and so a tap.
        d_emb: size of the embedding, odd and at least 3.
        d_hidden: size of the network's hidden layer.
        **kwargs: ignored, as in FLA.

    Raises:
        ShapeError: `d_emb` is even or below 3.
    """

    def __init__(self, hidden_size: int, max_len: int, d_emb: int = 3, d_hidden: int = 16, **kwargs: Any) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.d_emb = d_emb
        self.pos_emb = PositionalEmbedding(emb_dim=d_emb, seq_len=max_len)
        self.mlp = nn.Sequential(nn.Linear(d_emb, d_hidden), nn.ReLU(), nn.Linear(d_hidden, hidden_size))

    def filter(self, seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The taps, `[1, D, min(seq_len, max_len)]`."""
        return self.mlp(self.pos_emb(seq_len)).transpose(1, 2)

    def taps(self, length: int) -> torch.Tensor:
        return self.filter(length)
