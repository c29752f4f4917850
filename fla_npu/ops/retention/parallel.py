"""`parallel_retention`: `chunk_retention` without states, and the matrix of all pairs of tokens if asked for."""

import torch

from fla_npu.ops.checks import check_ranks
from fla_npu.ops.retention.decay import retention_decay
from fla_npu.ops.simple_gla.parallel import parallel_simple_gla


def parallel_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`parallel_simple_gla` with the decays of `chunk_retention`. Arguments, results and errors are its own."""
    check_ranks(q, k, v)
    g = retention_decay(v.shape[2], q).expand(*q.shape[:2], -1)
    return parallel_simple_gla(q, k, v, g, scale, output_attentions, cu_seqlens)
