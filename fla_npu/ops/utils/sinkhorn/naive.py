"""The definition of the Sinkhorn normalisation."""

import torch

from fla_npu.dtypes import compute_dtype


def naive_sinkhorn(logits: torch.Tensor, num_iters: int = 20) -> torch.Tensor:
    """`exp(logits)` with its columns scaled to sums of 1, then its rows, `num_iters` times (Sinkhorn and Knopp, 1967).

    Args:
        logits: `[..., N, N]`; -inf stands for an entry of 0.

    Returns:
        The matrices, of the same shape, in fp32 (fp64 for fp64 logits). Their rows sum to 1, their columns nearly.
    """
    x = logits.to(compute_dtype(logits))
    for _ in range(num_iters):
        x = x.log_softmax(-2).log_softmax(-1)
    return x.exp()
