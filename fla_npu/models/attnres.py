"""Attention residuals: a sub-layer's input is a mixture of earlier outputs, https://arxiv.org/abs/2603.15031."""

from collections.abc import Sequence

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.modules.norm.rms import rms


def attention_residual(
    query: torch.Tensor,
    residuals: Sequence[torch.Tensor],
    rms_weight: torch.Tensor,
    output_rms_weight: torch.Tensor | None,
    rms_eps: float,
) -> torch.Tensor:
    """The RMS norm of a mixture of `residuals`, each weighted by how its own RMS norm matches the query.

    Args:
        query: `[D]` or `[1, D]`.
        residuals: at least one tensor `[..., D]`.
        rms_weight: `[D]`, of the norm whose product with the query, over the residuals, goes through a softmax.
        output_rms_weight: `[D]` or None, of the norm of the mixture.
        rms_eps: of both.

    Returns:
        Shape and dtype of a residual; arithmetic is done in fp32 (fp64 for fp64) and rounded once.
    """
    dtype = residuals[0].dtype
    wide = compute_dtype(residuals[0])
    sources = [r.to(wide) for r in residuals]
    direction = query.flatten().to(wide) * rms_weight.to(wide)
    scores = [rms(r, None, None, eps=rms_eps) @ direction for r in sources]
    shares = torch.stack(scores).softmax(0).unsqueeze(-1)
    mixture = sum((share * r for share, r in zip(shares, sources, strict=True)), start=torch.zeros_like(sources[0]))
    weight = None if output_rms_weight is None else output_rms_weight.to(wide)
    return rms(mixture, weight, None, eps=rms_eps).to(dtype)
