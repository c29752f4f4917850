"""`parallel_simple_gla`: `chunk_simple_gla` without states, and the matrix of all pairs of tokens if asked for."""

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.ops.autograd import without_autocast
from fla_npu.ops.common.chunk_form import pair_scores
from fla_npu.ops.simple_gla.chunk import chunk_simple_gla


def parallel_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention with a decay per head. The arguments are those of `chunk_simple_gla`, except:

    Args:
        output_attentions: also return the scores, which is for short sequences; not for packed ones.

    Returns:
        o `[B, T, HV, V]`, and the scores `[B, HV, T, T]` in q's dtype, zero where k comes after q, or None.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    if output_attentions and cu_seqlens is not None:
        raise ShapeError("output_attentions=True is not there for packed sequences: cu_seqlens must be None")
    o, _ = chunk_simple_gla(q, k, v, g=g, scale=scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    if not output_attentions:
        return o, None
    with without_autocast(q.device.type):
        scores = pair_scores(q, k, v.shape[2], g=g, scale=scale, dtype=compute_dtype(q))
    return o, scores.to(q.dtype)
