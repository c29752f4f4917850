"""The difference between every token and the one before it, as in RWKV: a causal convolution with the taps 1 and -1."""

import torch

from fla_npu.errors import ShapeError
from fla_npu.modules.causal_conv1d import causal_conv1d


def token_shift(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`y_t = x_{t-1} - x_t`, where before the first token of a sequence comes what `cache` holds, or zeros.

    Args:
        x: `[B, T, D]`, any strides.
        cu_seqlens: `[N + 1]`, bounds of the sequences packed in x, whose B is then 1.
        cache: `[N, D]` (or `[N, 1, D]`), the last token of each sequence so far. Not written to.
        output_cache: also return the new cache.
        chunk_indices: accepted for FLA's sake; nothing here needs them.

    Returns:
        y of x's shape and dtype, differentiable in x and the cache; with `output_cache` also the last token of each
        sequence, `[N, D]`. That of a sequence without tokens is the one in `cache`; FLA does not write it.

    Raises:
        ShapeError: shapes that do not fit together.
    """
    if x.ndim != 3:
        raise ShapeError(f"x must be [B, T, D], got {tuple(x.shape)}")
    D = x.shape[2]
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state = None
    if cache is not None:
        if cache.shape not in ((N, D), (N, 1, D)):
            raise ShapeError(f"cache must be [N, D] = {[N, D]}, got {list(cache.shape)}")
        state = cache.reshape(N, D, 1).expand(N, D, 2)
    taps = x.new_ones(D, 2)
    taps[:, 1] = -1.0
    y, state = causal_conv1d(x, taps, initial_state=state, output_final_state=output_cache, cu_seqlens=cu_seqlens)
    return y if state is None else (y, state[..., -1].contiguous())


class TokenShift:
    """FLA's autograd Function, which is called as `TokenShift.apply(x, ...)`."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_cache: bool = False,
        chunk_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`token_shift`, always as a pair: y, and the new cache or None."""
        result = token_shift(x, cu_seqlens, cache, output_cache, chunk_indices)
        return result if isinstance(result, tuple) else (result, None)
