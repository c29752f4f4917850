"""The Sinkhorn normalisation with its arguments checked."""

import torch

from fla_npu.ops.utils.sinkhorn.naive import naive_sinkhorn


def sinkhorn(logits: torch.Tensor, num_iters: int = 20) -> torch.Tensor:
    """`naive_sinkhorn` of checked arguments, on any device and for any N; FLA's is for CUDA and N up to 8.

    Differentiable as often as wished; the backward pass keeps `2 * num_iters` matrices for each one given.

    Raises:
        ValueError: the logits are no `[..., N, N]` of floating point numbers, or `num_iters` is no positive integer.
    """
    if not logits.is_floating_point():
        raise ValueError(f"logits must be of a floating dtype, got {logits.dtype}")
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or logits.shape[-1] < 1:
        raise ValueError(f"logits must have shape [..., N, N] with N >= 1, got {list(logits.shape)}")
    if isinstance(num_iters, bool) or not isinstance(num_iters, int) or num_iters < 1:
        raise ValueError(f"num_iters must be a positive integer, got {num_iters!r}")
    return naive_sinkhorn(logits, num_iters)
